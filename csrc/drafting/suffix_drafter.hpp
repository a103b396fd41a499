#pragma once

#include <vector>

#include "drafting/draft_value.hpp"
#include "drafting/drafter.hpp"

namespace agentspec {

// Drafts token by token from the longest matches of all sources, by acceptance probabilities learned while serving.
// agentspec/cache/policy.py explains the rule; tests/oracle/drafting.py specifies the answers.
class SuffixDrafter final : public Drafter {
 public:
  explicit SuffixDrafter(const PolicySettings& settings) : settings_(settings) {}

  void start(SuffixIndex& own, std::span<const Token> prompt, std::size_t begin, std::size_t end) const override;
  std::size_t kept_context() const override { return kOverlap; }
  void draft(DraftRequest request, std::size_t limit, double cost) override;
  void merge_draft(DraftRequest request, const ExternalDraft& external, std::size_t limit, double cost) override;
  void learn(DraftRequest request, std::span<const Token> verified) override;

 private:
  void grow(const DraftRequest& request, const ExternalDraft& external, std::size_t limit, DraftValue& value,
            std::vector<ScoredPosition>& path) const;
  std::size_t learn_path(const DraftRequest& request, std::span<const Token> verified) const;

  PolicySettings settings_;
  Draft merged_;  // work space of merge_draft(), kept so that its memory is reused
};

}  // namespace agentspec
