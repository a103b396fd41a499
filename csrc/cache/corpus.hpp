#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "index/suffix_index.hpp"
#include "storage/queue.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

// Holds the finished responses that a tenant's or a group's sessions share, oldest first, as documents of one text.
//
// A dropped document counts as gone at once. Its positions leave the index with the next sweeps, a few at a time.
class Corpus {
 public:
  struct Document {
    std::uint64_t session;  // hash of its key; 0: no session
    std::uint64_t record;   // names the turn in the store; 0: it has no name
    Position begin, end;
    std::uint64_t written;  // time by the clock of the history window
  };

  bool holds(std::uint64_t record) const { return records_.contains(record); }
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
  void drop_session(const std::string& session);

  // Indexes at most `budget` pending positions. Returns how many.
  std::size_t advance(std::size_t budget) { return index_.advance(budget); }
  // Removes positions of dropped documents, for at most about `budget`. Returns how much of it was used.
  std::size_t sweep(std::size_t budget);

  const SuffixIndex& index() const { return index_; }
  bool empty() const { return documents_.empty(); }
  bool swept() const { return dropped_.empty(); }
  SuffixIndex take_index() { return std::exchange(index_, {}); }  // of a corpus that is not used any more
  std::size_t tokens() const { return tokens_; }
  std::size_t bytes() const;    // in memory now
  std::size_t leaving() const;  // about the part of bytes() that goes with the dropped documents

  // See SuffixIndex. Erasing thaws it, too.
  void freeze(bool frozen) { index_.freeze(frozen); }
  bool has_work() const { return index_.frozen() ? erased_ > 0 : index_.pending() > 0 || !dropped_.empty(); }

  template <class Archive>
  void describe(Archive& archive) {
    std::vector<Document> documents(documents_.begin(), documents_.end()), dropped(dropped_.begin(), dropped_.end());
    archive.vector(documents);
    archive.vector(dropped);
    archive.number(erased_);
    index_.describe(archive);
    if constexpr (Archive::kLoading) restore(archive, documents, dropped);
  }

 private:
  void restore(SnapshotReader& reader, const std::vector<Document>& documents, const std::vector<Document>& dropped);
  void release(bool removed);
  void forget(const Document& document);

  SuffixIndex index_;
  Queue<Document> documents_;
  Queue<Document> dropped_;  // documents to remove: those of erased sessions first, then the others, oldest first
  std::size_t erased_ = 0;        // documents of erased sessions in dropped_
  std::size_t tokens_ = 0;        // in documents_
  std::size_t dropped_tokens_ = 0;
  std::unordered_set<std::uint64_t> records_;  // of documents_, without 0
};

}  // namespace agentspec
