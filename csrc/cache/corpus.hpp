#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "index/suffix_index.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

// Finished responses, oldest first, as documents of one growing text: what the sessions of a tenant or of a group share.
//
// A dropped document counts as gone at once. Its positions leave the index with the next sweeps, a few at a time.
class Corpus {
 public:
  struct Document {
    std::uint64_t session;  // hash of its key
    Position begin, end;
  };

  // Adds a response behind the end of its context. `session` may be null: a response that belongs to none.
  void add(const std::string* session, std::span<const Token> context, std::span<const Token> response);
  void drop_oldest();
  void drop_session(const std::string& session);

  // Indexes at most `budget` pending positions. Returns how many.
  std::size_t advance(std::size_t budget) { return index_.advance(budget); }
  // Takes dropped positions out of the index, for at most about `budget`. Returns what it took of it.
  std::size_t sweep(std::size_t budget);

  const SuffixIndex& index() const { return index_; }
  bool empty() const { return documents_.empty(); }
  bool swept() const { return dropped_.empty(); }
  std::size_t tokens() const { return tokens_; }
  std::size_t bytes() const;  // held now

  // Needs swept() to be saved.
  template <class Archive>
  void describe(Archive& archive) {
    std::vector<Document> documents(documents_.begin(), documents_.end());
    archive.vector(documents);
    index_.describe(archive);
    if constexpr (Archive::kLoading) restore(archive, documents);
  }

 private:
  void restore(SnapshotReader& reader, const std::vector<Document>& documents);
  void release();

  SuffixIndex index_;
  std::deque<Document> documents_;
  std::deque<Document> dropped_;  // those of erased sessions first, then the oldest first
  std::size_t erased_ = 0;        // how many of dropped_ are of erased sessions
  std::size_t tokens_ = 0;  // of documents_
};

}  // namespace agentspec
