#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/context_hash.hpp"
#include "cache/entry.hpp"
#include "cache/position_map.hpp"
#include "storage/buffer.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

// Holds what a finished request adds to its session, group and tenant.
struct Turn {
  std::size_t kept = 0;                 // tokens of the context that the session held already
  std::uint64_t parent = 0, block = 0;  // hashes of that context, and of it up to its last block boundary
  std::vector<Token> tokens;            // the rest of the prompt, and the response
  std::size_t prompt_tail = 0;          // how many of them are the prompt's
  std::uint64_t record = 0;             // names the turn in the store; 0: it has no name

  std::span<const Token> response() const { return std::span(tokens).subspan(prompt_tail); }
};

// Names a prefix of a context: its first `length` tokens. In the session's text it ends in front of text[position].
struct Prefix {
  std::size_t length;
  Position position;
};

// Holds the turns of one conversation. They form a tree: each continues the context of another, or begins anew.
//
// The text is a log of documents. A turn that continues the text's end goes on in its document. Any other begins a
// document, behind a boundary and the last tokens of the context that it continues. `places_` finds that context again
// by its hash. A turn whose context isn't here (it was cut off, or comes later) begins a document without such tokens.
class Session final : public CacheEntry {
 public:
  std::string family;  // key of the session whose agent started this one, or an ancestor of that; empty: none is known
  bool final = false;  // the client has ended the session, which is evicted as soon as none of its requests run

  // Returns the longest prefix of a prompt that the session knows; the text of its beginning may be missing. `blocks`
  // holds the prompt's hashes at the block boundaries.
  std::optional<Prefix> find(std::span<const Token> prompt, std::span<const std::uint64_t> blocks) const;
  // Returns how many tokens at the beginning of the context at a place lack their text.
  std::uint32_t missing_at(Position position) const;
  // Returns the last tokens of the context that a turn continues, at most kOverlap.
  std::vector<Token> context_of(const Turn& turn) const;
  // Lets a turn without a parent's hash continue the newest turn, if its `kept` fits. Otherwise the turn stands alone.
  void find_parent(Turn& turn) const;

  bool holds(std::uint64_t record) const { return records_.contains(record); }
  // Appends the part of a turn that is new. Returns whether there was any. `prompt_blocks`: the hashes of the whole
  // prompt, the context included, at its block boundaries, if they are known.
  bool append(const Turn& turn, std::span<const std::uint64_t> prompt_blocks = {});
  // Returns whether it holds the other's records, and as much text: the other may hold turns without a record.
  bool holds_all_of(const Session& other) const;
  // Replaces all that it holds by what `from` holds, and empties `from`. Returns the former index.
  SuffixIndex take_over(Session& from);
  // Forgets all text and turns.
  void clear();
  // Cuts the text to its newest `tokens` tokens, and forgets the places and records of the rest. Returns the former
  // index.
  SuffixIndex trim(std::size_t tokens);

  std::size_t tokens() const override { return text_.size(); }
  std::size_t bytes() const override;
  const SuffixIndex& index() const override { return text_; }
  std::size_t advance(std::size_t budget) override { return text_.advance(budget); }
  void freeze(bool frozen) override { text_.freeze(frozen); }
  SuffixIndex take_index() override { return std::exchange(text_, {}); }

  template <class Archive>
  void describe(Archive& archive) {
    archive.name(family);
    text_.describe(archive);
    archive.array(documents_, true);
    archive.number(newest_.value);
    archive.number(newest_.length);
    places_.describe(archive);
    records_.describe(archive);
    if constexpr (Archive::kLoading) restore(archive);
  }

 private:
  static constexpr Position kNowhere = ~Position{0};

  struct Document {
    ContextHash context;    // the context that it continues
    Position parent;        // where that context ends; kNowhere: its end isn't here
    Position start, begin;  // of its boundary, and of the text that is its own
    std::uint32_t missing;  // tokens at the beginning of the context whose text isn't here
  };

  std::optional<Position> position_of(std::uint64_t hash, std::size_t most_missing = kNowhere) const;
  std::optional<Position> parent_of(const Turn& turn) const;
  bool goes_on_to(ContextHash context, Position position, std::size_t length, std::uint64_t hash) const;
  std::optional<Prefix> longest(ContextHash from, std::optional<Position> position, std::span<const Token> tokens,
                                std::span<const std::uint64_t> blocks, std::size_t most_missing) const;
  std::optional<Prefix> furthest(ContextHash at, std::optional<Position> position, std::span<const Token> tokens,
                                 std::size_t most_missing) const;
  std::span<const Token> before(Position position) const;
  std::vector<std::uint64_t> begin_newest(const Turn& turn, std::span<const std::uint64_t> prompt_blocks);
  Position append_rest(const Turn& turn, const std::optional<Prefix>& known, std::size_t known_of_turn,
                       std::span<const std::uint64_t> blocks);
  void begin_document(const std::optional<Prefix>& prefix, ContextHash context, Token first);
  void set_place(std::uint64_t hash, Position position);
  void restore(SnapshotReader& reader);

  SuffixIndex text_;
  Buffer<Document> documents_;  // in the order of their text
  // Ends of contexts, by hash: at block boundaries, behind the first token of each document, and at turns' ends.
  // kNowhere: a block boundary in front of text that is here, which lies in the part of its block that isn't.
  PositionMap places_;
  PositionMap records_;  // ends of the turns that came from or went to the store
  ContextHash newest_;   // context of the turn that was appended last
};

}  // namespace agentspec
