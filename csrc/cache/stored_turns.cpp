// Adds turns to the sessions, groups and tenants of Cache: those of requests that finish here, and stored ones, of other
// processes and of this one from before a restart.
#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include "cache/cache.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kLearnedContext = 512;  // tokens of the prompt that drafts see when a stored turn is learned from
constexpr std::size_t kLearnedPerSlice = 8;   // drafts learned from between two looks at other callers

}  // namespace

// Adds a turn to its session, group and tenant. `session`: the key of its session, whether or not the cache holds that;
// null: it has none. `prompt_blocks`: see Session::append.
void Cache::keep(const Turn& turn, Origin origin, const TurnTarget& to, const std::string* session,
                 std::span<const std::uint64_t> prompt_blocks) {
  const bool has_text = to.session && !turn.tokens.empty();
  bool is_new = true;
  std::vector<Token> context;
  if (has_text) {
    context = to.session->context_of(turn);
    if (!to.session->holds(turn.record)) {
      is_new = to.session->append(turn, prompt_blocks);
      entries_.trim(*to.session);
    }
  }
  // A stored turn without a record is taken for one that the group and tenant hold, unless it brought something new.
  const bool wanted = is_new || turn.record != 0 || origin == Origin::kFinished;
  if (wanted && !turn.response().empty()) {
    add_response(turn, origin, to, session, context_of_response(std::move(context), turn, drafter_->kept_context()));
  }
  if (has_text) count_added(*to.session, origin);
}

// Adds a turn's response to its group and, if it is shared, to its tenant, except to those that hold the turn already.
void Cache::add_response(const Turn& turn, Origin origin, const TurnTarget& to, const std::string* session,
                         std::span<const Token> context) {
  const auto takes = [&](const Group* group) {
    return group && !group->gone && !group->corpus.holds(turn.record) && !entries_.clogged();
  };
  Group* const group = takes(to.group.get()) ? to.group.get() : nullptr;
  Tenant* const tenant = to.shared && takes(to.tenant.get()) ? to.tenant.get() : nullptr;
  if (!group && !tenant) return;
  // Only new responses advance the window's clock: a stored one that is read again makes no other older.
  if (origin != Origin::kStored) to.tenant->written += turn.response().size();
  if (tenant) tenant->expect(origin == Origin::kFollowed);
  for (Group* taker : {group, static_cast<Group*>(tenant)}) {
    if (!taker) continue;
    taker->corpus.add(session, turn.record, context, turn.response(), entries_.now(*to.tenant));
    entries_.trim(*taker);
    count_added(*taker, origin);
  }
}

// Counts anew an entry that a turn was added to. Marks it as used, unless the turn is another process's.
void Cache::count_added(CacheEntry& entry, Origin origin) {
  if (origin != Origin::kFollowed) entries_.touch(entry);
  entries_.count(entry);
}

// Finds the named entries that are held. Returns false if none is.
bool Cache::find_held(Names names, TurnTarget& to) {
  if (!names.tenant) return false;
  to.tenant = entries_.tenants().find(*names.tenant);
  if (!to.tenant) return false;
  if (names.session) to.session = entries_.find_session(*names.session);
  if (names.shared && names.group) {
    to.group = entries_.find_group(*names.group);
  } else if (names.session) {
    to.group = entries_.find_family_of(names);
    if (!to.group && to.session) {  // the family exists wherever the session does
      names.owner = &to.session->owner->name;
      to.group = entries_.group(names, to.tenant);
    }
  }
  return names.shared || to.session || to.group;
}

// Finds the entries that a stored turn names, and makes those that are missing.
TurnTarget Cache::find_or_make(Names names) {
  TurnTarget to;
  to.tenant = entries_.tenant(names.tenant, nullptr);
  names.stored = true;
  if (to.tenant && to.tenant->owner->name != to.tenant->key) names.owner = &to.tenant->owner->name;
  to.session = entries_.session(names, to.tenant);
  to.group = entries_.group(names, to.tenant);
  return to;
}

bool Cache::adopt(Names names, PreparedSession& prepared) {
  const EngineCall call(*this);
  const auto held = entries_.find_session(*names.session);
  if (held && !prepared.session().holds_all_of(*held)) return false;
  const bool has_responses = !prepared.responses().empty();
  if (has_responses) {  // they belong to the session's family, to which other sessions may have added
    if (entries_.root_of(names) != *names.session) return false;
    const auto family = entries_.find_family(*names.session);
    if (family && !prepared.responses().holds_all_of(family->corpus)) return false;
    const Size responses{.tokens = prepared.responses().tokens(), .bytes = prepared.responses().bytes()};
    if (entries_.over_budget(responses)) return false;
  }
  if (entries_.over_budget(prepared.session().size())) return false;
  const TurnTarget to = find_or_make(names);
  entries_.dispose_later(prepared.move_to(*to.session));
  if (has_responses) {
    entries_.dispose_later(prepared.move_to(to.group->corpus));
    to.group->corpus.set_written(entries_.now(*to.tenant));
    entries_.count(*to.group);
  }
  entries_.count(*to.session);
  entries_.forget_if_empty(*to.session);
  entries_.forget_if_empty(*to.group);
  entries_.evict(to.tenant.get());
  return true;
}

void Cache::restore(Names names, Turn turn, bool held_only) {
  const EngineCall call(*this);
  TurnTarget to;
  if (held_only) {
    if (!find_held(names, to)) return;
  } else {
    to = find_or_make(names);
  }
  to.shared = to.tenant && names.shared;
  if (to.session) to.session->find_parent(turn);
  const std::string session = names.session ? entry_key(EntryKind::kSession, *names.session) : std::string();
  keep(turn, held_only ? Origin::kFollowed : Origin::kStored, to, names.session ? &session : nullptr);
  if (to.session) entries_.forget_if_empty(*to.session);
  if (to.group) entries_.forget_if_empty(*to.group);
  entries_.evict(to.tenant.get());
}

// Drafts once, and takes in the tokens that a step would have accepted, and the one behind them. `left`: the rest of
// the response. Returns how many of its tokens were taken in.
std::size_t Cache::replay_step(Request& request, std::span<const Token> left, double cost) {
  drafter_->draft(request.for_drafter(public_.get()), draft_limit(kMaxDraft), cost);
  const auto& draft = request.draft.taken;
  std::size_t right = 0;
  while (right < std::min(draft.size(), left.size()) && draft[right].token == left[right]) ++right;
  const auto verified = left.first(std::min(right + 1, left.size()));
  request.take(*drafter_, public_.get(), verified, draft.size());
  request.index.advance(verified.size());
  return verified.size();
}

std::size_t Cache::learn_from(Names names, const Turn& turn, double cost) {
  if (settings_.arctic || !names.shared || turn.response().empty()) return 0;
  Request request;
  request.shared = true;
  const auto prompt = last_of(std::span(turn.tokens).first(turn.prompt_tail), kLearnedContext);
  request.begin(*drafter_, prompt);
  request.index.advance(prompt.size());
  {
    const Change change(*this);
    if (!find_held(names, request) || request.tenant->corpus.holds(turn.record)) return 0;
    hold_entries(request);
    request.learned = learned_of(request);
  }
  const Leaving leaving{*this, request};
  auto left = turn.response();
  std::shared_ptr<const SuffixIndex> known;
  while (true) {
    std::shared_ptr<const SuffixIndex> former;  // outlives the lock: freeing it waits for Python's
    {
      const Change change(*this);
      if (request.tenant->gone) return 0;  // the cache has started over meanwhile
      former = std::exchange(known, public_);
      if (former != public_) request.forget_public();
      for (std::size_t i = 0; i < kLearnedPerSlice && !left.empty(); ++i) {
        left = left.subspan(replay_step(request, left, cost));
      }
      entries_.count(*request.tenant);
    }
    if (left.empty()) return turn.response().size();
    std::this_thread::sleep_for(kBetweenSlices);
  }
}

Cache::Leaving::~Leaving() {
  try {
    const Change change(cache);
    cache.let_go_of_entries(request);
  } catch (const std::bad_alloc&) {  // the cache is empty now
  }
}

}  // namespace agentspec
