#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "gram_table.hpp"

namespace agentspec {

inline constexpr Token kBoundary = -1;                                  // between documents; matches nothing
inline constexpr std::array<std::size_t, 7> kLevels{32, 16, 8, 4, 3, 2, 1};  // context lengths with a chain each
inline constexpr std::size_t kLongest = kLevels.front();
inline constexpr std::size_t kWindow = 32;                              // newest occurrences that a look-up considers
inline constexpr std::size_t kCap = 256;                                // match lengths are counted up to here

// Where the end of a context occurred before: the positions of the tokens that followed it, newest first.
struct Match {
  std::size_t length = 0;
  std::size_t count = 0;
  std::array<Position, kWindow> positions;

  void clear() { length = count = 0; }
};

// An append-only token log and, for every context length of kLevels, chains of the positions with equal context.
//
// Appending is a copy; positions become findable when `advance` reaches them, so a long prompt can be indexed over
// several steps. agentspec/cache/reference.py specifies the answers.
class TextIndex {
 public:
  // Appends tokens; with `findable` false they are context only and never proposed by a look-up.
  void append(std::span<const Token> tokens, bool findable = true);
  void append_boundary();

  // Indexes at most `budget` pending positions; returns how many.
  std::size_t advance(std::size_t budget);

  // Longest match of the context (its last kCap tokens suffice) among indexed positions; clear() if there is none.
  void look_up(std::span<const Token> context, Match& match) const;

  // Moves the positions of `match` that were followed by `token` one on, and drops the others.
  void follow(Token token, Match& match) const;

  Token at(Position position) const { return text_[position]; }
  std::span<const Token> text() const { return text_; }
  std::size_t size() const { return text_.size(); }
  std::size_t pending() const { return pending_; }
  std::size_t bytes() const;

 private:
  struct Range {
    Position begin, end;
  };
  struct Level {
    GramTable newest;
    std::vector<Position> previous;  // by position - base_
  };

  void insert(Position begin, Position count);

  std::vector<Token> text_;
  std::deque<Range> ranges_;  // findable positions still to be indexed
  std::size_t pending_ = 0;
  Position base_ = 0;  // first position that is indexed: a request need not pay for what its session holds
  std::array<Level, kLevels.size()> levels_;
};

}  // namespace agentspec
