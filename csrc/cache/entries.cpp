#include "cache/entries.hpp"

#include <algorithm>
#include <utility>

namespace agentspec {
namespace {

constexpr std::size_t kEverything = std::size_t{1} << 62;

bool is_session(const CacheEntry& entry) { return entry.key.front() == 's'; }

}  // namespace

std::size_t Group::advance(std::size_t budget) {
  std::size_t left = budget;
  left -= corpus.advance(left);
  left -= corpus.sweep(left);
  return budget - left;
}

std::shared_ptr<Tenant> CacheEntries::tenant(const std::string* key) {
  if (!key) return nullptr;
  auto& entry = tenants_.by_key[*key];
  if (!entry) {
    entry = std::make_shared<Tenant>();
    entry->key = *key;
  }
  const auto found = entry;
  touch(*found);
  while (tenants_.by_key.size() > kMaxTenants && forget_oldest_tenant()) {
  }
  return found;
}

template <class Entry>
std::shared_ptr<Entry> CacheEntries::entry(const std::string& key, const std::shared_ptr<Tenant>& tenant) {
  auto& entry = entries_.by_key[key];
  if (!entry) {
    entry = std::make_shared<Entry>();
    entry->key = key;
    entry->tenant = tenant;
    tenant->entries.insert(entry.get());
  }
  touch(*entry);
  return std::static_pointer_cast<Entry>(entry);
}

std::shared_ptr<Session> CacheEntries::session(const std::string* key, const std::shared_ptr<Tenant>& tenant) {
  return key ? entry<Session>("s" + *key, tenant) : nullptr;
}

// Returns the named group or the session's own: its responses alone, without what its prompts quote, draft better.
std::shared_ptr<Group> CacheEntries::group(Names names, const std::shared_ptr<Tenant>& tenant) {
  if (!tenant || !names.shared) return nullptr;
  if (names.group) return entry<Group>("g" + *names.group, tenant);
  return names.session ? entry<Group>("o" + *names.session, tenant) : nullptr;
}

std::shared_ptr<Session> CacheEntries::find_session(const std::string& key) const {
  return std::static_pointer_cast<Session>(entries_.find("s" + key));
}

std::shared_ptr<CacheEntry> CacheEntries::find_group(const std::string& key) const { return entries_.find("g" + key); }

void CacheEntries::touch(CacheEntry& entry) {
  if (entry.tenant) {
    entries_.use(entry, ++tick_);
  } else {
    tenants_.use(static_cast<Tenant&>(entry), ++tick_);
  }
}

// Lets at most kMaxLearners tenants keep what they learned. One is replaced only after a rest: if more took turns, all
// would start anew all the time. Returns null if none has rested.
std::shared_ptr<Learned> CacheEntries::learned_of(Tenant& tenant) {
  if (tenant.learned) return tenant.learned;
  if (learners_ >= kMaxLearners) {
    const auto oldest = std::ranges::find_if(tenants_.by_use, [](const auto& used) { return !!used.second->learned; });
    if (tick_ - oldest->first < kLearnerRest) return nullptr;
    oldest->second->learned.reset();
    --learners_;
  }
  ++learners_;
  return tenant.learned = std::make_shared<Learned>(settings_, Learned::kTenantBits);
}

std::shared_ptr<Learned> CacheEntries::learned_of(Session& session) {
  if (!session.learned) {
    session.learned = std::make_shared<Learned>(settings_, Learned::kSessionBits);
    count(session);
  }
  return session.learned;
}

void CacheEntries::count(CacheEntry& entry) {
  const Size before = std::exchange(entry.counted, entry.size());
  Tenant& tenant = entry.tenant ? *entry.tenant : static_cast<Tenant&>(entry);
  for (Size* sum : {&held_, &tenant.held}) (*sum += entry.counted) -= before;
  if (!entry.tenant) (corpora_ += entry.counted) -= before;
}

std::size_t CacheEntries::advance(CacheEntry& entry, std::size_t budget) {
  if (entry.gone) return 0;
  const std::size_t done = entry.advance(budget);
  if (done > 0) count(entry);
  return done;
}

void CacheEntries::drop(CacheEntry& entry) {
  const auto kept = entries_.find(entry.key);  // keeps the entry alive until this returns
  held_ -= entry.counted;
  entry.tenant->held -= entry.counted;
  entry.tenant->entries.erase(&entry);
  entry.counted = {};
  entry.gone = true;
  entries_.erase(entry);
}

void CacheEntries::forget_if_empty(CacheEntry& entry) {
  if (!entry.gone && entry.running == 0 && entry.size().tokens == 0) drop(entry);
}

void CacheEntries::trim(Session& session) {
  const Size size = session.size();
  if (!size.over(limits.session)) return;
  std::size_t tokens = size.tokens;
  if (limits.session.tokens > 0) tokens = std::min(tokens, limits.session.tokens);
  if (limits.session.bytes > 0) tokens = std::min(tokens, size.tokens * limits.session.bytes / size.bytes);
  session.trim(tokens / 2);
}

std::size_t CacheEntries::evict(Tenant* tenant) {
  std::size_t done = 0;
  while (tenant && done < kEvictPerCall && tenant->held.over(limits.tenant) && evict_one(tenant)) ++done;
  while (done < kEvictPerCall && held_.over(limits.process) && evict_one(nullptr)) ++done;
  return done;
}

// Evicts one entry or document, of tenant `only` or of any. If tenants' corpora are more than half of what is held,
// drops the oldest document of the least recently used tenant. Otherwise drops the least recently used session or group
// that no running request drafts from. Returns whether there was anything to evict.
bool CacheEntries::evict_one(Tenant* only) {
  const Size shared = only ? only->counted : corpora_;
  const std::size_t all = only ? only->held.tokens : held_.tokens;
  if (shared.tokens == 0 || 2 * shared.tokens <= all) {
    for (const auto& [tick, entry] : entries_.by_use) {
      if (entry->running > 0 || entry->counted.tokens == 0 || (only && entry->tenant.get() != only)) continue;
      if (entry->key.front() == 'o') {  // it comes back with its session
        if (const auto session = entries_.find("s" + entry->key.substr(1))) session->loaded = false;
      }
      drop(*entry);
      return true;
    }
  }
  if (shared.tokens == 0) return false;
  Tenant* oldest = only;
  for (auto used = tenants_.by_use.begin(); !oldest || oldest->corpus.empty(); ++used) oldest = used->second;
  oldest->corpus.drop_oldest();
  count(*oldest);
  return true;
}

// Forgets the least recently used tenant without running requests. Returns false if there is none but the newest.
bool CacheEntries::forget_oldest_tenant() {
  const auto idle = std::ranges::find_if(tenants_.by_use, [](const auto& used) { return used.second->running == 0; });
  if (idle == tenants_.by_use.end() || std::next(idle) == tenants_.by_use.end()) return false;
  Tenant& tenant = *idle->second;
  while (!tenant.entries.empty()) drop(**tenant.entries.begin());
  held_ -= tenant.counted;
  corpora_ -= tenant.counted;
  if (tenant.learned) --learners_;
  tenants_.erase(tenant);
  return true;
}

std::vector<std::shared_ptr<Group>> CacheEntries::remove_session(const std::string& key,
                                                                 const std::string* tenant_key) {
  if (const auto session = find_session(key)) drop(*session);
  const auto tenant = tenant_key ? tenants_.find(*tenant_key) : nullptr;
  if (!tenant) return {};
  std::vector<std::shared_ptr<Group>> sharing{tenant};
  for (const CacheEntry* entry : tenant->entries) {
    if (!is_session(*entry)) sharing.push_back(std::static_pointer_cast<Group>(entries_.find(entry->key)));
  }
  for (const auto& group : sharing) {
    group->corpus.drop_session("s" + key);
    count(*group);
    if (group != tenant) forget_if_empty(*group);
  }
  return sharing;
}

std::size_t CacheEntries::catch_up(std::size_t budget) {
  std::size_t left = budget;
  left -= std::min(left, evict(nullptr));
  for (const auto& [key, tenant] : tenants_.by_key) {
    left -= std::min(left, evict(tenant.get()));
    left -= advance(*tenant, left);
  }
  for (const auto& [used, entry] : entries_.by_use) left -= advance(*entry, left);
  return budget - left;
}

namespace {

// Saves or loads `learned`, if there is any. A table or reranker of another size stays new: other settings made it.
template <class Archive>
void describe(Archive& archive, std::shared_ptr<Learned>& learned, const PolicySettings& settings, unsigned bits) {
  std::uint64_t there = learned != nullptr;
  archive.number(there);
  if (!there) return;
  if (!learned) learned = std::make_shared<Learned>(settings, bits);
  learned->table.describe(archive);
  learned->reranker.describe(archive);
}

template <class Archive>
void describe(Archive& archive, CacheEntry& entry, const PolicySettings& settings) {
  if (is_session(entry)) {
    describe(archive, entry.learned, settings, Learned::kSessionBits);
    static_cast<Session&>(entry).describe(archive);
  } else {
    static_cast<Group&>(entry).describe(archive);
  }
}

}  // namespace

// Writes the tick, then the tenants in the order of their keys, then sessions and groups, least recently used first.
void CacheEntries::save(SnapshotWriter& writer) {
  std::vector<CacheEntry*> held;
  for (const auto& [used, entry] : entries_.by_use) {
    while (advance(*entry, kEverything) > 0) {
    }
    if (entry->size().tokens > 0) held.push_back(entry);  // otherwise only a running request knows it
  }
  writer.number(tick_);
  writer.number(tenants_.by_key.size());
  for (const auto& [key, tenant] : tenants_.by_key) {
    while (advance(*tenant, kEverything) > 0) {
    }
    writer.string(key);
    writer.number(tenant->used);
    describe(writer, tenant->learned, settings_, Learned::kTenantBits);
    tenant->describe(writer);
  }
  writer.number(held.size());
  for (CacheEntry* entry : held) {
    writer.string(entry->key);
    writer.string(entry->tenant->key);
    writer.number(entry->used);
    describe(writer, *entry, settings_);
  }
}

void CacheEntries::load(SnapshotReader& reader) {
  tick_ = reader.number();  // later than every use in the file, so that new uses are later still
  for (auto tenants = reader.number(); tenants > 0; --tenants) {
    const std::string key = reader.string();
    const auto loaded = tenant(&key);
    tenants_.use(*loaded, reader.number());
    describe(reader, loaded->learned, settings_, Learned::kTenantBits);
    learners_ += loaded->learned != nullptr;
    loaded->describe(reader);
    count(*loaded);
  }
  for (auto entries = reader.number(); entries > 0; --entries) {
    const std::string key = reader.string();
    const auto owner = tenants_.find(reader.string());
    if (key.empty() || entries_.find(key)) reader.damaged("a session or group is there twice");
    if (!owner) reader.damaged("a session or group belongs to an unknown tenant");
    std::shared_ptr<CacheEntry> loaded;
    if (key.front() == 's') {
      loaded = entry<Session>(key, owner);
    } else {
      loaded = entry<Group>(key, owner);
    }
    entries_.use(*loaded, reader.number());
    describe(reader, *loaded, settings_);
    count(*loaded);
  }
}

}  // namespace agentspec
