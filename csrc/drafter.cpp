#include "drafter.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr std::size_t kLengths = 9, kShapes = 12, kOthers = 3;

std::size_t length_bucket(std::size_t length) {
  constexpr std::array<std::size_t, kLengths - 1> bounds{1, 2, 3, 4, 6, 9, 15, 31};
  return static_cast<std::size_t>(std::lower_bound(bounds.begin(), bounds.end(), length) - bounds.begin());
}

std::size_t shape_bucket(std::size_t count, std::size_t winner) {
  if (count == 1) return 0;
  if (count == 2) return winner == 2 ? 2 : 1;
  const std::size_t first = count <= 5 ? 3 : 7;
  if (winner == count) return first + (count <= 5 ? 3 : 4);
  if (count <= 5) return first + (2 * winner < count ? 0 : 4 * winner < 3 * count ? 1 : 2);
  return first + (4 * winner < count ? 0 : 2 * winner < count ? 1 : 4 * winner < 3 * count ? 2 : 3);
}

// Most frequent successor of the matched places, the newest of them where counts are equal.
struct Successor {
  Token token;
  std::size_t winner;
};

Successor best_successor(const TextIndex& index, const Match& match) {
  std::array<Token, kWindow> tokens;
  std::array<std::size_t, kWindow> counts;
  std::size_t distinct = 0;
  std::size_t last = 0;
  for (std::size_t k = 0; k < match.count; ++k) {
    const Token token = index.at(match.positions[k]);
    if (distinct == 0 || tokens[last] != token) {
      for (last = 0; last < distinct && tokens[last] != token; ++last) {
      }
      if (last == distinct) {
        tokens[distinct] = token;
        counts[distinct++] = 0;
      }
    }
    ++counts[last];
  }
  std::size_t best = 0;
  for (std::size_t k = 1; k < distinct; ++k) {
    if (counts[k] > counts[best]) best = k;
  }
  return {tokens[best], counts[best]};
}

// What the other sources say: 0 nothing, 1 one of them the same, 2 something else.
std::size_t agreement(const Scored& scored, std::size_t of) {
  for (std::size_t c = 0; c < scored.count; ++c) {
    if (c != of && scored.candidates[c].token == scored.candidates[of].token) return 1;
  }
  return scored.count > 1 ? 2 : 0;
}

Scored score(const PolicySettings& settings, const Odds& odds, const Sources& sources,
             const std::array<Match, kSources>& matches) {
  Scored scored;
  std::array<std::size_t, kSources> winners;
  for (std::size_t s = 0; s < kSources; ++s) {
    const Match& match = matches[s];
    if (match.count == 0 || match.length < settings.min_match) continue;
    const Successor next = best_successor(*sources[s], match);
    winners[scored.count] = next.winner;
    scored.candidates[scored.count++] = {next.token, 0, 0.0, static_cast<std::uint8_t>(s)};
  }
  for (std::size_t c = 0; c < scored.count; ++c) {
    Candidate& candidate = scored.candidates[c];
    const Match& match = matches[candidate.source];
    candidate.cell = Odds::cell(candidate.source, match.length, match.count, winners[c], agreement(scored, c));
    candidate.probability = odds.probability(candidate.cell);
    if (candidate.probability > scored.taken().probability) scored.best = static_cast<std::uint8_t>(c);
  }
  return scored;
}

void look_up_missing(const Sources& sources, std::span<const Token> context, std::array<Match, kSources>& matches) {
  for (std::size_t s = 0; s < kSources; ++s) {
    if (sources[s] && matches[s].count == 0) sources[s]->look_up(context, matches[s]);
  }
}

void move_on(const Sources& sources, Token token, std::span<const Token> context,
             std::array<Match, kSources>& matches) {
  bool followed = false;
  for (std::size_t s = 0; s < kSources; ++s) {
    if (matches[s].count == 0) continue;
    sources[s]->follow(token, matches[s]);
    followed = followed || matches[s].count > 0;
  }
  if (!followed) look_up_missing(sources, context, matches);
}

}  // namespace

Odds::Odds(const PolicySettings& settings) : table_(cells()), memory_(settings.memory) {
  for (std::size_t c = 0; c < table_.size(); ++c) {
    table_[c] = {settings.priors[c] * settings.prior_weight, settings.prior_weight};
  }
}

std::size_t Odds::cells() { return kSources * kLengths * kShapes * kOthers; }

Odds::Cell Odds::cell(std::size_t source, std::size_t length, std::size_t count, std::size_t winner,
                      std::size_t others) {
  const std::size_t row = (source * kLengths + length_bucket(length)) * kShapes + shape_bucket(count, winner);
  return static_cast<Cell>(row * kOthers + others);
}

void Odds::learn(Cell cell, bool hit) {
  Tally& tally = table_[cell];
  if (tally.total >= memory_) {
    tally.hits *= 0.5;
    tally.total *= 0.5;
  }
  tally.total += 1;
  if (hit) tally.hits += 1;
}

void draft(const PolicySettings& settings, const Odds& odds, const Sources& sources, std::span<const Token> context,
           std::size_t room, DraftPath& result) {
  result.clear();
  const std::size_t limit = std::min(room, settings.max_draft);
  if (limit == 0) return;
  std::array<Token, kCap + kMaxDraft> tail;  // end of the context, then the draft as it grows
  const std::size_t known = std::min(context.size(), kCap);
  std::copy(context.end() - static_cast<std::ptrdiff_t>(known), context.end(), tail.begin());
  std::array<Match, kSources> matches;
  look_up_missing(sources, {tail.data(), known}, matches);

  double chance = 1, expected = 1, best_ratio = 1;
  while (result.path.size() < limit) {
    const std::size_t depth = result.path.size();
    const Scored scored = score(settings, odds, sources, matches);
    if (scored.count == 0) break;
    result.path.push_back(scored);
    if (depth == 0) result.match_length = matches[scored.taken().source].length;
    chance *= scored.taken().probability;
    expected += chance;
    const double ratio = expected / (1 + settings.cost * static_cast<double>(depth + 1));
    if (ratio > best_ratio) {
      best_ratio = ratio;
      result.drafted = depth + 1;
    }
    if (chance < settings.cost * best_ratio || depth + 1 == limit) break;
    tail[known + depth] = scored.taken().token;
    move_on(sources, scored.taken().token, {tail.data(), known + depth + 1}, matches);
  }
  if (result.drafted == 0) result.match_length = 0;
}

void learn(const DraftPath& drafted, std::span<const Token> verified, Odds& odds) {
  for (std::size_t d = 0; d < std::min(drafted.path.size(), verified.size()); ++d) {
    const Scored& scored = drafted.path[d];
    for (std::size_t c = 0; c < scored.count; ++c) {
      odds.learn(scored.candidates[c].cell, scored.candidates[c].token == verified[d]);
    }
    if (scored.taken().token != verified[d]) break;
  }
}

}  // namespace agentspec
