#include "drafting/scoring.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace agentspec {
namespace {

constexpr double kClip = 9;                // log-odds are clipped to this, either side of 0
constexpr std::uint32_t kMostMisses = 4;   // most misses in a row that a resume point survives
constexpr std::uint32_t kWorthResuming = 4;  // match length from which on a place is worth resuming
constexpr std::size_t kResumeKind = AcceptanceTable::kResumeKind;
static_assert(kResumeKind == kPublic && AcceptanceTable::kKinds == kSources + 1);

// Returns the kind of a source's proposals: the source's number, or the next one if that is not below kResumeKind.
constexpr std::size_t kind_of(std::size_t source) { return source < kResumeKind ? source : source + 1; }

struct Successor {
  Token token;
  std::uint32_t winner;  // occurrences that it follows
  Position place;
};

// Holds a proposed token and where it comes from.
struct Proposal : Successor {
  std::uint32_t length, count;  // of the match
  std::uint8_t kind, source, rank;
  AcceptanceTable::Cell cell;
  double probability;  // by the table
};

struct Proposals {
  std::array<Proposal, kProposals> all;
  std::size_t count = 0;

  std::span<const Proposal> get() const { return {all.data(), count}; }
};

// Finds the two most frequent successors of the listed occurrences; of equal ones, the one listed first.
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

// Collects the proposals of the sources and of the resume point.
Proposals gather(const PolicySettings& settings, const AcceptanceTable& table, const Sources& sources,
                 const DraftFront& front, std::size_t depth) {
  Proposals proposals;
  const auto add = [&](const Successor& next, std::uint32_t length, std::uint32_t count, std::size_t kind,
                       std::size_t source, std::size_t rank) {
    const auto cell = AcceptanceTable::cell(kind, length, count, next.winner, rank == 1, depth);
    proposals.all[proposals.count++] = {next, length, count, static_cast<std::uint8_t>(kind),
                                        static_cast<std::uint8_t>(source), static_cast<std::uint8_t>(rank), cell,
                                        table.probability(cell)};
  };
  for (std::size_t s = 0; s < kSources; ++s) {
    const Match& match = front.matches[s];
    if (!sources[s] || match.listed == 0 || match.length < settings.min_match) continue;
    std::array<Successor, 2> best;
    const std::size_t found = successors(*sources[s], match, best);
    for (std::size_t rank = 0; rank < found; ++rank) add(best[rank], match.length, match.listed, kind_of(s), s, rank);
  }
  if (const ResumePoint& resume = front.resume; resume.active()) {
    // Counts each miss as one more occurrence with another successor.
    add({sources[resume.source]->at(resume.place), 1, resume.place}, resume.hits + 1, resume.misses + 1, kResumeKind,
        resume.source, 2);
  }
  return proposals;
}

using Chosen = std::array<const Proposal*, kProposals>;

// Chooses the likeliest proposal of each token by the table, and sorts them, likeliest first. Returns how many of them
// become candidates.
std::size_t choose(const Proposals& proposals, Chosen& chosen) {
  std::size_t count = 0;
  for (const Proposal& proposal : proposals.get()) {
    std::size_t at = 0;
    while (at < count && chosen[at]->token != proposal.token) ++at;
    if (at < count && !(proposal.probability > chosen[at]->probability)) continue;
    count += at == count;
    for (; at > 0 && chosen[at - 1]->probability < proposal.probability; --at) chosen[at] = chosen[at - 1];
    chosen[at] = &proposal;
  }
  return std::min(count, kCandidates);
}

// Returns two bits for each kind of proposals. 0: it proposes nothing. 1: the token is its first. 2: the token is its
// second. 3: it proposes other tokens only.
std::uint32_t agreement(const Proposals& proposals, Token token) {
  std::uint32_t code = 0;
  for (const Proposal& proposal : proposals.get()) {
    const std::uint32_t says = proposal.token != token ? 3 : proposal.rank == 1 ? 2 : 1;
    const std::uint32_t shift = 2 * proposal.kind;
    if (says != 3 || (code >> shift & 3) == 0) code = (code & ~(3u << shift)) | says << shift;
  }
  return code;
}

std::uint64_t share_bucket(std::uint64_t count, std::uint64_t winner) {
  if (count == 1) return 0;
  if (winner == count) return 1;
  return 5 * winner >= 4 * count ? 2 : 2 * winner >= count ? 3 : 4 * winner >= count ? 4 : 10 * winner >= count ? 5 : 6;
}

// Hashes two numbers.
std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t z = (a ^ b * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
  return z ^ z >> 32;
}

// Computes the reranker's features of candidates at one position, hashing their common context once.
class Features {
 public:
  Features(const Reranker& reranker, const ScoringContext& context) : reranker_(reranker), outcome_(context.outcome) {
    const std::size_t size = context.tokens.size();
    const auto before = [&](std::size_t n) {
      return static_cast<std::uint32_t>(n <= size ? context.tokens[size - n] : -3);
    };
    last_ = mixed(1, before(1));
    pair_ = mixed(last_, before(2));
    depth_ = std::min<std::uint64_t>(context.depth, 3);
    first_ = context.depth == 0;
    const std::uint64_t written = context.written;
    age_ = written < 6 ? written : 3 + static_cast<std::uint64_t>(std::bit_width(written));
  }

  FeatureSlots of(const Proposal& proposal, std::uint32_t agreement, bool own) const {
    const std::uint64_t kind = proposal.kind;
    const std::uint64_t length = AcceptanceTable::length_bucket(proposal.length);
    const std::uint64_t share = share_bucket(proposal.count, proposal.winner);
    const std::uint64_t token = (static_cast<std::uint64_t>(proposal.token) + 1) * 0x9E3779B97F4A7C15u;
    const std::uint64_t outcome = first_ ? outcome_ : 3;
    const std::uint64_t deep = std::min<std::uint64_t>(depth_, 2);
    const auto with_token = [&](std::uint64_t key) { return reranker_.slot(key ^ token); };
    return {
        with_token(pair_),
        with_token(1000 + kind * 4 + depth_),
        reranker_.slot(last_ + 1100 + kind),
        with_token(1200 + length),
        with_token(last_ + (2000 + agreement) * 0xA24BAED4963EE407u),
        with_token(1300 + kind * 8 + share),
        reranker_.slot(4000 + ((kind * 16 + length) * 4 + deep) * 4 + outcome),
        reranker_.slot(8000 + agreement),
        with_token(1400 + own),
        with_token(1500 + age_),
        reranker_.slot(10000 + ((kind * 16 + length) * 2 + own) * 64 + age_),
    };
  }

 private:
  const Reranker& reranker_;
  std::uint64_t last_, pair_, depth_, age_, outcome_;
  bool first_;
};

void rerank(const Learned& learned, const Proposals& proposals, const Chosen& chosen, const ScoringContext& context,
            ScoredPosition& scored) {
  const Features features(learned.reranker, context);
  for (std::size_t c = 0; c < scored.count; ++c) {
    const Proposal& proposal = *chosen[c];
    const bool own = proposal.source == kRequest && proposal.place >= context.prompt;
    scored.candidates[c].features = features.of(proposal, agreement(proposals, proposal.token), own);
    for (const std::uint32_t slot : scored.candidates[c].features) learned.reranker.prefetch(slot);
  }
  for (std::size_t c = 0; c < scored.count; ++c) {
    const double base = std::clamp(learned.table.log_odds(chosen[c]->cell), -kClip, kClip);
    const double sum = std::clamp(base + learned.reranker.correction(scored.candidates[c].features), -kClip, kClip);
    scored.candidates[c].probability = 1 / (1 + std::exp(-sum));
  }
}

}  // namespace

void score(const PolicySettings& settings, const Learned& learned, const Sources& sources, const DraftFront& front,
           const ScoringContext& context, ScoredPosition& scored) {
  const Proposals proposals = gather(settings, learned.table, sources, front, context.depth);
  Chosen chosen;
  scored.count = static_cast<std::uint8_t>(choose(proposals, chosen));
  scored.proposed = static_cast<std::uint8_t>(proposals.count);
  for (std::size_t i = 0; i < proposals.count; ++i) {
    scored.proposals[i] = {proposals.all[i].token, proposals.all[i].cell};
  }
  for (std::size_t c = 0; c < scored.count; ++c) {
    const Proposal& from = *chosen[c];
    ScoredCandidate& candidate = scored.candidates[c];
    const double share = static_cast<double>(from.winner) / from.count;
    static_cast<Candidate&>(candidate) = {from.token, from.source, from.rank, from.length, from.count, share,
                                          from.probability};
    candidate.place = from.place;
  }
  if (settings.rerank) rerank(learned, proposals, chosen, context, scored);
  scored.best = 0;
  for (std::uint8_t c = 1; c < scored.count; ++c) {
    if (scored.candidates[c].probability > scored.candidates[scored.best].probability) scored.best = c;
  }
  if (scored.count > 0) scored.taken = scored.candidates[scored.best];
}

void mark_resume_point(const ScoredPosition& scored, Token token, ResumePoint& resume) {
  if (scored.count == 0) return;
  const ScoredCandidate& wrong = scored.candidates[scored.best];
  if (wrong.token == token || wrong.rank > 1) return;
  if (wrong.match_length >= kWorthResuming || !resume.active()) resume = {wrong.source, wrong.place, 0, 0};
}

void advance(const Sources& sources, Token token, ResumePoint& resume) {
  if (!resume.active()) return;
  const SuffixIndex* index = sources[resume.source];
  if (!index || resume.place >= index->size()) return resume.drop();
  if (index->at(resume.place) == token) {
    ++resume.hits;
    resume.misses = 0;
  } else {
    resume.hits = 0;
    if (++resume.misses > kMostMisses) return resume.drop();
  }
  ++resume.place;
  if (resume.place >= index->size() || index->at(resume.place) < 0) resume.drop();
}

}  // namespace agentspec
