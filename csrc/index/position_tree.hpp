#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/context.hpp"
#include "storage/buffer.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

inline constexpr std::uint32_t kLeaf = 64;    // positions in a leaf
inline constexpr std::uint32_t kChunk = 64;    // leaves in a chunk

// A place among the sorted positions: the chunk and the leaf by their rank, then the position in the leaf.
struct Place {
  std::uint32_t chunk = 0, leaf = 0, slot = 0;

  bool operator==(const Place&) const = default;
};

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

// Positions sorted by their contexts, as a B+-tree of three levels: leaves of positions, chunks of leaves, and one row
// of chunks. Leaves and chunks lie in two dense arrays: the last one fills the hole that a removed one leaves. With
// every leaf and chunk go its first position and the last four tokens, so that a descent reads little text.
// The text is the caller's; all functions but `insert` need it as it was when the positions came.
class SortedPositions {
 public:
  class Search;

  std::size_t size() const { return size_; }
  std::size_t bytes() const;

  Found search(const Token* text, const Query& query) const;
  // The same for a whole context, however long, and however many share how much of it.
  Found search_deep(const Token* text, std::span<const Token> context) const;
  // The places that share `length` tokens with the context; where `found` says that it belongs, if that is known.
  Extent extent(const Token* text, std::span<const Token> context, std::size_t length) const;
  Extent extent(const Token* text, std::span<const Token> context, std::uint32_t length, const Found& found) const;
  // Finds where a position stands; false if it is not here.
  bool locate(const Token* text, Position position, Place& place) const;

  void insert(const Token* text, Place place, Position position);
  // Inserts [begin, begin + count), count at most kBatch; returns the neighbours of the last one.
  Neighbours insert_batch(const Token* text, Position begin, std::uint32_t count);
  // Takes positions out, at most kBatch.
  void erase_batch(const Token* text, std::span<const Position> positions);

  Neighbours neighbours(const Found& found) const;

  Position at(Place place) const { return leaf_at(place)[place.slot]; }
  // The nearest place before or after that holds a position; false at the end. Takes places behind a leaf's last.
  bool previous(Place& place) const;
  bool normalise(Place& place) const;

  // Number of positions from `low` up to `high`.
  std::size_t distance(const Place& low, const Place& high) const;
  // Moves on by `count` positions, which must be there.
  void skip(Place& place, std::size_t count) const;
  // Positions of the `count` ones from `low` on, evenly spaced: the k-th of n is that of rank k * count / n.
  void pick(const Token* text, const Place& low, std::size_t count, std::span<Position> picked) const;
  static constexpr std::size_t kMostPicked = 32;

  void rebase(Position by);

  template <class Archive>
  void describe(Archive& archive) {
    archive.number(size_);
    archive.array(positions_);
    archive.array(owners_);
    archive.array(chunks_);
    archive.vector(row_.chunks);
  }
  // After loading: the arrays must refer to each other, and to a text of so many tokens, as they do in an index.
  void restore(SnapshotReader& reader, std::size_t end);

  static constexpr std::uint32_t kBatch = 16;
  static constexpr std::size_t kShallow = 64;   // tokens that are always compared directly

 private:
  struct Chunk {
    std::array<Key, kChunk> keys;  // of each leaf's first position
    std::array<Position, kChunk> firsts;
    std::array<std::uint32_t, kChunk> leaves;
    std::array<std::uint8_t, kChunk> counts;
    std::uint32_t size;
  };
  // The row of chunks, one array a field.
  struct Row {
    std::vector<Key> keys;
    std::vector<Position> firsts;
    std::vector<std::uint32_t> chunks, counts;
  };

  const Chunk& chunk_at(std::uint32_t rank) const { return chunks_[row_.chunks[rank]]; }
  Chunk& chunk_at(std::uint32_t rank) { return chunks_[row_.chunks[rank]]; }
  const Position* leaf_at(Place place) const {
    return positions_.data() + std::size_t{kLeaf} * chunk_at(place.chunk).leaves[place.leaf];
  }
  Position* leaf_at(Place place) {
    return positions_.data() + std::size_t{kLeaf} * chunk_at(place.chunk).leaves[place.leaf];
  }

  void erase(const Token* text, Place place);
  bool first_in_leaf(const Token* text, const Query& query, Place& place) const;
  bool last_in_leaf(const Token* text, const Query& query, Place& place) const;
  std::size_t rank_in_chunk(const Place& place) const;
  void enter(Place& place, std::size_t rank) const;
  bool find_in_leaf(Place& place, Position position) const;
  bool find_near(Place& place, Position position) const;
  bool find_between(Place low, Place high, Position position, Place& place) const;
  void insert_first(const Token* text, Position position);
  void set_first(const Token* text, std::uint32_t chunk, std::uint32_t leaf);
  std::uint32_t new_leaf(std::uint32_t owner);
  std::uint32_t new_chunk();
  void put_chunk(std::uint32_t rank, std::uint32_t chunk, std::uint32_t count);
  void free_leaf(std::uint32_t leaf);
  void free_chunk(std::uint32_t chunk);
  void put_leaf(std::uint32_t chunk, std::uint32_t rank, std::uint32_t leaf, std::uint32_t count);
  void drop_leaf(std::uint32_t chunk, std::uint32_t rank);
  void split_leaf(const Token* text, Place& place);
  void split_chunk(Place& place);
  void drop_chunk(std::uint32_t rank);
  void merge_leaf(std::uint32_t chunk, std::uint32_t rank);
  void merge_chunk(std::uint32_t rank);

  Buffer<Position> positions_;      // kLeaf a leaf
  Buffer<std::uint32_t> owners_;    // chunk of each leaf
  Buffer<Chunk> chunks_;
  Row row_;
  std::size_t size_ = 0;
};

}  // namespace agentspec
