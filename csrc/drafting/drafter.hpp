#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "drafting/reranker.hpp"
#include "drafting/acceptance_table.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

inline constexpr std::size_t kSources = 4;        // request, session, group, global
inline constexpr std::uint8_t kModel = kSources;  // in their place, for tokens that another drafter gave
inline constexpr std::size_t kMaxDraft = 128;     // the engine verifies no more
inline constexpr std::size_t kCandidates = 4;     // judged at each position of a draft
inline constexpr std::size_t kProposals = 2 * kSources + 1;  // two successors a source, and the trail's

// Slots of the judge, as a power of two, by whose it is.
inline constexpr unsigned kTenantBits = 18, kSessionBits = 14, kRequestBits = 12;

// The peer's rule; fixed_rule.hpp explains it.
struct FixedSettings {
  std::size_t max_depth = 64;
  double max_spec_factor = 1.0;
  double max_spec_offset = 0.0;
  double min_token_prob = 0.1;
};

struct PolicySettings {
  std::size_t max_draft = 32;  // tokens
  std::size_t min_match = 1;   // tokens
  double prior_weight = 200;   // observations that a prior counts for
  double memory = 1000;        // observations after which older ones are halved
  bool judge = true;           // whether the judge corrects the table
  double learning_rate = 0.5;  // of the judge
  std::optional<FixedSettings> fixed;  // where set, this rule drafts and nothing is learned
};

// What acceptance taught: one for each tenant, for each session that keeps to itself, for each request with neither.
struct Learned {
  AcceptanceTable table;
  Reranker judge;

  Learned(const PolicySettings& settings, unsigned judge_bits)
      : table(settings.prior_weight, settings.memory), judge(judge_bits) {}
};

// One possible next token.
struct Candidate {
  Token token = 0;
  std::uint8_t source = 0;
  std::uint8_t rank = 0;           // 0: the source's most frequent successor, 1: its second, 2: the trail's
  std::uint32_t match_length = 0;  // tokens of context that agree
  std::uint32_t count = 0;         // occurrences that were looked at
  double share = 0;                // of them followed by the token
  double probability = 0;          // that it is right, given that the draft before it is
};

// A position of a draft: the judged candidates, likeliest by the table first, and the token that the draft takes.
struct Scored {
  struct Proposal {  // what the table learns from: every successor of every source
    Token token;
    AcceptanceTable::Cell cell;
  };
  std::array<Candidate, kCandidates> candidates;
  std::array<Position, kCandidates> places;  // where each was found in its source
  std::array<FeatureSlots, kCandidates> features;
  std::array<Proposal, kProposals> proposals;
  std::uint8_t count = 0;     // of candidates; 0 only where the token was given
  std::uint8_t proposed = 0;  // of proposals
  std::uint8_t best = 0;      // the likeliest candidate
  Candidate taken;            // that one, unless another token was given

  // Takes a given token, with a given chance that it is right.
  void take(Token token, double chance);
};

// What was drafted for one request. `path` may be longer than the draft: positions that were scored but did not pay
// are kept, so that they can be learned from when the verified tokens reveal them. The fixed rule fills `taken` only.
struct DraftPath {
  std::vector<Scored> path;
  std::vector<Candidate> taken;  // the draft's tokens
  std::size_t match_length = 0;  // of the first token's source; 0 where nothing is drafted
  bool open = false;             // continues the text as it is now, so that other tokens may be offered instead

  void clear() {
    path.clear();
    taken.clear();
    match_length = 0;
    open = false;
  }
};

// Tokens that another drafter gives for one request, and of each the chance to be accepted if those before it are.
struct ExternalDraft {
  std::span<const Token> tokens;
  std::span<const double> chances;

  std::size_t size() const { return tokens.size(); }
};

// A place that was being copied when the copy went wrong once: text often goes on there after a replaced token.
struct ResumePoint {
  std::uint8_t source = kSources;  // kSources: none
  Position place = 0;              // of the token that it proposes
  std::uint32_t hits = 0;          // tokens that agreed since the last that did not
  std::uint32_t misses = 0;        // in a row

  bool active() const { return source < kSources; }
  void drop() { source = kSources; }
};

// What a request keeps from step to step, so that a step follows its matches rather than searching again.
struct MatchState {
  std::array<Match, kSources> matches;
  std::array<std::uint64_t, kSources> versions{};  // of the sources that the matches are of
  ResumePoint trail;
  std::vector<Token> ends;   // tokens that end the response: nothing is drafted behind one
  std::size_t begin = 0;     // length of the context when the response began
  std::uint8_t outcome = 0;  // of the last draft: 0 there was none, 1 wholly right, 2 not
  bool started = false;
  bool fresh = false;  // the matches were brought up to date and no token has come since
};

using Sources = std::array<const SuffixIndex*, kSources>;  // null where a source is not to be used

// Drafts at most `room` tokens after `context`, the request's whole text; policy.py explains the rule.
void draft(const PolicySettings& settings, const Learned& learned, const Sources& sources,
           std::span<const Token> context, std::size_t room, double cost, MatchState& state, DraftPath& result);

// Tokens that another drafter gives for a request that has an open draft. They take its place if they promise more,
// with what the trees add behind them, cut where it pays. Where both begin alike, the given chances hold for the draft
// too, which is cut anew (but not under the fixed rule, which also adds nothing). `scratch` is memory to work in.
void take_offer(const PolicySettings& settings, const Learned& learned, const Sources& sources,
                std::span<const Token> context, const ExternalDraft& given, std::size_t room, double cost, MatchState& state,
                DraftPath& scratch, DraftPath& drafted);

// Learns from the verified tokens, every position whose predecessors were all right, and follows the matches with
// them. To be called before they are appended to the request's text, after every draft and also without one.
// Afterwards `drafted.taken` is still there, `drafted.path` is not: nothing is learned twice.
void learn(const PolicySettings& settings, const Sources& sources, std::span<const Token> verified, MatchState& state,
           DraftPath& drafted, Learned& learned);

}  // namespace agentspec
