#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "drafting/draft.hpp"

namespace agentspec {

// Where a draft has got to: the places that its tokens so far lead to.
struct DraftFront {
  std::array<Match, kSources> matches;
  ResumePoint resume;
};

// What the reranker sees besides a candidate.
struct ScoringContext {
  std::span<const Token> tokens;  // the end of the text, with the draft so far
  std::size_t depth;              // tokens drafted before this one
  std::size_t prompt;             // length of the text in front of the response
  std::size_t written;            // tokens of the response before this one
  std::uint8_t outcome;           // MatchState::outcome
};

// Finds the candidates for the next token, scores them and takes the likeliest; `scored.count` is 0 if there is none.
void score(const PolicySettings& settings, const Learned& learned, const Sources& sources, const DraftFront& front,
           const ScoringContext& context, ScoredPosition& scored);

// Marks a resume point where `token` shows that the likeliest candidate, worth following, went wrong.
void mark_resume_point(const ScoredPosition& scored, Token token, ResumePoint& resume);

// Moves the resume point past `token`, which may or may not be the one that it proposed.
void advance(const Sources& sources, Token token, ResumePoint& resume);

}  // namespace agentspec
