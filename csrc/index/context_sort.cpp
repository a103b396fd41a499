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

}  // namespace

// Doubles the depth of what is sorted (Manber and Myers 1993; groups that still agree only, as Larsson and Sadakane
// 2007): contexts that agree in `depth` tokens are in the order of the contexts that lie `depth` tokens further back.
std::vector<Position> sort_contexts(const Token* text, Position begin, Position end) {
  const std::size_t count = end - begin;
  const Packer packer(text, begin, end);
  std::vector<Position> sorted(count);
  std::vector<std::uint32_t> ranks(count);  // of each position: where its group begins
  std::vector<std::pair<std::uint32_t, std::uint32_t>> groups, next;
  std::vector<Ordered> ordered(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto position = static_cast<Position>(begin + i);
    ordered[i] = {packer.key_before(text + position), position};
  }
  std::sort(ordered.begin(), ordered.end());
  for (std::uint32_t i = 0, group = 0; i < count; ++i) {
    const auto [key, position] = ordered[i];
    const bool last = i + 1 == count || ordered[i + 1].key != key;
    const bool apart = packer.ended(key);
    sorted[i] = position;
    ranks[position - begin] = apart ? i : group;
    if (!last) continue;
    if (!apart && group < i) groups.emplace_back(group, i + 1);
    group = i + 1;
  }
  for (std::size_t depth = packer.depth(); !groups.empty(); depth *= 2) {
    next.clear();
    for (const auto& [low, high] : groups) {
      ordered.clear();
      for (std::uint32_t i = low; i < high; ++i) ordered.push_back({ranks[sorted[i] - begin - depth], sorted[i]});
      std::sort(ordered.begin(), ordered.end());
      for (std::uint32_t i = low, group = low; i < high; ++i) {
        const auto [key, position] = ordered[i - low];
        sorted[i] = position;
        ranks[position - begin] = group;
        if (i + 1 < high && ordered[i + 1 - low].key == key) continue;
        if (group < i) next.emplace_back(group, i + 1);
        group = i + 1;
      }
    }
    std::swap(groups, next);
  }
  return sorted;
}

}  // namespace agentspec
