#include "index/suffix_index.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>

#include "index/context_sort.hpp"
#include "index/stopwatch.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kLargest = 0xFFFFFF00u;      // positions fit 32 bits
constexpr std::uint32_t kDeep = 512;              // shared tokens from which on insert_next() pays
constexpr std::size_t kDeepSome = 8;              // positions that insert_next() indexes between looks at the clock
constexpr std::int64_t kDeepTime = 100'000;       // ns that a call may spend in insert_next()
constexpr std::size_t kSorted = 32;               // fewest pending positions that are worth sorting
constexpr std::size_t kMostSorted = std::size_t{1} << 20;  // most positions of a text to sort, because it takes memory
constexpr Position kMoved = 1024;                // fewest released positions of a small index worth moving the others
constexpr Position kRebase = Position{1} << 31;  // released positions from which on all others are moved down

}  // namespace

void SuffixIndex::append(std::span<const Token> tokens, bool findable) {
  if (tokens.empty()) return;
  if (tokens.size() > kLargest - size()) throw std::length_error("an index holds fewer than 2^32 tokens");
  if (text_.empty()) {
    text_.resize(kPad);
    std::fill_n(text_.data(), kPad, kBoundary);
  }
  const auto begin = static_cast<Position>(size());
  text_.resize(text_.size() + tokens.size());
  std::copy(tokens.begin(), tokens.end(), text_.data() + kPad + begin);
  if (!findable) return;
  const auto end = static_cast<Position>(size());
  if (!pending_.empty() && pending_.back().end == begin && !frozen_) {
    pending_.back().end = end;
  } else {
    pending_.push_back({begin, end});
  }
  pending_count_ += tokens.size();
}

void SuffixIndex::append_boundary() { append(std::span<const Token>(&kBoundary, 1), false); }

void SuffixIndex::clear() {
  const std::uint64_t next = version_ + 1;
  *this = SuffixIndex();
  version_ = next;
}

SuffixIndex SuffixIndex::replace(SuffixIndex with) {
  const std::uint64_t next = std::max(version_, with.version_) + 1;
  std::swap(*this, with);
  version_ = next;
  return with;
}

std::size_t SuffixIndex::advance(std::size_t budget) {
  if (frozen_) return 0;
  if (piece(budget) > 0) return sort();
  const Token* const text = text_.data() + kPad;
  std::size_t done = 0, deep = 0;
  std::optional<Stopwatch> stopwatch;
  while (done < budget && !pending_.empty()) {
    Range& range = pending_.front();
    const std::size_t left = std::min<std::size_t>(budget - done, range.end - range.begin);
    auto count = static_cast<std::uint32_t>(std::min<std::size_t>(left, SortedPositions::kBatch));
    Neighbours beside_last;
    if (shortcuts_.behind_last == range.begin && shortcuts_.beside_last.longest_common() >= kDeep) {
      if (!stopwatch) stopwatch.emplace();
      if (++deep % kDeepSome == 0 && stopwatch->over(kDeepTime)) break;
      count = 1;
      beside_last = insert_next(range.begin);
    } else if (count == 1 && shortcuts_.end == range.begin) {
      beside_last = sorted_.insert_at(text, shortcuts_.found_end, range.begin);
    } else {
      beside_last = sorted_.insert_batch(text, range.begin, count);
    }
    note_indexed(range.begin, range.begin + count, beside_last);
    range.begin += count;
    done += count;
    if (range.begin == range.end) pending_.pop_front();
  }
  pending_count_ -= done;
  return done;
}

// Notes that [begin, end) was indexed, one position after the other. `beside_last`: the neighbours of the last one.
void SuffixIndex::note_indexed(Position begin, Position end, const Neighbours& beside_last) {
  for (Position position = begin; position < end; ++position) mark(position, true);
  shortcuts_ = {.behind_last = end, .beside_last = beside_last};
  ++version_;
}

std::size_t SuffixIndex::piece(std::size_t most) const {
  const std::size_t all = size() - released_;  // positions that would be sorted, those that are not indexed included
  const bool pays = pending_count_ >= kSorted && pending_count_ <= most && 3 * pending_count_ >= 2 * all;
  return pays && all <= kMostSorted ? pending_count_ : 0;
}

// Indexes all pending positions, by sorting them and those that are indexed. Returns how many were pending.
std::size_t SuffixIndex::sort() {
  const Token* const text = text_.data() + kPad;
  for (const Range& range : pending_) {
    for (Position position = range.begin; position < range.end; ++position) mark(position, true);
  }
  auto sorted = sort_contexts(text, released_, static_cast<Position>(size()));
  const std::span all(sorted.data(), sorted.size());
  const auto rest = std::ranges::remove_if(all, [&](Position position) { return !is_indexed(position); });
  sorted_.tree().build(text, all.first(all.size() - rest.size()));
  pending_.clear();
  shortcuts_ = {};
  ++version_;
  return std::exchange(pending_count_, 0);
}

// Indexes the position after the last one. If the same token follows the last one's neighbours, the positions behind
// them are the neighbours here and share one token more, so long contexts need not be compared again. Without this, a
// text that repeats itself would take quadratic time. Returns the position's neighbours.
Neighbours SuffixIndex::insert_next(Position position) {
  const Token* const text = text_.data() + kPad;
  const Neighbours& last = shortcuts_.beside_last;
  const Query query = Query::of_position(text, position);
  auto follows = [&](Position neighbour, std::uint32_t common) {
    return common > 0 && at(neighbour) == at(position - 1) && is_indexed(neighbour + 1);
  };
  const bool left = follows(last.left, last.left_common);
  const bool right = follows(last.right, last.right_common);
  Found found;
  bool known = false;
  if (left && sorted_.locate(text, last.left + 1, found.place)) {
    ++found.place.slot;
    found.left = last.left_common + 1;
    Place next = found.place;
    known = true;
    if (sorted_.tree().normalise(next)) {
      const Position other = sorted_.tree().at(next);
      const Order order = right && other == last.right + 1 ? Order{true, last.right_common + 1}
                                                           : compare(query, text, other, 0);
      found.right = order.common;
      known = order.less;
    }
  } else if (right && sorted_.locate(text, last.right + 1, found.place)) {
    found.right = last.right_common + 1;
    Place before = found.place;
    known = true;
    if (sorted_.tree().previous(before)) {
      const Order order = compare(query, text, sorted_.tree().at(before), 0);
      found.left = order.common;
      known = !order.less;
    }
  }
  if (!known) found = sorted_.search(text, query);
  return sorted_.insert_at(text, found, position);
}

void SuffixIndex::look_up(std::span<const Token> context, Match& match, KnownEnd* known) const {
  match.clear();
  const Neighbours near = known ? still_near(context, *known) : Neighbours{};
  if (known) *known = {};
  if (context.empty() || sorted_.tree().size() == 0) return;
  const Token* const text = text_.data() + kPad;
  const Found found = sorted_.search_deep(text, context, near);
  const std::uint32_t length = std::max(found.left, found.right);
  if (known && length >= kDeep) *known = {context.size(), sorted_.neighbours(found)};
  remember_end(context, found);
  if (length == 0) return;
  list(sorted_.extent(text, context, length, found), length, match);
}

// Returns positions that share much of a context that has become longer, and how much: those behind the known ones, if
// the new tokens stand there too.
Neighbours SuffixIndex::still_near(std::span<const Token> context, const KnownEnd& known) const {
  Neighbours near = known.near;
  if (known.length > context.size()) return {};
  const auto added = context.subspan(known.length);
  const auto follow = [&](Position& position, std::uint32_t& common) {
    if (position + added.size() > size() || !std::ranges::equal(added, text().subspan(position, added.size()))) {
      common = 0;
      return;
    }
    position += static_cast<Position>(added.size());
    common += static_cast<std::uint32_t>(added.size());
  };
  if (near.left_common > 0) follow(near.left, near.left_common);
  if (near.right_common > 0) follow(near.right, near.right_common);
  return near;
}

// Remembers where the end of the text belongs, if the context ends there. The place is right for the whole text if the
// tokens that the search compared decide its order among all others. A boundary among them does not: behind it, the
// order depends on the position.
void SuffixIndex::remember_end(std::span<const Token> context, const Found& found) const {
  const Token* const end = text_.data() + text_.size();
  if (context.data() + context.size() != end) return;
  shortcuts_.end = 0;
  const std::size_t decided = std::max(found.left, found.right) + std::size_t{1};  // tokens that decide the order
  if (decided > std::min(context.size(), SortedPositions::kShallow)) return;
  if (std::find(end - decided, end, kBoundary) != end) return;
  shortcuts_.end = static_cast<Position>(size());
  shortcuts_.found_end = found;
}

void SuffixIndex::look_up(std::span<const Token> context, std::size_t length, Match& match) const {
  match.clear();
  if (length == 0 || length > context.size() || sorted_.tree().size() == 0) return;
  const Token* const text = text_.data() + kPad;
  list(sorted_.extent(text, context, length), length, match);
}

// Fills `match` with the positions of an extent.
void SuffixIndex::list(const Extent& extent, std::size_t length, Match& match) const {
  const std::size_t count = sorted_.tree().distance(extent.low, extent.high);
  if (count == 0) return;
  match.length = static_cast<std::uint32_t>(length);
  match.count = static_cast<std::uint32_t>(count);
  match.listed = static_cast<std::uint32_t>(std::min(count, kWindow));
  sorted_.tree().pick(text_.data() + kPad, extent.low, count, {match.positions.data(), match.listed});
  if (match.complete()) std::sort(match.positions.begin(), match.positions.begin() + count, std::greater<>());
}

bool SuffixIndex::follow(Token token, Match& match) const {
  if (!match.complete()) return false;
  std::uint32_t kept = 0;
  for (std::uint32_t k = 0; k < match.count; ++k) {
    const Position position = match.positions[k];
    if (at(position) == token && is_indexed(position + 1)) match.positions[kept++] = position + 1;
  }
  match.count = match.listed = kept;
  match.length = kept > 0 ? match.length + 1 : 0;
  return true;
}

std::size_t SuffixIndex::remove(Position begin, Position& end, std::size_t budget) {
  begin = std::max(begin, released_);
  end = std::min(end, static_cast<Position>(size()));
  if (begin >= end) return 0;
  frozen_ = false;
  shortcuts_ = {};
  forget_pending(begin, end);
  Token* const text = text_.data() + kPad;
  std::size_t done = 0;
  while (done < budget) {
    std::array<Position, SortedPositions::kBatch> batch;
    std::size_t count = 0;
    Position first = end;
    for (const std::size_t most = std::min<std::size_t>(batch.size(), budget - done); count < most; ++count) {
      const Position last = last_indexed(begin, first);
      if (last == first) break;
      batch[count] = first = last;
      mark(last, false);
    }
    if (count == 0) break;
    sorted_.erase_batch(text, {batch.data(), count});
    std::fill(text + first, text + end, kBoundary);  // no indexed context reaches it any more
    end = first;
    done += count;
  }
  if (done < budget) {
    std::fill(text + begin, text + end, kBoundary);
    end = begin;
  }
  version_ += done > 0;
  return done;
}

// Returns the last indexed position of [begin, end), or `end` if there is none.
Position SuffixIndex::last_indexed(Position begin, Position end) const {
  std::size_t word = std::min<std::size_t>((end + kMarks - 1) / kMarks, marks_.size());
  while (word-- > begin / kMarks) {
    std::uint64_t bits = marks_[word];
    if (end < (word + 1) * kMarks) bits &= (std::uint64_t{1} << end % kMarks) - 1;
    if (bits == 0) continue;
    const auto last = static_cast<Position>(word * kMarks + static_cast<std::size_t>(std::bit_width(bits)) - 1);
    return last >= begin ? last : end;
  }
  return end;
}

void SuffixIndex::forget_pending(Position begin, Position end) {
  auto range = std::partition_point(pending_.begin(), pending_.end(), [&](const Range& r) { return r.end <= begin; });
  while (range != pending_.end() && range->begin < end) {
    const Range before{range->begin, std::max(range->begin, begin)}, after{std::min(range->end, end), range->end};
    pending_count_ -= (range->end - range->begin) - (before.end - before.begin) - (after.end - after.begin);
    range = pending_.erase(range);
    if (after.begin < after.end) range = pending_.insert(range, after);
    if (before.begin < before.end) range = pending_.insert(range, before) + 1;
  }
}

Position SuffixIndex::release_before(Position position, bool may_move) {
  position = std::min(position, static_cast<Position>(size()));
  if (position > released_) {
    Token* const text = text_.data() + kPad;
    std::fill(text + std::max(released_, position - std::min<Position>(position, kPad)), text + position, kBoundary);
    text_.release_front(position);
    marks_.release_front(position / kMarks);
    released_ = position;
  }
  const bool pays = may_move && !text_.mapped() && released_ > kMoved && released_ > size() / 2;
  if (released_ < kRebase && !pays) return 0;
  const Position by = released_ / kMarks * kMarks;
  rebase(by);
  return by;
}

void SuffixIndex::rebase(Position by) {
  Buffer<Token> text;
  text.resize(text_.size() - by);
  std::copy_n(text_.data() + by, text.size(), text.data());
  std::fill_n(text.data(), kPad, kBoundary);
  text_ = std::move(text);
  Buffer<std::uint64_t> marks;
  if (marks_.size() > by / kMarks) {
    marks.resize(marks_.size() - by / kMarks);
    std::copy_n(marks_.data() + by / kMarks, marks.size(), marks.data());
  }
  marks_ = std::move(marks);
  sorted_.tree().rebase(by);
  for (Range& range : pending_) range = {range.begin - by, range.end - by};
  released_ -= by;
  shortcuts_ = {};
  ++version_;
}

bool SuffixIndex::is_indexed(Position position) const {
  return position / kMarks < marks_.size() && (marks_[position / kMarks] >> position % kMarks & 1) != 0;
}

void SuffixIndex::mark(Position position, bool indexed) {
  const std::size_t word = position / kMarks;
  if (const std::size_t size = marks_.size(); word >= size) {
    marks_.resize(word + 1);
    std::fill(marks_.data() + size, marks_.data() + word + 1, 0);
  }
  const std::uint64_t bit = std::uint64_t{1} << position % kMarks;
  marks_[word] = indexed ? marks_[word] | bit : marks_[word] & ~bit;
}

std::size_t SuffixIndex::indexed_in(Position begin, Position end) const {
  std::size_t count = 0;
  for (std::size_t word = begin / kMarks; word < marks_.size() && word * kMarks < end; ++word) {
    std::uint64_t bits = marks_[word];
    if (begin > word * kMarks) bits &= ~std::uint64_t{0} << (begin - word * kMarks);
    if (end < (word + 1) * kMarks) bits &= ~(~std::uint64_t{0} << (end - word * kMarks));
    count += static_cast<std::size_t>(std::popcount(bits));
  }
  return count;
}

// Throws unless the loaded parts fit together: the tree holds each marked position once, and no pending one.
void SuffixIndex::restore(SnapshotReader& reader) {
  bool right = text_.empty() ? released_ == 0 : text_.size() >= kPad && released_ <= size();
  right = right && text_.released() <= released_ && marks_.released() <= released_ / kMarks && size() < kLargest;
  for (std::size_t k = 0; right && !text_.empty() && k < kPad; ++k) right = text_[released_ + k] == kBoundary;
  if (!right || marks_.size() > size() / kMarks + 1) reader.damaged("text");
  const auto end = static_cast<Position>(size());
  Position last = released_;
  for (const Range& range : pending_) {
    right = right && range.begin >= last && range.begin < range.end && range.end <= end;
    right = right && indexed_in(range.begin, range.end) == 0;
    last = range.end;
    if (right) pending_count_ += range.end - range.begin;
  }
  if (!right) reader.damaged("positions to be indexed");
  const auto marked = static_cast<Position>(std::min(marks_.size() * kMarks, kLargest));  // bits, also behind the text
  const std::size_t indexed = indexed_in(released_, end);
  if (indexed != sorted_.tree().size() || indexed_in(end, marked) > 0) reader.damaged("marks of positions");
  sorted_.tree().restore(reader, released_, end, [&](Position position) { return is_indexed(position); });
}

std::size_t SuffixIndex::bytes() const {
  return text_.bytes() + marks_.bytes() + sorted_.tree().bytes() + pending_.bytes();
}

}  // namespace agentspec
