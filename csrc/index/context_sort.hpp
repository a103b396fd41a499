#pragma once

#include "index/context.hpp"
#include "storage/buffer.hpp"

namespace agentspec {

// Returns the positions of [begin, end) in the order of an index (tests/oracle/index.py), all in one go.
// text[begin - 1] must be a boundary. Takes O(n log n) on average, and O(n log^2 n) where the text is one repeat, of n
// positions. Its memory, up to 32 bytes a position, is given back at the end.
Buffer<Position> sort_contexts(const Token* text, Position begin, Position end);

}  // namespace agentspec
