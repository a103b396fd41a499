#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "drafting/drafter.hpp"

// The parts of fixed_rule.cpp that know nothing of indexes: how long a draft may be, and how it is copied from places.
namespace agentspec::fixed {

inline constexpr std::size_t kMaxDepth = 256;         // of FixedSettings
inline constexpr std::size_t kPlaces = 2 * kWindow;  // listed by a source and by the running response

// How many tokens may be drafted after each length of context.
class Rooms {
 public:
  Rooms(const FixedSettings& settings, std::size_t context, std::size_t limit) {
    const std::size_t lengths = std::min({settings.max_depth, context, kMaxDepth});
    for (std::size_t length = 1; length < lengths; ++length) {
      const double room = static_cast<double>(length) * settings.max_spec_factor + settings.max_spec_offset + 1e-6;
      const auto most = static_cast<double>(std::min(limit, settings.max_depth - length));
      rooms_[length] = room < 1 ? 0 : static_cast<std::size_t>(std::min(room, most));
    }
    longest_ = lengths == 0 ? 0 : lengths - 1;
  }

  std::size_t longest() const { return longest_; }  // context
  std::size_t operator[](std::size_t length) const { return rooms_[length]; }

  // The longest of the lengths in [low, high] that leave the most room.
  std::size_t widest(std::size_t low, std::size_t high) const {
    std::size_t best = high;
    for (std::size_t length = high; length-- > low;) {
      if (rooms_[length] > rooms_[best]) best = length;
    }
    return best;
  }

  // The longest of them that leaves at least this room; there is one.
  std::size_t longest_with(std::size_t room, std::size_t high) const {
    while (rooms_[high] < room) --high;
    return high;
  }

 private:
  std::array<std::size_t, kMaxDepth> rooms_;
  std::size_t longest_;
};

// Where a draft is copied from, the oldest place first.
struct Places {
  std::array<const Token*, kPlaces> at;
  std::size_t size = 0;

  void add(const Token* place) { at[size++] = place; }
};

// The successors of a text, most frequent first. Which of equals comes first depends on the order in which they came:
// one that draws level with others is put in front of them, unless it leaves equals behind.
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

// A draft, copied from places.
class Growth {
 public:
  struct Step {
    Token token;
    double probability;    // given that the draft before it is right
    std::uint32_t places;  // that have it
  };

  // `ends`: of the texts that the places are in; null where there is none.
  Growth(double min_token_prob, std::array<const Token*, 2> ends) : min_token_prob_(min_token_prob), ends_(ends) {}

  // Grows while `room` and probability last. The places stand for `count` of the `whole` occurrences of a context.
  void grow(const Places& from, std::uint32_t count, double whole, std::size_t room) {
    const Origin origin{from, count, whole, room};
    if (origin == origin_) return;  // mostly, a longer context has the same occurrences
    origin_ = origin;
    size_ = 0;
    score_ = 0;
    Places places = from;
    const double weight = static_cast<double>(count) / static_cast<double>(places.size);
    double chance = 1;
    while (size_ < room && keep_most_frequent(places)) {
      const double kept = weight * static_cast<double>(places.size);
      const double probability = kept / whole;
      chance *= probability;
      if (chance < min_token_prob_) return;
      whole = kept;
      push(places, probability, chance);
      while (size_ < room && alike(places)) push(places, 1, chance);
    }
  }

  std::span<const Step> steps() const { return {steps_.data(), size_}; }
  std::size_t size() const { return size_; }
  double score() const { return score_; }

 private:
  struct Origin {
    std::size_t places = 0;
    std::uintptr_t sum = 0;  // of the places: who has as many may still have others
    std::uint32_t count = 0;
    double whole = 0;
    std::size_t room = 0;

    Origin() = default;
    Origin(const Places& from, std::uint32_t count, double whole, std::size_t room)
        : places(from.size), count(count), whole(whole), room(room) {
      for (std::size_t k = 0; k < from.size; ++k) sum += reinterpret_cast<std::uintptr_t>(from.at[k]) * (k + 1);
    }
    bool operator==(const Origin&) const = default;
  };

  bool at_end(const Token* at) const { return at == ends_[0] || at == ends_[1]; }

  // Takes the next token, which all places have.
  void push(Places& places, double probability, double chance) {
    steps_[size_++] = {*places.at[0], probability, static_cast<std::uint32_t>(places.size)};
    score_ += chance;
    for (std::size_t k = 0; k < places.size; ++k) ++places.at[k];
  }

  // Whether all places go on, and with the same token.
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

}  // namespace agentspec::fixed
