#include "drafting/drafter.hpp"

#include <algorithm>
#include <utility>

#include "drafting/draft_value.hpp"
#include "drafting/scoring.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kTail = 256;          // tokens of context that look-ups within a draft see
constexpr std::uint32_t kLongEnough = 32;   // one match of so many tokens: the other sources need not be searched
constexpr std::uint32_t kListedEnough = 4;  // so many listed occurrences may stand for all of them

// Brings the matches up to date with the sources: followed ones are kept, the others searched for.
void refresh(const Sources& sources, std::span<const Token> context, MatchState& state) {
  for (std::size_t s = 0; s < kSources; ++s) {
    Match& match = state.matches[s];
    if (!sources[s]) {
      match.clear();
      continue;
    }
    const std::uint64_t version = sources[s]->version();
    const bool followed = state.started && match.listed > 0 && match.complete();
    if (version == state.versions[s] && (state.fresh || followed)) continue;
    sources[s]->look_up(context, match);
    state.versions[s] = version;
  }
  state.started = state.fresh = true;
}

// Moves on within a draft. True where the match must be searched for instead.
bool move_on(const SuffixIndex& index, Token token, Match& match) {
  if (match.listed == 0) return true;
  if (!match.complete()) {
    match.count = match.listed;
    return !index.follow(token, match) || match.listed < kListedEnough;
  }
  return !index.follow(token, match) || match.listed == 0;
}

void move_on(const Sources& sources, Token token, std::span<const Token> context, Front& front) {
  std::uint32_t longest = 0;
  std::array<bool, kSources> search{};
  for (std::size_t s = 0; s < kSources; ++s) {
    if (!sources[s]) continue;
    search[s] = move_on(*sources[s], token, front.matches[s]);
    if (!search[s]) longest = std::max(longest, front.matches[s].length);
  }
  for (std::size_t s = 0; s < kSources; ++s) {
    if (!search[s]) continue;
    if (longest < kLongEnough) {
      sources[s]->look_up(context, front.matches[s]);
    } else {
      front.matches[s].clear();
    }
  }
  advance_trail(sources, token, front.trail);
}

// The first of the path's tokens become the draft.
void take(std::size_t drafted, DraftPath& result) {
  for (std::size_t d = 0; d < drafted; ++d) result.taken.push_back(result.path[d].taken);
  if (drafted > 0) result.match_length = result.taken[0].match_length;
}

std::size_t limit_of(const PolicySettings& settings, std::size_t room) {
  return std::min({room, settings.max_draft, kMaxDraft});
}

// Tokens that begin the draft and are given too.
std::size_t shared(const ExternalDraft& given, const std::vector<Candidate>& taken) {
  std::size_t size = 0;
  while (size < std::min(given.size(), taken.size()) && taken[size].token == given.tokens[size]) ++size;
  return size;
}

// Drops what was found in a source that has changed since. The request's own text only grows.
void distrust(const Sources& sources, MatchState& state) {
  for (std::size_t s = 0; s < kSources; ++s) {
    const bool same = sources[s] && sources[s]->version() == state.versions[s];
    if (!same) state.matches[s].clear();
    if (state.trail.source == s && !same && (s > 0 || !sources[s])) state.trail.drop();
  }
}

// Drafts token by token: first what is given, then the likeliest candidates. The path goes on while that can still pay.
void grow(const PolicySettings& settings, const Learned& learned, const Sources& sources,
          std::span<const Token> context, const ExternalDraft& given, std::size_t limit, MatchState& state, DraftValue& prospect,
          std::vector<Scored>& path) {
  if (state.started) distrust(sources, state);
  refresh(sources, context, state);
  std::array<Token, kTail + kMaxDraft> tail;  // end of the context, then the draft as it grows
  const std::size_t known = std::min(context.size(), kTail);
  std::copy(context.end() - static_cast<std::ptrdiff_t>(known), context.end(), tail.begin());
  Front front{state.matches, state.trail};
  const std::size_t written = context.size() - state.begin;
  for (std::size_t depth = 0; depth < limit; ++depth) {
    Scored& scored = path.emplace_back();
    const ScoringContext situation{{tail.data(), known + depth}, depth, state.begin, written + depth, state.outcome};
    score(settings, learned, sources, front, situation, scored);
    if (depth < given.size()) {
      scored.take(given.tokens[depth], given.chances[depth]);
    } else if (scored.count == 0) {
      path.pop_back();
      break;
    }
    prospect.add(scored.taken.probability);
    if (!prospect.can_grow() || depth + 1 == limit) break;
    if (std::find(state.ends.begin(), state.ends.end(), scored.taken.token) != state.ends.end()) break;
    tail[known + depth] = scored.taken.token;
    leave_trail(scored, scored.taken.token, front.trail);
    move_on(sources, scored.taken.token, {tail.data(), known + depth + 1}, front);
  }
}

// The fixed rule's draft is compared as it is, and given tokens stand alone.
void offer_fixed(const ExternalDraft& given, std::size_t limit, double price, DraftPath& scratch, DraftPath& drafted) {
  DraftValue present{price};
  for (const Candidate& taken : drafted.taken) present.add(taken.probability);
  DraftValue offered{price, std::max(present.value(), 1.0)};
  const std::size_t alike = shared(given, drafted.taken);
  for (std::size_t d = 0; d < std::min(limit, given.size()) && offered.can_grow(); ++d) {
    Candidate& taken = scratch.taken.emplace_back(d < alike ? drafted.taken[d] : Candidate{given.tokens[d], kModel});
    taken.probability = given.chances[d];
    offered.add(taken.probability);
  }
  if (offered.best_length == 0) return;
  scratch.taken.resize(offered.best_length);
  scratch.match_length = alike > 0 ? drafted.match_length : 0;
  std::swap(drafted, scratch);
}

}  // namespace

void draft(const PolicySettings& settings, const Learned& learned, const Sources& sources,
           std::span<const Token> context, std::size_t room, double cost, MatchState& state, DraftPath& result) {
  result.clear();
  const std::size_t limit = limit_of(settings, room);
  if (limit == 0) return;
  DraftValue prospect{kCaution * cost};
  grow(settings, learned, sources, context, {}, limit, state, prospect, result.path);
  take(prospect.best_length, result);
}

void take_offer(const PolicySettings& settings, const Learned& learned, const Sources& sources,
                std::span<const Token> context, const ExternalDraft& given, std::size_t room, double cost, MatchState& state,
                DraftPath& scratch, DraftPath& drafted) {
  scratch.clear();
  scratch.open = true;
  const std::size_t limit = limit_of(settings, room);
  const double price = kCaution * cost;
  if (settings.fixed) return offer_fixed(given, limit, price, scratch, drafted);
  DraftValue present{price};
  const std::size_t alike = shared(given, drafted.taken);
  for (std::size_t d = 0; d < drafted.taken.size(); ++d) {
    if (d < alike) drafted.taken[d].probability = given.chances[d];
    present.add(drafted.taken[d].probability);
  }
  drafted.taken.resize(present.best_length);
  if (present.best_length == 0) drafted.match_length = 0;
  if (limit == 0 || given.size() == 0) return;
  DraftValue offered{price, present.best};
  grow(settings, learned, sources, context, given, limit, state, offered, scratch.path);
  if (offered.best_length == 0) return;
  take(offered.best_length, scratch);
  std::swap(drafted, scratch);
}

void learn(const PolicySettings& settings, const Sources& sources, std::span<const Token> verified, MatchState& state,
           DraftPath& drafted, Learned& learned) {
  if (verified.empty()) return;
  distrust(sources, state);
  std::size_t right = 0;
  const std::size_t revealed = std::min(drafted.path.size(), verified.size());
  for (; right < revealed; ++right) {
    const Scored& scored = drafted.path[right];
    const Token token = verified[right];
    for (std::size_t i = 0; i < scored.proposed; ++i) {
      learned.table.learn(scored.proposals[i].cell, scored.proposals[i].token == token);
    }
    for (std::size_t c = 0; settings.judge && c < scored.count; ++c) {
      const Candidate& candidate = scored.candidates[c];
      const double error = (candidate.token == token ? 1.0 : 0.0) - candidate.probability;
      learned.judge.learn(scored.features[c], error, settings.learning_rate);
    }
    if (scored.taken.token != token) break;
  }
  state.outcome = drafted.taken.empty() ? 0 : right >= drafted.taken.size() ? 1 : 2;

  for (std::size_t d = 0; d < verified.size(); ++d) {
    if (d <= right && d < revealed) leave_trail(drafted.path[d], verified[d], state.trail);
    advance_trail(sources, verified[d], state.trail);
    for (std::size_t s = 0; s < kSources; ++s) {
      Match& match = state.matches[s];
      if (match.listed > 0 && !sources[s]->follow(verified[d], match)) match.clear();
    }
  }
  drafted.path.clear();
  drafted.open = state.fresh = false;
}

}  // namespace agentspec
