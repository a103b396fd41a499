// Adds stored turns to Cache: those of other processes, and those of this one from before a restart.
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

// Finds the named entries that are held. Returns false if none is.
bool Cache::find_held(Names names, Request& to) {
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
void Cache::find_or_make(Names names, Request& to) {
  to.tenant = entries_.tenant(names.tenant, nullptr);
  names.stored = true;
  if (to.tenant && to.tenant->owner->name != to.tenant->key) names.owner = &to.tenant->owner->name;
  to.session = entries_.session(names, to.tenant);
  to.group = entries_.group(names, to.tenant);
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
  Request to;
  find_or_make(names, to);
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
  Request to;
  if (held_only) {
    if (!find_held(names, to)) return;
  } else {
    find_or_make(names, to);
  }
  to.shared = to.tenant && names.shared;
  if (to.session) to.session->find_parent(turn);
  const std::string session = names.session ? entry_key(EntryKind::kSession, *names.session) : std::string();
  keep(to, names.session ? &session : nullptr, turn, held_only ? Origin::kFollowed : Origin::kStored);
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
