#include "cache/corpus.hpp"

#include <algorithm>

#include "index/stopwatch.hpp"

namespace agentspec {
namespace {

// Removing a position costs as much as indexing kSweepCost of them, and a hundred times as much among equal long
// documents. So the clock is read after every kSweepSome, and a call may end early.
constexpr std::size_t kSweepCost = 16;
constexpr std::size_t kSweepSome = 4;
constexpr std::int64_t kSweepTime = 100'000;  // ns

// Returns the FNV-1a hash. A collision within one tenant erases too much, never too little.
std::uint64_t hash_of(const std::string& key) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash | 1;  // 0 stands for no session
}

}  // namespace

void Corpus::add(const std::string* session, std::uint64_t record, std::span<const Token> context,
                 std::span<const Token> response, std::uint64_t written) {
  const auto begin = static_cast<Position>(index_.size());
  index_.append_boundary();
  index_.append(context, false);
  index_.append(response);
  const auto end = static_cast<Position>(index_.size());
  documents_.push_back({session ? hash_of(*session) : 0, record, begin, end, written});
  if (record != 0) records_.insert(record);
  tokens_ += end - begin;
}

bool Corpus::holds_all_of(const Corpus& other) const {
  return std::all_of(other.documents_.begin(), other.documents_.end(),
                     [&](const Document& document) { return holds(document.record); });
}

bool Corpus::holds_other_than(const std::string& session) const {
  const std::uint64_t own = hash_of(session);
  const auto is_other = [&](const Document& document) { return document.session != own; };
  return std::any_of(documents_.begin(), documents_.end(), is_other) ||
         std::any_of(dropped_.begin(), dropped_.end(), is_other);
}

SuffixIndex Corpus::take_over(Corpus& from) {
  SuffixIndex old = index_.replace(std::exchange(from.index_, {}));
  SuffixIndex taken = std::exchange(index_, {});
  *this = std::exchange(from, {});
  index_ = std::move(taken);
  return old;
}

void Corpus::forget(const Document& document) {
  tokens_ -= document.end - document.begin;
  dropped_tokens_ += document.end - document.begin;
  records_.erase(document.record);
}

void Corpus::drop_oldest() {
  forget(documents_.front());
  dropped_.push_back(documents_.front());
  documents_.pop_front();
}

std::size_t Corpus::drop_before(std::uint64_t time, std::size_t most) {
  std::size_t count = 0;
  for (; count < most && !documents_.empty() && documents_.front().written < time; ++count) drop_oldest();
  return count;
}

void Corpus::set_written(std::uint64_t time) {
  for (Document& document : documents_) document.written = time;
}

void Corpus::drop_older_half() {
  for (std::size_t left = (documents_.size() + 1) / 2; left > 0; --left) drop_oldest();
}

void Corpus::drop_session(const std::string& session) {
  const std::uint64_t hash = hash_of(session);
  const auto is_its = [&](const Document& document) { return document.session == hash; };
  const auto evicted = dropped_.begin() + static_cast<std::ptrdiff_t>(erased_);  // these may still be in the index
  const std::size_t before = erased_;
  erased_ += static_cast<std::size_t>(std::stable_partition(evicted, dropped_.end(), is_its) - evicted);
  documents_.erase_if([&](const Document& document) {
    if (!is_its(document)) return false;
    forget(document);
    dropped_.insert(dropped_.begin() + static_cast<std::ptrdiff_t>(erased_++), document);
    return true;
  });
  if (erased_ > before) index_.freeze(false);
}

std::size_t Corpus::sweep(std::size_t budget) {
  if (dropped_.empty() || budget == 0 || (index_.frozen() && erased_ == 0)) return 0;
  const std::size_t most = (budget + kSweepCost - 1) / kSweepCost;
  const Stopwatch stopwatch;
  std::size_t done = 0;
  bool removed_some = false;
  do {  // at least once: callers repeat the call until it returns 0, which the clock must not cause
    Document& oldest = dropped_.front();
    const std::size_t some = std::min(most - done, kSweepSome);
    const Position end = oldest.end;
    const std::size_t removed = index_.remove(oldest.begin, oldest.end, some);
    dropped_tokens_ -= end - oldest.end;
    removed_some = removed_some || removed > 0;
    done += removed;
    if (removed == some) continue;  // the next round finds out whether anything is left of it
    dropped_tokens_ -= oldest.end - oldest.begin;
    dropped_.pop_front();
    if (erased_ > 0) --erased_;
    ++done;  // a document without indexed positions takes time, too
  } while (!dropped_.empty() && done < most && !stopwatch.over(kSweepTime));
  release(removed_some);
  return std::min(budget, done * kSweepCost);
}

// Gives back the memory in front of the oldest document that is still there. `removed`: positions left the index, so
// its version has changed and they may be moved.
void Corpus::release(bool removed) {
  if (documents_.empty() && dropped_.empty()) return index_.clear();
  auto front = static_cast<Position>(index_.size());
  if (!documents_.empty()) front = documents_.front().begin;
  for (std::size_t i = 0; i < std::min(erased_ + 1, dropped_.size()); ++i) front = std::min(front, dropped_[i].begin);
  const Position moved = index_.release_before(front, removed);
  if (moved == 0) return;
  for (auto* list : {&documents_, &dropped_}) {
    for (Document& document : *list) {
      document.begin -= moved;
      document.end -= moved;
    }
  }
}

// Throws unless the documents lie in the text, none in another, and hold all that is indexed.
void Corpus::restore(SnapshotReader& reader, const std::vector<Document>& documents,
                     const std::vector<Document>& dropped) {
  std::vector<Document> all = documents;
  all.insert(all.end(), dropped.begin(), dropped.end());
  std::ranges::sort(all, {}, &Document::begin);
  bool right = erased_ <= dropped.size() && std::ranges::is_sorted(documents, {}, &Document::begin);
  Position last = 0;
  std::size_t indexed = 0;
  for (const Document& document : all) {
    right = right && document.begin >= last && document.begin <= document.end && document.end <= index_.size();
    if (right) indexed += index_.indexed_in(document.begin, document.end);
    last = document.end;
  }
  if (!right || indexed != index_.indexed()) reader.damaged("a document lies outside its text");
  documents_.assign(documents.begin(), documents.end());
  dropped_.assign(dropped.begin(), dropped.end());
  for (const Document& document : documents) {
    tokens_ += document.end - document.begin;
    if (document.record != 0) records_.insert(document.record);
  }
  for (const Document& document : dropped) dropped_tokens_ += document.end - document.begin;
}

std::size_t Corpus::bytes() const {
  return index_.bytes() + documents_.bytes() + dropped_.bytes() + set_bytes(records_);
}

std::size_t Corpus::leaving() const {
  if (dropped_tokens_ == 0) return 0;
  const double share = static_cast<double>(dropped_tokens_) / static_cast<double>(tokens_ + dropped_tokens_);
  return static_cast<std::size_t>(share * static_cast<double>(index_.bytes()));
}

}  // namespace agentspec
