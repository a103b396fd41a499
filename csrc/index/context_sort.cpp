#include "index/context_sort.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace agentspec {
namespace {

struct Ordered {
  std::uint64_t key;
  Position position;

  bool operator<(const Ordered& other) const {
    return key < other.key || (key == other.key && position < other.position);
  }
};

// Packs as many of a context's last tokens into 64 bits as fit.
class Packer {
 public:
  Packer(const Token* text, Position begin, Position end) {
    std::uint32_t highest = 1;
    for (Position p = begin; p < end; ++p) highest = std::max(highest, rank_of(text[p]));
    bits_ = static_cast<unsigned>(std::bit_width(highest));
    depth_ = 64 / bits_;
  }

  std::size_t depth() const { return depth_; }  // tokens

  std::uint64_t key_before(const Token* end) const {
    std::uint64_t key = 0;
    for (unsigned k = 0; k < depth_; ++k) {
      const std::uint64_t rank = rank_of(*(end - 1 - k));
      key = key << bits_ | rank;
      if (rank == 0) return key << bits_ * (depth_ - 1 - k);
    }
    return key;
  }

  // Returns whether a context ends within the key. Such contexts are in their order once their positions are.
  bool ended(std::uint64_t key) const { return (key & ((std::uint64_t{1} << bits_) - 1)) == 0; }

 private:
  unsigned bits_, depth_;
};

// Names the positions from `begin` up to, but not at, `end` in the order so far. Their contexts agree as far as they
// were compared.
struct Group {
  std::uint32_t begin, end;
};

template <class T>
void push(Buffer<T>& items, T item) {
  items.resize(items.size() + 1);
  items[items.size() - 1] = item;
}

}  // namespace

// Sorts by prefix doubling (Manber and Myers 1993), in each round only the groups that still agree (Larsson and
// Sadakane 2007). Contexts that agree in `depth` tokens have the order of the contexts `depth` tokens further back.
Buffer<Position> sort_contexts(const Token* text, Position begin, Position end) {
  const std::size_t count = end - begin;
  const Packer packer(text, begin, end);
  Buffer<Position> sorted;
  Buffer<std::uint32_t> ranks;  // of each position: where its group begins
  Buffer<Ordered> ordered;
  Buffer<Group> groups;
  sorted.resize(count);
  ranks.resize(count);
  ordered.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto position = static_cast<Position>(begin + i);
    ordered[i] = {packer.key_before(text + position), position};
  }
  std::sort(ordered.data(), ordered.data() + count);
  for (std::uint32_t i = 0, first = 0; i < count; ++i) {
    const auto [key, position] = ordered[i];
    const bool last = i + 1 == count || ordered[i + 1].key != key;
    const bool apart = packer.ended(key);
    sorted[i] = position;
    ranks[position - begin] = apart ? i : first;
    if (!last) continue;
    if (!apart && first < i) push(groups, {first, i + 1});
    first = i + 1;
  }
  for (std::size_t depth = packer.depth(); !groups.empty(); depth *= 2) {
    Buffer<Group> left;  // groups that still agree
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto [low, high] = groups[g];
      for (std::uint32_t i = low; i < high; ++i) ordered[i - low] = {ranks[sorted[i] - begin - depth], sorted[i]};
      std::sort(ordered.data(), ordered.data() + (high - low));
      for (std::uint32_t i = low, first = low; i < high; ++i) {
        const auto [key, position] = ordered[i - low];
        sorted[i] = position;
        ranks[position - begin] = first;
        if (i + 1 < high && ordered[i + 1 - low].key == key) continue;
        if (first < i) push(left, {first, i + 1});
        first = i + 1;
      }
    }
    groups = std::move(left);
  }
  return sorted;
}

}  // namespace agentspec
