// Keeps CacheEntries within their budgets: decides what to cut, and what to evict first.
#include <algorithm>
#include <utility>

#include "cache/entries.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kSessionTokens = std::size_t{1} << 19;  // limit without a budget; cutting copies half of it

}  // namespace

void CacheEntries::drop_outdated(Group& group) {
  const std::uint64_t time = now(group.tenant ? *group.tenant : static_cast<const Tenant&>(group));
  if (window.kept == 0 || time < window.kept) return;
  if (group.corpus.drop_before(time + 1 - window.kept, kOutdatedPerCall) > 0) count(group);
}

void CacheEntries::forget_if_empty(CacheEntry& entry) {
  if (!entry.gone && entry.running == 0 && entry.tokens() == 0) drop(entry);
}

bool CacheEntries::over_budget(const Size& size) const {
  const bool bounded = limits.session.tokens > 0 || limits.session.bytes > 0;
  return bounded ? size.over(limits.session) : size.tokens > kSessionTokens;
}

void CacheEntries::trim(Group& group) {
  if (!group.is(EntryKind::kFamily)) return;
  while (!group.corpus.empty() && over_budget(group.size())) group.corpus.drop_oldest();
}

void CacheEntries::trim(Session& session) {
  const Size size = session.size();
  if (!over_budget(size)) return;
  std::size_t tokens = size.tokens;
  if (limits.session.tokens > 0) {
    tokens = std::min(tokens, limits.session.tokens);
  } else if (limits.session.bytes == 0) {
    tokens = std::min(tokens, kSessionTokens);
  }
  if (size.over_bytes(limits.session)) {  // otherwise the product may not fit into 64 bits
    tokens = std::min(tokens, size.tokens * limits.session.bytes / size.bytes);
  }
  dispose_later(session.trim(tokens / 2));
}

void CacheEntries::note_if_over(const Tenant& tenant) {
  if (tenant.held.over(limits.tenant)) over_.insert(tenant.key);
}

void CacheEntries::set_limits(const Limits& changed) {
  if (std::exchange(limits, changed).tenant == changed.tenant) return;
  for (const auto& [key, tenant] : tenants_.by_key) note_if_over(*tenant);
}

void CacheEntries::evict_tenants(WorkBudget& budget) {
  for (auto next = over_.begin(); next != over_.end();) {
    const auto tenant = tenants_.find(*next);  // stays until the end of the round, even if it is dropped
    std::size_t done = 0;
    if (tenant->held.over(limits.tenant)) done = budget.timed([&] { return evict(tenant.get()); });
    budget.use(done);
    if (!tenant->held.over(limits.tenant)) over_.erase(tenant->key);
    if (done > 0 && budget.late()) return;  // tenants of which nothing can be evicted take no time from the others
    next = over_.upper_bound(tenant->key);
  }
}

std::size_t CacheEntries::evict(Tenant* tenant) {
  std::size_t done = 0;
  while (tenant && done < kEvictPerCall && tenant->held.over(limits.tenant) && evict_one(tenant)) ++done;
  while (done < kEvictPerCall && held_.over(limits.process) && evict_one(nullptr)) ++done;
  evictions_ += done;
  return done;
}

// Evicts one entry or document, of tenant `only` or of any. Returns whether there was anything to evict. If tenants
// take much memory beside their texts, because there are many or they learned much, evicts of the one used longest ago.
bool CacheEntries::evict_one(Tenant* only) {
  if (!only && held_.over_bytes(limits.process) && kTenantShare * beside_ > held_.bytes && evict_tenant()) return true;
  return evict_text(only) || evict_running(only) || (!only && evict_tenant());
}

// Returns the session or group that was used longest ago, of a tenant or else of owners who hold more than their share.
template <class Fits>
CacheEntry* CacheEntries::oldest_text(const Tenant* only, Fits fits) const {
  if (!only) return texts_.oldest(fits);
  const auto found = std::ranges::find_if(only->entries, [&](const auto& used) { return fits(*used.second); });
  return found == only->entries.end() ? nullptr : found->second;
}

// Notes that an entry of which nothing is left must be loaded again. A family is loaded with its root, too, so the root
// must be loaded again.
void CacheEntries::load_again(CacheEntry& entry) {
  entry.loaded = false;
  if (!entry.is(EntryKind::kFamily)) return;
  if (const auto root = find_session(entry.name())) root->loaded = false;
}

// If tenants' corpora are more than half of all tokens, drops the oldest document of the least recently used tenant.
// Otherwise drops the least recently used session or group that no running request drafts from.
bool CacheEntries::evict_text(Tenant* only) {
  const std::size_t shared = (only ? only->counted : corpora_).tokens, all = (only ? only->held : held_).tokens;
  if (shared == 0 || 2 * shared <= all) {
    const auto idle = [](const CacheEntry& entry) { return entry.running == 0 && entry.counted.tokens > 0; };
    if (CacheEntry* const entry = oldest_text(only, idle)) {
      load_again(*entry);
      drop(*entry);
      return true;
    }
  }
  if (shared == 0) return false;
  Tenant& oldest = only ? *only : *corpus_order_.oldest([](const Tenant&) { return true; });
  oldest.corpus.drop_oldest();
  if (oldest.corpus.empty()) oldest.loaded = false;
  count(oldest);
  return true;
}

// Drops the older half of the least recently used session or group that running requests draft from.
bool CacheEntries::evict_running(Tenant* only) {
  CacheEntry* const entry = oldest_text(only, [](const CacheEntry& entry) { return entry.counted.tokens > 0; });
  if (!entry) return false;
  if (entry->is(EntryKind::kSession)) {
    dispose_later(static_cast<Session&>(*entry).trim(entry->counted.tokens / 2));
  } else {
    auto& group = static_cast<Group&>(*entry);
    group.corpus.drop_older_half();
    if (group.corpus.empty()) load_again(group);
  }
  count(*entry);
  return true;
}

// Drops a session or group of the least recently used tenant without running requests, or the tenant if it has none.
// Returns false if there is no such tenant but the newest.
bool CacheEntries::evict_tenant() {
  Tenant* const found = tenant_order_.oldest(
      [&](const Tenant& tenant) { return tenant.running == 0 && tenant.used != newest_tenant_; });
  if (!found) return false;
  if (found->entries.empty()) {
    drop_tenant(*found);
  } else {
    CacheEntry& entry = *found->entries.begin()->second;
    load_again(entry);
    drop(entry);
  }
  return true;
}

void CacheEntries::free_session(const std::string& key) {
  const auto session = find_session(key);
  if (!session) return;
  session->final = true;
  free_if_final(*session);
}

void CacheEntries::free_if_final(Session& session) {
  if (!session.final || session.gone || session.running > 0) return;
  if (const auto family = find_family(session.name()); family && family->running == 0) drop(*family);
  drop(session);
}

bool CacheEntries::forget_tenant(Tenant& tenant) {
  for (std::size_t done = 0; !tenant.entries.empty(); ++done) {
    if (done == kEvictPerCall) return false;
    drop(*tenant.entries.begin()->second);
  }
  drop_tenant(tenant);
  return true;
}

// Drops a tenant without entries.
void CacheEntries::drop_tenant(Tenant& tenant) {
  leave_owner(tenant);
  held_ -= tenant.counted;
  corpora_ -= tenant.counted;
  beside_ -= tenant.beside;
  set_waiting(tenant, false);
  tenant.counted = {};
  tenant.gone = true;  // for an erasure or a snapshot of it that is under way
  dispose_later(tenant.take_index());
  over_.erase(tenant.key);
  tenants_.erase(tenant);
}

}  // namespace agentspec
