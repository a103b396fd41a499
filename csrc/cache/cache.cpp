#include "cache/cache.hpp"

#include <algorithm>
#include <utility>

#include "drafting/arctic_suffix_rule.hpp"

namespace agentspec {
namespace {

std::size_t common_prefix(std::span<const Token> a, std::span<const Token> b) {
  const auto limit = static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.begin() + limit, b.begin()).first - a.begin());
}

std::size_t count_of(std::int32_t number) { return static_cast<std::size_t>(std::max(number, 0)); }

}  // namespace

Cache::Cache(PolicySettings settings, Limits limits, std::int64_t vocab_size)
    : settings_(std::move(settings)), limits_(limits), vocab_size_(vocab_size) {}

Request& Cache::request(std::size_t slot) { return *requests_.at(slot); }

std::shared_ptr<Tenant> Cache::tenant(const std::string* key) {
  if (!key) return nullptr;
  auto& entry = tenants_[*key];
  if (!entry) {
    entry = std::make_shared<Tenant>();
    entry->key = *key;
  }
  const auto found = entry;
  touch(*found);
  while (tenants_.size() > kMaxTenants && forget_oldest_tenant()) {
  }
  return found;
}

void Cache::touch(Tenant& tenant) {
  tenants_by_use_.erase(tenant.used);
  tenant.used = ++tick_;
  tenants_by_use_[tenant.used] = &tenant;
}

// What the tenant's requests learned. So many tenants keep it. One of them gives way to another only after a rest: more
// that take turns would all learn anew all the time. Null where none has rested.
std::shared_ptr<Learned> Cache::learned_of(Tenant& tenant) {
  if (tenant.learned) return tenant.learned;
  if (learners_ >= kMaxLearners) {
    const auto oldest = std::find_if(tenants_by_use_.begin(), tenants_by_use_.end(),
                                     [](const auto& entry) { return entry.second->learned != nullptr; });
    if (tick_ - oldest->first < kLearnerRest) return nullptr;
    oldest->second->learned.reset();
    --learners_;
  }
  ++learners_;
  return tenant.learned = std::make_shared<Learned>(settings_, kTenantBits);
}

std::shared_ptr<Learned> Cache::learned_of(Session& session) {
  if (!session.learned) {
    session.learned = std::make_shared<Learned>(settings_, kSessionBits);
    count(session);
  }
  return session.learned;
}

std::shared_ptr<Learned> Cache::learned_of(const Request& request) {
  std::shared_ptr<Learned> learned;
  if (request.shared) {
    learned = learned_of(*request.tenant);
  } else if (request.session) {
    learned = learned_of(*request.session);
  }
  return learned ? learned : std::make_shared<Learned>(settings_, kRequestBits);
}

template <class Kind>
std::shared_ptr<Kind> Cache::holding(const std::string& key, const std::shared_ptr<Tenant>& tenant) {
  auto& entry = holdings_[key];
  if (!entry) {
    entry = std::make_shared<Kind>();
    entry->key = key;
    entry->tenant = tenant;
    tenant->holdings.insert(entry.get());
  }
  touch(*entry);
  return std::static_pointer_cast<Kind>(entry);
}

std::shared_ptr<Session> Cache::session(const std::string* key, const std::shared_ptr<Tenant>& tenant) {
  return key ? holding<Session>("s" + *key, tenant) : nullptr;
}

// A group joins sessions that share. A session that has none is a group of its own: its responses alone, apart from
// what its prompts quote, are better to draft from.
std::shared_ptr<Group> Cache::group(Names names, const std::shared_ptr<Tenant>& tenant) {
  if (!tenant || !names.shared) return nullptr;
  if (names.group) return holding<Group>("g" + *names.group, tenant);
  return names.session ? holding<Group>("o" + *names.session, tenant) : nullptr;
}

void Cache::touch(CacheEntry& holding) {
  by_use_.erase(holding.used);
  holding.used = ++tick_;
  by_use_[holding.used] = holdings_.at(holding.key);
}

void Cache::start(std::size_t slot, std::span<const Token> prompt, Names names, std::span<const Token> ends) {
  std::lock_guard lock(mutex_);
  auto fresh = std::make_unique<Request>();
  fresh->tenant = tenant(names.tenant);
  fresh->session = session(names.session, fresh->tenant);
  fresh->group = group(names, fresh->tenant);
  fresh->shared = fresh->tenant && names.shared;
  fresh->own_group = !names.group;
  if (fresh->tenant) ++fresh->tenant->running;
  if (fresh->session) ++fresh->session->running;
  if (fresh->group) ++fresh->group->running;
  fresh->learned = learned_of(*fresh);
  // The fixed rule drafts from the request's own text, all of it and at once, and not from its session's.
  const bool continues = fresh->session && !settings_.fixed;
  const std::size_t kept = continues ? common_prefix(prompt, fresh->session->last) : 0;
  fresh->prompt_length = prompt.size();
  fresh->index.append(prompt.first(kept), false);
  fresh->index.append(prompt.subspan(kept));
  while (settings_.fixed && fresh->index.advance(prompt.size()) > 0) {
  }
  fresh->state.begin = prompt.size();
  fresh->state.ends.assign(ends.begin(), ends.end());
  if (slot >= requests_.size()) requests_.resize(slot + 1);
  requests_[slot] = std::move(fresh);
  ++running_;
  advance(*requests_[slot], kIndexPerCall);
}

void Cache::extend(std::size_t slot, std::span<const Token> tokens) {
  std::lock_guard lock(mutex_);
  BySource accepted{}, drafted{};
  take(request(slot), tokens, kMaxDraft, accepted, drafted);
}

std::optional<Turn> Cache::finish(std::size_t slot, std::optional<std::size_t> output_limit) {
  std::lock_guard lock(mutex_);
  Request& current = request(slot);
  const auto session = current.session;
  const auto group = current.group;
  const auto tenant = current.tenant;
  const bool shared = current.shared;
  if ((!session && !shared) || (session && session->gone)) {
    release(slot);
    return std::nullopt;
  }
  const auto text = current.index.text();
  const auto prompt = text.first(current.prompt_length);
  auto response = text.subspan(current.prompt_length);
  if (output_limit) response = response.first(std::min(response.size(), *output_limit));
  Turn turn;
  if (session) turn.kept = common_prefix(prompt, session->last);
  const auto tail = session ? prompt.subspan(turn.kept) : last_of(prompt, kOverlap);
  turn.prompt_tail.assign(tail.begin(), tail.end());
  turn.response.assign(response.begin(), response.end());
  keep(session, group, tenant, shared, turn.kept, turn.prompt_tail, turn.response);
  release(slot);
  evict(tenant.get());
  return turn;
}

void Cache::abort(std::size_t slot) {
  std::lock_guard lock(mutex_);
  release(slot);
}

void Cache::release(std::size_t slot) {
  const auto session = request(slot).session;
  const auto group = request(slot).group;
  if (const auto& tenant = request(slot).tenant) --tenant->running;
  requests_[slot].reset();
  --running_;
  for (const std::shared_ptr<CacheEntry>& holding : {std::shared_ptr<CacheEntry>(session), std::shared_ptr<CacheEntry>(group)}) {
    if (!holding) continue;
    --holding->running;
    forget_if_empty(holding);
  }
}

void Cache::restore(Names names, std::size_t kept, std::span<const Token> prompt_tail,
                    std::span<const Token> response) {
  std::lock_guard lock(mutex_);
  const auto to_tenant = tenant(names.tenant);
  const auto to_session = session(names.session, to_tenant);
  const auto to_group = group(names, to_tenant);
  if (!to_session || kept > to_session->last.size()) kept = 0;  // what the turn continued is no longer there
  keep(to_session, to_group, to_tenant, names.shared, kept, prompt_tail, response);
  if (to_session) forget_if_empty(to_session);
  if (to_group) forget_if_empty(to_group);
  evict(to_tenant.get());
}

void Cache::keep(const std::shared_ptr<Session>& session, const std::shared_ptr<Group>& group,
                 const std::shared_ptr<Tenant>& tenant, bool shared, std::size_t kept,
                 std::span<const Token> prompt_tail, std::span<const Token> response) {
  std::size_t budget = kIndexPerCall;
  if (tenant && shared && !response.empty()) {
    std::vector<Token> context;
    if (session) {
      const auto before = last_of(std::span<const Token>(session->last).first(kept), kOverlap);
      context.assign(before.begin(), before.end());
    }
    context.insert(context.end(), prompt_tail.begin(), prompt_tail.end());
    if (settings_.fixed) context.clear();  // the fixed rule's text holds responses alone
    const std::string* of = session ? &session->key : nullptr;
    tenant->corpus.add(of, context, response);
    touch(*tenant);
    if (group && !group->gone) {
      group->corpus.add(of, context, response);
      touch(*group);
      budget -= group->advance(budget);
      count(*group);
    }
    budget -= tenant->corpus.advance(budget);
    count(*tenant);
  }
  if (session && !(prompt_tail.empty() && response.empty())) {
    session->append(kept, prompt_tail, response);
    trim(*session);
    touch(*session);
    session->advance(budget);
    count(*session);
  }
}

bool Cache::has_session(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto found = holdings_.find("s" + key);
  return found != holdings_.end() && found->second->size().tokens > 0;
}

Stats Cache::stats() {
  std::lock_guard lock(mutex_);
  Stats stats;
  stats.tokens = held_.tokens;
  stats.requests = running_;
  stats.tenants = tenants_.size();
  for (const auto& [key, holding] : holdings_) {
    stats.sessions += key.front() == 's' && holding->size().tokens > 0;
    stats.bytes += holding->bytes();
    stats.pending += holding->index().pending();
  }
  for (const auto& [key, tenant] : tenants_) {
    stats.bytes += tenant->corpus.bytes();
    stats.pending += tenant->corpus.index().pending();
  }
  for (const auto& current : requests_) {
    if (!current) continue;
    stats.bytes += current->index.bytes();
    stats.pending += current->index.pending();
  }
  return stats;
}

// Indexes some of what is pending for one request, and takes out some of what was dropped. Returns how much was done.
std::size_t Cache::advance(Request& request, std::size_t budget) {
  std::size_t left = budget;
  left -= request.index.advance(left);
  if (request.session) left -= advance(*request.session, left);
  if (request.group) left -= advance(*request.group, left);
  if (!request.tenant) return budget - left;
  const std::size_t before = left;
  left -= request.tenant->corpus.advance(left);
  left -= request.tenant->corpus.sweep(left);
  if (left < before) count(*request.tenant);
  return budget - left;
}

std::size_t Cache::advance(CacheEntry& holding, std::size_t budget) {
  if (holding.gone) return 0;
  std::size_t left = budget;
  left -= holding.advance(left);
  left -= holding.sweep(left);
  if (left < budget) count(holding);
  return budget - left;
}

// Adds verified tokens, the first of which answer the draft; only `scheduled` tokens of that were verified.
void Cache::take(Request& request, std::span<const Token> tokens, std::size_t scheduled, BySource& accepted,
                 BySource& drafted) {
  if (tokens.empty()) return;
  const auto& draft = request.draft.taken;
  bool right = true;
  for (std::size_t d = 0; d < std::min(draft.size(), scheduled); ++d) {
    right = right && d < tokens.size() && tokens[d] == draft[d].token;
    const std::size_t source = request.source_of(draft[d]);
    ++drafted[source];
    if (right) ++accepted[source];
  }
  learn(settings_, request.sources(), tokens, request.state, request.draft, *request.learned);
  request.index.append(tokens);
}

void Cache::draft_for(Request& request, std::size_t room, double cost) {
  const auto text = request.index.text();
  if (settings_.fixed) {
    draft_fixed(*settings_.fixed, request.sources(), text, request.prompt_length, std::min(room, settings_.max_draft),
                request.draft);
  } else {
    draft(settings_, *request.learned, request.sources(), text, room, cost, request.state, request.draft);
  }
}

void Cache::write(const Request& request, Drafts& drafts) {
  for (const Candidate& taken : request.draft.taken) {
    drafts.tokens.push_back(taken.token);
    drafts.sources.push_back(request.source_of(taken));
    drafts.probabilities.push_back(static_cast<float>(taken.probability));
  }
  drafts.offsets.push_back(static_cast<std::int32_t>(drafts.tokens.size()));
  drafts.match_lengths.push_back(static_cast<std::int32_t>(request.draft.match_length));
}

std::vector<Scored> Cache::candidates(std::size_t slot) {
  std::lock_guard lock(mutex_);
  auto path = request(slot).draft.path;
  for (Scored& scored : path) {
    for (std::size_t c = 0; c < scored.count; ++c) {
      scored.candidates[c].source = request(slot).source_of(scored.candidates[c]);
    }
  }
  return path;
}

Drafts Cache::propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> room, double cost) {
  return step(slots, {nullptr, 0, 0}, {}, {}, room, {}, cost);
}

Drafts Cache::step(std::span<const std::int32_t> slots, TokenTable table, std::span<const std::int32_t> rows,
                   std::span<const std::int32_t> lengths, std::span<const std::int32_t> room,
                   std::span<const std::int32_t> scheduled, double cost) {
  std::lock_guard lock(mutex_);
  Drafts drafts;
  std::size_t budget = kIndexPerCall;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Request& current = request(static_cast<std::size_t>(slots[i]));
    BySource accepted{}, drafted{};
    bool sound = true;
    if (table.data) {
      const std::size_t known = current.index.size();
      const auto length = static_cast<std::size_t>(lengths[i]);
      const Token* row = table.data + static_cast<std::size_t>(rows[i]) * table.columns;
      std::size_t end = std::min(known, length);
      while (end < length && legal(row[end])) ++end;
      const std::size_t begin = std::min(known, end);
      take(current, {row + begin, end - begin}, count_of(scheduled[i]), accepted, drafted);
      sound = current.index.size() == length;  // otherwise a draft would continue another text than the engine's
    }
    budget -= advance(current, budget);
    draft_for(current, sound ? count_of(room[i]) : 0, cost);
    current.draft.open = sound;
    write(current, drafts);
    drafts.accepted.push_back(accepted);
    drafts.drafted.push_back(drafted);
  }
  return drafts;
}

Drafts Cache::offer(std::span<const std::int32_t> slots, Offers offers, std::span<const std::int32_t> lengths,
                    std::span<const std::int32_t> room, double cost) {
  std::lock_guard lock(mutex_);
  Drafts drafts;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Request& current = request(static_cast<std::size_t>(slots[i]));
    const std::size_t begin = i * offers.columns, length = count_of(lengths[i]);
    if (current.draft.open) {
      const ExternalDraft given{{offers.tokens + begin, length}, {offers.chances + begin, length}};
      take_offer(settings_, *current.learned, current.sources(), current.index.text(), given, count_of(room[i]),
                       cost, current.state, scratch_, current.draft);
    } else {
      current.draft.clear();
    }
    write(current, drafts);
  }
  return drafts;
}

}  // namespace agentspec
