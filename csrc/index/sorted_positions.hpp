#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "index/context.hpp"
#include "index/position_tree.hpp"

namespace agentspec {

// Where a query belongs, and how many tokens the neighbours there share with it.
struct Found {
  Place place;
  std::uint32_t left = 0, right = 0;
};

// From one place up to another.
struct Extent {
  Place low, high;
};

// The positions next to a place, and how many tokens each shares with what belongs there; 0: none.
struct Neighbours {
  Position left = 0, right = 0;
  std::uint32_t left_common = 0, right_common = 0;
};

// Positions sorted by their contexts. The text is the caller's; all functions but insertion need it as it was when the
// positions came.
class SortedPositions {
 public:
  static constexpr std::uint32_t kBatch = 16;  // searches that run side by side

  PositionTree& tree() { return tree_; }
  const PositionTree& tree() const { return tree_; }

  Found search(const Token* text, const Query& query) const;
  // Does the same for a whole context, however long, and however many share how much of it.
  Found search_deep(const Token* text, std::span<const Token> context) const;
  // Returns the places that share `length` tokens with the context. `found`: where it belongs, if that is known.
  Extent extent(const Token* text, std::span<const Token> context, std::size_t length) const;
  Extent extent(const Token* text, std::span<const Token> context, std::uint32_t length, const Found& found) const;
  // Finds where a position stands; false if it is not here.
  bool locate(const Token* text, Position position, Place& place) const;
  Neighbours neighbours(const Found& found) const;

  // Inserts [begin, begin + count), count at most kBatch. Returns the neighbours of the last one.
  Neighbours insert_batch(const Token* text, Position begin, std::uint32_t count);
  // Takes positions out, at most kBatch.
  void erase_batch(const Token* text, std::span<const Position> positions);

 private:
  bool first_in_leaf(const Token* text, const Query& query, Place& place) const;
  bool last_in_leaf(const Token* text, const Query& query, Place& place) const;
  bool find_in_leaf(Place& place, Position position) const;
  bool find_near(Place& place, Position position) const;
  bool find_between(Place low, Place high, Position position, Place& place) const;

  PositionTree tree_;
};

}  // namespace agentspec
