#include "index/position_tree.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "index/sorted_positions.hpp"

namespace agentspec {
namespace {

template <class Array>
void open_gap(Array& array, std::uint32_t at, std::uint32_t size) {
  std::memmove(&array[at + 1], &array[at], (size - at) * sizeof(array[0]));
}

template <class Array>
void close_gap(Array& array, std::uint32_t at, std::uint32_t size) {
  std::memmove(&array[at], &array[at + 1], (size - at - 1) * sizeof(array[0]));
}

template <class Array>
void copy_part(Array& to, std::uint32_t at, const Array& from, std::uint32_t begin, std::uint32_t count) {
  std::memcpy(&to[at], &from[begin], count * sizeof(to[0]));
}

}  // namespace

std::size_t SortedPositions::bytes() const {
  return positions_.bytes() + owners_.bytes() + chunks_.bytes() +
         row_.keys.capacity() * (sizeof(Key) + sizeof(Position) + 2 * sizeof(std::uint32_t));
}

// The key and the first position of a leaf, in its chunk and, for a chunk's first leaf, in the row.
void SortedPositions::set_first(const Token* text, std::uint32_t chunk, std::uint32_t leaf) {
  Chunk& c = chunk_at(chunk);
  const Position first = leaf_at({chunk, leaf, 0})[0];
  c.firsts[leaf] = first;
  c.keys[leaf] = key_before(text + first);
  if (leaf == 0) {
    row_.firsts[chunk] = first;
    row_.keys[chunk] = c.keys[0];
  }
}

void SortedPositions::insert_first(const Token* text, Position position) {
  new_chunk();
  row_.chunks.assign(1, 0);
  row_.counts.assign(1, 1);
  row_.keys.assign(1, {});
  row_.firsts.assign(1, 0);
  const std::uint32_t leaf = new_leaf(0);
  positions_[std::size_t{kLeaf} * leaf] = position;
  put_leaf(0, 0, leaf, 1);
  set_first(text, 0, 0);
  size_ = 1;
}

void SortedPositions::insert(const Token* text, Place place, Position position) {
  if (size_ == 0) return insert_first(text, position);
  if (chunk_at(place.chunk).counts[place.leaf] == kLeaf) split_leaf(text, place);
  Chunk& chunk = chunk_at(place.chunk);
  Position* const leaf = leaf_at(place);
  std::uint8_t& count = chunk.counts[place.leaf];
  std::memmove(leaf + place.slot + 1, leaf + place.slot, (count - place.slot) * sizeof(Position));
  leaf[place.slot] = position;
  ++count;
  ++row_.counts[place.chunk];
  ++size_;
  if (place.slot == 0) set_first(text, place.chunk, place.leaf);
}

Neighbours SortedPositions::insert_batch(const Token* text, Position begin, std::uint32_t count) {
  std::array<Search, kBatch> searches;
  std::array<Found, kBatch> found{};
  std::array<bool, kBatch> stale{};
  Neighbours last;
  if (size_ > 0) {
    for (std::uint32_t i = 0; i < count; ++i) searches[i] = Search(*this, text, Query::of_position(text, begin + i));
    SearchTogether<kBatch>::run({searches.data(), count});
    for (std::uint32_t i = 0; i < count; ++i) found[i] = searches[i].found();
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    if (stale[i]) found[i] = search(text, Query::of_position(text, begin + i));
    const Place place = found[i].place;
    if (i + 1 == count) last = neighbours(found[i]);
    const std::size_t leaves = owners_.size();
    const std::size_t chunks = row_.chunks.size();
    insert(text, place, begin + i);
    const bool leaf_split = owners_.size() != leaves;
    const bool chunk_split = row_.chunks.size() != chunks;
    for (std::uint32_t k = i + 1; k < count; ++k) {
      Place& other = found[k].place;
      if (chunk_split || (other.chunk == place.chunk && other.leaf == place.leaf)) {
        stale[k] = true;
      } else if (leaf_split && other.chunk == place.chunk && other.leaf > place.leaf) {
        ++other.leaf;
      }
    }
  }
  return last;
}

void SortedPositions::erase_batch(const Token* text, std::span<const Position> positions) {
  std::array<Search, kBatch> searches;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    searches[i] = Search(*this, text, Query::of_position(text, positions[i], kShallow));
  }
  SearchTogether<kBatch>::run({searches.data(), positions.size()});
  for (std::size_t i = 0; i < positions.size(); ++i) {
    Place place = searches[i].found().place;  // out of date where the ones before changed it
    if (find_near(place, positions[i]) || locate(text, positions[i], place)) erase(text, place);
  }
}

void SortedPositions::erase(const Token* text, Place place) {
  Chunk& chunk = chunk_at(place.chunk);
  Position* const leaf = leaf_at(place);
  std::uint8_t& count = chunk.counts[place.leaf];
  close_gap(leaf, place.slot, count);
  --count;
  --row_.counts[place.chunk];
  --size_;
  if (count > 0 && place.slot == 0) set_first(text, place.chunk, place.leaf);
  if (count < kLeaf / 2) merge_leaf(place.chunk, place.leaf);
}

void SortedPositions::rebase(Position by) {
  for (std::size_t rank = 0; rank < row_.chunks.size(); ++rank) {
    row_.firsts[rank] -= by;
    Chunk& chunk = chunk_at(static_cast<std::uint32_t>(rank));
    for (std::uint32_t i = 0; i < chunk.size; ++i) {
      chunk.firsts[i] -= by;
      Position* const leaf = positions_.data() + std::size_t{kLeaf} * chunk.leaves[i];
      for (std::uint32_t k = 0; k < chunk.counts[i]; ++k) leaf[k] -= by;
    }
  }
}

std::uint32_t SortedPositions::new_leaf(std::uint32_t owner) {
  const auto leaf = static_cast<std::uint32_t>(owners_.size());
  owners_.resize(leaf + 1);
  owners_[leaf] = owner;
  positions_.resize(positions_.size() + kLeaf);
  std::fill_n(&positions_[std::size_t{kLeaf} * leaf], kLeaf, 0);
  return leaf;
}

// All of it is zero, and what is unused stays so: snapshots hold it as it is, and nothing of erased text.
std::uint32_t SortedPositions::new_chunk() {
  const auto chunk = static_cast<std::uint32_t>(chunks_.size());
  chunks_.resize(chunk + 1);
  std::memset(static_cast<void*>(&chunks_[chunk]), 0, sizeof(Chunk));
  return chunk;
}

// The last leaf moves to where `leaf` was.
void SortedPositions::free_leaf(std::uint32_t leaf) {
  const auto last = static_cast<std::uint32_t>(owners_.size() - 1);
  if (leaf != last) {
    std::memcpy(&positions_[std::size_t{kLeaf} * leaf], &positions_[std::size_t{kLeaf} * last],
                kLeaf * sizeof(Position));
    owners_[leaf] = owners_[last];
    Chunk& chunk = chunks_[owners_[leaf]];
    *std::find(chunk.leaves.begin(), chunk.leaves.begin() + chunk.size, last) = leaf;
  }
  owners_.resize(last);
  positions_.resize(std::size_t{kLeaf} * last);
}

// The last chunk moves to where `chunk` was.
void SortedPositions::free_chunk(std::uint32_t chunk) {
  const auto last = static_cast<std::uint32_t>(chunks_.size() - 1);
  if (chunk != last) {
    std::memcpy(&chunks_[chunk], &chunks_[last], sizeof(Chunk));
    for (std::uint32_t i = 0; i < chunks_[chunk].size; ++i) owners_[chunks_[chunk].leaves[i]] = chunk;
    *std::find(row_.chunks.begin(), row_.chunks.end(), last) = chunk;
  }
  chunks_.resize(last);
}

void SortedPositions::put_leaf(std::uint32_t chunk, std::uint32_t rank, std::uint32_t leaf, std::uint32_t count) {
  Chunk& c = chunk_at(chunk);
  open_gap(c.keys, rank, c.size);
  open_gap(c.firsts, rank, c.size);
  open_gap(c.leaves, rank, c.size);
  open_gap(c.counts, rank, c.size);
  c.leaves[rank] = leaf;
  c.counts[rank] = static_cast<std::uint8_t>(count);
  ++c.size;
}

void SortedPositions::drop_leaf(std::uint32_t chunk, std::uint32_t rank) {
  Chunk& c = chunk_at(chunk);
  const std::uint32_t leaf = c.leaves[rank];
  close_gap(c.keys, rank, c.size);
  close_gap(c.firsts, rank, c.size);
  close_gap(c.leaves, rank, c.size);
  close_gap(c.counts, rank, c.size);
  c.keys[--c.size] = {};
  free_leaf(leaf);
}

void SortedPositions::split_leaf(const Token* text, Place& place) {
  if (chunk_at(place.chunk).size == kChunk) split_chunk(place);
  const std::uint32_t fresh = new_leaf(row_.chunks[place.chunk]);
  constexpr std::uint32_t kept = kLeaf / 2;
  std::memcpy(&positions_[std::size_t{kLeaf} * fresh], leaf_at(place) + kept, (kLeaf - kept) * sizeof(Position));
  chunk_at(place.chunk).counts[place.leaf] = kept;
  put_leaf(place.chunk, place.leaf + 1, fresh, kLeaf - kept);
  set_first(text, place.chunk, place.leaf + 1);
  if (place.slot > kept) {
    ++place.leaf;
    place.slot -= kept;
  }
}

void SortedPositions::split_chunk(Place& place) {
  const std::uint32_t fresh = new_chunk();
  Chunk& from = chunk_at(place.chunk);
  Chunk& to = chunks_[fresh];
  constexpr std::uint32_t kept = kChunk / 2;
  to.size = kChunk - kept;
  copy_part(to.keys, 0, from.keys, kept, to.size);
  copy_part(to.firsts, 0, from.firsts, kept, to.size);
  copy_part(to.leaves, 0, from.leaves, kept, to.size);
  copy_part(to.counts, 0, from.counts, kept, to.size);
  from.size = kept;
  std::fill(from.keys.begin() + kept, from.keys.end(), Key{});
  std::uint32_t moved = 0;
  for (std::uint32_t i = 0; i < to.size; ++i) {
    owners_[to.leaves[i]] = fresh;
    moved += to.counts[i];
  }
  row_.counts[place.chunk] -= moved;
  put_chunk(place.chunk + 1, fresh, moved);
  if (place.leaf >= kept) {
    ++place.chunk;
    place.leaf -= kept;
  }
}

// Puts a chunk of so many positions into the row.
void SortedPositions::put_chunk(std::uint32_t rank, std::uint32_t chunk, std::uint32_t count) {
  row_.keys.insert(row_.keys.begin() + rank, chunks_[chunk].keys[0]);
  row_.firsts.insert(row_.firsts.begin() + rank, chunks_[chunk].firsts[0]);
  row_.chunks.insert(row_.chunks.begin() + rank, chunk);
  row_.counts.insert(row_.counts.begin() + rank, count);
}

void SortedPositions::drop_chunk(std::uint32_t rank) {
  const std::uint32_t chunk = row_.chunks[rank];
  row_.keys.erase(row_.keys.begin() + rank);
  row_.firsts.erase(row_.firsts.begin() + rank);
  row_.chunks.erase(row_.chunks.begin() + rank);
  row_.counts.erase(row_.counts.begin() + rank);
  free_chunk(chunk);
}

// Joins a leaf that lost positions with a neighbour in its chunk, where both fit with room to spare.
void SortedPositions::merge_leaf(std::uint32_t rank, std::uint32_t leaf) {
  Chunk& chunk = chunk_at(rank);
  if (chunk.counts[leaf] == 0) {
    drop_leaf(rank, leaf);
    if (chunk.size > 0 && leaf == 0) {
      row_.firsts[rank] = chunk.firsts[0];
      row_.keys[rank] = chunk.keys[0];
    }
    return merge_chunk(rank);
  }
  for (std::uint32_t left = leaf > 0 ? leaf - 1 : leaf; left <= leaf && left + 1 < chunk.size; ++left) {
    const std::uint32_t a = chunk.counts[left], b = chunk.counts[left + 1];
    if (a + b > kLeaf * 3 / 4) continue;
    std::memcpy(leaf_at({rank, left, a}) + a, leaf_at({rank, left + 1, 0}), b * sizeof(Position));
    chunk.counts[left] = static_cast<std::uint8_t>(a + b);
    drop_leaf(rank, left + 1);
    return merge_chunk(rank);
  }
}

void SortedPositions::merge_chunk(std::uint32_t rank) {
  if (chunk_at(rank).size == 0) return drop_chunk(rank);
  if (chunk_at(rank).size >= kChunk / 2) return;
  for (std::uint32_t left = rank > 0 ? rank - 1 : rank; left <= rank && left + 1 < row_.chunks.size(); ++left) {
    Chunk& to = chunk_at(left);
    const Chunk& from = chunk_at(left + 1);
    if (to.size + from.size > kChunk * 3 / 4) continue;
    copy_part(to.keys, to.size, from.keys, 0, from.size);
    copy_part(to.firsts, to.size, from.firsts, 0, from.size);
    copy_part(to.leaves, to.size, from.leaves, 0, from.size);
    copy_part(to.counts, to.size, from.counts, 0, from.size);
    for (std::uint32_t i = 0; i < from.size; ++i) owners_[from.leaves[i]] = row_.chunks[left];
    to.size += from.size;
    row_.counts[left] += row_.counts[left + 1];
    return drop_chunk(left + 1);
  }
}

void SortedPositions::restore(SnapshotReader& reader, std::size_t end) {
  const auto numbers = std::exchange(row_, {}).chunks;
  std::vector<bool> seen(chunks_.size());
  std::size_t leaves = 0, size = 0;
  bool right = numbers.size() == chunks_.size() && positions_.size() == owners_.size() * kLeaf;
  for (const std::uint32_t number : numbers) {
    right = right && number < chunks_.size() && !seen[number] && chunks_[number].size - 1 < kChunk;
    if (!right) break;
    seen[number] = true;
    const Chunk& chunk = chunks_[number];
    const std::size_t before = size;
    for (std::uint32_t k = 0; right && k < chunk.size; ++k, ++leaves) {
      const std::uint32_t leaf = chunk.leaves[k], count = chunk.counts[k];
      right = leaf < owners_.size() && owners_[leaf] == number && count - 1 < kLeaf;
      if (!right) break;
      const Position* const positions = &positions_[std::size_t{kLeaf} * leaf];
      right = chunk.firsts[k] == positions[0] && *std::max_element(positions, positions + count) < end;
      size += count;
    }
    put_chunk(static_cast<std::uint32_t>(row_.chunks.size()), number, static_cast<std::uint32_t>(size - before));
  }
  if (!right || leaves != owners_.size() || size != size_) reader.damaged("positions");
}

}  // namespace agentspec
