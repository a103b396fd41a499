#include "cache/corpus.hpp"

#include <algorithm>
#include <iterator>
#include <vector>

#include "index/stopwatch.hpp"

namespace agentspec {
namespace {

// Removing a position costs as much as indexing kSweepCost of them, and a hundred times as much among equal long
// documents. So the clock is read after every kSweepSome, and a call may end early.
constexpr std::size_t kSweepCost = 16;
constexpr std::size_t kSweepSome = 4;
constexpr std::int64_t kSweepTime = 100'000;  // ns

// Dropping a document of an erased session costs as much as looking at kDropCost others.
constexpr std::size_t kDroppedPerCall = 16 * 1024;
constexpr std::size_t kDropCost = 64;

// Returns the FNV-1a hash. A collision within one tenant erases too much, never too little.
std::uint64_t hash_of(const std::string& key) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash | 1;  // 0 stands for no session
}

}  // namespace

// Returns the record by which a document is found; nothing for one that is gone or has none.
std::optional<std::uint64_t> Corpus::record_of(HashIndex::Number number) const {
  const std::size_t place = documents_.place_of(number);
  if (place >= documents_.size() || documents_[place].record == 0) return std::nullopt;
  return documents_[place].record;
}

bool Corpus::holds(std::uint64_t record) const {
  const auto is_held = [&](HashIndex::Number number) { return documents_.place_of(number) >= evicted_; };
  return records_.find(record, by_record(), is_held).has_value();
}

void Corpus::add(const std::string* session, std::uint64_t record, std::span<const Token> context,
                 std::span<const Token> response, std::uint64_t written) {
  const auto begin = static_cast<Position>(index_.size());
  const auto end = static_cast<Position>(begin + 1 + context.size() + response.size());
  const HashIndex::Number number = documents_.next();
  records_.make_room(number, documents_.first(), by_record());
  documents_.push_back({session ? hash_of(*session) : 0, record, begin, end, written});
  try {
    index_.append_boundary();
    index_.append(context, false);
    index_.append(response);
  } catch (...) {
    documents_.pop_back();
    throw;
  }
  if (record != 0) records_.put(number, record);
  tokens_ += end - begin;
  ++held_;
}

bool Corpus::holds_all_of(const Corpus& other) const {
  return std::all_of(other.documents_.begin() + other.evicted_, other.documents_.end(),
                     [&](const Document& document) { return document.erased() || holds(document.record); });
}

bool Corpus::holds_other_than(const std::string& session) const {
  const std::uint64_t own = hash_of(session);
  const auto is_other = [&](const Document& document) { return !document.erased() && document.session != own; };
  return std::ranges::any_of(documents_, is_other) || std::ranges::any_of(erased_, is_other);
}

SuffixIndex Corpus::take_over(Corpus& from) {
  SuffixIndex old = index_.replace(std::exchange(from.index_, {}));
  SuffixIndex taken = std::exchange(index_, {});
  *this = std::exchange(from, {});
  index_ = std::move(taken);
  return old;
}

// Counts a document that it held as dropped.
void Corpus::drop(const Document& document) {
  --held_;
  tokens_ -= document.end - document.begin;
  dropped_tokens_ += document.end - document.begin;
}

// Lets the oldest documents, of those that were evicted and of those that it holds, be ones that were not erased.
void Corpus::pass_erased() {
  while (evicted_ < documents_.size() && documents_[evicted_].erased()) ++evicted_;
  std::size_t count = 0;
  while (count < evicted_ && documents_[count].erased()) ++count;
  if (count == 0) return;
  documents_.pop_front(count);
  evicted_ -= count;
}

void Corpus::drop_oldest() {
  drop(documents_[evicted_++]);
  pass_erased();
}

std::size_t Corpus::drop_before(std::uint64_t time, std::size_t most) {
  std::size_t count = 0;
  for (; count < most && !empty() && documents_[evicted_].written < time; ++count) drop_oldest();
  return count;
}

void Corpus::set_written(std::uint64_t time) {
  for (Document& document : documents_) document.written = time;
}

void Corpus::drop_older_half() {
  for (std::size_t left = (held_ + 1) / 2; left > 0; --left) drop_oldest();
}

Corpus::Erasure Corpus::erasure_of(const std::string& session) const {
  return {hash_of(session), documents_.first(), documents_.next()};
}

// Moves a document to `erased_`. Leaves an empty one in its place, because `records_` finds the others by number.
void Corpus::move_to_erased(std::size_t place) {
  Document& document = documents_[place];
  records_.erase(documents_.first() + static_cast<HashIndex::Number>(place), by_record());  // reads its record
  if (place >= evicted_) drop(document);
  erased_.push_back(document);
  document = {0, 0, document.end, document.end, document.written};
}

bool Corpus::drop_some(Erasure& erasure) {
  const auto place_of = [&](HashIndex::Number number) {  // 0 if the documents up to there have gone
    const std::size_t place = documents_.place_of(number);
    return place <= documents_.size() ? place : 0;
  };
  const std::size_t before = erased_.size(), end = place_of(erasure.end);
  std::size_t place = place_of(erasure.next), left = kDroppedPerCall;
  for (; place < end && left > 0; ++place) {
    const Document& document = documents_[place];
    --left;
    if (document.session != erasure.session || document.erased()) continue;  // evicted ones may still be in the index
    left -= std::min(left, kDropCost);
    move_to_erased(place);
  }
  erasure.next = documents_.first() + static_cast<HashIndex::Number>(place);
  const bool more = place < end;
  pass_erased();
  if (erased_.size() > before) index_.freeze(false);
  return more;
}

std::size_t Corpus::sweep(std::size_t budget) {
  if (swept() || budget == 0 || (index_.frozen() && !erasing())) return 0;
  const std::size_t most = (budget + kSweepCost - 1) / kSweepCost;
  const Stopwatch stopwatch;
  std::size_t done = 0;
  bool removed_some = false;
  const bool erased = erasing();
  do {  // at least once: callers repeat the call until it returns 0, which the clock must not cause
    Document& oldest = erased ? erased_.front() : documents_.front();
    const std::size_t some = std::min(most - done, kSweepSome);
    const Position end = oldest.end;
    const std::size_t removed = index_.remove(oldest.begin, oldest.end, some);
    dropped_tokens_ -= end - oldest.end;
    removed_some = removed_some || removed > 0;
    done += removed;
    if (removed == some) continue;  // the next round finds out whether anything is left of it
    dropped_tokens_ -= oldest.end - oldest.begin;
    if (erased) {
      erased_.pop_front();
    } else {
      records_.erase(documents_.first(), by_record());
      documents_.pop_front();
      --evicted_;
      pass_erased();
    }
    ++done;  // a document without indexed positions takes time, too
  } while ((erased ? erasing() : evicted_ > 0) && done < most && !stopwatch.over(kSweepTime));
  release(removed_some);
  return std::min(budget, done * kSweepCost);
}

// Gives back the memory in front of the oldest document that is still there. `removed`: positions left the index, so
// its version has changed and they may be moved.
void Corpus::release(bool removed) {
  if (erasing()) return;
  if (documents_.empty()) {
    records_ = {};
    return index_.clear();
  }
  const Position moved = index_.release_before(documents_.front().begin, removed);
  if (moved == 0) return;
  for (Document& document : documents_) {
    document.begin -= moved;
    document.end -= moved;
  }
}

// Throws unless the documents lie in the text, none in another, and hold all that is indexed.
void Corpus::restore(SnapshotReader& reader) {
  bool right = evicted_ <= documents_.size() && std::ranges::is_sorted(documents_, {}, &Document::begin);
  std::vector<Document> all;
  for (const auto* list : {&documents_, &erased_}) {
    std::ranges::copy_if(*list, std::back_inserter(all), [](const Document& document) { return !document.erased(); });
  }
  std::ranges::sort(all, {}, &Document::begin);
  Position last = 0;
  std::size_t indexed = 0;
  for (const Document& document : all) {
    right = right && document.begin >= last && document.begin < document.end && document.end <= index_.size();
    if (right) indexed += index_.indexed_in(document.begin, document.end);
    last = document.end;
  }
  if (!right || indexed != index_.indexed()) reader.damaged("a document lies outside its text");
  HashIndex::Number number = documents_.first();
  for (std::size_t place = 0; place < documents_.size(); ++place, ++number) {
    const Document& document = documents_[place];
    (place < evicted_ ? dropped_tokens_ : tokens_) += document.end - document.begin;
    held_ += place >= evicted_ && !document.erased();
    if (document.record == 0) continue;
    records_.make_room(number, documents_.first(), by_record());
    records_.put(number, document.record);
  }
  for (const Document& document : erased_) dropped_tokens_ += document.end - document.begin;
  pass_erased();
}

std::size_t Corpus::bytes() const {
  return index_.bytes() + documents_.bytes() + erased_.bytes() + records_.bytes();
}

std::size_t Corpus::leaving() const {
  if (dropped_tokens_ == 0) return 0;
  const double share = static_cast<double>(dropped_tokens_) / static_cast<double>(tokens_ + dropped_tokens_);
  return static_cast<std::size_t>(share * static_cast<double>(index_.bytes()));
}

}  // namespace agentspec
