// Copies drafts from the places where a context occurred, for ArcticSuffixRule, which compares them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "drafting/draft.hpp"

namespace agentspec {

inline constexpr std::size_t kPlaces = 2 * kWindow;  // most places that a source and the running response list

// Lists the places that a draft is copied from, oldest first.
struct Places {
  std::array<const Token*, kPlaces> at;
  std::size_t size = 0;

  void add(const Token* place) { at[size++] = place; }
};

// Holds the successors of a text, most frequent first, in ArcticInference's order. A token whose count rises passes the
// tokens ahead of it that had the same count or, if there are none, those whose count it reaches.
class Successors {
 public:
  void add(Token token) {
    std::size_t at = 0;
    while (at < size_ && tokens_[at] != token) ++at;
    if (at == size_) {
      tokens_[size_] = token;
      counts_[size_++] = 1;
      return;
    }
    const std::uint32_t count = counts_[at] + 1;
    std::size_t to = at;
    if (at > 0 && counts_[at - 1] <= count) {
      const std::uint32_t level = counts_[at - 1];
      while (to > 0 && counts_[to - 1] == level) --to;
    }
    for (; at > to; --at) {
      tokens_[at] = tokens_[at - 1];
      counts_[at] = counts_[at - 1];
    }
    tokens_[to] = token;
    counts_[to] = count;
  }

  Token first() const { return tokens_[0]; }

 private:
  std::array<Token, kPlaces> tokens_;
  std::array<std::uint32_t, kPlaces> counts_;
  std::size_t size_ = 0;
};

// Copies a draft from places, as long as enough of them agree.
class CopiedDraft {
 public:
  struct Step {
    Token token;
    double probability;    // given that the draft before it is right
    std::uint32_t places;  // listed places that have this token next
  };

  // `ends`: the ends of the texts that the places are in; null for none.
  CopiedDraft(double min_token_prob, std::array<const Token*, 2> ends) : min_token_prob_(min_token_prob), ends_(ends) {}

  // Copies at most `limit` tokens while likely enough. The places stand for `count` of a context's `whole` occurrences.
  void grow(const Places& from, std::uint32_t count, double whole, std::size_t limit) {
    const Origin origin{from, count, whole, limit};
    if (origin == origin_) return;  // a longer context mostly has the same occurrences
    origin_ = origin;
    size_ = 0;
    score_ = 0;
    Places places = from;
    const double weight = static_cast<double>(count) / static_cast<double>(places.size);
    double so_far = 1;
    while (size_ < limit && keep_most_frequent(places)) {
      const double kept = weight * static_cast<double>(places.size);
      const double probability = kept / whole;
      so_far *= probability;
      if (so_far < min_token_prob_) return;
      whole = kept;
      push(places, probability, so_far);
      while (size_ < limit && alike(places)) push(places, 1, so_far);
    }
  }

  std::span<const Step> steps() const { return {steps_.data(), size_}; }
  std::size_t size() const { return size_; }
  double score() const { return score_; }  // sum of the probabilities that each token is reached and right

 private:
  struct Origin {
    std::size_t places = 0;
    std::uintptr_t sum = 0;  // checksum of the places, because other places may be as many
    std::uint32_t count = 0;
    double whole = 0;
    std::size_t limit = 0;

    Origin() = default;
    Origin(const Places& from, std::uint32_t count, double whole, std::size_t limit)
        : places(from.size), count(count), whole(whole), limit(limit) {
      for (std::size_t k = 0; k < from.size; ++k) sum += reinterpret_cast<std::uintptr_t>(from.at[k]) * (k + 1);
    }
    bool operator==(const Origin&) const = default;
  };

  bool at_end(const Token* at) const { return at == ends_[0] || at == ends_[1]; }

  // Appends the next token, which all places have.
  void push(Places& places, double probability, double so_far) {
    steps_[size_++] = {*places.at[0], probability, static_cast<std::uint32_t>(places.size)};
    score_ += so_far;
    for (std::size_t k = 0; k < places.size; ++k) ++places.at[k];
  }

  // Returns whether all places go on with the same token.
  bool alike(const Places& places) const {
    if (at_end(places.at[0]) || *places.at[0] < 0) return false;
    for (std::size_t k = 1; k < places.size; ++k) {
      if (at_end(places.at[k]) || *places.at[k] != *places.at[0]) return false;
    }
    return true;
  }

  // Keeps the places with the most frequent next token; false if there is none.
  bool keep_most_frequent(Places& places) const {
    std::size_t kept = 0;
    bool same = true;
    for (std::size_t k = 0; k < places.size; ++k) {
      const Token* at = places.at[k];
      if (at_end(at) || *at < 0) continue;
      places.at[kept++] = at;
      same = same && *at == *places.at[0];
    }
    places.size = kept;
    if (same) return kept > 0;
    Successors successors;
    for (std::size_t k = 0; k < kept; ++k) successors.add(*places.at[k]);
    places.size = 0;
    for (std::size_t k = 0; k < kept; ++k) {
      if (*places.at[k] == successors.first()) places.add(places.at[k]);
    }
    return true;
  }

  double min_token_prob_;
  std::array<const Token*, 2> ends_;
  Origin origin_;
  std::array<Step, kMaxDraft> steps_;
  std::size_t size_ = 0;
  double score_ = 0;
};

}  // namespace agentspec
