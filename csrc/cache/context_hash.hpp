#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/context.hpp"

namespace agentspec {

inline constexpr std::size_t kBlock = 64;  // tokens between two boundaries

// Names a context, which is all text of a conversation up to some token, by a 64-bit number. A hash can be continued
// at any length, so a turn can be placed by the hash and the length of its context. 0 names the empty context.
//
// Within a block the value is a sum of products, which is quick to compute. At each boundary it is mixed.
struct ContextHash {
  std::uint64_t value = 0;
  std::size_t length = 0;  // tokens of the context

  void add(Token token);
  // Adds tokens. Appends the value at each boundary on the way to `blocks`.
  void add(std::span<const Token> tokens, std::vector<std::uint64_t>& blocks);

 private:
  static std::uint64_t number_of(Token token) {
    return std::uint64_t{static_cast<std::uint32_t>(token < kBoundary ? placeholder_of(token) : token)} + 1;
  }
  static constexpr std::uint64_t mix(std::uint64_t value) {  // SplitMix64's
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
  }
  static constexpr std::array<std::uint64_t, kBlock> factors() {
    std::array<std::uint64_t, kBlock> factors{};
    for (std::size_t i = 0; i < kBlock; ++i) factors[i] = mix((i + 1) * 0x9E3779B97F4A7C15u) | 1;
    return factors;
  }
  static const std::array<std::uint64_t, kBlock> kFactors;
};

inline constexpr std::array<std::uint64_t, kBlock> ContextHash::kFactors = ContextHash::factors();

inline void ContextHash::add(Token token) {
  value += number_of(token) * kFactors[length % kBlock];
  if (++length % kBlock == 0) value = mix(value);
}

inline void ContextHash::add(std::span<const Token> tokens, std::vector<std::uint64_t>& blocks) {
  while (!tokens.empty()) {
    const std::size_t at = length % kBlock, count = std::min(tokens.size(), kBlock - at);
    for (std::size_t i = 0; i < count; ++i) value += number_of(tokens[i]) * kFactors[at + i];
    length += count;
    tokens = tokens.subspan(count);
    if (length % kBlock != 0) break;
    blocks.push_back(value = mix(value));
  }
}

}  // namespace agentspec
