#include "drafting/scoring.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace agentspec {
namespace {

constexpr double kClip = 9;              // log-odds stay within
constexpr std::uint32_t kMissesMost = 4;  // in a row, then a trail ends
constexpr std::uint32_t kTrailLength = 4;  // a match of so many tokens that goes wrong leaves a trail
constexpr std::size_t kTrailKind = kSources;

struct Successor {
  Token token;
  std::uint32_t winner;  // occurrences that it follows
  Position place;
};

// A successor with the kind of its origin: its source, or kTrailKind.
struct Origin {
  Successor successor;
  std::uint32_t length, count;
  std::uint8_t kind, source, rank;
  AcceptanceTable::Cell cell;
  double probability;
};

struct Origins {
  std::array<Origin, kProposals> all;
  std::size_t count = 0;
};

// The two most frequent successors of the listed occurrences, the earlier listed first where they are equal.
std::size_t successors(const SuffixIndex& index, const Match& match, std::array<Successor, 2>& best) {
  std::array<Successor, kWindow> found;
  std::size_t distinct = 0, last = 0;
  for (std::size_t k = 0; k < match.listed; ++k) {
    const Token token = index.at(match.positions[k]);
    if (token < 0) continue;
    if (distinct == 0 || found[last].token != token) {
      for (last = 0; last < distinct && found[last].token != token; ++last) {
      }
      if (last == distinct) found[distinct++] = {token, 0, match.positions[k]};
    }
    ++found[last].winner;
  }
  std::size_t count = 0;
  for (; count < std::min<std::size_t>(distinct, best.size()); ++count) {
    const auto top = std::max_element(found.begin(), found.begin() + distinct,
                                      [](const Successor& a, const Successor& b) { return a.winner < b.winner; });
    best[count] = *top;
    top->winner = 0;
  }
  return count;
}

void gather(const PolicySettings& settings, const AcceptanceTable& table, const Sources& sources, const Front& front,
            std::size_t depth, Origins& origins) {
  const auto add = [&](const Successor& next, std::uint32_t length, std::uint32_t count, std::size_t kind,
                       std::size_t source, std::size_t rank) {
    const AcceptanceTable::Cell cell = AcceptanceTable::cell(kind, length, count, next.winner, rank == 1, depth);
    origins.all[origins.count++] = {next, length, count, static_cast<std::uint8_t>(kind),
                                    static_cast<std::uint8_t>(source), static_cast<std::uint8_t>(rank), cell,
                                    table.probability(cell)};
  };
  for (std::size_t s = 0; s < kSources; ++s) {
    const Match& match = front.matches[s];
    if (!sources[s] || match.listed == 0 || match.length < settings.min_match) continue;
    std::array<Successor, 2> best;
    const std::size_t found = successors(*sources[s], match, best);
    for (std::size_t rank = 0; rank < found; ++rank) add(best[rank], match.length, match.listed, s, s, rank);
  }
  if (front.trail.active()) {
    const ResumePoint& trail = front.trail;
    // As if there had been one occurrence more for each miss, all with other successors.
    add({sources[trail.source]->at(trail.place), 1, trail.place}, trail.hits + 1, trail.misses + 1, kTrailKind,
        trail.source, 2);
  }
}

// The distinct tokens' likeliest origins by the table, likeliest first.
std::size_t choose(const Origins& origins, std::array<const Origin*, kProposals>& chosen) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < origins.count; ++i) {
    const Origin& origin = origins.all[i];
    std::size_t at = 0;
    while (at < count && chosen[at]->successor.token != origin.successor.token) ++at;
    if (at < count && !(origin.probability > chosen[at]->probability)) continue;
    count += at == count;
    for (; at > 0 && chosen[at - 1]->probability < origin.probability; --at) chosen[at] = chosen[at - 1];
    chosen[at] = &origin;
  }
  return std::min(count, kCandidates);
}

// For each kind two bits: 0 it has no proposal, 1 the token is its first, 2 its second, 3 it has others.
std::uint32_t agreement(const Origins& origins, Token token) {
  std::uint32_t code = 0;
  for (std::size_t i = 0; i < origins.count; ++i) {
    const Origin& origin = origins.all[i];
    const std::uint32_t says = origin.successor.token != token ? 3 : origin.rank == 1 ? 2 : 1;
    if (says != 3 || (code >> 2 * origin.kind & 3) == 0) {
      code = (code & ~(3u << 2 * origin.kind)) | says << 2 * origin.kind;
    }
  }
  return code;
}

std::uint64_t share_bucket(std::uint64_t count, std::uint64_t winner) {
  if (count == 1) return 0;
  if (winner == count) return 1;
  return 5 * winner >= 4 * count ? 2 : 2 * winner >= count ? 3 : 4 * winner >= count ? 4 : 10 * winner >= count ? 5 : 6;
}

// The judge's features of candidates at one position; what depends on the context alone is computed once.
class Features {
 public:
  Features(const Reranker& judge, const ScoringContext& situation) : judge_(judge), outcome_(situation.outcome) {
    const std::size_t size = situation.context.size();
    const auto before = [&](std::size_t n) {
      return static_cast<std::uint32_t>(n <= size ? situation.context[size - n] : -3);
    };
    last_ = mixed(1, before(1));
    pair_ = mixed(last_, before(2));
    depth_ = std::min<std::uint64_t>(situation.depth, 3);
    first_ = situation.depth == 0;
    const std::uint64_t written = situation.written;
    age_ = written < 6 ? written : 3 + static_cast<std::uint64_t>(std::bit_width(written));
  }

  FeatureSlots of(const Origin& origin, std::uint32_t agreement, bool own) const {
    const std::uint64_t kind = origin.kind;
    const std::uint64_t length = AcceptanceTable::length_bucket(origin.length);
    const std::uint64_t share = share_bucket(origin.count, origin.successor.winner);
    const std::uint64_t token = (static_cast<std::uint64_t>(origin.successor.token) + 1) * 0x9E3779B97F4A7C15u;
    const std::uint64_t outcome = first_ ? outcome_ : 3;
    const std::uint64_t deep = std::min<std::uint64_t>(depth_, 2);
    const auto with_token = [&](std::uint64_t key) { return judge_.slot(key ^ token); };
    return {
        with_token(pair_),
        with_token(1000 + kind * 4 + depth_),
        judge_.slot(last_ + 1100 + kind),
        with_token(1200 + length),
        with_token(last_ + (2000 + agreement) * 0xA24BAED4963EE407u),
        with_token(1300 + kind * 8 + share),
        judge_.slot(4000 + ((kind * 16 + length) * 4 + deep) * 4 + outcome),
        judge_.slot(8000 + agreement),
        with_token(1400 + own),
        with_token(1500 + age_),
        judge_.slot(10000 + ((kind * 16 + length) * 2 + own) * 64 + age_),
    };
  }

 private:
  const Reranker& judge_;
  std::uint64_t last_, pair_, depth_, age_, outcome_;
  bool first_;
};

void judge(const Learned& learned, const Origins& origins, const std::array<const Origin*, kProposals>& chosen,
           const ScoringContext& situation, Scored& scored) {
  const Features features(learned.judge, situation);
  for (std::size_t c = 0; c < scored.count; ++c) {
    const Origin& origin = *chosen[c];
    const bool own = origin.source == 0 && origin.successor.place >= situation.prompt;
    scored.features[c] = features.of(origin, agreement(origins, origin.successor.token), own);
    for (const std::uint32_t slot : scored.features[c]) learned.judge.prefetch(slot);
  }
  for (std::size_t c = 0; c < scored.count; ++c) {
    const double base = std::clamp(learned.table.log_odds(chosen[c]->cell), -kClip, kClip);
    const double sum = std::clamp(base + learned.judge.correction(scored.features[c]), -kClip, kClip);
    scored.candidates[c].probability = 1 / (1 + std::exp(-sum));
  }
}

}  // namespace

void score(const PolicySettings& settings, const Learned& learned, const Sources& sources, const Front& front,
           const ScoringContext& situation, Scored& scored) {
  Origins origins;
  gather(settings, learned.table, sources, front, situation.depth, origins);
  std::array<const Origin*, kProposals> chosen;
  scored.count = static_cast<std::uint8_t>(choose(origins, chosen));
  scored.proposed = static_cast<std::uint8_t>(origins.count);
  for (std::size_t i = 0; i < origins.count; ++i) {
    scored.proposals[i] = {origins.all[i].successor.token, origins.all[i].cell};
  }
  for (std::size_t c = 0; c < scored.count; ++c) {
    const Origin& origin = *chosen[c];
    scored.candidates[c] = {origin.successor.token, origin.source, origin.rank, origin.length, origin.count,
                            static_cast<double>(origin.successor.winner) / origin.count, origin.probability};
    scored.places[c] = origin.successor.place;
  }
  if (settings.judge) judge(learned, origins, chosen, situation, scored);
  scored.best = 0;
  for (std::uint8_t c = 1; c < scored.count; ++c) {
    if (scored.candidates[c].probability > scored.candidates[scored.best].probability) scored.best = c;
  }
  if (scored.count > 0) scored.taken = scored.candidates[scored.best];
}

void Scored::take(Token token, double chance) {
  if (count == 0 || taken.token != token) taken = {token, kModel};
  taken.probability = chance;
}

void leave_trail(const Scored& scored, Token token, ResumePoint& trail) {
  if (scored.count == 0) return;
  const Candidate& wrong = scored.candidates[scored.best];
  if (wrong.token == token || wrong.rank > 1) return;
  if (wrong.match_length >= kTrailLength || !trail.active()) trail = {wrong.source, scored.places[scored.best], 0, 0};
}

void advance_trail(const Sources& sources, Token token, ResumePoint& trail) {
  if (!trail.active()) return;
  const SuffixIndex* index = sources[trail.source];
  if (!index || trail.place >= index->size()) return trail.drop();
  if (index->at(trail.place) == token) {
    ++trail.hits;
    trail.misses = 0;
  } else {
    trail.hits = 0;
    if (++trail.misses > kMissesMost) return trail.drop();
  }
  ++trail.place;
  if (trail.place >= index->size() || index->at(trail.place) < 0) trail.drop();
}

}  // namespace agentspec
