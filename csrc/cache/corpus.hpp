#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "index/suffix_index.hpp"
#include "storage/hash_index.hpp"
#include "storage/queue.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

// Holds the finished responses that a tenant's or a group's sessions share, oldest first, as documents of one text.
//
// A dropped document, evicted or erased, counts as gone at once. Its positions leave the index with the next sweeps, a
// few at a time: those of erased sessions first.
class Corpus {
 public:
  struct Document {
    std::uint64_t session;  // hash of its key; 0: no session
    std::uint64_t record;   // names the turn in the store; 0: it has no name
    Position begin, end;    // equal: it was erased
    std::uint64_t written;  // time by the clock of the history window

    bool erased() const { return begin == end; }
  };
  // Says which documents are still to be searched for those of an erased session.
  struct Erasure {
    std::uint64_t session;
    HashIndex::Number next, end;
  };

  bool holds(std::uint64_t record) const;
  // Adds a response behind the end of its context. `session` is null if the response belongs to none. `written`: the
  // time by the clock of the history window.
  void add(const std::string* session, std::uint64_t record, std::span<const Token> context,
           std::span<const Token> response, std::uint64_t written = 0);
  // Drops at most `most` of the oldest documents that were written before a time. Returns how many.
  std::size_t drop_before(std::uint64_t time, std::size_t most);
  // Sets the time at which all documents count as written.
  void set_written(std::uint64_t time);
  bool holds_all_of(const Corpus& other) const;  // by the records: false if `other` has a response without one
  // Returns whether it holds responses of other sessions, those included that wait to be removed.
  bool holds_other_than(const std::string& session) const;
  // Replaces all that it holds by what `from` holds, and empties `from`. Returns the former index.
  SuffixIndex take_over(Corpus& from);
  void drop_oldest();
  void drop_older_half();
  // Begins to erase a session: pass the result to drop_some() until that returns false.
  Erasure erasure_of(const std::string& session) const;
  // Drops some of a session's documents. Returns whether there may be more.
  bool drop_some(Erasure& erasure);

  // Indexes at most `budget` pending positions. Returns how many.
  std::size_t advance(std::size_t budget) { return index_.advance(budget); }
  // Removes positions of dropped documents, for at most about `budget`: of erased ones, or of evicted ones if no erased
  // ones are left. Returns how much of the budget was used.
  std::size_t sweep(std::size_t budget);

  const SuffixIndex& index() const { return index_; }
  bool empty() const { return held_ == 0; }
  bool erasing() const { return !erased_.empty(); }  // whether documents of erased sessions wait to be removed
  bool swept() const { return evicted_ == 0 && !erasing(); }
  SuffixIndex take_index() { return std::exchange(index_, {}); }  // of a corpus that is not used any more
  std::size_t tokens() const { return tokens_; }
  std::size_t bytes() const;    // in memory now
  std::size_t leaving() const;  // about the part of bytes() that goes with the dropped documents

  // See SuffixIndex. Erasing thaws it, too.
  void freeze(bool frozen) { index_.freeze(frozen); }
  bool has_work() const { return index_.frozen() ? erasing() : index_.pending() > 0 || !swept(); }

  template <class Archive>
  void describe(Archive& archive) {
    archive.number(evicted_);
    documents_.describe(archive);
    erased_.describe(archive);
    index_.describe(archive);
    if constexpr (Archive::kLoading) restore(archive);
  }

 private:
  void restore(SnapshotReader& reader);
  void release(bool removed);
  void drop(const Document& document);
  void move_to_erased(std::size_t place);
  void pass_erased();
  std::optional<std::uint64_t> record_of(HashIndex::Number number) const;
  auto by_record() const {  // for the calls of records_
    return [this](HashIndex::Number number) { return record_of(number); };
  }

  SuffixIndex index_;
  // In the order of the text: first those that were evicted and not removed yet, then those that it holds. What is
  // erased moves to `erased_` and leaves an empty document in its place, which goes when it is the oldest.
  Queue<Document> documents_;
  std::size_t evicted_ = 0;
  std::size_t held_ = 0;    // behind those, without the empty ones
  Queue<Document> erased_;  // erased documents that were not removed yet
  std::size_t tokens_ = 0;  // of the documents that it holds
  std::size_t dropped_tokens_ = 0;  // of those that are to be removed
  HashIndex records_;               // finds `documents_` by record
};

}  // namespace agentspec
