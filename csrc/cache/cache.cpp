#include "cache/cache.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "drafting/arctic_suffix_rule.hpp"
#include "drafting/suffix_drafter.hpp"

namespace agentspec {
namespace {

constexpr std::chrono::microseconds kBetweenSlices{200};  // in which a saver leaves the lock to others
constexpr std::size_t kLearnedPerSlice = 8;   // drafts learned from between two looks at other callers
constexpr std::size_t kSweepPerSlice = 1024;  // units of work for an erasure between two looks at other callers

bool is_same(Token in_text, Token in_row) {
  return in_text == in_row || (in_text < kBoundary && in_text == placeholder_of(in_row));
}

// Returns whether a row begins with a text. Looks at the last tokens only: no step adds more of them.
bool goes_on(std::span<const Token> text, std::span<const Token> row) {
  if (row.size() < text.size()) return false;
  const auto end = last_of(text, kMaxDraft + 1);
  return std::ranges::equal(end, row.subspan(text.size() - end.size(), end.size()), is_same);
}

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

DraftRequest Request::for_drafter(const SuffixIndex* public_corpus) {
  const auto index_of = [](const CacheEntry* entry) { return entry && !entry->gone ? &entry->index() : nullptr; };
  const Sources sources{&index, index_of(session.get()), index_of(group.get()),
                        shared ? &tenant->corpus.index() : nullptr, shared ? public_corpus : nullptr};
  return {sources, index.text(), state, draft, *learned};
}

void Request::forget_public() {
  state.matches[kPublic].clear();
  state.versions[kPublic] = 0;
  if (state.resume.source == kPublic) state.resume.drop();
  draft.clear();
}

Size Request::size() const {
  Size size;
  size.bytes = heap_bytes(sizeof *this) + index.bytes() + heap_bytes(state.ends.capacity() * sizeof(Token)) +
               heap_bytes(draft.path.capacity() * sizeof(ScoredPosition)) +
               heap_bytes(draft.taken.capacity() * sizeof(Candidate));
  if (!session && !shared) size.bytes += learned->bytes();
  size.pending = index.pending();
  return size;
}

Cache::Cache(const PolicySettings& settings, Limits limits, std::int64_t vocab_size)
    : settings_(settings), vocab_size_(vocab_size), drafter_(make_drafter(settings)), entries_(settings, limits) {}

CacheEntry* Cache::teacher_of(const Request& request) {
  return request.shared ? static_cast<CacheEntry*>(request.tenant.get()) : request.session.get();
}

std::shared_ptr<Learned> Cache::learned_of(const Request& request) {
  CacheEntry* const teacher = teacher_of(request);
  if (!teacher) return std::make_shared<Learned>(settings_, Learned::kRequestBits);
  return entries_.learned_of(*teacher);
}

// Updates the sums to what the request holds, and to what its teacher learned since.
void Cache::count(Request& request) {
  const Size now = request.size();
  if (now.bytes != request.counted.bytes || now.pending != request.counted.pending) {
    entries_.count_request(std::exchange(request.counted, now), now);
  }
  CacheEntry* const teacher = teacher_of(request);
  if (!teacher || teacher->gone) return;
  const std::size_t learned = request.learned->bytes();
  if (std::exchange(request.learned_bytes, learned) != learned) entries_.count(*teacher);
}

void Cache::start(std::size_t slot, std::span<const Token> prompt, Names names, std::span<const Token> ends) {
  std::lock_guard lock(mutex_);
  auto fresh = std::make_unique<Request>();
  fresh->tenant = entries_.tenant(names.tenant, names.tenant_owner);
  fresh->session = entries_.session(names, fresh->tenant);
  fresh->group = entries_.group(names, fresh->tenant);
  fresh->shared = fresh->tenant && names.shared;
  fresh->own_group = !names.group;
  for (CacheEntry* entry : fresh->entries()) {
    if (entry) ++entry->running;
  }
  fresh->learned = learned_of(*fresh);
  fresh->state.ends.assign(ends.begin(), ends.end());
  begin_text(*fresh, prompt);
  if (slot >= requests_.size()) requests_.resize(slot + 1);
  requests_[slot] = std::move(fresh);
  count(*requests_[slot]);
}

// Puts the prompt into a request's empty index.
void Cache::begin_text(Request& request, std::span<const Token> prompt) {
  request.prompt_length = request.state.begin = prompt.size();
  std::size_t begin = 0, end = 0;  // of what the session holds
  if (request.session && !request.session->gone) {
    request.blocks.clear();
    ContextHash().add(prompt, request.blocks);
    if (const auto known = request.session->find(prompt, request.blocks)) {
      end = known->length;
      begin = std::min<std::size_t>(request.session->missing_at(known->position), end);
    }
  }
  drafter_->start(request.index, prompt, begin, end);
}

void Cache::extend(std::size_t slot, std::span<const Token> tokens) {
  std::lock_guard lock(mutex_);
  BySource accepted{}, drafted{};
  take(request(slot), tokens, kMaxDraft, accepted, drafted);
  count(request(slot));
}

std::optional<Turn> Cache::finish(std::size_t slot, std::optional<std::size_t> output_limit, std::uint64_t record) {
  std::lock_guard lock(mutex_);
  const Request& current = request(slot);
  const auto tenant = current.tenant;
  std::optional<Turn> turn;
  if (current.session ? !current.session->gone : current.shared) {
    turn = turn_of(current, output_limit);
    turn->record = record;
    keep(current, current.session ? &current.session->key : nullptr, *turn, Origin::kFinished);
  }
  release(slot);
  if (turn) entries_.evict(tenant.get());
  return turn;
}

Turn Cache::turn_of(const Request& request, std::optional<std::size_t> output_limit) {
  const auto text = request.index.text();
  const auto prompt = text.first(request.prompt_length);
  const std::size_t response = std::min(text.size() - prompt.size(), output_limit.value_or(text.size()));
  Turn turn;
  turn.prompt_tail = std::min(prompt.size(), kOverlap);
  if (request.session) {
    const auto known = request.session->find(prompt, request.blocks);
    if (known) turn.kept = known->length;
    if (turn.kept >= kBlock) turn.block = request.blocks[turn.kept / kBlock - 1];
    ContextHash parent{turn.block, turn.kept / kBlock * kBlock};
    for (const Token token : prompt.subspan(parent.length, turn.kept - parent.length)) parent.add(token);
    turn.parent = parent.value;
    turn.prompt_tail = prompt.size() - turn.kept;
  }
  const auto added = text.subspan(prompt.size() - turn.prompt_tail, turn.prompt_tail + response);
  turn.tokens.assign(added.begin(), added.end());
  return turn;
}

void Cache::abort(std::size_t slot) {
  std::lock_guard lock(mutex_);
  release(slot);
}

void Cache::release(std::size_t slot) {
  const auto ended = std::move(requests_.at(slot));
  entries_.count_request(ended->counted, {});
  for (CacheEntry* entry : ended->entries()) {
    if (!entry) continue;
    --entry->running;
    if (entry->tenant) entries_.forget_if_empty(*entry);
  }
  entries_.bury(std::move(ended->index));
}

// Finds what is held of what is named. Returns false if nothing is.
bool Cache::find_held(Names names, Request& to) {
  if (!names.tenant) return false;
  to.tenant = entries_.tenants().find(*names.tenant);
  if (!to.tenant) return false;
  if (names.session) to.session = entries_.find_session(*names.session);
  if (!names.shared) return to.session != nullptr;
  if (names.group) {
    to.group = entries_.find_group(*names.group);
  } else if (to.session) {  // its own group comes with it
    to.group = entries_.find_own_group(*names.session);
    names.owner = &to.session->owner->name;
    if (!to.group) to.group = entries_.group(names, to.tenant);
  }
  return true;
}

// Finds what a stored turn names, and makes what is missing.
void Cache::find_or_make(Names names, Request& to) {
  to.tenant = entries_.tenant(names.tenant, nullptr);
  names.stored = true;
  if (to.tenant && to.tenant->owner->name != to.tenant->key) names.owner = &to.tenant->owner->name;
  to.session = entries_.session(names, to.tenant);
  to.group = entries_.group(names, to.tenant);
}

bool Cache::adopt(Names names, PreparedSession& prepared) {
  std::lock_guard lock(mutex_);
  const auto held = entries_.find_session(*names.session);
  const auto own = entries_.find_own_group(*names.session);
  if (held && !prepared.session().holds_all_of(*held)) return false;
  if (own && !prepared.responses().holds_all_of(own->corpus)) return false;
  if (entries_.over_budget(prepared.session())) return false;
  names.shared = !prepared.responses().empty();
  Request to;
  find_or_make(names, to);
  entries_.bury(prepared.move_to(*to.session));
  if (to.group) {
    entries_.bury(prepared.move_to(to.group->corpus));
    entries_.count(*to.group);
  }
  entries_.count(*to.session);
  entries_.forget_if_empty(*to.session);
  entries_.evict(to.tenant.get());
  return true;
}

void Cache::restore(Names names, Turn turn, bool held_only) {
  std::lock_guard lock(mutex_);
  Request to;
  if (held_only) {
    if (!find_held(names, to)) return;
  } else {
    find_or_make(names, to);
  }
  to.shared = to.tenant && names.shared;
  if (to.session) to.session->find_parent(turn);
  const std::string session = names.session ? "s" + *names.session : std::string();
  keep(to, names.session ? &session : nullptr, turn, held_only ? Origin::kFollowed : Origin::kStored);
  if (to.session) entries_.forget_if_empty(*to.session);
  if (to.group) entries_.forget_if_empty(*to.group);
  entries_.evict(to.tenant.get());
}

std::size_t Cache::learn_from(Names names, const Turn& turn, double cost) {
  if (settings_.arctic || !names.shared || turn.response().empty()) return 0;
  Request request;
  request.shared = true;
  request.own_group = !names.group;
  const auto prompt = last_of(std::span(turn.tokens).first(turn.prompt_tail), kLearnedContext);
  request.prompt_length = request.state.begin = prompt.size();
  drafter_->start(request.index, prompt, 0, 0);
  request.index.advance(prompt.size());
  {
    std::lock_guard lock(mutex_);
    if (!find_held(names, request) || request.tenant->corpus.holds(turn.record)) return 0;
    for (CacheEntry* entry : request.entries()) {
      if (entry) ++entry->running;
    }
    request.learned = learned_of(request);
  }
  const Leaving leaving{*this, request};
  auto left = turn.response();
  std::shared_ptr<const SuffixIndex> known;
  while (true) {
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(known, public_) != public_) request.forget_public();
      for (std::size_t i = 0; i < kLearnedPerSlice && !left.empty(); ++i) {
        drafter_->draft(request.for_drafter(public_.get()), draft_limit(kMaxDraft), cost);
        const auto& draft = request.draft.taken;
        std::size_t right = 0;
        while (right < std::min(draft.size(), left.size()) && draft[right].token == left[right]) ++right;
        const auto verified = left.first(std::min(right + 1, left.size()));
        BySource accepted{}, drafted{};
        take(request, verified, draft.size(), accepted, drafted);
        request.index.advance(verified.size());
        left = left.subspan(verified.size());
      }
      entries_.count(*request.tenant);
    }
    if (left.empty()) return turn.response().size();
    std::this_thread::sleep_for(kBetweenSlices);
  }
}

Cache::Leaving::~Leaving() {
  std::lock_guard lock(cache.mutex_);
  for (CacheEntry* entry : request.entries()) {
    if (!entry) continue;
    --entry->running;
    if (entry->tenant) cache.entries_.forget_if_empty(*entry);
  }
}

// Adds a turn to the session, group and tenant of a request. `session`: key of its session, which may not be held.
void Cache::keep(const Request& of, const std::string* session, const Turn& turn, Origin origin) {
  bool wanted = true;  // by the group and the tenant: a restored turn without a record must bring something new
  std::vector<Token> context;
  if (of.session && !turn.tokens.empty()) {
    context = of.session->context_of(turn);
    if (!of.session->holds(turn.record)) {
      const bool is_new = of.session->append(turn);
      wanted = is_new || turn.record != 0 || origin == Origin::kFinished;
      entries_.trim(*of.session);
    }
  }
  if (of.shared && !turn.response().empty() && wanted) {
    const auto kept_context = context_of_response(std::move(context), turn, drafter_->kept_context());
    for (Group* group : {of.group.get(), static_cast<Group*>(of.tenant.get())}) {
      if (!group || group->gone || group->corpus.holds(turn.record) || entries_.clogged()) continue;
      group->corpus.add(session, turn.record, kept_context, turn.response());
      if (origin != Origin::kFollowed) entries_.touch(*group);
      entries_.count(*group);
    }
  }
  if (of.session && !turn.tokens.empty()) {
    if (origin != Origin::kFollowed) entries_.touch(*of.session);
    entries_.count(*of.session);
  }
}

void Cache::publish(std::shared_ptr<const SuffixIndex> corpus) {
  count_public(corpus->bytes());
  std::lock_guard lock(mutex_);
  public_.swap(corpus);
  for (const auto& current : requests_) {  // what was found in another corpus is nowhere in this one
    if (current) current->forget_public();
  }
}

void Cache::count_public(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  Size before, now;
  before.bytes = std::exchange(public_bytes_, bytes);
  now.bytes = bytes;
  entries_.count_request(before, now);
  entries_.evict(nullptr);
}

void Cache::remove_session(const std::string& session, const std::string* tenant) {
  std::vector<std::shared_ptr<Group>> sharing;
  {
    std::lock_guard lock(mutex_);
    sharing = entries_.remove_session(session, tenant);
    for (const auto& current : requests_) {  // their drafts may quote it
      if (current && current->tenant && tenant && current->tenant->key == *tenant) current->draft.clear();
    }
  }
  for (const auto& group : sharing) {
    bool dropped = false;
    for (bool more = true; more;) {  // in slices, so that a step can run in between
      std::lock_guard lock(mutex_);
      if (group->gone) break;
      if (!std::exchange(dropped, true)) group->corpus.drop_session("s" + session);
      group->corpus.sweep(kSweepPerSlice);
      entries_.count(*group);
      more = group->has_work() && !group->corpus.swept();
      if (!more && group->tenant) entries_.forget_if_empty(*group);
    }
  }
}

bool Cache::has_session(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto session = entries_.find_session(key);
  return session && session->tokens() > 0;
}

std::shared_ptr<CacheEntry> Cache::find(Names names) const {
  if (names.session) return entries_.find_session(*names.session);
  if (names.group) return entries_.find_group(*names.group);
  return entries_.tenants().find(*names.tenant);
}

bool Cache::needs_load(Names names) {
  std::lock_guard lock(mutex_);
  const auto entry = find(names);
  return !entry || !entry->loaded;
}

void Cache::mark_loaded(Names names) {
  std::lock_guard lock(mutex_);
  if (const auto entry = find(names)) entry->loaded = true;
}

std::vector<std::string> Cache::tenants() {
  std::lock_guard lock(mutex_);
  std::vector<const Tenant*> all;
  for (const auto& [key, tenant] : entries_.tenants().by_key) all.push_back(tenant.get());
  std::ranges::sort(all, {}, &Tenant::used);
  std::vector<std::string> keys;
  for (const Tenant* tenant : all) keys.push_back(tenant->key);
  return keys;
}

bool Cache::forget_tenant(const std::string& tenant) {
  for (;;) {  // in slices, so that a step can run in between
    std::lock_guard lock(mutex_);
    const auto found = entries_.tenants().find(tenant);
    if (!found) return true;
    if (found->running > 0) return false;
    if (entries_.forget_tenant(*found)) return true;
  }
}

std::size_t Cache::catch_up(WorkBudget budget) {
  std::lock_guard lock(mutex_);
  entries_.evict_tenants(budget);
  entries_.work(budget);
  for (const auto& current : requests_) {
    if (!current || current->index.pending() == 0) continue;
    budget.run([&] { return current->index.pending() > 0; }, [&](std::size_t n) { return current->index.advance(n); });
    count(*current);
  }
  worked_ += budget.spent();
  return budget.used() == 0 && entries_.has_work() ? 1 : budget.used();
}

void Cache::resize(Limits limits) {
  std::lock_guard lock(mutex_);
  entries_.limits = limits;
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

// Indexes pending positions of a request and its entries, and removes dropped ones.
void Cache::advance(Request& request, WorkBudget& budget) {
  SuffixIndex& own = request.index;
  if (own.pending() > 0) {
    own.advance(kOwnPerStep);
    budget.run([&] { return own.pending() > 0; }, [&](std::size_t most) { return own.advance(most); });
  }
  for (CacheEntry* entry : request.entries()) {
    if (entry) entries_.advance(*entry, budget);
  }
}

// Cuts a request's text to what the engine's row still begins with: the engine took back the rest.
void Cache::rewind(Request& request, std::span<const Token> row) {
  const auto text = request.index.text();
  const auto common = std::ranges::mismatch(text, row, is_same).in1;
  const std::vector<Token> kept(text.begin(), common);
  const std::span<const Token> prompt = std::span(kept).first(std::min(kept.size(), request.prompt_length));
  request.index.clear();
  begin_text(request, prompt);
  request.index.append(std::span(kept).subspan(prompt.size()));
  request.draft.clear();
  MatchState state;
  state.ends = std::move(request.state.ends);
  state.begin = request.state.begin;
  request.state = std::move(state);
}

// Adds verified tokens. Counts by source the draft's first `num_verified` tokens, which were verified, and the accepted.
void Cache::take(Request& request, std::span<const Token> tokens, std::size_t num_verified, BySource& accepted,
                 BySource& drafted) {
  if (tokens.empty()) return;
  const auto& draft = request.draft.taken;
  bool right = true;
  for (std::size_t d = 0; d < std::min(draft.size(), num_verified); ++d) {
    right = right && d < tokens.size() && tokens[d] == draft[d].token;
    const std::size_t source = request.source_of(draft[d]);
    ++drafted[source];
    if (right) ++accepted[source];
  }
  drafter_->learn(request.for_drafter(public_.get()), tokens);
  request.index.append(tokens);
}

std::size_t Cache::draft_limit(std::int32_t max_draft) const {
  return std::min({count_of(max_draft), settings_.max_draft, kMaxDraft});
}

std::vector<ScoredPosition> Cache::candidates(std::size_t slot) {
  std::lock_guard lock(mutex_);
  auto path = request(slot).draft.path;
  for (ScoredPosition& scored : path) {
    for (Candidate& candidate : scored.candidates) candidate.source = request(slot).source_of(candidate);
  }
  return path;
}

Drafts Cache::propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> max_draft, double cost,
                      double seconds) {
  return step(slots, {nullptr, 0, 0}, {}, {}, max_draft, {}, cost, seconds);
}

Drafts Cache::step(std::span<const std::int32_t> slots, TokenTable table, std::span<const std::int32_t> rows,
                   std::span<const std::int32_t> lengths, std::span<const std::int32_t> max_draft,
                   std::span<const std::int32_t> num_verified, double cost, double seconds) {
  std::lock_guard lock(mutex_);
  Drafts drafts;
  WorkBudget budget(kWorkPerStep, seconds);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Request& current = request(static_cast<std::size_t>(slots[i]));
    BySource accepted{}, drafted{};
    bool sound = true;
    if (table.data) {
      const auto length = static_cast<std::size_t>(lengths[i]);
      const Token* row = table.data + static_cast<std::size_t>(rows[i]) * table.columns;
      if (!goes_on(current.index.text(), {row, length})) rewind(current, {row, length});
      const std::size_t known = current.index.size();
      std::size_t end = std::min(known, length);
      while (end < length && legal(row[end])) ++end;
      const std::size_t begin = std::min(known, end);
      take(current, {row + begin, end - begin}, count_of(num_verified[i]), accepted, drafted);
      sound = current.index.size() == length;  // if not, a draft would not continue the engine's text
    }
    advance(current, budget);
    drafter_->draft(current.for_drafter(public_.get()), sound ? draft_limit(max_draft[i]) : 0, cost);
    current.draft.open = sound;
    count(current);
    write(current, drafts);
    drafts.accepted.push_back(accepted);
    drafts.drafted.push_back(drafted);
  }
  entries_.work(budget);
  worked_ += budget.spent();
  return drafts;
}

Drafts Cache::merge_drafts(std::span<const std::int32_t> slots, ExternalDrafts external,
                           std::span<const std::int32_t> lengths, std::span<const std::int32_t> max_draft,
                           double cost) {
  std::lock_guard lock(mutex_);
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

bool Cache::save(const std::string& path, const std::string& identity, const std::string& note) {
  std::lock_guard saving(saving_);
  SnapshotWriter writer(path);
  writer.string(identity);
  writer.string(note);
  writer.number(static_cast<std::uint64_t>(vocab_size_));
  CacheEntries::Cursor next;
  std::uint64_t erasures = 0;
  {
    std::lock_guard lock(mutex_);
    erasures = entries_.erasures;
  }
  for (bool more = true, again = false; more;) {
    const auto mark = writer.mark();
    const CacheEntries::Cursor here = next;
    Thawing thawing{*this, nullptr};
    {
      std::lock_guard lock(mutex_);
      more = entries_.save_some(writer, next, thawing.entry);
    }
    const bool whole = writer.flush([&](const auto& copy) {
      std::this_thread::sleep_for(kBetweenSlices);
      std::lock_guard lock(mutex_);
      return !thawing.entry->gone && thawing.entry->index().frozen() && copy();
    });
    if (whole) {
      again = false;
    } else {  // it was erased, evicted or cut: tried again once, as it is now
      writer.rewind(mark);
      if (!again) next = here;
      more = true;
      again = !again;
    }
    std::this_thread::sleep_for(kBetweenSlices);
  }
  writer.flush([](const auto&) { return true; });
  {
    std::lock_guard lock(mutex_);
    if (entries_.erasures != erasures) return false;
  }
  writer.commit();
  return true;
}

std::string Cache::load(const std::string& path, const std::string& identity) {
  SnapshotReader reader(path);
  if (const std::string its = reader.string(); its != identity) {
    throw std::runtime_error("it was saved for " + (its.empty() ? "nothing in particular" : its) + ", not for " + identity);
  }
  std::string note = reader.string();
  const auto vocabulary = static_cast<std::int64_t>(reader.number());
  if (vocabulary > vocab_size_) {
    throw std::runtime_error("it was saved with vocab_size=" + std::to_string(vocabulary) + ", which is more than " +
                             std::to_string(vocab_size_) + ": it belongs to another model");
  }
  CacheEntries loaded(settings_, entries_.limits);
  loaded.load(reader, vocab_size_);
  std::lock_guard lock(mutex_);
  if (!entries_.empty()) throw std::runtime_error("the cache is in use already: load into a new one");
  loaded.limits = entries_.limits;
  entries_ = std::move(loaded);
  return note;
}

}  // namespace agentspec
