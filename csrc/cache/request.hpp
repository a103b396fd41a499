// Defines a running request: its text, the texts that it drafts from, and its present draft.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/entries.hpp"
#include "drafting/drafter.hpp"

namespace agentspec {

using BySource = std::array<std::int32_t, kQuote + 1>;  // tokens of each source, as users see it

// Counts by source the tokens of a draft that were accepted, and those that were verified.
struct Verified {
  BySource accepted{}, drafted{};
};

// Holds the entries to which a turn is added; null where there is none. A running request is the target of its turn.
struct TurnTarget {
  std::shared_ptr<Session> session;
  std::shared_ptr<Group> group;
  std::shared_ptr<Tenant> tenant;
  bool shared = false;  // it uses its tenant's responses and adds its own
};

inline constexpr std::size_t kAskedSiblings = 8;   // most requests of its group into which a request looks in a step
inline constexpr std::size_t kAskedTokens = 1024;  // tokens of its end that it looks up in all but the present sibling

struct Request : TurnTarget {
  std::shared_ptr<Learned> learned;
  SuffixIndex index;       // the whole text; only the part that the session does not hold is findable
  SuffixIndex prediction;  // the response that the caller expects, behind the end of the prompt; or text that the
                           // response may quote; mostly empty
  bool quotes = false;     // whether `prediction` is text that it may quote
  bool own_group = false;  // its group is the family whose root its session is
  std::size_t prompt_length = 0;
  std::vector<std::uint64_t> blocks;  // hashes of the prompt at its block boundaries, if there is a session
  Request* sibling = nullptr;         // another running request of its group whose text it drafts from
  std::size_t next_asked = 0;         // index in the group's `members` of the request to look into next
  MatchState state;
  Draft draft;
  Size counted;                  // its part of the sums over all that is held
  std::size_t learned_bytes = 0;  // size of `learned` when it was counted last

  // Puts the prompt into the empty index.
  void begin(const Drafter& drafter, std::span<const Token> prompt);
  // Lets it draft from the response that the caller expects, behind the end of `prompt`. If none is expected, lets it
  // draft from text that the response may quote.
  void predict(const Drafter& drafter, std::span<const Token> prompt, std::span<const Token> expected,
               std::span<const Token> quotable);
  // Returns whether the engine's row begins with the text. Compares the last kMaxDraft + 1 tokens: a step adds no more.
  bool goes_on_in(std::span<const Token> row) const;
  // Cuts the text to the beginning that it shares with the engine's row, because the engine took back the rest.
  void rewind(const Drafter& drafter, std::span<const Token> row);
  // Adds verified tokens. Returns how the draft's first `num_verified` tokens, which were verified, fared.
  Verified take(Drafter& drafter, const SuffixIndex* public_corpus, std::span<const Token> tokens,
                std::size_t num_verified);
  // Returns the turn that the request adds to its session, group and tenant when it ends.
  Turn turn(std::optional<std::size_t> output_limit) const;

  // Joins its group's running requests, and leaves them.
  void join();
  void leave();
  // Chooses the sibling whose text has the longest match of this text's end. Looks into the present sibling and, in
  // turn, into others.
  void choose_sibling();
  void forget_sibling();

  Size size() const;
  std::size_t pending() const { return index.pending() + prediction.pending(); }
  // Returns its texts in the order in which they are to be indexed.
  std::array<SuffixIndex*, 2> in_order() {
    return quotes ? std::array{&index, &prediction} : std::array{&prediction, &index};
  }
  void forget_public();
  // Returns the entries that it drafts from and adds to; null where there is none.
  std::array<CacheEntry*, 3> entries() const { return {session.get(), group.get(), tenant.get()}; }
  // Returns the entry whose learned state it uses and adds to; null: it has its own state.
  CacheEntry* teacher() const { return shared ? static_cast<CacheEntry*>(tenant.get()) : session.get(); }
  DraftRequest for_drafter(const SuffixIndex* public_corpus);
  // Returns a candidate's source as users see it: the family of a root counts as the session.
  std::uint8_t source_of(const Candidate& candidate) const {
    if (quotes && candidate.source == kPrediction) return kQuote;
    return own_group && candidate.source == kGroup ? std::uint8_t{kSession} : candidate.source;
  }
};

}  // namespace agentspec
