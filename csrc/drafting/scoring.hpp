#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "drafting/drafter.hpp"

namespace agentspec {

// Where a draft has got to: the places that its tokens so far lead to.
struct Front {
  std::array<Match, kSources> matches;
  ResumePoint trail;
};

// What the judge sees besides a candidate.
struct ScoringContext {
  std::span<const Token> context;  // with the draft so far
  std::size_t depth;               // tokens drafted before this one
  std::size_t prompt;              // length of the context in front of the response
  std::size_t written;             // tokens of the response before this one
  std::uint8_t outcome;            // MatchState::outcome
};

// The candidates for the next token, judged, and the likeliest taken; `scored.count` is 0 where there are none.
void score(const PolicySettings& settings, const Learned& learned, const Sources& sources, const Front& front,
           const ScoringContext& situation, Scored& scored);

// Starts a trail where `token` shows that the likeliest candidate, worth following, went wrong.
void leave_trail(const Scored& scored, Token token, ResumePoint& trail);

// Moves the trail one on: past `token`, which may or may not be the one it proposed.
void advance_trail(const Sources& sources, Token token, ResumePoint& trail);

}  // namespace agentspec
