#pragma once

#include "drafting/drafter.hpp"

namespace agentspec {

// Drafts as ArcticInference does, for comparisons and for command lines that ask for it. For every length of context
// that occurred before, it follows the most frequent successors while the draft is likely enough. Of these drafts, from
// the request's text and from the tenant's responses, the one with the largest sum of probabilities wins.
//
// It learns nothing and drafts from neither session nor group. It indexes a whole prompt at once and keeps no context
// in front of stored responses. It never cuts its own draft and adds nothing behind another drafter's tokens.
class ArcticSuffixRule final : public Drafter {
 public:
  explicit ArcticSuffixRule(const ArcticSettings& settings) : settings_(settings) {}

  void start(SuffixIndex& own, std::span<const Token> prompt, std::size_t begin, std::size_t end) const override;
  std::size_t kept_context() const override { return 0; }
  void draft(DraftRequest request, std::size_t limit, double cost) override;
  void merge_draft(DraftRequest request, const ExternalDraft& external, std::size_t limit, double cost) override;
  void learn(DraftRequest request, std::span<const Token> verified) override;

 private:
  ArcticSettings settings_;
};

}  // namespace agentspec
