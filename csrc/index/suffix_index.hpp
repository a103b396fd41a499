#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/context.hpp"
#include "index/sorted_positions.hpp"
#include "storage/buffer.hpp"
#include "storage/queue.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

inline constexpr std::size_t kWindow = 32;  // most occurrences that a match lists
static_assert(kWindow <= PositionTree::kMostPicked);
inline constexpr std::size_t kMarks = 64;   // bits in a word of marks

// Lists where the end of a context occurred before.
struct Match {
  std::uint32_t length = 0;                 // tokens that agree, without limit; 0: none
  std::uint32_t count = 0;                  // number of occurrences, exact
  std::uint32_t listed = 0;                 // occurrences in `positions`: all, or kWindow if there are more
  std::array<Position, kWindow> positions;  // of the tokens that followed: newest first if complete, otherwise
                                            // evenly spaced in the order of their contexts

  bool complete() const { return listed == count; }
  void clear() { length = count = listed = 0; }
};

// Remembers between which positions a context belonged. When the context has become longer, a look-up need not compare
// the tokens again that it shares with them. Valid while nothing is removed from the index.
struct KnownEnd {
  std::size_t length = 0;  // of the context
  Neighbours near;
};

// Holds an append-only token log with its positions sorted by what precedes them.
//
// A position is sorted by its context: text[p-1], text[p-2], ... back to a boundary or the start, without a limit of
// depth. So the occurrences of any text are neighbours, the longest match of a context is next to where it would be
// inserted, and counts are exact. Appending is a copy; positions become findable when `advance` reaches them.
// tests/oracle/index.py specifies the answers.
class SuffixIndex {
 public:
  // Appends tokens. If they are not `findable`, they are context only: no look-up returns them.
  void append(std::span<const Token> tokens, bool findable = true);
  void append_boundary();

  // Indexes at most `budget` pending positions, oldest first. Returns how many. Among repeats of thousands of tokens,
  // which can take a hundred times as long, the clock ends the call early, but not before the first position. If
  // piece(budget) is not 0, the call sorts all positions anew, which takes a third to an eighth of the time.
  std::size_t advance(std::size_t budget);

  // Returns how many pending positions are best indexed at once: all, if at most `most` are pending and make up two
  // thirds of the text; otherwise 0, because then any number is as good.
  std::size_t piece(std::size_t most) const;

  // Finds the longest match of the context among the indexed positions. Clears `match` if there is none. `known`: where
  // an earlier look-up found the beginning of the same context; the call updates it.
  void look_up(std::span<const Token> context, Match& match, KnownEnd* known = nullptr) const;

  // Finds the occurrences of exactly the last `length` tokens of the context. Clears `match` if there are none.
  void look_up(std::span<const Token> context, std::size_t length, Match& match) const;

  // Keeps the occurrences that `token` follows and moves them past it; clears `match` if there are none. Returns false
  // and changes nothing if `match` does not list all occurrences: the caller must look up again. Misses an occurrence
  // whose preceding position is not indexed (at the first findable token of a document).
  bool follow(Token token, Match& match) const;

  // Removes at most `budget` positions of [begin, end), which must be whole documents, from the index, newest first.
  // Overwrites their text with boundaries and moves `end` down to the end of the rest. Pending positions there will
  // never be indexed. Returns how many were removed; fewer than `budget` means that none are left.
  std::size_t remove(Position begin, Position& end, std::size_t budget);

  // Frees the memory of all text before `position`, which must have been removed. Returns the number that the caller
  // must subtract from every position that it keeps: mostly 0. The call moves a small index to the front of its memory
  // if it `may_move` and that pays, and a large one once in billions of tokens, when positions would run out.
  [[nodiscard]] Position release_before(Position position, bool may_move);

  // Forgets everything but the version, which goes on.
  void clear();

  // Replaces this index by `with`, and returns the former one. The version goes on, so that no match of either is valid
  // any more.
  SuffixIndex replace(SuffixIndex with);

  // Gives back up to about `most` bytes of an index that is not used any more. Returns whether all are gone.
  bool dispose(std::size_t most) { return sorted_.tree().dispose(most) && text_.dispose(most) && marks_.dispose(most); }

  Position released() const { return released_; }  // positions in front whose memory was given back
  // Counts the indexed positions of [begin, end).
  std::size_t indexed_in(Position begin, Position end) const;

  // Returns a number that changes whenever indexed positions change. A Match stays valid until then.
  std::uint64_t version() const { return version_; }

  Token at(Position position) const { return text_[kPad + position]; }
  std::span<const Token> text() const { return {text_.data() + (text_.empty() ? 0 : kPad), size()}; }
  std::size_t size() const { return text_.empty() ? 0 : text_.size() - kPad; }
  std::size_t pending() const { return pending_count_; }
  std::size_t indexed() const { return sorted_.tree().size(); }
  std::size_t bytes() const;  // in memory now

  // While an index is frozen, tokens may be appended, but all that describe() saves stays as it is: nothing is indexed.
  // Removing and clearing thaw it.
  void freeze(bool frozen) { frozen_ = frozen; }
  bool frozen() const { return frozen_; }

  // Saves an index, or loads into an empty one.
  template <class Archive>
  void describe(Archive& archive) {
    archive.number(released_);
    archive.array(text_, true);
    archive.array(marks_, true);
    sorted_.tree().describe(archive);
    pending_.describe(archive);
    if constexpr (Archive::kLoading) restore(archive);
  }

 private:
  struct Range {
    Position begin, end;
  };

  // Remembers what spares the next insertion its search. Every change of the indexed positions makes it out of date.
  struct Shortcuts {
    Position behind_last = 0;  // the position behind the one that was indexed last; 0: unknown
    Neighbours beside_last{};  // the neighbours of that one
    Position end = 0;          // the end of the text when a look-up found where it belongs; 0: unknown
    Found found_end{};         // where it belongs
  };

  Neighbours still_near(std::span<const Token> context, const KnownEnd& known) const;
  void remember_end(std::span<const Token> context, const Found& found) const;
  std::size_t sort();
  Neighbours insert_next(Position position);
  void note_indexed(Position begin, Position end, const Neighbours& beside_last);
  bool is_indexed(Position position) const;
  void mark(Position position, bool indexed);
  Position last_indexed(Position begin, Position end) const;
  void forget_pending(Position begin, Position end);
  void list(const Extent& extent, std::size_t length, Match& match) const;
  void rebase(Position by);
  void restore(SnapshotReader& reader);

  Buffer<Token> text_;           // kPad boundaries, then the log
  Buffer<std::uint64_t> marks_;  // one bit for each position: 1 if it is indexed
  SortedPositions sorted_;
  Queue<Range> pending_;  // findable positions still to be indexed, oldest first
  std::size_t pending_count_ = 0;
  mutable Shortcuts shortcuts_;  // const look-ups set it, but only those of this index's own end
  Position released_ = 0;   // everything before it was removed, and its memory given back
  std::uint64_t version_ = 0;
  bool frozen_ = false;
};

}  // namespace agentspec
