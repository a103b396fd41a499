// Keeps what finished requests leave behind: tenants, and their sessions and groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "cache/corpus.hpp"
#include "cache/session.hpp"
#include "drafting/draft.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

inline constexpr std::size_t kEvictPerCall = 64;     // sessions, groups or documents evicted in one call
inline constexpr std::size_t kMaxTenants = 4096;     // held at a time; beyond that the least recently used is forgotten
inline constexpr std::size_t kMaxLearners = 64;      // tenants that keep what they learned, 2 MB each
inline constexpr std::uint64_t kLearnerRest = 1024;  // ticks without use after which one of them may be replaced

// Holds responses to one problem: those of a tenant's sessions that name the group, or of one session alone.
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

// Holds what all sessions of one tenant share: their responses, and what was learned about drafts.
struct Tenant final : Group {
  Size held;  // sum over itself and its sessions and groups
  std::unordered_set<CacheEntry*> entries;
};

// Finds entries by key and by last use.
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

// Holds all sessions, groups and tenants with the sums of their sizes, and evicts what exceeds the budgets.
class CacheEntries {
 public:
  CacheEntries(const PolicySettings& settings, Limits limits) : limits(limits), settings_(settings) {}

  // Each returns the named entry, made if there is none, and marks it as used. Null where none is named.
  std::shared_ptr<Tenant> tenant(const std::string* key);
  std::shared_ptr<Session> session(const std::string* key, const std::shared_ptr<Tenant>& tenant);
  std::shared_ptr<Group> group(Names names, const std::shared_ptr<Tenant>& tenant);
  std::shared_ptr<Session> find_session(const std::string& key) const;
  std::shared_ptr<CacheEntry> find_group(const std::string& key) const;  // a named one

  std::shared_ptr<Learned> learned_of(Tenant& tenant);
  std::shared_ptr<Learned> learned_of(Session& session);

  void touch(CacheEntry& entry);
  void count(CacheEntry& entry);  // updates the sums to its present size
  std::size_t advance(CacheEntry& entry, std::size_t budget);
  void forget_if_empty(CacheEntry& entry);
  // Cuts a session that is over its budget to at most half of the tokens that it may hold, and keeps its newest tokens.
  void trim(Session& session);
  // Evicts until the tenant, if not null, and the process are within budget, at most kEvictPerCall. Returns how many.
  std::size_t evict(Tenant* tenant);
  // Drops a session and its responses. Returns the tenant and the groups that must be swept to erase them.
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
  Size corpora_;  // the tenants' own corpora together
  EntryMap<Tenant> tenants_;
  EntryMap<CacheEntry> entries_;  // sessions (keys begin with s), named groups (g) and sessions' own groups (o)
  std::size_t learners_ = 0;      // tenants with `learned`
};

}  // namespace agentspec
