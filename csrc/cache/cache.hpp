#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/entries.hpp"
#include "cache/prepared_session.hpp"
#include "cache/request.hpp"
#include "drafting/drafter.hpp"

namespace agentspec {

inline constexpr std::size_t kWorkPerStep = 4096;  // most positions indexed in a step; the clock mostly ends it earlier
inline constexpr std::chrono::microseconds kBetweenSlices{200};  // pause of a long call, so that others get the lock
inline constexpr std::size_t kOwnPerStep = 32;     // positions of each request's own text that a step always indexes

// Holds a step's drafts, one after the other: request i has tokens[offsets[i]:offsets[i + 1]].
struct Drafts {
  std::vector<Token> tokens;
  std::vector<std::int32_t> offsets{0};
  std::vector<std::uint8_t> sources;
  std::vector<float> probabilities;
  std::vector<std::int32_t> match_lengths;
  std::vector<BySource> accepted, drafted;  // of each request's previous draft: tokens accepted, and verified
};

struct Stats : Size {
  std::size_t requests = 0, tenants = 0, evictions = 0;
};

// Refers to the engine's tokens: each row holds the prompt and output of one request.
struct TokenTable {
  const Token* data;
  std::size_t rows, columns;
};

// Refers to the requests of a step. Every span has one number for each: the slot, the row in the engine's tokens, how
// many of the row's tokens are valid, the most tokens to draft, and how many tokens of the last draft were verified.
struct StepRequests {
  std::span<const std::int32_t> slots{}, rows{}, lengths{}, max_draft{}, num_verified{};
};

// Refers to another drafter's tokens, one row for each request, and the probability of each token.
struct ExternalDrafts {
  const Token* tokens;
  const double* probabilities;
  std::size_t columns;
};

// Holds the running requests, and the sessions, groups and tenants with the text of finished ones. Every public call
// takes the lock. A call that throws because memory has run out leaves the cache empty, as if it were new.
class Cache {
 public:
  Cache(const PolicySettings& settings, Limits limits, std::int64_t vocab_size, HistoryWindow window = {});

  // Starts a request in a slot that the caller knows to be unused: a request that is still there is ended, because its
  // caller never learned that it began. The caller has also checked the tokens. Returns the root of its session's
  // family, empty without a session.
  std::string start(std::size_t slot, std::span<const Token> prompt, Names names, std::span<const Token> ends,
                    std::span<const Token> prediction, std::span<const Token> quotable);
  void extend(std::size_t slot, std::span<const Token> tokens);
  // Ends a request. Returns the turn that it adds, if any. `record` names the turn in the store; 0: it has no name.
  std::optional<Turn> finish(std::size_t slot, std::optional<std::size_t> output_limit, std::uint64_t record);
  void abort(std::size_t slot);
  // Adds a stored turn to its session, group and tenant, except to those that hold its record already. A turn without
  // a record is added if its text is new. `held_only`: adds it only to entries that the cache holds, and marks none of
  // them as used.
  void restore(Names names, Turn turn, bool held_only);
  // Drafts a shared turn as if it ran here, and learns how the drafts from its session, group and tenant would have
  // fared. Call it before restoring the turn. Holds the lock for some drafts at a time. Returns the tokens of its
  // response, or 0 if it learned nothing: its tenant isn't held or has the turn already, or ArcticSuffixRule drafts.
  std::size_t learn_from(Names names, const Turn& turn, double cost);
  // Lets all shared requests draft from a finished index. Replaces the one that was there.
  void publish(std::shared_ptr<const SuffixIndex> corpus);
  // Counts the bytes of the public corpus, published or being made, and evicts to make room for them.
  void count_public(std::size_t bytes);
  // Begins a session that is built beside the cache, without the lock.
  PreparedSession prepare(const std::string& session) const { return {session, drafter_->kept_context()}; }
  // Replaces the held session by a prepared one. Returns false and does nothing if the held one has turns that the
  // prepared one lacks, or if the session's budget would cut it. Restore the turns in either case: that adds them to
  // their named groups and tenant, and to the session if it was not adopted.
  bool adopt(Names names, PreparedSession& prepared);
  // Erases a session. When it returns, no index holds text that only this session said, and no snapshot that holds such
  // text will be put in place. So it waits if one is being put in place.
  void remove_session(const std::string& session, const std::string& tenant);
  // Evicts a session when none of its requests run, because its client has ended it.
  void free_session(const std::string& session);
  bool has_session(const std::string& session);
  // Returns whether the store may hold turns of the named session, group or family, or else of the tenant's corpus,
  // that were not restored yet.
  bool needs_load(Names names);
  // Notes that all of these were restored. Evicting the entry forgets that.
  void mark_loaded(Names names);
  // Notes that new weights serve, or that an epoch begins, for a window that counts these. Responses of groups and
  // tenants that are older than the window are dropped when requests name their group or tenant.
  void begin_period(HistoryWindow::Unit unit);
  std::vector<std::string> tenants();  // their keys, least recently used first
  // Forgets a tenant with its corpus, sessions and groups. Returns false, and keeps what is left of it, if it has
  // running requests: one may start when a part of it is gone already.
  bool forget_tenant(const std::string& tenant);
  // Does the work that waits: evicts, indexes and removes dropped positions. Returns how much was done.
  std::size_t catch_up(WorkBudget budget);
  // Does that work whenever some waits, until close() is called. It releases the lock within some tens of microseconds
  // of a call by the engine. Call it in a thread of its own, whose priority becomes the lowest.
  void index_until_closed();
  void close();
  void resize(Limits limits);
  Stats stats();
  std::int64_t worked() const { return worked_; }  // CPU time of the work beside drafting so far, in nanoseconds
  Size recount();  // the sizes of stats(), added up anew

  // `cost`: price of verifying one more token, as a share of a step.
  // `most`: no draft is longer, whatever its request's `max_draft` is.
  // `seconds`: CPU time for waiting work beside drafting, such as indexing what start, finish and restore appended.
  Drafts propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> max_draft, double cost,
                 double seconds);
  Drafts step(const StepRequests& requests, TokenTable table, double cost, double seconds,
              std::int32_t most = static_cast<std::int32_t>(kMaxDraft));
  // Merges another drafter's tokens, the first lengths[i] of row i, into the open drafts that were just made. Returns
  // the merged drafts. The caller has checked tokens and probabilities. A request without an open draft gets none.
  Drafts merge_drafts(std::span<const std::int32_t> slots, ExternalDrafts external,
                      std::span<const std::int32_t> lengths, std::span<const std::int32_t> max_draft, double cost);
  // Returns every scored position of the request's last draft.
  std::vector<ScoredPosition> candidates(std::size_t slot);

  // Saves sessions, groups, tenants and their learned state, but no running requests. Steps may run: the lock is
  // held for a fraction of a millisecond at a time. Returns false, and leaves the file alone, if a session was erased
  // meanwhile. `identity` names what the snapshot can be used with, `note` is for the caller. Throws
  // std::runtime_error.
  bool save(const std::string& path, const std::string& identity, const std::string& note);
  // Loads a file that was saved under the same identity into an empty cache. Returns the note. Throws
  // std::runtime_error.
  std::string load(const std::string& path, const std::string& identity);

 private:
  // Holds the lock during a change. If it ends with an exception, as when memory runs out, half of the change may be
  // left. Then the cache starts over.
  class Change {
   public:
    explicit Change(Cache& cache) : cache_(cache), exceptions_(std::uncaught_exceptions()) { cache.mutex_.lock(); }
    ~Change() {
      if (std::uncaught_exceptions() > exceptions_ && !std::exchange(cache_.refused_, false)) cache_.start_over();
      cache_.mutex_.unlock();
    }
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

   protected:
    Cache& cache_;

   private:
    int exceptions_;
  };

  // Holds the lock for a short call. The indexing thread releases it soon, because the engine may wait for the call. At
  // its end, wakes that thread if there is work.
  class EngineCall : Change {
   public:
    explicit EngineCall(Cache& cache) : Change(waiting(cache)) { --cache.calling_; }
    ~EngineCall() { cache_.want_indexing(); }

   private:
    static Cache& waiting(Cache& cache) {
      ++cache.calling_;
      return cache;
    }
  };

  // Thaws its entry, if it has one, when it is destroyed.
  struct Thawing {
    Cache& cache;
    std::shared_ptr<CacheEntry> entry;
    ~Thawing();
  };

  // Lets go of the entries of a request without a slot when it is destroyed.
  struct Leaving {
    Cache& cache;
    Request& request;
    ~Leaving();
  };

  bool runs(std::size_t slot) const { return slot < requests_.size() && requests_[slot]; }
  // Throws std::out_of_range for a request that was forgotten when the cache started over.
  Request& request(std::size_t slot);
  // Forgets everything: all requests, sessions, groups and tenants, and what was learned.
  void start_over();
  std::shared_ptr<Learned> learned_of(const Request& request);
  void count(Request& request);
  // hold_entries() keeps the entries of a request from being evicted, until let_go_of_entries().
  void hold_entries(const Request& request);
  void let_go_of_entries(const Request& request);
  void release(std::size_t slot);
  // Says where a turn comes from: a request that finished here, the store, or another process that just stored it. The
  // last is a followed turn, which marks nothing as used.
  enum class Origin { kFinished, kStored, kFollowed };
  void keep(const Turn& turn, Origin origin, const TurnTarget& to, const std::string* session,
            std::span<const std::uint64_t> prompt_blocks = {});
  void add_response(const Turn& turn, Origin origin, const TurnTarget& to, const std::string* session,
                    std::span<const Token> context);
  void count_added(CacheEntry& entry, Origin origin);
  bool erase_some(Group& group, Corpus::Erasure& erasure);
  void forget_drafts(const std::string& tenant);
  std::size_t replay_step(Request& request, std::span<const Token> left, double cost);
  bool find_held(Names names, TurnTarget& to);
  TurnTarget find_or_make(Names names);
  std::shared_ptr<CacheEntry> find(Names names) const;
  Verified take_in(Request& request, std::span<const Token> row, std::size_t num_verified);
  void advance(Request& request, WorkBudget& budget);
  std::size_t work(WorkBudget& budget);
  bool has_thread() const { return indexing_ && !closed_; }  // whether a thread indexes what steps leave to it
  void let_engine_call() const;
  bool index_some();
  void want_indexing();
  std::size_t draft_limit(std::int32_t max_draft) const;
  bool legal(Token token) const { return token >= 0 && token < vocab_size_; }

  std::mutex saving_;   // lets one snapshot be saved at a time; taken before the others
  std::mutex placing_;  // held while a snapshot is put in place, which waits for the disk; taken before `mutex_`
  std::mutex mutex_;
  PolicySettings settings_;
  std::int64_t vocab_size_;
  std::unique_ptr<Drafter> drafter_;
  CacheEntries entries_;
  std::shared_ptr<const SuffixIndex> public_;  // read-only: nothing that a request says gets into it
  std::size_t public_bytes_ = 0;               // its part of the sums of `entries_`
  std::atomic<std::int64_t> worked_ = 0;
  std::atomic<int> calling_ = 0;         // calls of the engine that wait for the lock
  std::atomic<bool> indexing_ = false;   // a thread is in index_until_closed
  std::atomic<bool> wanted_ = false;     // there may be work for it
  std::atomic<bool> closed_ = false;
  std::vector<std::unique_ptr<Request>> requests_;  // by slot
  bool refused_ = false;  // the present call throws before it has changed anything
};

}  // namespace agentspec
