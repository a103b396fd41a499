#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "index/context.hpp"
#include "index/sorted_positions.hpp"
#include "storage/buffer.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

inline constexpr std::size_t kWindow = 32;  // occurrences that a match lists
static_assert(kWindow <= PositionTree::kMostPicked);
inline constexpr std::size_t kMarks = 64;   // bits in a word of marks

// Where the end of a context occurred before.
struct Match {
  std::uint32_t length = 0;                 // tokens that agree, without limit; 0: none
  std::uint32_t count = 0;                  // number of occurrences, exact
  std::uint32_t listed = 0;                 // how many of them are in `positions`: all, or kWindow where there are more
  std::array<Position, kWindow> positions;  // of the tokens that followed: newest first when complete, otherwise
                                            // evenly spaced in the order of their contexts

  bool complete() const { return listed == count; }
  void clear() { length = count = listed = 0; }
};

// An append-only token log and all its positions sorted by what precedes them.
//
// A position is sorted by its context: text[p-1], text[p-2], ... back to a boundary or the start, without a limit of
// depth. So the occurrences of any text are neighbours, the longest match of a context is next to where it would be
// inserted, and counts are exact. Appending is a copy; positions become findable when `advance` reaches them.
// tests/oracle/index.py specifies the answers.
class SuffixIndex {
 public:
  // Appends tokens; with `findable` false they are context only and never a look-up's answer.
  void append(std::span<const Token> tokens, bool findable = true);
  void append_boundary();

  // Indexes at most `budget` pending positions, oldest first; returns how many. Among repeats of thousands of tokens a
  // position can take a hundred times as long as elsewhere: there it ends early by the clock, but never without any.
  std::size_t advance(std::size_t budget);

  // Longest match of the context among the indexed positions; clear() if there is none.
  void look_up(std::span<const Token> context, Match& match) const;

  // The occurrences of exactly the last `length` tokens of the context; clear() if there are none.
  void look_up(std::span<const Token> context, std::size_t length, Match& match) const;

  // Moves on to the indexed positions behind those of `match` that were followed by `token`; clear() if there are none.
  // False, and `match` as it was, where not all occurrences are listed: the caller looks up again.
  // An occurrence whose own preceding position is not indexed (the first findable token of a document) is not reached.
  bool follow(Token token, Match& match) const;

  // Un-indexes positions of [begin, end), which must be whole documents, newest first and at most `budget` of them,
  // and overwrites their text with boundaries; returns how many. Fewer than `budget`: all is done. `end` moves down to
  // the end of what is left. What is pending there will never be indexed.
  std::size_t remove(Position begin, Position& end, std::size_t budget);

  // Gives back the memory of everything before `position`, all of which was removed. Returns what the caller has to
  // subtract from every position it keeps: 0 but once in billions of tokens, when positions are about to run out.
  [[nodiscard]] Position release_before(Position position);

  // Forgets everything; the version goes on.
  void clear();

  // Changes whenever indexed positions change, so that a kept Match can be trusted.
  std::uint64_t version() const { return version_; }

  Token at(Position position) const { return text_[kPad + position]; }
  std::span<const Token> text() const { return {text_.data() + (text_.empty() ? 0 : kPad), size()}; }
  std::size_t size() const { return text_.empty() ? 0 : text_.size() - kPad; }
  std::size_t pending() const { return pending_count_; }
  std::size_t indexed() const { return sorted_.tree().size(); }
  std::size_t bytes() const;  // memory held, in bytes

  // Needs pending() == 0 to be saved. Loading, into an empty index, maps large parts privately: they are copied where
  // they are written to.
  template <class Archive>
  void describe(Archive& archive) {
    archive.number(released_);
    archive.array(text_);
    archive.array(marks_);
    sorted_.tree().describe(archive);
    if constexpr (Archive::kLoading) restore(archive);
  }

 private:
  struct Range {
    Position begin, end;
  };

  void insert_next(Position position);
  bool is_indexed(Position position) const;
  void mark(Position position, bool indexed);
  Position last_indexed(Position begin, Position end) const;
  void forget_pending(Position begin, Position end);
  void list(const Extent& extent, std::size_t length, Match& match) const;
  void rebase(Position by);
  void restore(SnapshotReader& reader);

  Buffer<Token> text_;           // kPad boundaries, then the log
  Buffer<std::uint64_t> marks_;  // one bit a position: indexed
  SortedPositions sorted_;
  std::deque<Range> pending_;  // findable positions still to be indexed, oldest first
  std::size_t pending_count_ = 0;
  Neighbours last_;         // of the position that was indexed last
  Position next_ = 0;       // the position behind that one; 0: unknown
  Position released_ = 0;   // everything before it was removed, and its memory given back
  std::uint64_t version_ = 0;
};

}  // namespace agentspec
