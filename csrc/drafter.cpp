#include "drafter.hpp"

#include <algorithm>

#include "scoring.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kTail = 256;          // tokens of context that look-ups within a draft see
constexpr std::uint32_t kLongEnough = 32;   // one match of so many tokens: the other sources need not be searched
constexpr std::uint32_t kListedEnough = 4;  // so many listed occurrences may stand for all of them
constexpr std::uint32_t kTrailLength = 4;   // a match of so many tokens that goes wrong leaves a trail
// The token taken is the one that looks best of several, so its chances are somewhat overrated; it is made up for here.
constexpr double kCaution = 1.3;

// Brings the matches up to date with the sources: followed ones are kept, the others searched for.
void refresh(const Sources& sources, std::span<const Token> context, MatchState& state) {
  for (std::size_t s = 0; s < kSources; ++s) {
    Match& match = state.matches[s];
    if (!sources[s]) {
      match.clear();
      continue;
    }
    const std::uint64_t version = sources[s]->version();
    if (state.started && version == state.versions[s] && match.listed > 0 && match.complete()) continue;
    sources[s]->look_up(context, match);
    state.versions[s] = version;
  }
  state.started = true;
}

// Moves on within a draft. True where the match must be searched for instead.
bool move_on(const TextIndex& index, Token token, Match& match) {
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

void take(std::size_t drafted, DraftPath& result) {
  for (std::size_t d = 0; d < drafted; ++d) result.taken.push_back(result.path[d].taken());
  if (drafted > 0) result.match_length = result.taken[0].match_length;
}

// Drops what was found in a source that has changed since. The request's own text only grows.
void distrust(const Sources& sources, MatchState& state) {
  for (std::size_t s = 0; s < kSources; ++s) {
    const bool same = sources[s] && sources[s]->version() == state.versions[s];
    if (!same) state.matches[s].clear();
    if (state.trail.source == s && !same && (s > 0 || !sources[s])) state.trail.drop();
  }
}

}  // namespace

void draft(const PolicySettings& settings, const Learned& learned, const Sources& sources,
           std::span<const Token> context, std::size_t room, double cost, MatchState& state, DraftPath& result) {
  result.clear();
  const std::size_t limit = std::min({room, settings.max_draft, kMaxDraft});
  if (limit == 0) return;
  if (state.started) distrust(sources, state);
  refresh(sources, context, state);

  std::array<Token, kTail + kMaxDraft> tail;  // end of the context, then the draft as it grows
  const std::size_t known = std::min(context.size(), kTail);
  std::copy(context.end() - static_cast<std::ptrdiff_t>(known), context.end(), tail.begin());
  Front front{state.matches, state.trail};
  const double price = kCaution * cost;
  const std::size_t written = context.size() - state.begin;
  double chance = 1, expected = 1, best_ratio = 1;
  std::size_t drafted = 0;
  for (std::size_t depth = 0; depth < limit; ++depth) {
    Scored& scored = result.path.emplace_back();
    const Situation situation{{tail.data(), known + depth}, depth, state.begin, written + depth, state.outcome};
    score(settings, learned, sources, front, situation, scored);
    if (scored.count == 0) {
      result.path.pop_back();
      break;
    }
    chance *= scored.taken().probability;
    expected += chance;
    const double ratio = expected / (1 + price * static_cast<double>(depth + 1));
    if (ratio > best_ratio) {
      best_ratio = ratio;
      drafted = depth + 1;
    }
    if (chance < price * best_ratio || depth + 1 == limit) break;
    tail[known + depth] = scored.taken().token;
    move_on(sources, scored.taken().token, {tail.data(), known + depth + 1}, front);
  }
  take(drafted, result);
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
    if (scored.taken().token != token) break;
  }
  state.outcome = drafted.taken.empty() ? 0 : right >= drafted.taken.size() ? 1 : 2;

  for (std::size_t d = 0; d < verified.size(); ++d) {
    if (d == right && d < revealed) {
      const Candidate& wrong = drafted.path[d].taken();
      const bool worth = wrong.rank < 2 && (wrong.match_length >= kTrailLength || !state.trail.active());
      if (worth) state.trail = {wrong.source, drafted.path[d].places[drafted.path[d].best], 0, 0};
    }
    advance_trail(sources, verified[d], state.trail);
    for (std::size_t s = 0; s < kSources; ++s) {
      Match& match = state.matches[s];
      if (match.listed > 0 && !sources[s]->follow(verified[d], match)) match.clear();
    }
  }
  drafted.path.clear();
}

}  // namespace agentspec
