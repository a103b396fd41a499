#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "index/context.hpp"
#include "index/position_tree.hpp"

namespace agentspec {

// Tells where a query belongs, and how many tokens the neighbours there share with it.
struct Found {
  Place place;
  std::uint32_t left = 0, right = 0;
};

// Spans the places from `low` up to, but not at, `high`.
struct Extent {
  Place low, high;
};

// Holds the positions next to a place, and how many tokens each shares with the context that belongs there; 0: none.
struct Neighbours {
  Position left = 0, right = 0;
  std::uint32_t left_common = 0, right_common = 0;

  std::uint32_t longest_common() const { return std::max(left_common, right_common); }
};

// Keeps positions sorted by their contexts. The caller owns the text, and must not change it in front of positions that
// are here.
class SortedPositions {
 public:
  static constexpr std::uint32_t kBatch = 16;  // searches that run side by side
  static constexpr std::size_t kShallow = 64;  // tokens of context that a first search compares

  PositionTree& tree() { return tree_; }
  const PositionTree& tree() const { return tree_; }

  // Finds where a query belongs.
  Found search(const Token* text, const Query& query) const;
  // Finds where a whole context belongs. Stays fast if it is long and many others share much of it. `known`: tokens
  // that it is known to share with two positions, which are not compared again.
  Found search_deep(const Token* text, std::span<const Token> context, const Neighbours& known = {}) const;
  // Returns the places that share `length` tokens with the context. `found`: where the context belongs, if known.
  Extent extent(const Token* text, std::span<const Token> context, std::size_t length) const;
  Extent extent(const Token* text, std::span<const Token> context, std::uint32_t length, const Found& found) const;
  // Finds the place of a position. Returns false if it is not here.
  bool locate(const Token* text, Position position, Place& place) const;
  Neighbours neighbours(const Found& found) const;

  // Inserts [begin, begin + count), count at most kBatch. Returns the neighbours of the last one.
  Neighbours insert_batch(const Token* text, Position begin, std::uint32_t count);
  // Inserts a position where it belongs. Returns its neighbours.
  Neighbours insert_at(const Token* text, const Found& found, Position position);
  // Removes positions, at most kBatch.
  void erase_batch(const Token* text, std::span<const Position> positions);

 private:
  bool find_first(const Token* text, const Query& query, Place& place) const;
  bool find_last(const Token* text, const Query& query, Place& place) const;
  bool find_in_leaf(Place& place, Position position) const;
  bool find_near(Place& place, Position position) const;
  bool find_between(Place low, Place high, Position position, Place& place) const;
  bool find_anywhere(Position position, Place& place) const;

  PositionTree tree_;
};

}  // namespace agentspec
