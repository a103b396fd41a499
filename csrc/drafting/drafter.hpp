#pragma once

#include <cstddef>
#include <span>

#include "drafting/draft.hpp"

namespace agentspec {

// Refers to the parts of one running request that a drafter reads and changes.
struct DraftRequest {
  Sources sources;
  std::span<const Token> text;  // prompt and response
  MatchState& state;
  Draft& draft;
  Learned& learned;
};

// Decides which tokens to draft. SuffixDrafter learns while serving; ArcticSuffixRule follows ArcticInference.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Puts a new request's prompt into its own index. The session already holds the tokens from `begin` to `end` of it.
  virtual void start(SuffixIndex& own, std::span<const Token> prompt, std::size_t begin, std::size_t end) const = 0;
  // Returns how many tokens of context are kept in front of a stored response, so that its first tokens can be matched.
  virtual std::size_t kept_context() const = 0;

  // Replaces the draft by one of at most `limit` tokens behind the request's text.
  // `cost`: price of verifying one more token, as a share of a step.
  virtual void draft(DraftRequest request, std::size_t limit, double cost) = 0;
  // Merges another drafter's tokens into an open draft: they replace it if their value is higher. Where both begin with
  // the same tokens, the given probabilities hold for the draft too.
  virtual void merge_draft(DraftRequest request, const ExternalDraft& external, std::size_t limit, double cost) = 0;
  // Learns from verified tokens. Call it before they are appended to the request's text, also without a draft. It keeps
  // `draft.taken` but clears `draft.path`, so that nothing is learned twice.
  virtual void learn(DraftRequest request, std::span<const Token> verified) = 0;
};

}  // namespace agentspec
