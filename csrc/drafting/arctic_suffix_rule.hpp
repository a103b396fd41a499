#pragma once

#include <cstddef>
#include <span>

#include "drafting/drafter.hpp"

namespace agentspec {

// ArcticInference's rule for drafts, here to compare with. From every length of context that occurred before, the most
// frequent successors are followed while the draft is likely enough; of all these drafts, from the request's own text
// and from the responses of all, the one with the largest sum of probabilities is taken.
//
// `context` is the request's whole text, whose response begins at `begin`. Of `sources` only request and global are
// used. tests/oracle/fixed_rule.py specifies the answers.
void draft_fixed(const FixedSettings& settings, const Sources& sources, std::span<const Token> context,
                 std::size_t begin, std::size_t room, DraftPath& result);

}  // namespace agentspec
