// Keeps the text of finished requests: tenants, and their sessions and groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cache/corpus.hpp"
#include "cache/fair_order.hpp"
#include "cache/session.hpp"
#include "drafting/draft.hpp"
#include "index/stopwatch.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

inline constexpr std::size_t kEvictPerCall = 64;  // sessions, groups or documents evicted in one call
inline constexpr std::size_t kOutdatedPerCall = 256;  // documents older than the window dropped in one call
inline constexpr std::size_t kTenantShare = 4;    // tenants, without their texts, may take 1 / kTenantShare of all
inline constexpr std::size_t kClogged = 8;        // 1 / kClogged of the budget may wait to be swept

struct Request;

// Says how long groups and tenants keep a response: until `kept` more weights or epochs have begun, or until the tenant
// has written so many more tokens. 0: as long as there is room. Its clock counts weights, epochs, or those tokens.
struct HistoryWindow {
  enum class Unit : std::uint64_t { kNone, kWeights, kEpochs, kTokens };
  Unit unit = Unit::kNone;
  std::uint64_t kept = 0;
};

// Holds responses of several sessions of a tenant: of those that name the group, or of a family, which is a session and
// all sessions that descend from it. A session alone is a family too.
struct Group : CacheEntry {
  static constexpr std::size_t kInGroups = heap_bytes(48);  // bytes of its node in Tenant::groups
  Corpus corpus;
  std::vector<Request*> members;  // its running requests, oldest first

  std::size_t tokens() const override { return corpus.tokens(); }
  std::size_t bytes() const override {
    return sizeof *this + corpus.bytes() + heap_bytes(members.capacity() * sizeof(Request*)) + kInGroups;
  }
  std::size_t leaving() const override { return corpus.leaving(); }
  const SuffixIndex& index() const override { return corpus.index(); }
  bool has_work() const override { return corpus.has_work(); }
  void freeze(bool frozen) override { corpus.freeze(frozen); }
  SuffixIndex take_index() override { return corpus.take_index(); }
  std::size_t advance(std::size_t budget) override;

  template <class Archive>
  void describe(Archive& archive) {
    corpus.describe(archive);
  }
};

// Holds the responses and the learned state that all sessions of one tenant share.
struct Tenant final : Group {
  Size held;               // sum over itself and its sessions and groups
  std::size_t beside = 0;  // its `counted` bytes without its texts': its own and its learned state's
  std::map<std::uint64_t, CacheEntry*> entries;  // its sessions and groups, by last use
  std::set<std::string_view> groups;             // keys of its groups that hold responses of several sessions
  std::uint64_t written = 0;                     // tokens of the responses that its requests finished so far
  bool followed = false;  // whether all text that waits to be indexed was said in other processes
  std::size_t left = 0;   // size of the text when a step last left some of it to the indexing thread

  std::size_t bytes() const override { return sizeof *this + corpus.bytes(); }
  // Notes that a response is about to be added. `by_others`: another process said it.
  void expect(bool by_others) { followed = by_others && (followed || corpus.index().pending() == 0); }
  // Returns whether nothing but text from other processes waits to be indexed.
  bool waits_for_others() const { return followed && corpus.swept(); }
  // Leaves that text to the indexing thread. Returns false if text that was left to it before still waits.
  bool leave_to_thread();
};

// Stands for a caller for whom sessions, groups and tenants count, so that no caller's entries push out all others.
struct Owner {
  std::string name;
  std::size_t entries = 0;                 // sessions, groups and tenants that count for it
  FairOrder<CacheEntry>::Line texts;       // sessions and groups
  FairOrder<Tenant>::Line tenants, corpora;  // all its tenants, weighed by `beside`; those with texts, by tokens
};

// Finds entries by key. The keys are the entries' own.
template <class Entry>
struct EntryMap {
  std::map<std::string_view, std::shared_ptr<Entry>> by_key;

  void add(const std::shared_ptr<Entry>& entry) { by_key.emplace(entry->key, entry); }
  std::shared_ptr<Entry> find(std::string_view key) const {
    const auto found = by_key.find(key);
    return found == by_key.end() ? nullptr : found->second;
  }
  void erase(const Entry& entry) { by_key.erase(by_key.find(entry.key)); }
};

// Holds all sessions, groups and tenants with the sums of their sizes, and evicts what exceeds the budgets.
class CacheEntries {
 public:
  CacheEntries(const PolicySettings& settings, Limits limits, HistoryWindow window)
      : limits(limits), window(window), settings_(settings) {}

  // Each returns the named entry and marks it as used. It makes the entry if there is none. Null if none is named.
  std::shared_ptr<Tenant> tenant(const std::string* key, const std::string* tenant_owner);
  std::shared_ptr<Session> session(Names names, const std::shared_ptr<Tenant>& tenant);
  std::shared_ptr<Group> group(Names names, const std::shared_ptr<Tenant>& tenant);
  std::shared_ptr<Session> find_session(const std::string& key) const;
  std::shared_ptr<Group> find_group(const std::string& key) const;      // a named one
  std::shared_ptr<Group> find_family(const std::string& root) const;
  std::shared_ptr<Group> find_family_of(Names names) const;  // of the named session
  // Returns the root of the family of the named session: the session that all its others descend from, as far as known.
  std::string root_of(Names names) const;

  std::shared_ptr<Learned> learned_of(CacheEntry& entry);

  void touch(CacheEntry& entry);
  void count(CacheEntry& entry);  // updates the sums to its present size, unless it is gone
  void advance(CacheEntry& entry, WorkBudget& budget);
  // Returns the time by the window's clock.
  std::uint64_t now(const Tenant& tenant) const {
    return window.unit == HistoryWindow::Unit::kTokens ? tenant.written : periods;
  }
  // Drops some of the responses that are older than the window.
  void drop_outdated(Group& group);
  void forget_if_empty(CacheEntry& entry);
  bool over_budget(const Size& size) const;  // of a session
  // Cuts a session that is over its budget to at most half of the tokens that it may hold, and keeps its newest tokens.
  void trim(Session& session);
  // Drops the oldest responses of a family that holds more than a session may. Does nothing to other groups.
  void trim(Group& group);
  // Counts memory that eviction cannot give back: that of running requests and of the public corpus.
  void count_unevictable(const Size& before, const Size& now) { (held_ += now) -= before; }
  // Evicts until the tenant, if not null, and the process are within budget, but at most kEvictPerCall sessions, groups
  // or documents. Returns how many.
  std::size_t evict(Tenant* tenant);
  // Evicts, gives back memory, indexes and sweeps as far as the budget allows, the entries used last first.
  // `has_thread`: text from other processes is left to the indexing thread, unless that thread is late.
  void work(WorkBudget& budget, bool has_thread = false);
  // Evicts from tenants that are over the budget of a tenant, until the work budget's time is up.
  void evict_tenants(WorkBudget& budget);
  void set_limits(const Limits& changed);
  // Drops a session, and counts its family among the groups that may hold responses of it.
  void remove_session(const std::string& key);
  // Returns the tenant's group with the next key, of those that may hold responses of several sessions. `last`: {} for
  // the first. Null: there is none.
  std::shared_ptr<Group> group_behind(const std::string& tenant, const std::string& last) const;
  // Evicts a session, and the family whose root it is, now or when none of its requests run. A request that starts in
  // it before that keeps it.
  void free_session(const std::string& key);
  void free_if_final(Session& session);
  // Drops a tenant that has no running requests. A call drops at most kEvictPerCall of its entries and returns false if
  // it has more: then call it again.
  bool forget_tenant(Tenant& tenant);
  // Takes over an index that is not used any more. Its memory is given back little by little.
  void dispose_later(SuffixIndex index);
  bool has_work() const { return !waiting_.empty() || !waiting_tenants_.empty() || !to_dispose_.empty(); }
  // Returns whether so much waits to be swept that nothing more should be added to the tenants' corpora.
  bool clogged() const { return limits.process.bytes > 0 && kClogged * corpora_.leaving > limits.process.bytes; }

  const Size& held() const { return held_; }
  std::size_t evictions() const { return evictions_; }  // since this was made
  Size recount() const;  // held() without the requests, added up anew, so that a test can compare the two
  const EntryMap<Tenant>& tenants() const { return tenants_; }
  const EntryMap<CacheEntry>& entries() const { return entries_; }

  // Saves entries to a writer in pieces. `next` begins with {}. Returns whether there may be more. If the call sets
  // `frozen`, the writer has deferred this entry's arrays: thaw the entry once they are written.
  struct Cursor {
    bool tenants_done = false, begun = false;
    std::string key;  // of the last entry saved
  };
  bool save_some(SnapshotWriter& writer, Cursor& next, std::shared_ptr<CacheEntry>& frozen);
  void thaw(CacheEntry& entry);
  // `same_window`: the snapshot's clock counts the same as the present one. Otherwise all responses count as new.
  void load(SnapshotReader& reader, std::int64_t vocab_size, bool same_window);
  // Forgets all entries, whose sums and orders may be wrong.
  void start_over();
  bool empty() const { return tenants_.by_key.empty() && held_.bytes == 0; }

  Limits limits;
  std::uint64_t erasures = 0;  // changes while a session is erased
  HistoryWindow window;
  std::uint64_t periods = 0;   // weights or epochs that began so far, whichever the window counts

 private:
  template <class Entry>
  std::shared_ptr<Entry> entry(const std::string& key, const std::shared_ptr<Tenant>& tenant, Names names);
  std::shared_ptr<Group> family(const std::string& root, const std::shared_ptr<Tenant>& tenant, Names names);
  void set_owner(CacheEntry& entry, const std::string& name);
  void leave_owner(CacheEntry& entry);
  void file(CacheEntry& entry);  // into the orders by last use
  void unfile(CacheEntry& entry);
  struct Weight {
    std::size_t tokens = 0, beside = 0;
  };
  static Weight weight_of(const CacheEntry& entry);
  void weigh(CacheEntry& entry, Weight before, Weight now);
  unsigned learned_bits(const CacheEntry& entry) const;
  void note_if_over(const Tenant& tenant);
  void set_waiting(CacheEntry& entry, bool waiting);
  template <class Entry>
  bool save_some(const EntryMap<Entry>& map, SnapshotWriter& writer, Cursor& next, std::shared_ptr<CacheEntry>& frozen);
  std::shared_ptr<CacheEntry> load_name(SnapshotReader& reader);
  bool dispose_some();
  void drop(CacheEntry& entry);
  bool evict_one(Tenant* only);
  template <class Fits>
  CacheEntry* oldest_text(const Tenant* only, Fits fits) const;
  void load_again(CacheEntry& entry);
  bool evict_tenant();
  void drop_tenant(Tenant& tenant);
  bool evict_text(Tenant* only);
  bool evict_running(Tenant* only);

  PolicySettings settings_;
  std::uint64_t tick_ = 0;
  std::size_t evictions_ = 0;
  Size held_;               // sessions, groups, tenants and requests together
  Size corpora_;            // the tenants themselves together
  std::size_t beside_ = 0;  // sum of the tenants' `beside`
  EntryMap<Tenant> tenants_;
  std::set<std::string_view> over_;  // keys of tenants that are, or lately were, over the budget of a tenant
  EntryMap<CacheEntry> entries_;  // sessions, named groups and families
  std::map<std::string_view, std::shared_ptr<Owner>> owners_;
  FairOrder<CacheEntry> texts_;
  FairOrder<Tenant> tenant_order_, corpus_order_;
  std::uint64_t newest_tenant_ = 0;  // tick of the last use of any tenant
  std::map<std::uint64_t, CacheEntry*> waiting_, waiting_tenants_;  // entries with work to do, by last use
  std::vector<SuffixIndex> to_dispose_;  // indexes whose memory is still to be given back
};

}  // namespace agentspec
