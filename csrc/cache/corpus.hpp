#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>

#include "storage/snapshot.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

inline constexpr std::size_t kOverlap = 8;  // context kept in front of a response, so that its first tokens can be matched

// Taking a place out costs as much as putting so many in. Where long documents are the same, it is found only after long
// comparisons, and can cost a hundred times as much: so the clock is looked at after every few, and a call ends early.
inline constexpr std::size_t kSweepCost = 16;
inline constexpr std::size_t kSweepSome = 4;
inline constexpr std::int64_t kSweepTime = 100'000;  // ns

std::span<const Token> last_of(std::span<const Token> tokens, std::size_t count);

// Finished responses, oldest first, as documents of one growing text: what the sessions of a tenant or of a group share.
//
// A dropped document counts as gone at once; its places leave the index with the next sweeps, a few at a time.
class Corpus {
 public:
  struct Document {
    std::uint64_t session;  // hash of its key
    Position begin, end;
  };

  // `session` may be null: a response that belongs to none.
  void add(const std::string* session, std::span<const Token> context, std::span<const Token> response);
  void drop_oldest();
  void drop_session(const std::string& session);

  // Index at most `budget` pending places, or take dropped ones out, each for kSweepCost of it; return what it took.
  std::size_t advance(std::size_t budget) { return index_.advance(budget); }
  std::size_t sweep(std::size_t budget);

  const SuffixIndex& index() const { return index_; }
  bool empty() const { return documents_.empty(); }
  bool swept() const { return dropped_.empty(); }
  std::size_t tokens() const { return tokens_; }
  std::size_t bytes() const;  // held now

  void save(SnapshotWriter& writer) const;  // needs swept()
  void load(SnapshotReader& reader);

 private:
  void release();

  SuffixIndex index_;
  std::deque<Document> documents_;
  std::deque<Document> dropped_;  // those of erased sessions first, then the oldest first
  std::size_t erased_ = 0;        // how many of dropped_ are of erased sessions
  std::size_t tokens_ = 0;  // of documents_
};

}  // namespace agentspec
