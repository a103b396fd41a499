// Defines the plain data of drafting: settings, what a request keeps between steps, and drafts.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "drafting/acceptance_table.hpp"
#include "drafting/reranker.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

// Names the source of a drafted token, an index or another drafter, in the order of SOURCES in
// agentspec/cache/types.py. kSibling is the text of another running request of the group.
enum Source : std::uint8_t { kRequest, kSession, kGroup, kGlobal, kPublic, kSibling, kPrediction, kModel, kQuote };

inline constexpr std::size_t kSources = kModel;  // number of indexes that a request drafts from
inline constexpr std::size_t kMaxDraft = 128;    // tokens: the engine verifies no more
inline constexpr std::size_t kCandidates = 4;    // scored at each position of a draft
inline constexpr std::size_t kProposals = 2 * kSources + 1;  // two for each source, and the resume point's

// Holds ArcticInference's parameters, named and meant as there; arctic_suffix_rule.hpp explains the rule.
struct ArcticSettings {
  std::size_t max_depth = 64;
  double max_spec_factor = 1.0;
  double max_spec_offset = 0.0;
  double min_token_prob = 0.1;
};

// Holds DraftPolicy's fields; agentspec/cache/policy.py explains them.
struct PolicySettings {
  std::size_t max_draft = kMaxDraft;  // tokens
  std::size_t min_match = 1;   // tokens
  double prior_weight = 200;   // observations that a prior counts for
  double memory = 1000;        // observations after which older ones are halved
  bool rerank = true;          // the reranker corrects the acceptance table
  double learning_rate = 0.5;  // of the reranker
  std::optional<ArcticSettings> arctic;  // if set, ArcticInference's rule drafts and nothing is learned
};

// Holds what verification taught about acceptance. Each tenant, each session that shares nothing, and each request that
// has neither has one of its own. It starts empty and grows as it learns.
struct Learned {
  static constexpr unsigned kTenantBits = 18, kSessionBits = 14, kRequestBits = 12;  // reranker sizes, log2

  AcceptanceTable table;
  Reranker reranker;

  Learned(const PolicySettings& settings, unsigned bits)
      : table(settings.prior_weight, settings.memory), reranker(bits) {}

  std::size_t bytes() const { return heap_bytes(sizeof *this + 16) + table.bytes() + reranker.bytes(); }
};

// Holds a possible next token.
struct Candidate {
  Token token = 0;
  std::uint8_t source = 0;
  std::uint8_t rank = 0;           // 0: the source's most frequent successor, 1: its second, 2: the resume point's
  std::uint32_t match_length = 0;  // tokens of context that agree
  std::uint32_t count = 0;         // occurrences that were examined
  double share = 0;                // part of them that the token follows
  double probability = 0;          // that it is accepted, given that the draft before it is
};

struct ScoredCandidate : Candidate {
  Position place;         // where it was found in its source
  FeatureSlots features;  // slots of its features, from which the reranker learns
};

// Holds one position of a draft: its candidates, likeliest by the acceptance table first, and the token that the draft
// takes.
struct ScoredPosition {
  struct Proposal {  // the table learns from every successor of every source
    Token token;
    AcceptanceTable::Cell cell;
  };
  std::array<ScoredCandidate, kCandidates> candidates;
  std::array<Proposal, kProposals> proposals;
  std::uint8_t count = 0;     // number of candidates; 0: the token came from another drafter
  std::uint8_t proposed = 0;  // number of proposals
  std::uint8_t best = 0;      // index of the likeliest candidate
  Candidate taken;            // the likeliest candidate, unless another drafter's token was taken

  void take(Token token, double probability) {
    if (count == 0 || taken.token != token) taken = {token, kModel};
    taken.probability = probability;
  }
};

// Holds the draft of one request. `path` may be longer than the draft: it keeps positions that did not pay, so that
// they can be learned from when the verified tokens reveal them. ArcticInference's rule fills `taken` only.
struct Draft {
  std::vector<ScoredPosition> path;
  std::vector<Candidate> taken;  // the draft's tokens
  std::size_t match_length = 0;  // of the first token, in tokens of context; 0 if nothing is drafted
  bool open = false;             // it continues the present text, so another drafter's tokens may be merged
  std::bitset<kSources> outdated;  // sources that were searched anew since, so that the path's places in them are wrong

  void clear() {
    path.clear();
    taken.clear();
    match_length = 0;
    open = false;
    outdated.reset();
  }

  // Returns whether the place of a position's likeliest candidate is wrong by now.
  bool is_outdated(const ScoredPosition& scored) const {
    return scored.count > 0 && outdated.test(scored.candidates[scored.best].source);
  }

  // Forgets the tokens, and what could be learned from them. Keeps their number and sources, because the engine is
  // verifying them.
  void forget_tokens() {
    path.clear();
    for (Candidate& candidate : taken) candidate.token = kBoundary;
    match_length = 0;
    open = false;
  }
};

// Refers to another drafter's tokens and, for each, the probability that it is accepted if those before it are.
struct ExternalDraft {
  std::span<const Token> tokens;
  std::span<const double> probabilities;

  std::size_t size() const { return tokens.size(); }

  // Counts the tokens with which both this and a draft begin.
  std::size_t shared_with(const std::vector<Candidate>& taken) const {
    std::size_t count = 0;
    while (count < size() && count < taken.size() && taken[count].token == tokens[count]) ++count;
    return count;
  }
};

// Remembers a place from which a draft was copied up to a wrong token. Text often goes on as there after one replaced
// token.
struct ResumePoint {
  std::uint8_t source = kSources;  // kSources: none
  Position place = 0;              // of the token that it proposes
  std::uint32_t hits = 0;          // hits since the last miss: tokens that it proposed rightly
  std::uint32_t misses = 0;        // misses in a row

  bool active() const { return source < kSources; }
  void drop() { source = kSources; }
};

// Keeps a request's matches from step to step, so that a step can follow them rather than search again.
struct MatchState {
  std::array<Match, kSources> matches;
  std::array<std::uint64_t, kSources> versions{};  // versions of the sources when they were matched
  KnownEnd own_end, sibling_end;  // where the text's end belonged in the two indexes that only grow
  ResumePoint resume;
  std::vector<Token> ends;   // tokens that end the response: nothing is drafted behind one
  std::size_t begin = 0;     // length of the context when the response began
  std::uint8_t outcome = 0;  // of the last draft: 0 there was none, 1 all of it was right, 2 not all
  bool started = false;      // the matches were found once
  bool fresh = false;        // the matches are up to date: no token has come since

  KnownEnd* known_end(std::size_t source) {
    return source == kRequest ? &own_end : source == kSibling ? &sibling_end : nullptr;
  }

  // Forgets all that was found in a source.
  void forget(std::uint8_t source) {
    matches[source].clear();
    versions[source] = 0;
    if (KnownEnd* const known = known_end(source)) *known = {};
    if (resume.source == source) resume.drop();
  }
};

using Sources = std::array<const SuffixIndex*, kSources>;  // null where a source is not to be used

}  // namespace agentspec
