// What the cache holds: plain data with the few operations that keep it consistent. cache.hpp has the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "cache/corpus.hpp"
#include "drafting/drafter.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

// What budgets count. Bytes are reckoned from tokens, not measured: buffers grow in leaps and shrink late, and a budget
// that followed them would evict too much.
inline constexpr std::size_t kBytesPerToken = 12;
inline constexpr std::size_t kBytesPerLearner = std::size_t{1} << 17;

struct Size {
  std::size_t tokens = 0, bytes = 0;

  Size& operator+=(Size other) { return tokens += other.tokens, bytes += other.bytes, *this; }
  Size& operator-=(Size other) { return tokens -= other.tokens, bytes -= other.bytes, *this; }
};

struct CacheEntry;

// What all sessions of one tenant share: finished responses and what was learned about drafts.
struct Tenant {
  std::string key;
  std::uint64_t used = 0;  // tick of its last use
  Corpus corpus;
  std::shared_ptr<Learned> learned;  // null until a request of its own learns, and when others were used since
  std::size_t running = 0;           // requests that draft from it: then it stays
  Size counted;                      // of the corpus
  Size held;                         // of the corpus and of its sessions and groups
  std::unordered_set<CacheEntry*> holdings;
};

// What can be evicted as a whole: a session or a group.
struct CacheEntry {
  std::string key;
  std::shared_ptr<Tenant> tenant;
  std::size_t running = 0;         // requests that draft from it: then it stays
  std::uint64_t used = 0;
  bool gone = false;  // erased or evicted; running requests may still know it
  Size counted;

  virtual ~CacheEntry() = default;
  virtual Size size() const = 0;          // as budgets count it
  virtual std::size_t bytes() const = 0;  // held now
  virtual const SuffixIndex& index() const = 0;
  virtual std::size_t advance(std::size_t budget) = 0;
  virtual std::size_t sweep(std::size_t budget) = 0;
  virtual void save(SnapshotWriter& writer) const = 0;
  virtual void load(SnapshotReader& reader) = 0;
};

// What one conversation leaves behind: its turns as one growing text.
struct Session final : CacheEntry {
  SuffixIndex text;
  std::vector<Token> last;           // full text of the last finished request
  std::shared_ptr<Learned> learned;  // from requests that keep to their session; null where there were none

  // Appends one finished turn, in place where the prompt repeats all that came before.
  void append(std::size_t kept, std::span<const Token> prompt_tail, std::span<const Token> response);
  // Starts again from its newest tokens, at most `tokens` of them.
  void trim(std::size_t tokens);

  Size size() const override;
  std::size_t bytes() const override;
  const SuffixIndex& index() const override { return text; }
  std::size_t advance(std::size_t budget) override { return text.advance(budget); }
  std::size_t sweep(std::size_t) override { return 0; }
  void save(SnapshotWriter& writer) const override;
  void load(SnapshotReader& reader) override;
};

// Responses to one problem, from all sessions of a tenant that worked on it; or those of one session.
struct Group final : CacheEntry {
  Corpus corpus;

  Size size() const override { return {corpus.tokens(), kBytesPerToken * corpus.tokens()}; }
  std::size_t bytes() const override { return corpus.bytes(); }
  const SuffixIndex& index() const override { return corpus.index(); }
  std::size_t advance(std::size_t budget) override { return corpus.advance(budget); }
  std::size_t sweep(std::size_t budget) override { return corpus.sweep(budget); }
  void save(SnapshotWriter& writer) const override { corpus.save(writer); }
  void load(SnapshotReader& reader) override { corpus.load(reader); }
};

struct Request {
  std::shared_ptr<Session> session;
  std::shared_ptr<Group> group;
  std::shared_ptr<Tenant> tenant;
  std::shared_ptr<Learned> learned;
  SuffixIndex index;  // the whole text; findable is what the session does not already hold
  bool shared = false;     // draws on its tenant and gives to it
  bool own_group = false;  // the group is the session's own, not one that was named
  std::size_t prompt_length = 0;
  MatchState state;
  DraftPath draft;

  Sources sources() const;
  // Where a candidate comes from as users see it.
  std::uint8_t source_of(const Candidate& candidate) const {
    return own_group && candidate.source == 2 ? 1 : candidate.source;
  }
};

}  // namespace agentspec
