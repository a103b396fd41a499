// What leaves the cache: budgets, erasure, and the work that is put off so that no step waits for it.
#include <algorithm>

#include "cache/cache.hpp"

namespace agentspec {
namespace {

bool over(Size size, Size limit) {
  return (limit.tokens > 0 && size.tokens > limit.tokens) || (limit.bytes > 0 && size.bytes > limit.bytes);
}

}  // namespace

// Brings the sums up to what a holding has now.
void Cache::count(CacheEntry& holding) {
  const Size now = holding.size();
  held_ -= holding.counted;
  held_ += now;
  holding.tenant->held -= holding.counted;
  holding.tenant->held += now;
  holding.counted = now;
}

void Cache::count(Tenant& tenant) {
  const Size now{tenant.corpus.tokens(), kBytesPerToken * tenant.corpus.tokens()};
  held_ -= tenant.counted;
  held_ += now;
  corpora_ -= tenant.counted;
  corpora_ += now;
  tenant.held -= tenant.counted;
  tenant.held += now;
  tenant.counted = now;
}

void Cache::drop(const std::shared_ptr<CacheEntry>& holding) {
  held_ -= holding->counted;
  holding->tenant->held -= holding->counted;
  holding->tenant->holdings.erase(holding.get());
  holding->counted = {};
  holding->gone = true;
  by_use_.erase(holding->used);
  holdings_.erase(holding->key);
}

void Cache::forget_if_empty(const std::shared_ptr<CacheEntry>& holding) {
  if (!holding->gone && holding->running == 0 && holding->size().tokens == 0) drop(holding);
}

// A session over its budget goes on with the newest half of what it may hold.
void Cache::trim(Session& session) {
  const Size size = session.size();
  if (!over(size, limits_.session)) return;
  std::size_t tokens = size.tokens;
  if (limits_.session.tokens > 0) tokens = std::min(tokens, limits_.session.tokens);
  if (limits_.session.bytes > 0) tokens = std::min(tokens, size.tokens * limits_.session.bytes / size.bytes);
  session.trim(tokens / 4);  // of the text, and as many of the last context
}

std::size_t Cache::evict(Tenant* tenant) {
  std::size_t done = 0;
  while (tenant && done < kEvictPerCall && over(tenant->held, limits_.tenant) && evict_one(tenant)) ++done;
  while (done < kEvictPerCall && over(held_, limits_.process) && evict_one(nullptr)) ++done;
  return done;
}

// Makes some room, in one tenant or anywhere: where global corpora are more than half of what is held, the oldest
// document of the tenant that was used least recently goes; otherwise the least recently used session or group.
// What a running request drafts from stays. Returns whether there was anything to evict.
bool Cache::evict_one(Tenant* only) {
  const Size shared = only ? only->counted : corpora_;
  const std::size_t all = only ? only->held.tokens : held_.tokens;
  if (shared.tokens == 0 || 2 * shared.tokens <= all) {
    const auto idle = std::find_if(by_use_.begin(), by_use_.end(), [&](const auto& entry) {
      const CacheEntry& holding = *entry.second;
      return holding.running == 0 && holding.counted.tokens > 0 && (!only || holding.tenant.get() == only);
    });
    if (idle != by_use_.end()) {
      drop(std::shared_ptr<CacheEntry>(idle->second));
      return true;
    }
  }
  if (shared.tokens == 0) return false;
  Tenant* oldest = only;
  for (auto entry = tenants_by_use_.begin(); !oldest || oldest->corpus.empty(); ++entry) oldest = entry->second;
  oldest->corpus.drop_oldest();
  count(*oldest);
  return true;
}

// Forgets the least recently used tenant of which no request is running, with its sessions and groups. Returns whether
// there was one.
bool Cache::forget_oldest_tenant() {
  const auto idle = std::find_if(tenants_by_use_.begin(), tenants_by_use_.end(),
                                 [](const auto& entry) { return entry.second->running == 0; });
  if (idle == tenants_by_use_.end() || std::next(idle) == tenants_by_use_.end()) return false;
  Tenant& tenant = *idle->second;
  while (!tenant.holdings.empty()) drop(holdings_.at((*tenant.holdings.begin())->key));
  held_ -= tenant.counted;
  corpora_ -= tenant.counted;
  if (tenant.learned) --learners_;
  tenants_by_use_.erase(idle);
  tenants_.erase(tenants_.find(tenant.key));
  return true;
}

// Exact: when it returns, no index holds what only this session said. In slices, so that a step can come between.
void Cache::remove_session(const std::string& session_key, const std::string* tenant_key) {
  const std::string key = "s" + session_key;
  std::vector<std::shared_ptr<Group>> groups;
  std::shared_ptr<Tenant> tenant;
  {
    std::lock_guard lock(mutex_);
    if (const auto found = holdings_.find(key); found != holdings_.end()) drop(std::shared_ptr<CacheEntry>(found->second));
    if (!tenant_key) return;
    const auto found = tenants_.find(*tenant_key);
    if (found == tenants_.end()) return;
    tenant = found->second;
    tenant->corpus.drop_session(key);
    count(*tenant);
    for (const CacheEntry* holding : tenant->holdings) {
      if (holding->key.front() != 's') groups.push_back(std::static_pointer_cast<Group>(holdings_.at(holding->key)));
    }
    for (const auto& group : groups) {
      group->corpus.drop_session(key);
      count(*group);
      forget_if_empty(group);
    }
  }
  auto sweep_all = [this](Corpus& corpus) {
    for (bool more = true; more;) {
      std::lock_guard lock(mutex_);
      corpus.sweep(kIndexPerCall);
      more = !corpus.swept();
    }
  };
  sweep_all(tenant->corpus);
  for (const auto& group : groups) sweep_all(group->corpus);
}

std::size_t Cache::catch_up(std::size_t budget) {
  std::lock_guard lock(mutex_);
  std::size_t left = budget;
  left -= std::min(left, evict(nullptr));
  for (const auto& [key, tenant] : tenants_) {
    left -= std::min(left, evict(tenant.get()));
    left -= tenant->corpus.advance(left);
    left -= tenant->corpus.sweep(left);
    count(*tenant);
  }
  for (const auto& [used, holding] : by_use_) left -= advance(*holding, left);
  for (const auto& current : requests_) {
    if (current) left -= current->index.advance(left);
  }
  return budget - left;
}

void Cache::resize(Limits limits) {
  std::lock_guard lock(mutex_);
  limits_ = limits;
  evict(nullptr);
}

}  // namespace agentspec
