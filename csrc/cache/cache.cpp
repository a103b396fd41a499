#include "cache/cache.hpp"

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "drafting/arctic_suffix_rule.hpp"
#include "drafting/suffix_drafter.hpp"

namespace agentspec {
namespace {

// An erasure works for so many units, and for so much CPU time in ns, between two pauses for other callers.
constexpr std::size_t kSweepPerSlice = 1024;
constexpr std::int64_t kEraseTime = 100'000;
constexpr std::size_t kTenantsPerSlice = 64;  // tenants listed between two such pauses

std::size_t count_of(std::int32_t number) { return static_cast<std::size_t>(std::max(number, 0)); }

std::unique_ptr<Drafter> make_drafter(const PolicySettings& settings) {
  if (settings.arctic) return std::make_unique<ArcticSuffixRule>(*settings.arctic);
  return std::make_unique<SuffixDrafter>(settings);
}

void write(const Request& request, Drafts& drafts) {
  for (const Candidate& taken : request.draft.taken) {
    drafts.tokens.push_back(taken.token);
    drafts.sources.push_back(request.source_of(taken));
    drafts.probabilities.push_back(static_cast<float>(taken.probability));
  }
  drafts.offsets.push_back(static_cast<std::int32_t>(drafts.tokens.size()));
  drafts.match_lengths.push_back(static_cast<std::int32_t>(request.draft.match_length));
}

}  // namespace

Cache::Cache(const PolicySettings& settings, Limits limits, std::int64_t vocab_size, HistoryWindow window)
    : settings_(settings),
      vocab_size_(vocab_size),
      drafter_(make_drafter(settings)),
      entries_(settings, limits, window) {}

Request& Cache::request(std::size_t slot) {
  if (runs(slot)) return *requests_[slot];
  refused_ = true;
  throw std::out_of_range("the request does not run: memory had run out, and the cache forgot everything");
}

void Cache::start_over() {
  requests_.clear();
  entries_.start_over();
  Size now;
  now.bytes = public_bytes_;
  entries_.count_unevictable({}, now);
}

std::shared_ptr<Learned> Cache::learned_of(const Request& request) {
  CacheEntry* const teacher = request.teacher();
  if (!teacher) return std::make_shared<Learned>(settings_, Learned::kRequestBits);
  return entries_.learned_of(*teacher);
}

// Updates the sums over all that is held: to the request's present size, and to that of its learned state.
void Cache::count(Request& request) {
  const Size now = request.size();
  if (now.bytes != request.counted.bytes || now.pending != request.counted.pending) {
    entries_.count_unevictable(std::exchange(request.counted, now), now);
  }
  CacheEntry* const teacher = request.teacher();
  if (!teacher || teacher->gone) return;
  const std::size_t learned = request.learned->bytes();
  if (std::exchange(request.learned_bytes, learned) != learned) entries_.count(*teacher);
}

std::string Cache::start(std::size_t slot, std::span<const Token> prompt, Names names, std::span<const Token> ends,
                         std::span<const Token> prediction, std::span<const Token> quotable) {
  const EngineCall call(*this);
  release(slot);
  auto fresh = std::make_unique<Request>();
  fresh->tenant = entries_.tenant(names.tenant, names.tenant_owner);
  fresh->session = entries_.session(names, fresh->tenant);
  fresh->group = entries_.group(names, fresh->tenant);
  fresh->shared = fresh->tenant && names.shared;
  const auto is_own = [&](const Group& group) { return group.key == entry_key(EntryKind::kFamily, *names.session); };
  fresh->own_group = names.session && fresh->group && is_own(*fresh->group);
  if (fresh->session) fresh->session->final = false;
  if (fresh->group) entries_.drop_outdated(*fresh->group);
  if (fresh->tenant) entries_.drop_outdated(*fresh->tenant);
  fresh->learned = learned_of(*fresh);
  fresh->state.ends.assign(ends.begin(), ends.end());
  fresh->begin(*drafter_, prompt);
  fresh->predict(*drafter_, prompt, prediction, quotable);
  if (slot >= requests_.size()) requests_.resize(slot + 1);
  Request& started = *(requests_[slot] = std::move(fresh));
  hold_entries(started);
  started.join();
  if (started.group) entries_.count(*started.group);
  count(started);
  return names.session ? entries_.root_of(names) : std::string();
}

void Cache::extend(std::size_t slot, std::span<const Token> tokens) {
  const EngineCall call(*this);
  request(slot).take(*drafter_, public_.get(), tokens, kMaxDraft);
  count(request(slot));
}

std::optional<Turn> Cache::finish(std::size_t slot, std::optional<std::size_t> output_limit, std::uint64_t record) {
  const EngineCall call(*this);
  const Request& current = request(slot);
  const auto tenant = current.tenant;
  std::optional<Turn> turn;
  if (current.session ? !current.session->gone : current.shared) {
    turn = current.turn(output_limit);
    turn->record = record;
    keep(*turn, Origin::kFinished, current, current.session ? &current.session->key : nullptr, current.blocks);
  }
  release(slot);
  if (turn) entries_.evict(tenant.get());
  return turn;
}

void Cache::abort(std::size_t slot) {
  const EngineCall call(*this);
  release(slot);
}

void Cache::hold_entries(const Request& request) {
  for (CacheEntry* entry : request.entries()) {
    if (entry) ++entry->running;
  }
}

void Cache::let_go_of_entries(const Request& request) {
  for (CacheEntry* entry : request.entries()) {
    if (!entry) continue;
    --entry->running;
    if (entry->tenant) entries_.forget_if_empty(*entry);
  }
  if (request.session) entries_.free_if_final(*request.session);
}

void Cache::release(std::size_t slot) {
  if (!runs(slot)) return;
  const auto ended = std::move(requests_[slot]);
  entries_.count_unevictable(ended->counted, {});
  ended->leave();
  if (ended->group) entries_.count(*ended->group);
  let_go_of_entries(*ended);
  entries_.dispose_later(std::move(ended->index));
}

void Cache::publish(std::shared_ptr<const SuffixIndex> corpus) {
  count_public(corpus->bytes());
  std::lock_guard lock(mutex_);
  public_.swap(corpus);
  for (const auto& current : requests_) {  // matches found in the former corpus mean nothing in this one
    if (current) current->forget_public();
  }
}

void Cache::count_public(std::size_t bytes) {
  const EngineCall call(*this);
  Size before, now;
  before.bytes = std::exchange(public_bytes_, bytes);
  now.bytes = bytes;
  entries_.count_unevictable(before, now);
  entries_.evict(nullptr);
}

void Cache::remove_session(const std::string& session, const std::string& tenant) {
  const std::string key = entry_key(EntryKind::kSession, session);
  std::shared_ptr<Group> group;  // whose documents are searched for the session's: the tenant, then its groups
  {
    const Change change(*this);
    ++entries_.erasures;
    entries_.remove_session(session);
    for (const auto& current : requests_) {
      if (!current || !current->tenant || current->tenant->key != tenant) continue;
      current->forget_sibling();  // the sibling may be a request of the session
    }
    forget_drafts(tenant);
    group = entries_.tenants().find(tenant);
  }
  std::optional<Corpus::Erasure> erasure;
  for (std::string last; group; let_engine_call()) {
    const Change change(*this);
    ++entries_.erasures;  // a snapshot under way may have copied some of it since the last slice
    const Stopwatch stopwatch;
    do {
      if (!group->gone) {
        if (!erasure) erasure = group->corpus.erasure_of(key);
        if (erase_some(*group, *erasure)) continue;
      }
      if (group->tenant) last = group->key;
      group = entries_.group_behind(tenant, last);
      erasure.reset();
    } while (group && !stopwatch.over(kEraseTime));
  }
  {
    const EngineCall call(*this);
    forget_drafts(tenant);  // a step may have drafted what the slices had not erased yet
  }
  const std::lock_guard placed(placing_);  // a snapshot that may hold the session is in place now, or never will be
}

// Forgets the drafts of a tenant's requests, which may quote an erased session. Needs the lock.
void Cache::forget_drafts(const std::string& tenant) {
  for (const auto& current : requests_) {
    if (current && current->tenant && current->tenant->key == tenant) current->draft.forget_tokens();
  }
}

// Erases some of a session's responses. Returns whether there may be more in this group.
bool Cache::erase_some(Group& group, Corpus::Erasure& erasure) {
  const bool more = group.corpus.drop_some(erasure);
  if (!group.corpus.erasing()) return more;
  group.corpus.sweep(kSweepPerSlice);
  entries_.count(group);
  if (more || group.corpus.erasing()) return true;
  if (group.tenant) entries_.forget_if_empty(group);
  return false;
}

// Pauses if a call of the engine waits for the lock. Without a pause, this thread would mostly win it back first.
void Cache::let_engine_call() const {
  if (calling_ > 0) std::this_thread::sleep_for(kBetweenSlices);
}

void Cache::free_session(const std::string& session) {
  const EngineCall call(*this);
  entries_.free_session(session);
}

bool Cache::has_session(const std::string& key) {
  const EngineCall call(*this);
  const auto session = entries_.find_session(key);
  return session && session->tokens() > 0;
}

std::shared_ptr<CacheEntry> Cache::find(Names names) const {
  if (names.session) return entries_.find_session(*names.session);
  if (names.group) return entries_.find_group(*names.group);
  if (names.family) return entries_.find_family(*names.family);
  return entries_.tenants().find(*names.tenant);
}

bool Cache::needs_load(Names names) {
  const EngineCall call(*this);
  const auto entry = find(names);
  return !entry || !entry->loaded;
}

void Cache::mark_loaded(Names names) {
  const EngineCall call(*this);
  if (const auto entry = find(names)) entry->loaded = true;
}

void Cache::begin_period(HistoryWindow::Unit unit) {
  const EngineCall call(*this);
  if (unit == entries_.window.unit) ++entries_.periods;
}

std::vector<std::string> Cache::tenants() {
  std::vector<std::pair<std::uint64_t, std::string>> all;  // by last use
  for (bool more = true; more; let_engine_call()) {
    if (all.capacity() - all.size() < kTenantsPerSlice) all.reserve(2 * all.size() + kTenantsPerSlice);
    std::lock_guard lock(mutex_);
    const auto& by_key = entries_.tenants().by_key;
    auto at = all.empty() ? by_key.begin() : by_key.upper_bound(all.back().second);
    for (std::size_t i = 0; i < kTenantsPerSlice && at != by_key.end(); ++i, ++at) {
      all.emplace_back(at->second->used, at->second->key);
    }
    more = at != by_key.end();
  }
  std::ranges::sort(all);
  std::vector<std::string> keys;
  for (auto& [used, key] : all) keys.push_back(std::move(key));
  return keys;
}

bool Cache::forget_tenant(const std::string& tenant) {
  for (;; let_engine_call()) {
    std::shared_ptr<Tenant> found;  // outlives the lock, because freeing a tenant takes time
    const EngineCall call(*this);
    found = entries_.tenants().find(tenant);
    if (!found) return true;
    if (found->running > 0) return false;
    if (entries_.forget_tenant(*found)) return true;
  }
}

void Cache::resize(Limits limits) {
  const EngineCall call(*this);
  entries_.set_limits(limits);
  entries_.evict(nullptr);
}

Stats Cache::stats() {
  std::lock_guard lock(mutex_);
  Stats stats{entries_.held()};
  stats.tenants = entries_.tenants().by_key.size();
  stats.evictions = entries_.evictions();
  stats.requests = static_cast<std::size_t>(std::ranges::count_if(requests_, [](const auto& r) { return !!r; }));
  return stats;
}

Size Cache::recount() {
  std::lock_guard lock(mutex_);
  Size sum = entries_.recount();
  sum.bytes += public_bytes_;
  for (const auto& current : requests_) {
    if (current) sum += current->size();
  }
  return sum;
}

std::size_t Cache::draft_limit(std::int32_t max_draft) const {
  return std::min({count_of(max_draft), settings_.max_draft, kMaxDraft});
}

std::vector<ScoredPosition> Cache::candidates(std::size_t slot) {
  const EngineCall call(*this);
  auto path = request(slot).draft.path;
  for (ScoredPosition& scored : path) {
    for (Candidate& candidate : scored.candidates) candidate.source = request(slot).source_of(candidate);
  }
  return path;
}

Drafts Cache::propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> max_draft, double cost,
                      double seconds) {
  return step({.slots = slots, .max_draft = max_draft}, {nullptr, 0, 0}, cost, seconds);
}

// Takes in the tokens with which the engine's row goes on behind the request's text, up to the first illegal one.
Verified Cache::take_in(Request& request, std::span<const Token> row, std::size_t num_verified) {
  if (!request.goes_on_in(row)) request.rewind(*drafter_, row);
  const auto fresh = row.subspan(request.index.size());
  const auto illegal = std::ranges::find_if_not(fresh, [&](Token token) { return legal(token); });
  return request.take(*drafter_, public_.get(), {fresh.begin(), illegal}, num_verified);
}

Drafts Cache::step(const StepRequests& requests, TokenTable table, double cost, double seconds, std::int32_t most) {
  const EngineCall call(*this);
  const auto slots = requests.slots;
  Drafts drafts;
  drafts.offsets.reserve(slots.size() + 1);
  drafts.match_lengths.reserve(slots.size());
  drafts.accepted.reserve(slots.size());
  drafts.drafted.reserve(slots.size());
  WorkBudget budget(kWorkPerStep, seconds);
  std::vector<bool> sound(slots.size(), true);  // whether a draft would continue the engine's text
  for (std::size_t i = 0; i < slots.size(); ++i) {  // all rows before the first draft, so that each draft sees them all
    Request& current = request(static_cast<std::size_t>(slots[i]));
    Verified verified;
    if (table.data) {
      const auto length = static_cast<std::size_t>(requests.lengths[i]);
      const Token* const row = table.data + static_cast<std::size_t>(requests.rows[i]) * table.columns;
      verified = take_in(current, {row, length}, count_of(requests.num_verified[i]));
      sound[i] = current.index.size() == length;
    }
    advance(current, budget);
    drafts.accepted.push_back(verified.accepted);
    drafts.drafted.push_back(verified.drafted);
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Request& current = request(static_cast<std::size_t>(slots[i]));
    const std::size_t limit = sound[i] ? draft_limit(std::min(requests.max_draft[i], most)) : 0;
    if (!settings_.arctic) current.choose_sibling();
    drafter_->draft(current.for_drafter(public_.get()), limit, cost);
    current.draft.open = sound[i];
    count(current);
    write(current, drafts);
  }
  entries_.work(budget, has_thread());
  worked_ += budget.spent();
  return drafts;
}

Drafts Cache::merge_drafts(std::span<const std::int32_t> slots, ExternalDrafts external,
                           std::span<const std::int32_t> lengths, std::span<const std::int32_t> max_draft,
                           double cost) {
  const EngineCall call(*this);
  Drafts drafts;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Request& current = request(static_cast<std::size_t>(slots[i]));
    const std::size_t begin = i * external.columns, length = count_of(lengths[i]);
    if (current.draft.open) {
      const ExternalDraft given{{external.tokens + begin, length}, {external.probabilities + begin, length}};
      drafter_->merge_draft(current.for_drafter(public_.get()), given, draft_limit(max_draft[i]), cost);
    } else {
      current.draft.clear();
    }
    count(current);
    write(current, drafts);
  }
  return drafts;
}

}  // namespace agentspec
