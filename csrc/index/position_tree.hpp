#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "index/context.hpp"
#include "storage/buffer.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

inline constexpr std::uint32_t kLeaf = 64;   // positions in a leaf
inline constexpr std::uint32_t kChunk = 64;  // leaves in a chunk

// Names a place in the tree: the rank of the chunk, the rank of the leaf in it, and the slot in the leaf.
struct Place {
  std::uint32_t chunk = 0, leaf = 0, slot = 0;

  bool operator==(const Place&) const = default;
};

// Holds a sequence of positions as a B+-tree of three levels: leaves of positions, chunks of leaves, and one row of
// chunks. Leaves and chunks lie in two dense arrays: the last one fills the hole that a removed one leaves. The level
// above each has its first position and that position's last four tokens of context, so that a descent reads little
// text.
// The caller owns the text. SortedPositions decides where a position belongs.
class PositionTree {
 public:
  struct Chunk {
    std::array<Key, kChunk> keys;  // of each leaf's first position
    std::array<Position, kChunk> firsts;
    std::array<std::uint32_t, kChunk> leaves;
    std::array<std::uint8_t, kChunk> counts;
    std::uint32_t size;
  };
  // Holds the row of chunks, one array for each field.
  struct Row {
    std::vector<Key> keys;
    std::vector<Position> firsts;
    std::vector<std::uint32_t> chunks, counts;
  };

  std::size_t size() const { return size_; }
  std::size_t leaves() const { return owners_.size(); }
  std::size_t bytes() const;
  const Row& row() const { return row_; }
  const Chunk& chunk_at(std::uint32_t rank) const { return chunks_[row_.chunks[rank]]; }
  const Position* leaf_at(Place place) const { return leaf(chunk_at(place.chunk).leaves[place.leaf]); }
  std::uint32_t leaf_size(Place place) const { return chunk_at(place.chunk).counts[place.leaf]; }
  Position at(Place place) const { return leaf_at(place)[place.slot]; }

  void insert(const Token* text, Place place, Position position);
  // Replaces all positions by these, which must be sorted.
  void build(const Token* text, std::span<const Position> sorted);
  void erase(const Token* text, Place place);
  void rebase(Position by);  // subtracts `by` from all positions
  // Gives back up to `most` bytes of a tree that is not used any more. Returns whether all are gone.
  bool dispose(std::size_t most) { return positions_.dispose(most) && owners_.dispose(most) && chunks_.dispose(most); }

  // Each moves to the nearest place that holds a position: previous() before this place, normalise() from it on.
  // Returns false if there is none. The given place may be one behind the last of its leaf.
  bool previous(Place& place) const;
  bool normalise(Place& place) const;
  // Moves forward by `count` positions, which must exist.
  void skip(Place& place, std::size_t count) const;
  // Counts the positions from `low` up to, but not at, `high`.
  std::size_t distance(const Place& low, const Place& high) const;
  // Fills `picked` with n evenly spaced positions of the `count` from `low` on: the k-th has rank k * count / n.
  // Prefetches their text.
  void pick(const Token* text, const Place& low, std::size_t count, std::span<Position> picked) const;
  static constexpr std::size_t kMostPicked = 32;

  template <class Archive>
  void describe(Archive& archive) {
    archive.number(size_);
    archive.array(positions_);
    archive.array(owners_);
    archive.array(chunks_);
    archive.vector(row_.chunks);
  }
  // Completes the row after loading. Throws unless the arrays form a tree of positions of [begin, end) that are
  // `indexed`, each once.
  void restore(SnapshotReader& reader, Position begin, Position end, const std::function<bool(Position)>& indexed);

 private:
  Chunk& chunk_at(std::uint32_t rank) { return chunks_[row_.chunks[rank]]; }
  const Position* leaf(std::uint32_t number) const { return positions_.data() + std::size_t{kLeaf} * number; }
  Position* leaf(std::uint32_t number) { return positions_.data() + std::size_t{kLeaf} * number; }
  Position* leaf_at(Place place) { return leaf(chunk_at(place.chunk).leaves[place.leaf]); }

  void set_first(const Token* text, std::uint32_t chunk, std::uint32_t leaf);
  std::size_t rank_in_chunk(const Place& place) const;
  void enter(Place& place, std::size_t rank) const;

  std::uint32_t new_leaf(std::uint32_t owner);
  std::uint32_t new_chunk();
  void free_leaf(std::uint32_t leaf);
  void free_chunk(std::uint32_t chunk);
  void put_leaf(std::uint32_t chunk, std::uint32_t rank, std::uint32_t leaf, std::uint32_t count);
  void put_chunk(std::uint32_t rank, std::uint32_t chunk, std::uint32_t count);
  void drop_leaf(std::uint32_t chunk, std::uint32_t rank);
  void drop_chunk(std::uint32_t rank);
  std::uint32_t move_leaves(Chunk& from, std::uint32_t begin, std::uint32_t number);
  void split_leaf(const Token* text, Place& place);
  void split_chunk(Place& place);
  void merge_leaf(std::uint32_t chunk, std::uint32_t rank);
  void merge_chunk(std::uint32_t rank);

  Buffer<Position> positions_;    // kLeaf for each leaf
  Buffer<std::uint32_t> owners_;  // chunk of each leaf
  Buffer<Chunk> chunks_;
  Row row_;
  std::size_t size_ = 0;
};

}  // namespace agentspec
