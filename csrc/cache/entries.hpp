// What is kept of finished requests: tenants, and their sessions and groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "cache/corpus.hpp"
#include "drafting/draft.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

inline constexpr std::size_t kEvictPerCall = 64;     // sessions, groups or documents evicted in one call
inline constexpr std::size_t kMaxTenants = 4096;     // held at a time; beyond that the least recently used one goes
inline constexpr std::size_t kMaxLearners = 64;      // tenants that keep what they learned, 2 MB each
inline constexpr std::uint64_t kLearnerRest = 1024;  // ticks without use after which one of them gives way to another

// What budgets count. Bytes are reckoned from tokens, not measured: buffers grow in leaps and shrink late, and a budget
// that followed them would evict too much.
struct Size {
  static constexpr std::size_t kBytesPerToken = 12, kBytesPerLearner = std::size_t{1} << 17;

  std::size_t tokens = 0, bytes = 0;

  Size& operator+=(Size other) { return tokens += other.tokens, bytes += other.bytes, *this; }
  Size& operator-=(Size other) { return tokens -= other.tokens, bytes -= other.bytes, *this; }
  bool over(Size limit) const {
    return (limit.tokens > 0 && tokens > limit.tokens) || (limit.bytes > 0 && bytes > limit.bytes);
  }
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

struct Tenant;

struct CacheEntry {
  std::string key;
  std::shared_ptr<Tenant> tenant;     // whose session or group it is; null for a tenant itself
  std::uint64_t used = 0;             // tick of its last use
  std::size_t running = 0;            // requests that draft from it: then it stays
  bool gone = false;                  // erased or evicted; running requests may still know it
  Size counted;                       // what the sums over all entries hold of it
  std::shared_ptr<Learned> learned;   // of a tenant, or of a session's requests that keep to it; null: nothing yet

  virtual ~CacheEntry() = default;
  virtual Size size() const = 0;          // as budgets count it
  virtual std::size_t bytes() const = 0;  // held now
  virtual const SuffixIndex& index() const = 0;
  // Indexes pending positions and takes out dropped ones, for at most about `budget`. Returns what it took.
  virtual std::size_t advance(std::size_t budget) = 0;
};

// What one conversation leaves behind: its turns as one growing text.
struct Session final : CacheEntry {
  SuffixIndex text;
  std::vector<Token> last;  // full text of the last finished request

  // Appends one finished turn, in place where the prompt repeats all that came before.
  void append(std::size_t kept, std::span<const Token> prompt_tail, std::span<const Token> response);
  // Starts again from its newest tokens, at most `tokens` of them.
  void trim(std::size_t tokens);

  Size size() const override;
  std::size_t bytes() const override { return text.bytes() + last.capacity() * sizeof(Token); }
  const SuffixIndex& index() const override { return text; }
  std::size_t advance(std::size_t budget) override { return text.advance(budget); }

  template <class Archive>
  void describe(Archive& archive) {
    archive.vector(last);
    text.describe(archive);
  }
};

// Responses that several requests share: to one problem from all sessions of a tenant that worked on it, or of one
// session.
struct Group : CacheEntry {
  Corpus corpus;

  Size size() const override { return {corpus.tokens(), Size::kBytesPerToken * corpus.tokens()}; }
  std::size_t bytes() const override { return corpus.bytes(); }
  const SuffixIndex& index() const override { return corpus.index(); }
  std::size_t advance(std::size_t budget) override;

  template <class Archive>
  void describe(Archive& archive) {
    corpus.describe(archive);
  }
};

// What all sessions of one tenant share: the responses of all of them, and what was learned about drafts.
struct Tenant final : Group {
  Size held;  // of itself and of its sessions and groups
  std::unordered_set<CacheEntry*> entries;
};

// Entries by their keys and by their last use.
template <class Entry>
struct EntryMap {
  std::map<std::string, std::shared_ptr<Entry>> by_key;
  std::map<std::uint64_t, Entry*> by_use;  // least recently used first

  std::shared_ptr<Entry> find(const std::string& key) const {
    const auto found = by_key.find(key);
    return found == by_key.end() ? nullptr : found->second;
  }
  void use(Entry& entry, std::uint64_t tick) {
    by_use.erase(entry.used);
    entry.used = tick;
    by_use[tick] = &entry;
  }
  void erase(const Entry& entry) {
    by_use.erase(entry.used);
    by_key.erase(by_key.find(entry.key));
  }
};

// All sessions, groups and tenants: who is evicted, and what the sums are.
class CacheEntries {
 public:
  CacheEntries(const PolicySettings& settings, Limits limits) : limits(limits), settings_(settings) {}

  // Each finds or makes one, which then counts as used. Null where none is named.
  std::shared_ptr<Tenant> tenant(const std::string* key);
  std::shared_ptr<Session> session(const std::string* key, const std::shared_ptr<Tenant>& tenant);
  std::shared_ptr<Group> group(Names names, const std::shared_ptr<Tenant>& tenant);
  std::shared_ptr<Session> find_session(const std::string& key) const;

  std::shared_ptr<Learned> learned_of(Tenant& tenant);
  std::shared_ptr<Learned> learned_of(Session& session);

  void touch(CacheEntry& entry);
  void count(CacheEntry& entry);  // brings the sums up to what it has now
  std::size_t advance(CacheEntry& entry, std::size_t budget);
  void forget_if_empty(CacheEntry& entry);
  void trim(Session& session);  // where it is over its budget
  // Evicts until a tenant (null: none in particular) and the process are within their budgets, or much was done.
  std::size_t evict(Tenant* tenant);
  // Drops a session and what it gave. Returns the entries that are still to be swept.
  std::vector<std::shared_ptr<Group>> remove_session(const std::string& key, const std::string* tenant);
  std::size_t catch_up(std::size_t budget);

  Size held() const { return held_; }
  const EntryMap<Tenant>& tenants() const { return tenants_; }
  const EntryMap<CacheEntry>& entries() const { return entries_; }

  void save(SnapshotWriter& writer);
  void load(SnapshotReader& reader);

  Limits limits;

 private:
  template <class Entry>
  std::shared_ptr<Entry> entry(const std::string& key, const std::shared_ptr<Tenant>& tenant);
  void drop(CacheEntry& entry);
  bool evict_one(Tenant* only);
  bool forget_oldest_tenant();

  PolicySettings settings_;
  std::uint64_t tick_ = 0;
  Size held_;     // sessions, groups and tenants together
  Size corpora_;  // of all tenants together
  EntryMap<Tenant> tenants_;
  EntryMap<CacheEntry> entries_;  // sessions (keys begin with s), named groups (g) and sessions' own groups (o)
  std::size_t learners_ = 0;      // tenants that have learned
};

}  // namespace agentspec
