#pragma once

#include <cstddef>
#include <span>

#include "drafting/draft.hpp"

namespace agentspec {

// One running request as a drafter sees it.
struct DraftRequest {
  Sources sources;
  std::span<const Token> text;  // prompt and response
  MatchState& state;
  Draft& draft;
  Learned& learned;
};

// A rule for drafts, and all that depends on it: SuffixDrafter's, learned while serving, or ArcticSuffixRule's.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Puts a new request's prompt into its own index. The session holds the first `in_session` tokens already.
  virtual void start(SuffixIndex& own, std::span<const Token> prompt, std::size_t in_session) const = 0;
  // Returns how many tokens of context are kept in front of a stored response, so that its first tokens can be matched.
  virtual std::size_t kept_context() const = 0;

  // Replaces the draft by one of at most `limit` tokens behind the request's text.
  // `cost`: price of verifying one more token, as a share of a step.
  virtual void draft(DraftRequest request, std::size_t limit, double cost) = 0;
  // Merges another drafter's tokens into an open draft: they take its place where they promise more. Where both begin
  // alike, the given probabilities hold for the draft too.
  virtual void merge_draft(DraftRequest request, const ExternalDraft& external, std::size_t limit, double cost) = 0;
  // Learns from verified tokens. To be called before they are appended to the request's text, after every draft and
  // also without one. Afterwards `draft.taken` is still there, `draft.path` is not: nothing is learned twice.
  virtual void learn(DraftRequest request, std::span<const Token> verified) = 0;
};

}  // namespace agentspec
