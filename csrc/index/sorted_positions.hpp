#pragma once

#include <algorithm>
#include <span>

#include "index/position_tree.hpp"

namespace agentspec {

// Number of keys below `key` (or with `equal`, not above it): a binary search without branches.
inline std::uint32_t count_below(const Key* keys, std::uint32_t size, const Key& key, bool equal) {
  std::uint32_t base = 0;
  while (size > 0) {
    const std::uint32_t half = size - size / 2;
    const Key& other = keys[base + half - 1];
    base += (other < key) | (equal & (other == key)) ? half : 0;
    size -= half;
  }
  return base;
}

// One descent in small moves, so that several searches can take turns: each asks for memory, and the others' moves pass
// while it comes.
class SortedPositions::Search {
 public:
  Search() = default;
  Search(const SortedPositions& order, const Token* text, const Query& query)
      : order_(&order), text_(text), query_(query) {
    narrow(order.row_.keys.data(), order.row_.firsts.data(), 0, static_cast<std::uint32_t>(order.row_.keys.size()));
  }

  const Found& found() const { return found_; }
  const Query& query() const { return query_; }

  bool open() const { return low_ < high_; }

  // The row is searched: on to the chunk.
  void find_chunk() {
    front_ = low_ == 0;
    found_.place.chunk = front_ ? 0 : low_ - 1;
    chunk_ = &order_->chunk_at(found_.place.chunk);
    const auto* keys = reinterpret_cast<const char*>(chunk_->keys.data());
    for (std::size_t line = 0; line < sizeof(chunk_->keys) / 64; ++line) __builtin_prefetch(keys + 64 * line);
    __builtin_prefetch(&chunk_->size);
  }

  void enter_chunk() {
    low_ = high_ = 1;
    if (!front_) narrow(chunk_->keys.data(), chunk_->firsts.data(), 1, chunk_->size);
  }

  // The chunk is searched: on to the leaf.
  void enter_leaf() {
    found_.place.leaf = low_ - 1;
    firsts_ = order_->leaf_at(found_.place);
    known_ = 0;
    low_ = front_ ? 0 : 1;
    high_ = front_ ? 0 : chunk_->counts[found_.place.leaf];
    for (std::uint32_t i = 0; i < kLeaf; i += 16) __builtin_prefetch(firsts_ + i);
  }

  void finish() { found_.place.slot = low_; }

  // Asks for the text that the next steps may read: of 2^levels - 1 entries.
  void aim(std::uint32_t levels) const {
    const std::size_t depth = skip() + 1;
    const std::uint32_t parts = 1u << levels;
    for (std::uint32_t k = 1; k < parts; ++k) {
      __builtin_prefetch(text_ + firsts_[low_ + (high_ - low_) * k / parts] - depth);
    }
  }

  void step() {
    const std::uint32_t middle = low_ + (high_ - low_) / 2;
    const Order order = compare(query_, text_, firsts_[middle], skip());
    low_ = order.less ? low_ : middle + 1;
    high_ = order.less ? middle : high_;
    found_.left = order.less ? found_.left : order.common;
    found_.right = order.less ? order.common : found_.right;
  }

 private:
  // Searches [low, high) by keys alone: what remains has the query's own key.
  void narrow(const Key* keys, const Position* firsts, std::uint32_t low, std::uint32_t high) {
    const Key& key = query_.key;
    low_ = low + count_below(keys + low, high - low, key, false);
    high_ = low_;
    if (low_ < high && keys[low_] == key) high_ += count_below(keys + low_, high - low_, key, true);
    const auto common = [&](const Key& other) {
      return static_cast<std::uint32_t>(std::min<std::size_t>(key_common(key, other), query_.length));
    };
    if (low_ > low) found_.left = common(keys[low_ - 1]);
    if (high_ < high) found_.right = common(keys[high_]);
    known_ = common(key);
    firsts_ = firsts;
  }

  std::size_t skip() const { return std::max<std::size_t>(known_, std::min(found_.left, found_.right)); }

  const SortedPositions* order_ = nullptr;
  const Token* text_ = nullptr;
  Query query_;
  Found found_;
  const Chunk* chunk_ = nullptr;
  const Position* firsts_ = nullptr;
  std::size_t known_ = 0;  // tokens that everything in [low, high) shares with the query
  std::uint32_t low_ = 0, high_ = 0;
  bool front_ = false;     // in front of everything
};

// Runs searches side by side, level by level.
template <std::size_t kMost>
class SearchTogether {
 public:
  using Search = SortedPositions::Search;

  static void run(std::span<Search> searches) {
    step_all(searches);
    for (Search& search : searches) search.find_chunk();
    for (Search& search : searches) search.enter_chunk();
    step_all(searches);
    for (Search& search : searches) search.enter_leaf();
    step_all(searches);
    for (Search& search : searches) search.finish();
  }

 private:
  // A few searches ask for more than they will need, so as not to wait for each step.
  static constexpr std::uint32_t kAhead = kMost > 4 ? 1 : 3;

  static void step_all(std::span<Search> searches) {
    std::array<Search*, kMost> open;
    std::size_t count = 0;
    for (Search& search : searches) {
      if (search.open()) open[count++] = &search;
    }
    while (count > 0) {
      for (std::size_t i = 0; i < count; ++i) open[i]->aim(kAhead);
      for (std::uint32_t k = 0; k < kAhead; ++k) {
        std::size_t left = 0;
        for (std::size_t i = 0; i < count; ++i) {
          open[i]->step();
          open[left] = open[i];
          left += open[i]->open();
        }
        count = left;
      }
    }
  }
};

}  // namespace agentspec
