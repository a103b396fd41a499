#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "text_index.hpp"

namespace agentspec {

inline constexpr std::size_t kSources = 3;        // request, session, global
inline constexpr std::size_t kMaxDraft = 128;     // the engine verifies no more

struct PolicySettings {
  double cost = 0.02;          // price of verifying one more token, as a share of a step
  std::size_t max_draft = 32;  // tokens
  std::size_t min_match = 1;   // tokens
  double prior_weight = 8;     // observations that a prior counts for
  double memory = 200;         // observations after which older ones are halved
  std::vector<double> priors;  // mean of each cell before anything was observed
};

// Online odds of acceptance by source, match length, agreement among the occurrences and with other sources.
class Odds {
 public:
  using Cell = std::uint32_t;

  explicit Odds(const PolicySettings& settings);

  // `others`: 0 where no other source has a candidate, 1 where one has the same, 2 where all have another.
  static Cell cell(std::size_t source, std::size_t length, std::size_t count, std::size_t winner, std::size_t others);
  static std::size_t cells();

  double probability(Cell cell) const { return table_[cell].hits / table_[cell].total; }
  void learn(Cell cell, bool hit);

 private:
  struct Tally {
    double hits, total;
  };
  std::vector<Tally> table_;
  double memory_;
};

// One source's most likely next token at its longest match.
struct Candidate {
  Token token;
  Odds::Cell cell;
  double probability;
  std::uint8_t source;
};

// A scored position of a draft: every source's candidate, and which of them the draft takes.
struct Scored {
  std::array<Candidate, kSources> candidates;
  std::uint8_t count = 0;
  std::uint8_t best = 0;

  const Candidate& taken() const { return candidates[best]; }
};

// What was drafted for one request. `path` may be longer than the draft: positions that were scored but did not pay
// are kept, so that they can be learned from when the verified tokens reveal them.
struct DraftPath {
  std::vector<Scored> path;
  std::size_t drafted = 0;       // the first so many of path are the draft
  std::size_t match_length = 0;  // of the first token's source

  void clear() {
    path.clear();
    drafted = match_length = 0;
  }
};

using Sources = std::array<const TextIndex*, kSources>;  // null where a source is not to be used

// Drafts at most `room` tokens after `context`; policy.py explains the rule.
void draft(const PolicySettings& settings, const Odds& odds, const Sources& sources, std::span<const Token> context,
           std::size_t room, DraftPath& result);

// Learns from the verified tokens: every position whose predecessors were all right was revealed.
void learn(const DraftPath& drafted, std::span<const Token> verified, Odds& odds);

}  // namespace agentspec
