#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "cache/entry.hpp"

namespace agentspec {

// Holds the turns of one conversation as one growing text.
struct Session final : CacheEntry {
  SuffixIndex text;
  std::vector<Token> last;  // full text of the last finished request

  // Appends a finished turn, as a new document if its prompt does not repeat all of `last`.
  void append(std::size_t kept, std::span<const Token> prompt_tail, std::span<const Token> response);
  // Cuts the text to its newest `tokens` tokens, and drops `last` if it is longer than that.
  void trim(std::size_t tokens);

  Size size() const override;
  std::size_t bytes() const override { return text.bytes() + last.capacity() * sizeof(Token); }
  const SuffixIndex& index() const override { return text; }
  std::size_t advance(std::size_t budget) override { return text.advance(budget); }

  template <class Archive>
  void describe(Archive& archive) {
    archive.vector(last);
    text.describe(archive);
  }
};

}  // namespace agentspec
