#pragma once

#include "drafting/drafter.hpp"

namespace agentspec {

// ArcticInference's rule for drafts, to compare with and for command lines that ask for it. From every length of context
// that occurred before, the most frequent successors are followed while the draft is likely enough. Of all these drafts,
// from the request's own text and from the responses of all, the one with the largest sum of probabilities is taken.
//
// Nothing is learned, and session and group are not drafted from. The request's own text is all indexed at once, and
// stored responses have no context in front. Another drafter's tokens stand alone, and the rule's draft is never cut.
// tests/oracle/arctic_suffix_rule.py specifies the answers.
class ArcticSuffixRule final : public Drafter {
 public:
  explicit ArcticSuffixRule(const ArcticSettings& settings) : settings_(settings) {}

  void start(SuffixIndex& own, std::span<const Token> prompt, std::size_t in_session) const override;
  std::size_t kept_context() const override { return 0; }
  void draft(DraftRequest request, std::size_t limit, double cost) override;
  void merge_draft(DraftRequest request, const ExternalDraft& external, std::size_t limit, double cost) override;
  void learn(DraftRequest request, std::span<const Token> verified) override;

 private:
  ArcticSettings settings_;
};

}  // namespace agentspec
