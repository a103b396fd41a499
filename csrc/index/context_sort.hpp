#pragma once

#include "index/context.hpp"
#include "storage/buffer.hpp"

namespace agentspec {

// Returns the positions of [begin, end) in the order of an index (tests/oracle/index.py). text[begin - 1] must be a
// boundary. For n positions it takes O(n log n) on average, and O(n log^2 n) if the text is one repeat. It needs up to
// 32 bytes a position until it returns.
Buffer<Position> sort_contexts(const Token* text, Position begin, Position end);

}  // namespace agentspec
