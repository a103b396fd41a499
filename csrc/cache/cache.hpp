#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/entries.hpp"

namespace agentspec {

inline constexpr std::size_t kIndexPerCall = 1024;  // places indexed in one call: under 1 ms
inline constexpr std::size_t kEvictPerCall = 64;    // sessions, groups or documents evicted in one call
inline constexpr std::size_t kMaxTenants = 4096;    // held at a time; beyond that the least recently used one goes
inline constexpr std::size_t kMaxLearners = 64;     // tenants that keep what they learned, 2 MB each
inline constexpr std::uint64_t kLearnerRest = 1024;  // ticks without use after which one of them gives way to another

struct Turn {
  std::size_t kept = 0;
  std::vector<Token> prompt_tail, response;
};

using BySource = std::array<std::int32_t, kSources + 1>;  // the last: kModel

// A step's drafts, one after the other: request i has tokens[offsets[i]:offsets[i + 1]].
struct Drafts {
  std::vector<Token> tokens;
  std::vector<std::int32_t> offsets{0};
  std::vector<std::uint8_t> sources;
  std::vector<float> probabilities;
  std::vector<std::int32_t> match_lengths;
  std::vector<BySource> accepted, drafted;
};

struct Stats {
  std::size_t tokens = 0, bytes = 0, sessions = 0, requests = 0, tenants = 0, pending = 0;
};

// The engine's tokens: row r holds prompt and output of one request.
struct TokenTable {
  const Token* data;
  std::size_t rows, columns;
};

// Another drafter's tokens, one row a request, and the chance of each.
struct Offers {
  const Token* tokens;
  const double* chances;
  std::size_t columns;
};

// What may be held; 0: no limit.
struct Limits {
  Size process, tenant, session;
};

// To whom a request belongs; null: to none. `shared`: it draws on its group and tenant, and gives to them.
struct Names {
  const std::string *session, *group, *tenant;
  bool shared;
};

// Requests, sessions, groups and tenants, and the calls on them. Every public call takes the lock.
class Cache {
 public:
  Cache(PolicySettings settings, Limits limits, std::int64_t vocab_size);

  // The caller chooses unused slots and has checked the tokens.
  void start(std::size_t slot, std::span<const Token> prompt, Names names, std::span<const Token> ends);
  void extend(std::size_t slot, std::span<const Token> tokens);
  std::optional<Turn> finish(std::size_t slot, std::optional<std::size_t> output_limit);
  void abort(std::size_t slot);
  void restore(Names names, std::size_t kept, std::span<const Token> prompt_tail, std::span<const Token> response);
  void remove_session(const std::string& session, const std::string* tenant);
  bool has_session(const std::string& session);
  // Does what steps leave for later: indexing, and giving back what was evicted. Returns how much was done.
  std::size_t catch_up(std::size_t budget);
  void resize(Limits limits);
  Stats stats();

  // `cost`: price of verifying one more token, as a share of a step.
  Drafts propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> room, double cost);
  Drafts step(std::span<const std::int32_t> slots, TokenTable table, std::span<const std::int32_t> rows,
              std::span<const std::int32_t> lengths, std::span<const std::int32_t> room,
              std::span<const std::int32_t> scheduled, double cost);
  // Tokens that another drafter gives, the first lengths[i] of row i, for requests that have just been drafted for: the
  // drafts as they are with them. The caller has checked tokens and chances. A request without an open draft gets none.
  Drafts offer(std::span<const std::int32_t> slots, Offers offers, std::span<const std::int32_t> lengths,
               std::span<const std::int32_t> room, double cost);
  // Every scored position of the request's last draft.
  std::vector<Scored> candidates(std::size_t slot);

  // Sessions, groups, tenants and what was learned, without running requests. Both throw std::runtime_error.
  void save(const std::string& path);
  void load(const std::string& path);  // into a new cache

 private:
  Request& request(std::size_t slot);
  std::shared_ptr<Tenant> tenant(const std::string* key);
  void touch(Tenant& tenant);
  bool forget_oldest_tenant();
  std::shared_ptr<Learned> learned_of(Tenant& tenant);
  std::shared_ptr<Learned> learned_of(Session& session);
  std::shared_ptr<Learned> learned_of(const Request& request);
  std::shared_ptr<Session> session(const std::string* key, const std::shared_ptr<Tenant>& tenant);
  std::shared_ptr<Group> group(Names names, const std::shared_ptr<Tenant>& tenant);
  template <class Kind>
  std::shared_ptr<Kind> holding(const std::string& key, const std::shared_ptr<Tenant>& tenant);
  void touch(CacheEntry& holding);
  void count(CacheEntry& holding);
  void count(Tenant& tenant);
  void drop(const std::shared_ptr<CacheEntry>& holding);
  void forget_if_empty(const std::shared_ptr<CacheEntry>& holding);
  void release(std::size_t slot);
  void keep(const std::shared_ptr<Session>& session, const std::shared_ptr<Group>& group,
            const std::shared_ptr<Tenant>& tenant, bool shared, std::size_t kept, std::span<const Token> prompt_tail,
            std::span<const Token> response);

  void trim(Session& session);
  std::size_t evict(Tenant* tenant);
  bool evict_one(Tenant* only);
  void load_holding(SnapshotReader& reader);

  std::size_t advance(Request& request, std::size_t budget);
  std::size_t advance(CacheEntry& holding, std::size_t budget);
  void take(Request& request, std::span<const Token> tokens, std::size_t scheduled, BySource& accepted,
            BySource& drafted);
  void draft_for(Request& request, std::size_t room, double cost);
  static void write(const Request& request, Drafts& drafts);
  bool legal(Token token) const { return token >= 0 && token < vocab_size_; }

  std::mutex mutex_;
  PolicySettings settings_;
  Limits limits_;
  std::int64_t vocab_size_;
  std::uint64_t tick_ = 0;
  std::vector<std::unique_ptr<Request>> requests_;
  std::size_t running_ = 0;
  DraftPath scratch_;  // of `offer`
  Size held_;  // sessions, groups and tenants together
  std::unordered_map<std::string, std::shared_ptr<CacheEntry>> holdings_;
  std::map<std::uint64_t, std::shared_ptr<CacheEntry>> by_use_;  // least recently used first
  std::map<std::string, std::shared_ptr<Tenant>> tenants_;
  std::map<std::uint64_t, Tenant*> tenants_by_use_;  // least recently used first
  Size corpora_;                                     // of all tenants together
  std::size_t learners_ = 0;                         // tenants that have learned
};

}  // namespace agentspec
