// Finding things among the sorted positions.
#include "index/sorted_positions.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr std::size_t kScan = 16;  // leaves that are looked through for a position before contexts are compared deeper

}  // namespace

Found SortedPositions::search(const Token* text, const Query& query) const {
  if (size_ == 0) return {};
  std::array<Search, 1> search{Search(*this, text, query)};
  SearchTogether<1>::run(search);
  return search[0].found();
}

// Most contexts share little with any other. Where many share much, the query is probably longer than all of them, as
// in a text that repeats itself: then a comparison with the last or the first of them decides.
Found SortedPositions::search_deep(const Token* text, std::span<const Token> context) const {
  const std::size_t shallow = std::min(context.size(), kShallow);
  Found found = search(text, Query::of_context(context, shallow, Query::Tie::kFirst));
  if (found.right < shallow || shallow == context.size()) return found;
  const Query query = Query::of_context(context, context.size(), Query::Tie::kFirst);
  const Place begin = found.place;
  const Place end = search(text, Query::of_context(context, shallow, Query::Tie::kLast)).place;
  std::size_t low = 0, high = distance(begin, end);
  found.left = found.right = 0;  // within [low, high) all share at least `shallow` tokens
  for (std::size_t tried = 0; low < high; ++tried) {
    const std::size_t middle = tried == 0 ? high - 1 : tried == 1 ? low : low + (high - low) / 2;
    Place place = begin;
    skip(place, middle);
    const std::size_t known = std::max<std::size_t>(shallow, std::min(found.left, found.right));
    const Order order = compare(query, text, at(place), known);
    if (order.less) {
      high = middle;
      found.right = order.common;
      found.place = place;
    } else {
      low = middle + 1;
      found.left = order.common;
      found.place = {place.chunk, place.leaf, place.slot + 1};
    }
  }
  return found;
}

Extent SortedPositions::extent(const Token* text, std::span<const Token> context, std::size_t length) const {
  std::array<Search, 2> searches{Search(*this, text, Query::of_context(context, length, Query::Tie::kFirst)),
                                 Search(*this, text, Query::of_context(context, length, Query::Tie::kLast))};
  SearchTogether<2>::run(searches);
  return {searches[0].found().place, searches[1].found().place};
}

// Mostly few share so much, and all in one leaf. Where its edge is reached, a search finds the end: for both ends side
// by side.
Extent SortedPositions::extent(const Token* text, std::span<const Token> context, std::uint32_t length,
                            const Found& found) const {
  const std::array<Query, 2> queries{Query::of_context(context, length, Query::Tie::kFirst),
                                     Query::of_context(context, length, Query::Tie::kLast)};
  Extent extent{found.place, found.place};
  std::array<Search, 2> searches;
  std::array<Place*, 2> results;
  std::size_t open = 0;
  if (found.left >= length && !first_in_leaf(text, queries[0], extent.low)) {
    searches[open] = Search(*this, text, queries[0]);
    results[open++] = &extent.low;
  }
  if (found.right >= length && !last_in_leaf(text, queries[1], extent.high)) {
    searches[open] = Search(*this, text, queries[1]);
    results[open++] = &extent.high;
  }
  if (open > 0) SearchTogether<2>::run({searches.data(), open});
  for (std::size_t i = 0; i < open; ++i) *results[i] = searches[i].found().place;
  return extent;
}

// Moves `place` to the first position in its leaf that shares the whole query; false if there may be more before.
bool SortedPositions::first_in_leaf(const Token* text, const Query& query, Place& place) const {
  const Position* const leaf = leaf_at(place);
  const std::uint32_t behind = place.slot;
  std::uint32_t low = 0, high = behind;
  while (low < high) {
    const std::uint32_t middle = high - std::min((high - low + 1) / 2, behind - high + 1);
    if (compare(query, text, leaf[middle], 0).common >= query.length) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  place.slot = low;
  return low > 0 || (place.chunk == 0 && place.leaf == 0);
}

// Moves `place` behind the last position in its leaf that shares the whole query; false if there may be more behind.
bool SortedPositions::last_in_leaf(const Token* text, const Query& query, Place& place) const {
  if (!normalise(place)) return true;
  const Position* const leaf = leaf_at(place);
  const std::uint32_t count = chunk_at(place.chunk).counts[place.leaf];
  const std::uint32_t first = place.slot;
  std::uint32_t low = first, high = count;
  while (low < high) {
    const std::uint32_t middle = low + std::min((high - low) / 2, low - first);
    if (compare(query, text, leaf[middle], 0).common >= query.length) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  place.slot = low;
  return low < count;
}

Neighbours SortedPositions::neighbours(const Found& found) const {
  Neighbours result;
  if (size_ == 0) return result;
  Place place = found.place;
  if (normalise(place)) {
    result.right = at(place);
    result.right_common = found.right;
  }
  place = found.place;
  if (previous(place)) {
    result.left = at(place);
    result.left_common = found.left;
  }
  return result;
}

bool SortedPositions::find_in_leaf(Place& place, Position position) const {
  const Position* const leaf = leaf_at(place);
  const std::uint32_t count = chunk_at(place.chunk).counts[place.leaf];
  std::uint32_t slot = count;
  for (std::uint32_t i = 0; i < count; ++i) slot = leaf[i] == position ? i : slot;  // without branches
  place.slot = slot;
  return place.slot < count;
}

// Looks for a position in the leaf of a place that may be out of date, and in the leaf behind it.
bool SortedPositions::find_near(Place& place, Position position) const {
  if (place.chunk >= row_.chunks.size() || place.leaf >= chunk_at(place.chunk).size) return false;
  if (find_in_leaf(place, position)) return true;
  place.slot = kLeaf;
  return normalise(place) && find_in_leaf(place, position);
}

// Looks for a position in the leaves from `low` to `high`, from both ends, not too far.
bool SortedPositions::find_between(Place low, Place high, Position position, Place& place) const {
  for (std::size_t i = 0; i < kScan; ++i) {
    place = low;
    if (find_in_leaf(place, position)) return true;
    place = high;
    if (find_in_leaf(place, position)) return true;
    if (low.chunk == high.chunk && low.leaf >= high.leaf) return false;
    low.slot = kLeaf;
    high.slot = 0;
    if (!normalise(low) || !previous(high)) return false;
  }
  return false;
}

bool SortedPositions::locate(const Token* text, Position position, Place& place) const {
  if (size_ == 0) return false;
  for (std::size_t length = kShallow;; length *= 8) {
    const bool whole = length >= position;
    Query query = Query::of_position(text, position, whole ? Query::kUnlimited : length);
    const Found found = search(text, query);
    place = found.place;
    if (find_near(place, position)) return true;
    if (whole || found.right < length) return false;
    query.tie = Query::Tie::kLast;
    if (find_between(found.place, search(text, query).place, position, place)) return true;
  }
}

bool SortedPositions::previous(Place& place) const {
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

bool SortedPositions::normalise(Place& place) const {
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

std::size_t SortedPositions::rank_in_chunk(const Place& place) const {
  const Chunk& chunk = chunk_at(place.chunk);
  std::size_t count = place.slot;
  for (std::uint32_t i = 0; i < place.leaf; ++i) count += chunk.counts[i];
  return count;
}

std::size_t SortedPositions::distance(const Place& low, const Place& high) const {
  if (low.chunk == high.chunk && low.leaf == high.leaf) return high.slot - low.slot;
  __builtin_prefetch(chunk_at(high.chunk).counts.data());
  std::size_t sum = 0;
  for (std::uint32_t i = low.chunk; i < high.chunk; ++i) sum += row_.counts[i];
  return sum + rank_in_chunk(high) - rank_in_chunk(low);
}

void SortedPositions::skip(Place& place, std::size_t count) const {
  count += rank_in_chunk(place);
  while (count >= row_.counts[place.chunk]) count -= row_.counts[place.chunk++];
  enter(place, count);
}

// The place with the given rank within its chunk.
void SortedPositions::enter(Place& place, std::size_t rank) const {
  const Chunk& chunk = chunk_at(place.chunk);
  for (place.leaf = 0; rank >= chunk.counts[place.leaf]; ++place.leaf) rank -= chunk.counts[place.leaf];
  place.slot = static_cast<std::uint32_t>(rank);
}

// In rounds, so that the chunks, then the leaves, then the text that the caller will read are waited for together.
void SortedPositions::pick(const Token* text, const Place& low, std::size_t count, std::span<Position> picked) const {
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

}  // namespace agentspec
