#include "cache/entries.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace agentspec {
namespace {

constexpr std::size_t kGenerations = 16;  // most generations of a family that the search for its root goes up
constexpr std::size_t kDisposedAtOnce = std::size_t{64} << 10;  // bytes below which an index is freed on the spot
constexpr std::size_t kDisposedPerCall = std::size_t{1} << 20;  // bytes that a call of dispose_some() gives back

// Bytes that the maps which find an entry take for it: a node by key and two by use, and the reference count.
constexpr std::size_t kInMaps = heap_bytes(64) + 2 * heap_bytes(48) + 8 + 32;

constexpr std::size_t kEntryWeight = 64;  // tokens that a session or group weighs on top of its own

// Returns the bytes that an owner takes: itself, a node by name, and a node in each of three orders.
std::size_t bytes_of(const Owner& owner) {
  return heap_bytes(sizeof(Owner) + 16) + heap_bytes(64) + 3 * heap_bytes(48) +
         (owner.name.capacity() > 15 ? heap_bytes(owner.name.capacity() + 1) : 0);
}

}  // namespace

Size CacheEntry::size() const {
  Size size;
  size.tokens = tokens();
  size.bytes = bytes() + kInMaps + (key.capacity() > 15 ? heap_bytes(key.capacity() + 1) : 0);
  if (learned) size.bytes += learned->bytes();
  size.leaving = leaving();
  size.pending = index().pending();
  size.sessions = is(EntryKind::kSession) && size.tokens > 0;
  return size;
}

// Indexes pending text or, if none is left, removes dropped documents. A call does only one of the two: how much is
// indexed at once depends on how the index does it, and must not change what is removed.
std::size_t Group::advance(std::size_t budget) {
  const std::size_t indexed = corpus.advance(budget);
  return indexed > 0 ? indexed : corpus.sweep(budget);
}

bool Tenant::leave_to_thread() {
  left = std::min(left, index().size());  // the text may have become shorter
  if (index().size() - index().pending() < left) return false;
  left = index().size();
  return true;
}

std::shared_ptr<Tenant> CacheEntries::tenant(const std::string* key, const std::string* tenant_owner) {
  if (!key) return nullptr;
  auto found = tenants_.find(*key);
  if (!found) {
    found = std::make_shared<Tenant>();
    found->key = *key;
    tenants_.add(found);
    set_owner(*found, tenant_owner ? *tenant_owner : *key);
    count(*found);
  } else if (tenant_owner) {
    set_owner(*found, *tenant_owner);
  }
  touch(*found);
  return found;
}

template <class Entry>
std::shared_ptr<Entry> CacheEntries::entry(const std::string& key, const std::shared_ptr<Tenant>& tenant,
                                           Names names) {
  auto found = entries_.find(key);
  if (!found) {
    found = std::make_shared<Entry>();
    found->key = key;
    found->tenant = tenant;
    if (found->is(EntryKind::kGroup)) tenant->groups.insert(found->key);
    entries_.add(found);
    set_owner(*found, names.owner ? *names.owner : tenant->key);
    count(*found);
  } else if (names.owner && !names.stored) {
    set_owner(*found, *names.owner);
  }
  touch(*found);
  return std::static_pointer_cast<Entry>(found);
}

std::shared_ptr<Session> CacheEntries::session(Names names, const std::shared_ptr<Tenant>& tenant) {
  if (!names.session) return nullptr;
  const auto found = entry<Session>(entry_key(EntryKind::kSession, *names.session), tenant, names);
  if (std::string root = root_of(names); root != *names.session && root != found->family) {
    found->family = std::move(root);
    count(*found);
  }
  return found;
}

// Returns the named group, or else the session's family. A session alone has a family too, because its responses draft
// better without the text that prompts quote.
std::shared_ptr<Group> CacheEntries::group(Names names, const std::shared_ptr<Tenant>& tenant) {
  if (!tenant) return nullptr;
  if (names.shared && names.group) return entry<Group>(entry_key(EntryKind::kGroup, *names.group), tenant, names);
  if (!names.session) return nullptr;
  const std::string root = root_of(names);
  const auto found = family(root, tenant, names);
  if (root != *names.session) found->tenant->groups.insert(found->key);
  return found;
}

std::shared_ptr<Group> CacheEntries::family(const std::string& root, const std::shared_ptr<Tenant>& tenant,
                                            Names names) {
  return entry<Group>(entry_key(EntryKind::kFamily, root), tenant, names);
}

std::string CacheEntries::root_of(Names names) const {
  const auto above = [&](const std::string& key) {
    const auto session = find_session(key);
    return session ? session->family : std::string();
  };
  std::string root = above(*names.session);
  if (root.empty()) root = names.family ? *names.family : *names.session;
  for (std::size_t generation = 0; generation < kGenerations; ++generation) {
    std::string next = above(root);
    if (next.empty()) break;
    root = std::move(next);
  }
  return root;
}

std::shared_ptr<Session> CacheEntries::find_session(const std::string& key) const {
  return std::static_pointer_cast<Session>(entries_.find(entry_key(EntryKind::kSession, key)));
}

std::shared_ptr<Group> CacheEntries::find_group(const std::string& key) const {
  return std::static_pointer_cast<Group>(entries_.find(entry_key(EntryKind::kGroup, key)));
}

std::shared_ptr<Group> CacheEntries::find_family(const std::string& root) const {
  return std::static_pointer_cast<Group>(entries_.find(entry_key(EntryKind::kFamily, root)));
}

std::shared_ptr<Group> CacheEntries::find_family_of(Names names) const {
  const std::string root = root_of(names);
  const auto found = find_family(root);
  if (found && root != *names.session) found->tenant->groups.insert(found->key);
  return found;
}

// The orders and the lists of waiting entries find an entry by `used`. So it leaves them before that changes.
void CacheEntries::touch(CacheEntry& entry) {
  const bool waiting = entry.waiting;
  set_waiting(entry, false);
  unfile(entry);
  entry.used = ++tick_;
  file(entry);
  set_waiting(entry, waiting);
}

void CacheEntries::file(CacheEntry& entry) {
  if (entry.tenant) {
    entry.tenant->entries[entry.used] = &entry;
    texts_.add(entry.owner->texts, entry.used, entry);
    return;
  }
  auto& tenant = static_cast<Tenant&>(entry);
  newest_tenant_ = std::max(newest_tenant_, tenant.used);
  tenant_order_.add(tenant.owner->tenants, tenant.used, tenant);
  if (tenant.counted.tokens > 0) corpus_order_.add(tenant.owner->corpora, tenant.used, tenant);
}

void CacheEntries::unfile(CacheEntry& entry) {
  if (entry.tenant) {
    entry.tenant->entries.erase(entry.used);
    texts_.remove(entry.owner->texts, entry.used);
    return;
  }
  tenant_order_.remove(entry.owner->tenants, entry.used);
  if (entry.counted.tokens > 0) corpus_order_.remove(entry.owner->corpora, entry.used);
}

CacheEntries::Weight CacheEntries::weight_of(const CacheEntry& entry) {
  const std::size_t tokens = entry.counted.tokens;
  if (entry.tenant) return {tokens == 0 ? 0 : tokens + kEntryWeight, 0};
  return {tokens, static_cast<const Tenant&>(entry).beside};
}

// Changes the weight that an entry adds to its owner's.
void CacheEntries::weigh(CacheEntry& entry, Weight before, Weight now) {
  Owner& owner = *entry.owner;
  if (entry.tenant) return texts_.weigh(owner.texts, before.tokens, now.tokens);
  tenant_order_.weigh(owner.tenants, before.beside, now.beside);
  corpus_order_.weigh(owner.corpora, before.tokens, now.tokens);
}

void CacheEntries::set_owner(CacheEntry& entry, const std::string& name) {
  if (entry.owner && entry.owner->name == name) return;
  auto found = owners_.find(name);
  if (found == owners_.end()) {
    const auto owner = std::make_shared<Owner>();
    owner->name = name;
    held_.bytes += bytes_of(*owner);
    found = owners_.emplace(owner->name, owner).first;
  }
  ++found->second->entries;
  if (entry.owner) {
    leave_owner(entry);
  } else {
    entry.used = ++tick_;
  }
  entry.owner = found->second;
  file(entry);
  weigh(entry, {}, weight_of(entry));
}

void CacheEntries::leave_owner(CacheEntry& entry) {
  unfile(entry);
  weigh(entry, weight_of(entry), {});
  if (--entry.owner->entries > 0) return;
  held_.bytes -= bytes_of(*entry.owner);
  owners_.erase(entry.owner->name);
}

void CacheEntries::set_waiting(CacheEntry& entry, bool waiting) {
  if (entry.waiting == waiting) return;
  entry.waiting = waiting;
  auto& list = entry.tenant ? waiting_ : waiting_tenants_;
  if (waiting) {
    list[entry.used] = &entry;
  } else {
    list.erase(entry.used);
  }
}

// Returns the size of an entry's reranker, log2. A tenant's takes at most a sixteenth of a small budget.
unsigned CacheEntries::learned_bits(const CacheEntry& entry) const {
  if (entry.tenant) return Learned::kSessionBits;
  const std::size_t most = limits.process.bytes / 16 / Reranker::kBytesPerWeight;
  if (most == 0) return Learned::kTenantBits;
  return std::clamp(static_cast<unsigned>(std::bit_width(most)) - 1, Learned::kRequestBits, Learned::kTenantBits);
}

std::shared_ptr<Learned> CacheEntries::learned_of(CacheEntry& entry) {
  if (!entry.learned) {
    entry.learned = std::make_shared<Learned>(settings_, learned_bits(entry));
    count(entry);
  }
  return entry.learned;
}

void CacheEntries::count(CacheEntry& entry) {
  if (entry.gone) return;  // it has no part in the sums
  const Weight weight = weight_of(entry);
  const Size before = std::exchange(entry.counted, entry.size());
  Tenant& tenant = entry.tenant ? *entry.tenant : static_cast<Tenant&>(entry);
  for (Size* sum : {&held_, &tenant.held}) (*sum += entry.counted) -= before;
  note_if_over(tenant);
  set_waiting(entry, entry.has_work());
  if (!entry.tenant) {
    (corpora_ += entry.counted) -= before;
    beside_ -= std::exchange(tenant.beside, tenant.counted.bytes - tenant.corpus.bytes());
    beside_ += tenant.beside;
    const std::size_t now = tenant.counted.tokens;
    if (before.tokens == 0 && now > 0) corpus_order_.add(tenant.owner->corpora, tenant.used, tenant);
    if (before.tokens > 0 && now == 0) corpus_order_.remove(tenant.owner->corpora, tenant.used);
  }
  weigh(entry, weight, weight_of(entry));
}

Size CacheEntries::recount() const {
  Size sum;
  for (const auto& [key, tenant] : tenants_.by_key) sum += tenant->size();
  for (const auto& [key, entry] : entries_.by_key) sum += entry->size();
  for (const auto& [name, owner] : owners_) sum.bytes += bytes_of(*owner);
  for (const SuffixIndex& index : to_dispose_) {
    sum.bytes += index.bytes();
    sum.leaving += index.bytes();
  }
  return sum;
}

void CacheEntries::advance(CacheEntry& entry, WorkBudget& budget) {
  if (entry.gone || !entry.has_work()) return;
  budget.run([&] { return entry.has_work(); }, [&](std::size_t most) { return entry.index().piece(most); },
             [&](std::size_t most) { return entry.advance(most); });
  count(entry);
}

void CacheEntries::work(WorkBudget& budget, bool has_thread) {
  const auto dispose_timed = [&] { return budget.timed([&] { return dispose_some(); }); };
  if (!to_dispose_.empty()) dispose_timed();  // some in any case, so that the memory does not stay for ever
  if (held_.over(limits.process)) budget.use(budget.timed([&] { return evict(nullptr); }));
  for (auto* list : {&waiting_, &waiting_tenants_}) {
    auto end = list->end();
    while (end != list->begin() && budget.left() > 0 && !budget.late()) {
      CacheEntry& newest = *std::prev(end)->second;
      if (has_thread && !newest.tenant && static_cast<Tenant&>(newest).waits_for_others()) {
        // The indexing thread does this. If it is late, the step helps with at most half of its time.
        if (!static_cast<Tenant&>(newest).leave_to_thread()) {
          budget.halved([&](WorkBudget& half) { advance(newest, half); });
        }
        if (newest.waiting) --end;
        continue;
      }
      advance(newest, budget);
      if (newest.waiting) break;
    }
  }
  while (!budget.late() && !to_dispose_.empty()) dispose_timed();
}

void CacheEntries::dispose_later(SuffixIndex index) {
  const std::size_t bytes = index.bytes();
  if (bytes < kDisposedAtOnce) return;
  held_.bytes += bytes;
  held_.leaving += bytes;
  to_dispose_.push_back(std::move(index));
}

// Gives back some memory. Returns whether there was any.
bool CacheEntries::dispose_some() {
  if (to_dispose_.empty()) return false;
  const std::size_t before = to_dispose_.back().bytes();
  const bool all = to_dispose_.back().dispose(kDisposedPerCall);
  const std::size_t gone = before - (all ? 0 : to_dispose_.back().bytes());
  if (all) to_dispose_.pop_back();
  held_.bytes -= gone;
  held_.leaving -= gone;
  return true;
}

void CacheEntries::start_over() {
  for (const auto& [key, entry] : entries_.by_key) entry->gone = true;  // for an erasure or a snapshot under way
  for (const auto& [key, tenant] : tenants_.by_key) tenant->gone = true;
  CacheEntries fresh(settings_, limits, window);
  fresh.erasures = erasures + 1;
  fresh.periods = periods;
  fresh.evictions_ = evictions_;
  *this = std::move(fresh);
}

void CacheEntries::drop(CacheEntry& entry) {
  const auto alive = entries_.find(entry.key);  // keeps the entry until this returns
  set_waiting(entry, false);
  leave_owner(entry);
  held_ -= entry.counted;
  entry.tenant->held -= entry.counted;
  if (!entry.is(EntryKind::kSession)) entry.tenant->groups.erase(entry.key);
  entry.counted = {};
  entry.gone = true;
  dispose_later(entry.take_index());
  entries_.erase(entry);
}

void CacheEntries::remove_session(const std::string& key) {
  if (const auto family = find_family(key)) family->tenant->groups.insert(family->key);
  const auto session = find_session(key);
  if (!session) return;
  drop(*session);
  session->clear();  // its running requests keep the entry itself
}

std::shared_ptr<Group> CacheEntries::group_behind(const std::string& tenant, const std::string& last) const {
  const auto found = tenants_.find(tenant);
  if (!found) return nullptr;
  const auto next = found->groups.upper_bound(last);
  return next == found->groups.end() ? nullptr : std::static_pointer_cast<Group>(entries_.find(*next));
}

}  // namespace agentspec
