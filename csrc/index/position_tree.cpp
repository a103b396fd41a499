#include "index/position_tree.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace agentspec {
namespace {

// Applies a function to each column of a chunk.
template <class Function>
void each_column(PositionTree::Chunk& chunk, Function apply) {
  apply(chunk.keys);
  apply(chunk.firsts);
  apply(chunk.leaves);
  apply(chunk.counts);
}

}  // namespace

std::size_t PositionTree::bytes() const {
  return positions_.bytes() + owners_.bytes() + chunks_.bytes() +
         heap_bytes(row_.keys.capacity() * sizeof(Key)) + heap_bytes(row_.firsts.capacity() * sizeof(Position)) +
         heap_bytes(row_.chunks.capacity() * sizeof(std::uint32_t)) +
         heap_bytes(row_.counts.capacity() * sizeof(std::uint32_t));
}

bool PositionTree::previous(Place& place) const {
  if (place.slot == 0) {
    if (place.leaf == 0) {
      if (place.chunk == 0) return false;
      --place.chunk;
      place.leaf = chunk_at(place.chunk).size;
    }
    --place.leaf;
    place.slot = chunk_at(place.chunk).counts[place.leaf];
  }
  --place.slot;
  return true;
}

bool PositionTree::normalise(Place& place) const {
  if (size_ == 0) return false;
  const Chunk& chunk = chunk_at(place.chunk);
  if (place.slot < chunk.counts[place.leaf]) return true;
  if (place.leaf + 1 < chunk.size) {
    place = {place.chunk, place.leaf + 1, 0};
    return true;
  }
  if (place.chunk + 1 == row_.chunks.size()) return false;
  place = {place.chunk + 1, 0, 0};
  return true;
}

std::size_t PositionTree::rank_in_chunk(const Place& place) const {
  const Chunk& chunk = chunk_at(place.chunk);
  std::size_t count = place.slot;
  for (std::uint32_t i = 0; i < place.leaf; ++i) count += chunk.counts[i];
  return count;
}

std::size_t PositionTree::distance(const Place& low, const Place& high) const {
  if (std::tie(high.chunk, high.leaf, high.slot) <= std::tie(low.chunk, low.leaf, low.slot)) return 0;
  if (low.chunk == high.chunk && low.leaf == high.leaf) return high.slot - low.slot;
  __builtin_prefetch(chunk_at(high.chunk).counts.data());
  std::size_t sum = 0;
  for (std::uint32_t i = low.chunk; i < high.chunk; ++i) sum += row_.counts[i];
  return sum + rank_in_chunk(high) - rank_in_chunk(low);
}

void PositionTree::skip(Place& place, std::size_t count) const {
  count += rank_in_chunk(place);
  while (count >= row_.counts[place.chunk]) count -= row_.counts[place.chunk++];
  enter(place, count);
}

// Moves to the position of this rank within the chunk.
void PositionTree::enter(Place& place, std::size_t rank) const {
  const Chunk& chunk = chunk_at(place.chunk);
  for (place.leaf = 0; rank >= chunk.counts[place.leaf]; ++place.leaf) rank -= chunk.counts[place.leaf];
  place.slot = static_cast<std::uint32_t>(rank);
}

// Works in rounds, so that the memory of all chunks, then leaves, then texts is waited for once each.
void PositionTree::pick(const Token* text, const Place& low, std::size_t count, std::span<Position> picked) const {
  if (low.slot + count <= chunk_at(low.chunk).counts[low.leaf]) {
    const Position* const leaf = leaf_at(low) + low.slot;
    for (std::size_t k = 0; k < picked.size(); ++k) picked[k] = leaf[k * count / picked.size()];
  } else {
    std::array<Place, kMostPicked> places;
    std::array<std::size_t, kMostPicked> ranks;
    const std::size_t first = rank_in_chunk(low);
    std::uint32_t chunk = low.chunk;
    std::size_t before = 0;
    for (std::size_t k = 0; k < picked.size(); ++k) {
      const std::size_t rank = first + k * count / picked.size();
      while (rank - before >= row_.counts[chunk]) before += row_.counts[chunk++];
      places[k].chunk = chunk;
      ranks[k] = rank - before;
      __builtin_prefetch(chunk_at(chunk).counts.data());
    }
    for (std::size_t k = 0; k < picked.size(); ++k) {
      enter(places[k], ranks[k]);
      __builtin_prefetch(leaf_at(places[k]) + places[k].slot);
    }
    for (std::size_t k = 0; k < picked.size(); ++k) picked[k] = at(places[k]);
  }
  for (const Position position : picked) __builtin_prefetch(text + position);
}

// Sets the key and the first position of a leaf, in its chunk and, for a chunk's first leaf, in the row.
void PositionTree::set_first(const Token* text, std::uint32_t chunk, std::uint32_t leaf) {
  Chunk& c = chunk_at(chunk);
  const Position first = at({chunk, leaf, 0});
  c.firsts[leaf] = first;
  c.keys[leaf] = key_before(text + first);
  if (leaf == 0) {
    row_.firsts[chunk] = first;
    row_.keys[chunk] = c.keys[0];
  }
}

void PositionTree::insert(const Token* text, Place place, Position position) {
  if (size_ == 0) {
    new_chunk();
    put_chunk(0, 0, 0);
    put_leaf(0, 0, new_leaf(0), 0);
  }
  if (leaf_size(place) == kLeaf) split_leaf(text, place);
  Position* const leaf = leaf_at(place);
  std::uint8_t& count = chunk_at(place.chunk).counts[place.leaf];
  std::copy_backward(leaf + place.slot, leaf + count, leaf + count + 1);
  leaf[place.slot] = position;
  ++count;
  ++row_.counts[place.chunk];
  ++size_;
  if (place.slot == 0) set_first(text, place.chunk, place.leaf);
}

// Fills leaves unequally, from half to five sixths. Equally filled leaves would all split at about the same time later,
// and then the tree would take twice the memory.
void PositionTree::build(const Token* text, std::span<const Position> sorted) {
  constexpr std::uint32_t kLeast = kLeaf / 2, kSpread = kLeaf / 3, kStep = 8;  // kStep and kSpread are coprime
  *this = PositionTree();
  std::uint32_t rank = 0;
  for (std::uint32_t turn = 0; !sorted.empty(); turn = (turn + kStep) % kSpread) {
    if (size_ == 0 || chunk_at(rank).size == kChunk * 2 / 3) {
      const std::uint32_t chunk = new_chunk();
      rank = static_cast<std::uint32_t>(row_.chunks.size());
      put_chunk(rank, chunk, 0);
    }
    const bool alone = size_ == 0 && sorted.size() <= kLeaf;
    const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(sorted.size(), alone ? kLeaf : kLeast + turn));
    const std::uint32_t fresh = new_leaf(row_.chunks[rank]), place = chunk_at(rank).size;
    std::ranges::copy(sorted.first(count), leaf(fresh));
    put_leaf(rank, place, fresh, count);
    set_first(text, rank, place);
    row_.counts[rank] += count;
    size_ += count;
    sorted = sorted.subspan(count);
  }
}

void PositionTree::erase(const Token* text, Place place) {
  Position* const leaf = leaf_at(place);
  std::uint8_t& count = chunk_at(place.chunk).counts[place.leaf];
  std::copy(leaf + place.slot + 1, leaf + count, leaf + place.slot);
  --count;
  --row_.counts[place.chunk];
  --size_;
  if (count > 0 && place.slot == 0) set_first(text, place.chunk, place.leaf);
  if (count < kLeaf / 2) merge_leaf(place.chunk, place.leaf);
}

void PositionTree::rebase(Position by) {
  for (Position& first : row_.firsts) first -= by;
  for (std::size_t number = 0; number < chunks_.size(); ++number) {
    Chunk& chunk = chunks_[number];
    for (std::uint32_t i = 0; i < chunk.size; ++i) {
      chunk.firsts[i] -= by;
      Position* const positions = leaf(chunk.leaves[i]);
      for (std::uint32_t k = 0; k < chunk.counts[i]; ++k) positions[k] -= by;
    }
  }
}

std::uint32_t PositionTree::new_leaf(std::uint32_t owner) {
  const auto number = static_cast<std::uint32_t>(owners_.size());
  owners_.resize(number + 1);
  owners_[number] = owner;
  positions_.resize(positions_.size() + kLeaf);
  std::fill_n(leaf(number), kLeaf, 0);
  return number;
}

// Makes a chunk of zeros. Unused fields stay zero, so that snapshots contain nothing of erased text.
std::uint32_t PositionTree::new_chunk() {
  const auto number = static_cast<std::uint32_t>(chunks_.size());
  chunks_.resize(number + 1);
  std::memset(static_cast<void*>(&chunks_[number]), 0, sizeof(Chunk));
  return number;
}

// Frees a leaf by moving the last leaf to its number.
void PositionTree::free_leaf(std::uint32_t number) {
  const auto last = static_cast<std::uint32_t>(owners_.size() - 1);
  if (number != last) {
    std::copy_n(leaf(last), kLeaf, leaf(number));
    owners_[number] = owners_[last];
    *std::ranges::find(chunks_[owners_[number]].leaves, last) = number;
  }
  owners_.resize(last);
  positions_.resize(std::size_t{kLeaf} * last);
}

// Frees a chunk by moving the last chunk to its number.
void PositionTree::free_chunk(std::uint32_t number) {
  const auto last = static_cast<std::uint32_t>(chunks_.size() - 1);
  if (number != last) {
    std::memcpy(static_cast<void*>(&chunks_[number]), &chunks_[last], sizeof(Chunk));
    for (std::uint32_t i = 0; i < chunks_[number].size; ++i) owners_[chunks_[number].leaves[i]] = number;
    *std::ranges::find(row_.chunks, last) = number;
  }
  chunks_.resize(last);
}

void PositionTree::put_leaf(std::uint32_t chunk, std::uint32_t rank, std::uint32_t leaf, std::uint32_t count) {
  Chunk& c = chunk_at(chunk);
  each_column(c, [&](auto& column) {
    std::copy_backward(column.begin() + rank, column.begin() + c.size, column.begin() + c.size + 1);
  });
  c.leaves[rank] = leaf;
  c.counts[rank] = static_cast<std::uint8_t>(count);
  ++c.size;
}

void PositionTree::drop_leaf(std::uint32_t chunk, std::uint32_t rank) {
  Chunk& c = chunk_at(chunk);
  const std::uint32_t leaf = c.leaves[rank];
  each_column(c, [&](auto& column) {
    std::copy(column.begin() + rank + 1, column.begin() + c.size, column.begin() + rank);
    column[c.size - 1] = {};
  });
  --c.size;
  free_leaf(leaf);
}

// Puts a chunk of `count` positions into the row.
void PositionTree::put_chunk(std::uint32_t rank, std::uint32_t chunk, std::uint32_t count) {
  row_.keys.insert(row_.keys.begin() + rank, chunks_[chunk].keys[0]);
  row_.firsts.insert(row_.firsts.begin() + rank, chunks_[chunk].firsts[0]);
  row_.chunks.insert(row_.chunks.begin() + rank, chunk);
  row_.counts.insert(row_.counts.begin() + rank, count);
}

void PositionTree::drop_chunk(std::uint32_t rank) {
  const std::uint32_t chunk = row_.chunks[rank];
  row_.keys.erase(row_.keys.begin() + rank);
  row_.firsts.erase(row_.firsts.begin() + rank);
  row_.chunks.erase(row_.chunks.begin() + rank);
  row_.counts.erase(row_.counts.begin() + rank);
  free_chunk(chunk);
}

void PositionTree::split_leaf(const Token* text, Place& place) {
  if (chunk_at(place.chunk).size == kChunk) split_chunk(place);
  const std::uint32_t fresh = new_leaf(row_.chunks[place.chunk]);
  constexpr std::uint32_t kept = kLeaf / 2;
  std::copy_n(leaf_at(place) + kept, kLeaf - kept, leaf(fresh));
  chunk_at(place.chunk).counts[place.leaf] = kept;
  put_leaf(place.chunk, place.leaf + 1, fresh, kLeaf - kept);
  set_first(text, place.chunk, place.leaf + 1);
  if (place.slot > kept) {
    ++place.leaf;
    place.slot -= kept;
  }
}

// Appends the leaves of `from`, from `begin` on, to chunk `number`. Returns how many positions they hold.
std::uint32_t PositionTree::move_leaves(Chunk& from, std::uint32_t begin, std::uint32_t number) {
  Chunk& to = chunks_[number];
  const std::uint32_t count = from.size - begin;
  std::copy_n(from.keys.begin() + begin, count, to.keys.begin() + to.size);
  std::copy_n(from.firsts.begin() + begin, count, to.firsts.begin() + to.size);
  std::copy_n(from.leaves.begin() + begin, count, to.leaves.begin() + to.size);
  std::copy_n(from.counts.begin() + begin, count, to.counts.begin() + to.size);
  std::uint32_t moved = 0;
  for (std::uint32_t i = begin; i < from.size; ++i) {
    owners_[from.leaves[i]] = number;
    moved += from.counts[i];
  }
  to.size += count;
  from.size = begin;
  each_column(from, [&](auto& column) {
    std::fill(column.begin() + begin, column.end(), std::remove_cvref_t<decltype(column[0])>{});
  });
  return moved;
}

void PositionTree::split_chunk(Place& place) {
  constexpr std::uint32_t kept = kChunk / 2;
  const std::uint32_t fresh = new_chunk();
  const std::uint32_t moved = move_leaves(chunk_at(place.chunk), kept, fresh);
  row_.counts[place.chunk] -= moved;
  put_chunk(place.chunk + 1, fresh, moved);
  if (place.leaf >= kept) {
    ++place.chunk;
    place.leaf -= kept;
  }
}

// Joins a leaf that lost positions with a neighbour in its chunk, if both fit into one leaf with room to spare.
void PositionTree::merge_leaf(std::uint32_t rank, std::uint32_t at) {
  Chunk& chunk = chunk_at(rank);
  if (chunk.counts[at] == 0) {
    drop_leaf(rank, at);
    if (chunk.size > 0 && at == 0) {
      row_.firsts[rank] = chunk.firsts[0];
      row_.keys[rank] = chunk.keys[0];
    }
    return merge_chunk(rank);
  }
  for (std::uint32_t left = at > 0 ? at - 1 : at; left <= at && left + 1 < chunk.size; ++left) {
    const std::uint32_t a = chunk.counts[left], b = chunk.counts[left + 1];
    if (a + b > kLeaf * 3 / 4) continue;
    std::copy_n(leaf(chunk.leaves[left + 1]), b, leaf(chunk.leaves[left]) + a);
    chunk.counts[left] = static_cast<std::uint8_t>(a + b);
    drop_leaf(rank, left + 1);
    return merge_chunk(rank);
  }
}

void PositionTree::merge_chunk(std::uint32_t rank) {
  if (chunk_at(rank).size == 0) return drop_chunk(rank);
  if (chunk_at(rank).size >= kChunk / 2) return;
  for (std::uint32_t left = rank > 0 ? rank - 1 : rank; left <= rank && left + 1 < row_.chunks.size(); ++left) {
    if (chunk_at(left).size + chunk_at(left + 1).size > kChunk * 3 / 4) continue;
    row_.counts[left] += move_leaves(chunk_at(left + 1), 0, row_.chunks[left]);
    return drop_chunk(left + 1);
  }
}

void PositionTree::restore(SnapshotReader& reader, Position begin, Position end,
                           const std::function<bool(Position)>& indexed) {
  const auto check = [&](bool right) {
    if (!right) reader.damaged("positions");
  };
  const auto numbers = std::exchange(row_, {}).chunks;
  std::vector<bool> seen(chunks_.size()), found(end - begin), used(owners_.size());
  std::size_t leaves = 0, size = 0;
  check(numbers.size() == chunks_.size() && positions_.size() == owners_.size() * kLeaf);
  for (const std::uint32_t number : numbers) {
    check(number < chunks_.size() && !seen[number] && chunks_[number].size - 1 < kChunk);
    seen[number] = true;
    const Chunk& chunk = chunks_[number];
    std::uint32_t in_chunk = 0;
    for (std::uint32_t k = 0; k < chunk.size; ++k, ++leaves) {
      const std::uint32_t leaf = chunk.leaves[k], count = chunk.counts[k];
      check(leaf < owners_.size() && !used[leaf] && owners_[leaf] == number && count - 1 < kLeaf);
      used[leaf] = true;
      const std::span positions(this->leaf(leaf), count);
      check(chunk.firsts[k] == positions[0]);
      for (const Position position : positions) {
        check(position >= begin && position < end && !found[position - begin] && indexed(position));
        found[position - begin] = true;
      }
      in_chunk += count;
    }
    put_chunk(static_cast<std::uint32_t>(row_.chunks.size()), number, in_chunk);
    size += in_chunk;
  }
  check(leaves == owners_.size() && size == size_);
}

}  // namespace agentspec
