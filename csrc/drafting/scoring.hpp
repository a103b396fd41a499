#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "drafting/draft.hpp"

namespace agentspec {

// Holds the places in the sources behind the draft's tokens so far.
struct DraftFront {
  std::array<Match, kSources> matches;
  ResumePoint resume;
};

// Holds the context that the reranker sees besides a candidate.
struct ScoringContext {
  std::span<const Token> tokens;  // the end of the text, with the draft so far
  std::size_t depth;              // tokens drafted before this one
  std::size_t prompt;             // length of the text in front of the response
  std::size_t written;            // tokens of the response before this one
  std::uint8_t outcome;           // of the last draft; see MatchState::outcome
};

// Finds the candidates for the next token, scores them and takes the likeliest; `scored.count` is 0 if there is none.
void score(const PolicySettings& settings, const Learned& learned, const Sources& sources, const DraftFront& front,
           const ScoringContext& context, ScoredPosition& scored);

// Sets a resume point if the likeliest candidate is not `token` but is worth resuming.
void mark_resume_point(const ScoredPosition& scored, Token token, ResumePoint& resume);

// Moves the resume point past `token`, whether or not it proposed it.
void advance(const Sources& sources, Token token, ResumePoint& resume);

}  // namespace agentspec
