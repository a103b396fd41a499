#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

namespace agentspec {

using Token = std::int32_t;
using Position = std::uint32_t;

inline constexpr Token kBoundary = -1;  // between documents; ends every context and matches nothing, not even itself
inline constexpr std::size_t kPad = 8;  // boundaries in front of a text, so that reading backwards needs no limit

// Maps a token that the model reads but cannot say, such as the placeholder of an image, to its form in a text, and
// back. No negative token of a text is drafted.
inline constexpr Token placeholder_of(Token token) { return -2 - token; }

// Tokens of context that are kept in front of a text, so that its first tokens can be matched.
inline constexpr std::size_t kOverlap = 8;

inline std::span<const Token> last_of(std::span<const Token> tokens, std::size_t count) {
  return tokens.last(std::min(tokens.size(), count));
}

// Returns the sort order of a token: the boundary comes first, then tokens by their number.
inline std::uint32_t rank_of(Token token) { return static_cast<std::uint32_t>(token) + 1; }

// Holds the ranks of the last four tokens of a context, so that most comparisons need not read the text. A 0 says that
// the context ends there; the ranks behind it are 0 too.
struct Key {
  std::uint64_t high = 0, low = 0;

  bool operator==(const Key&) const = default;
};
inline constexpr std::uint32_t kKeyTokens = 4;

// Returns the key of the context before `end`. Only `limit` tokens count; `rest` stands for the others.
inline Key key_before(const Token* end, std::size_t limit = kKeyTokens, std::uint32_t rest = 0) {
  std::array<std::uint64_t, kKeyTokens> ranks{rest, rest, rest, rest};
  for (std::size_t k = 0; k < kKeyTokens && k < limit; ++k) {
    ranks[k] = rank_of(*(end - 1 - k));
    if (ranks[k] == 0) {
      std::fill(ranks.begin() + k, ranks.end(), 0);
      break;
    }
  }
  return {ranks[0] << 32 | ranks[1], ranks[2] << 32 | ranks[3]};
}
inline bool operator<(const Key& a, const Key& b) {
  return (a.high < b.high) | ((a.high == b.high) & (a.low < b.low));  // without branches
}
// Counts the tokens that two keys share before they differ or end.
inline std::uint32_t key_common(const Key& a, const Key& b) {
  const std::uint64_t differ = a.high ^ b.high;
  if (differ != 0) return differ >> 32 ? 0 : a.high >> 32 ? 1 : 0;
  if (static_cast<std::uint32_t>(a.high) == 0) return a.high == 0 ? 0 : 1;
  const std::uint64_t behind = a.low ^ b.low;
  if (behind >> 32 || a.low >> 32 == 0) return 2;
  return static_cast<std::uint32_t>(behind) || static_cast<std::uint32_t>(a.low) == 0 ? 3 : 4;
}

// Describes a context to look for: the tokens before `end`, at most `length` of them. Contexts that end at the same
// depth are ordered by position.
struct Query {
  enum class Tie : std::uint8_t {
    kByPosition,  // for a whole context of the index itself
    kFirst,       // sorts in front of all contexts that agree with `length` tokens
    kLast,        // sorts behind them
  };

  const Token* end;
  std::size_t length;
  std::size_t deepest;  // tokens that exist in front of `end`
  Position position;
  Tie tie;
  Key key;

  static constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

  static Query of_position(const Token* text, Position position, std::size_t length = kUnlimited) {
    const Token* end = text + position;
    const Tie tie = length == kUnlimited ? Tie::kByPosition : Tie::kFirst;
    return {end, length, std::min<std::size_t>(length, position), position, tie, key_before(end)};
  }

  static Query of_context(std::span<const Token> context, std::size_t length, Tie tie) {
    const Token* end = context.data() + context.size();
    return {end, length, length, 0, tie, key_before(end, length, tie == Tie::kLast ? 0xFFFFFFFFu : 0)};
  }
};

struct Order {
  bool less;             // the query comes before the entry
  std::uint32_t common;  // tokens that agree
};

// Compares the query with the context of an indexed position; `skip` tokens are known to agree. Never reads in front of
// a text, even if `skip` is wrong, as it can be with a forged snapshot.
inline Order compare(const Query& query, const Token* text, Position position, std::size_t skip) {
  const Token* const a = query.end;
  const Token* const b = text + position;
  if (query.tie == Query::Tie::kByPosition && query.position == position) return {true, 0};
  std::size_t depth = std::min({skip, query.deepest, std::size_t{position}});
  if (depth < query.length) {  // mostly the next token decides
    const Token left = *(a - depth - 1), right = *(b - depth - 1);
    if (left != right) return {rank_of(left) < rank_of(right), static_cast<std::uint32_t>(depth)};
  }
  for (;;) {
    // Skips eight tokens at a time while they are equal and none of them is a boundary.
    while (query.length - depth >= 8) {
      std::uint64_t x[4], y[4];
      std::memcpy(x, a - depth - 8, sizeof x);
      std::memcpy(y, b - depth - 8, sizeof y);
      const std::uint64_t differ = (x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3]);
      if ((differ | ((x[0] | x[1] | x[2] | x[3]) & 0x8000000080000000u)) != 0) break;
      depth += 8;
    }
    for (int k = 0; k < 8; ++k, ++depth) {
      const auto common = static_cast<std::uint32_t>(depth);
      if (depth == query.length) return {query.tie != Query::Tie::kLast, common};
      const Token left = *(a - depth - 1), right = *(b - depth - 1);
      if (left != right) return {rank_of(left) < rank_of(right), common};
      if (left == kBoundary) return {query.position <= position, common};
    }
  }
}

}  // namespace agentspec
