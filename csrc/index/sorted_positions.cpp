#include "index/sorted_positions.hpp"

#include <algorithm>
#include <array>

namespace agentspec {
namespace {

constexpr std::size_t kScan = 16;  // leaves from each end to look through for a position before comparing more tokens

// Counts the keys below `key`, or with `equal` those not above it, by a binary search without branches.
std::uint32_t count_below(const Key* keys, std::uint32_t size, const Key& key, bool equal) {
  std::uint32_t base = 0;
  while (size > 0) {
    const std::uint32_t half = size - size / 2;
    const Key& other = keys[base + half - 1];
    base += (other < key) | (equal & (other == key)) ? half : 0;
    size -= half;
  }
  return base;
}

// Returns whether a position shares the whole query. Compares the query's far end first, because most positions that
// share much of it but not all differ there.
bool shares(const Query& query, const Token* text, Position position) {
  if (position < query.length || *(text + position - query.length) != *(query.end - query.length)) return false;
  return compare(query, text, position, 0).common >= query.length;
}

// Descends the tree in small moves, so that several searches can take turns: while one waits for memory, the others
// move. A search has three levels: the row, a chunk and a leaf. It makes its step() on each until it is no longer
// open(), and descends in between: by find_chunk() and enter_chunk(), then by enter_leaf(). run() keeps this order.
class Search {
 public:
  Search() = default;
  Search(const PositionTree& tree, const Token* text, const Query& query)
      : tree_(&tree), text_(text), query_(query) {
    narrow(tree.row().keys.data(), tree.row().firsts.data(), 0, static_cast<std::uint32_t>(tree.row().keys.size()));
  }

  // Returns where the query belongs, once no step is left in the leaf.
  Found found() const {
    Found found = found_;
    found.place.slot = low_;
    return found;
  }

  bool open() const { return low_ < high_; }

  // Prefetches the chunk that the search found in the row.
  void find_chunk() {
    front_ = low_ == 0;
    found_.place.chunk = front_ ? 0 : low_ - 1;
    chunk_ = &tree_->chunk_at(found_.place.chunk);
    const auto* keys = reinterpret_cast<const char*>(chunk_->keys.data());
    for (std::size_t line = 0; line < sizeof(chunk_->keys) / 64; ++line) __builtin_prefetch(keys + 64 * line);
    __builtin_prefetch(&chunk_->size);
  }

  // Descends into that chunk.
  void enter_chunk() {
    low_ = high_ = 1;
    if (!front_) narrow(chunk_->keys.data(), chunk_->firsts.data(), 1, chunk_->size);
  }

  // Descends into the leaf that the search found in the chunk.
  void enter_leaf() {
    found_.place.leaf = low_ - 1;
    firsts_ = tree_->leaf_at(found_.place);
    known_ = 0;
    low_ = front_ ? 0 : 1;
    high_ = front_ ? 0 : chunk_->counts[found_.place.leaf];
    for (std::uint32_t i = 0; i < kLeaf; i += 16) __builtin_prefetch(firsts_ + i);
  }

  // Prefetches the text that the next `levels` steps may read: that of 2^levels - 1 entries. It is always inlined,
  // because GCC drops calls of a function that does nothing but prefetch.
  [[gnu::always_inline]] void aim(std::uint32_t levels) const {
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
  // Narrows [low, high) to the entries that have the query's own key.
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

  const PositionTree* tree_ = nullptr;
  const Token* text_ = nullptr;
  Query query_;
  Found found_;
  const PositionTree::Chunk* chunk_ = nullptr;
  const Position* firsts_ = nullptr;
  std::size_t known_ = 0;  // tokens that all entries in [low, high) share with the query
  std::uint32_t low_ = 0, high_ = 0;
  bool front_ = false;     // the query belongs in front of all entries
};

// Runs all searches to the end of their level.
template <std::size_t kMost>
void step_all(std::span<Search> searches) {
  // If there are few searches, they prefetch more than they will need, so as not to wait at each step.
  constexpr std::uint32_t kAhead = kMost > 4 ? 1 : 3;
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

// Runs at most kMost searches side by side, level by level.
template <std::size_t kMost>
void run(std::span<Search> searches) {
  step_all<kMost>(searches);
  for (Search& search : searches) search.find_chunk();
  for (Search& search : searches) search.enter_chunk();
  step_all<kMost>(searches);
  for (Search& search : searches) search.enter_leaf();
  step_all<kMost>(searches);
}

}  // namespace

Found SortedPositions::search(const Token* text, const Query& query) const {
  if (tree_.size() == 0) return {};
  std::array<Search, 1> search{Search(tree_, text, query)};
  run<1>(search);
  return search[0].found();
}

// Most contexts share little with any other. If many share much, as in a text that repeats itself, the query is
// probably longer than all of them and belongs at an end. So the last and the first of them are compared first.
Found SortedPositions::search_deep(const Token* text, std::span<const Token> context, const Neighbours& known) const {
  const std::size_t shallow = std::min(context.size(), kShallow);
  Found found = search(text, Query::of_context(context, shallow, Query::Tie::kFirst));
  if (found.right < shallow || shallow == context.size()) return found;
  const Query query = Query::of_context(context, context.size(), Query::Tie::kFirst);
  const Place begin = found.place;
  const Place end = search(text, Query::of_context(context, shallow, Query::Tie::kLast)).place;
  std::size_t low = 0, high = tree_.distance(begin, end);
  found.left = found.right = 0;  // within [low, high) all share at least `shallow` tokens
  for (std::size_t tried = 0; low < high; ++tried) {
    const std::size_t middle = tried == 0 ? high - 1 : tried == 1 ? low : low + (high - low) / 2;
    Place place = begin;
    tree_.skip(place, middle);
    const Position position = tree_.at(place);
    std::size_t shared = std::max<std::size_t>(shallow, std::min(found.left, found.right));
    if (position == known.left) shared = std::max<std::size_t>(shared, known.left_common);
    if (position == known.right) shared = std::max<std::size_t>(shared, known.right_common);
    const Order order = compare(query, text, position, shared);
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
  std::array<Search, 2> searches{Search(tree_, text, Query::of_context(context, length, Query::Tie::kFirst)),
                                 Search(tree_, text, Query::of_context(context, length, Query::Tie::kLast))};
  run<2>(searches);
  return {searches[0].found().place, searches[1].found().place};
}

// Looks in the leaf first: mostly few contexts share so much, and all are in one leaf. If they reach its edge, a search
// finds the end; searches for both ends run side by side.
Extent SortedPositions::extent(const Token* text, std::span<const Token> context, std::uint32_t length,
                               const Found& found) const {
  const std::array<Query, 2> queries{Query::of_context(context, length, Query::Tie::kFirst),
                                     Query::of_context(context, length, Query::Tie::kLast)};
  Extent extent{found.place, found.place};
  std::array<Search, 2> searches;
  std::array<Place*, 2> results;
  std::size_t open = 0;
  if (found.left >= length && !find_first(text, queries[0], extent.low)) {
    searches[open] = Search(tree_, text, queries[0]);
    results[open++] = &extent.low;
  }
  if (found.right >= length && !find_last(text, queries[1], extent.high)) {
    searches[open] = Search(tree_, text, queries[1]);
    results[open++] = &extent.high;
  }
  if (open > 0) run<2>({searches.data(), open});
  for (std::size_t i = 0; i < open; ++i) *results[i] = searches[i].found().place;
  return extent;
}

// Moves `place` to the first position that shares the whole query, as the one before `place` does; false if that may
// lie in an earlier leaf.
bool SortedPositions::find_first(const Token* text, const Query& query, Place& place) const {
  if (place.slot == 0) return false;
  const Position* const leaf = tree_.leaf_at(place);
  const std::uint32_t known = place.slot - 1;
  std::uint32_t low = 0, high = known;
  while (low < high) {
    const std::uint32_t middle = high - std::min((high - low + 1) / 2, known - high + 1);
    if (shares(query, text, leaf[middle])) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  place.slot = low;
  Place before = place;
  return low > 0 || !tree_.previous(before) || !shares(query, text, tree_.at(before));
}

// Moves `place` behind the last position that shares the whole query, as the one at `place` does; false if that may lie
// in a later leaf.
bool SortedPositions::find_last(const Token* text, const Query& query, Place& place) const {
  if (!tree_.normalise(place)) return true;
  const Position* const leaf = tree_.leaf_at(place);
  const std::uint32_t count = tree_.leaf_size(place);
  const std::uint32_t first = place.slot + 1;
  std::uint32_t low = first, high = count;
  while (low < high) {
    const std::uint32_t middle = low + std::min((high - low) / 2, low - first);
    if (shares(query, text, leaf[middle])) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  place.slot = low;
  Place behind = place;
  return low < count || !tree_.normalise(behind) || !shares(query, text, tree_.at(behind));
}

Neighbours SortedPositions::neighbours(const Found& found) const {
  Neighbours result;
  if (tree_.size() == 0) return result;
  Place place = found.place;
  if (tree_.normalise(place)) {
    result.right = tree_.at(place);
    result.right_common = found.right;
  }
  place = found.place;
  if (tree_.previous(place)) {
    result.left = tree_.at(place);
    result.left_common = found.left;
  }
  return result;
}

bool SortedPositions::find_in_leaf(Place& place, Position position) const {
  const Position* const leaf = tree_.leaf_at(place);
  const std::uint32_t count = tree_.leaf_size(place);
  std::uint32_t slot = count;
  for (std::uint32_t i = 0; i < count; ++i) slot = leaf[i] == position ? i : slot;  // without branches
  place.slot = slot;
  return place.slot < count;
}

// Looks for a position in the leaf of a place that may be out of date, and in the leaf behind it.
bool SortedPositions::find_near(Place& place, Position position) const {
  if (place.chunk >= tree_.row().chunks.size() || place.leaf >= tree_.chunk_at(place.chunk).size) return false;
  if (find_in_leaf(place, position)) return true;
  place.slot = kLeaf;
  return tree_.normalise(place) && find_in_leaf(place, position);
}

// Looks for a position in the leaves from `low` to `high`: at most kScan from each end.
bool SortedPositions::find_between(Place low, Place high, Position position, Place& place) const {
  for (std::size_t i = 0; i < kScan; ++i) {
    place = low;
    if (find_in_leaf(place, position)) return true;
    place = high;
    if (find_in_leaf(place, position)) return true;
    if (low.chunk == high.chunk && low.leaf >= high.leaf) return false;
    low.slot = kLeaf;
    high.slot = 0;
    if (!tree_.normalise(low) || !tree_.previous(high)) return false;
  }
  return false;
}

// Looks for a position in all leaves. Only a forged snapshot has a position where its context does not belong. Left in
// the tree, it would outlive its text.
bool SortedPositions::find_anywhere(Position position, Place& place) const {
  for (place = {}; place.chunk < tree_.row().chunks.size(); ++place.chunk) {
    for (place.leaf = 0; place.leaf < tree_.chunk_at(place.chunk).size; ++place.leaf) {
      if (find_in_leaf(place, position)) return true;
    }
  }
  return false;
}

bool SortedPositions::locate(const Token* text, Position position, Place& place) const {
  if (tree_.size() == 0) return false;
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

Neighbours SortedPositions::insert_batch(const Token* text, Position begin, std::uint32_t count) {
  if (count == 1) {  // as in most steps; the arrays below would take as long as the search
    return insert_at(text, search(text, Query::of_position(text, begin)), begin);
  }
  std::array<Search, kBatch> searches;
  std::array<Found, kBatch> found{};
  std::array<bool, kBatch> stale{};
  Neighbours last;
  if (tree_.size() > 0) {
    for (std::uint32_t i = 0; i < count; ++i) searches[i] = Search(tree_, text, Query::of_position(text, begin + i));
    run<kBatch>({searches.data(), count});
    for (std::uint32_t i = 0; i < count; ++i) found[i] = searches[i].found();
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    if (stale[i]) found[i] = search(text, Query::of_position(text, begin + i));
    const Place place = found[i].place;
    if (i + 1 == count) last = neighbours(found[i]);
    const std::size_t leaves = tree_.leaves();
    const std::size_t chunks = tree_.row().chunks.size();
    tree_.insert(text, place, begin + i);
    const bool leaf_split = tree_.leaves() != leaves;
    const bool chunk_split = tree_.row().chunks.size() != chunks;
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

Neighbours SortedPositions::insert_at(const Token* text, const Found& found, Position position) {
  const Neighbours around = neighbours(found);
  tree_.insert(text, found.place, position);
  return around;
}

void SortedPositions::erase_batch(const Token* text, std::span<const Position> positions) {
  std::array<Search, kBatch> searches;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    searches[i] = Search(tree_, text, Query::of_position(text, positions[i], kShallow));
  }
  run<kBatch>({searches.data(), positions.size()});
  for (std::size_t i = 0; i < positions.size(); ++i) {
    Place place = searches[i].found().place;  // out of date if an earlier removal changed the tree
    const Position position = positions[i];
    if (find_near(place, position) || locate(text, position, place) || find_anywhere(position, place)) {
      tree_.erase(text, place);
    }
  }
}

}  // namespace agentspec
