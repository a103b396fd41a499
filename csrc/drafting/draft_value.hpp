#pragma once

#include <cstddef>

namespace agentspec {

// Drafters multiply the cost by this, because a drafted token is the one of several that looks best, so its probability
// is somewhat overrated.
inline constexpr double kCaution = 1.3;

// Computes the value of a draft as it grows: the tokens that its step is expected to yield, divided by the step's
// price, expected / (1 + cost * length). `expected` includes the token that every step yields, so a step without a
// draft has the value 1.
struct DraftValue {
  double cost;                  // price of verifying one drafted token, as a share of a step
  double best = 1;              // the largest value so far
  std::size_t best_length = 0;  // tokens of the draft that reached it
  std::size_t length = 0;       // tokens so far
  double probability = 1;       // that all of them are accepted
  double expected = 1;          // tokens that the step is expected to yield

  // Adds the next token, which is accepted with this probability if those before it are.
  void add(double next) {
    probability *= next;
    expected += probability;
    ++length;
    if (value() > best) {
      best = value();
      best_length = length;
    }
  }

  double value() const { return expected / (1 + cost * static_cast<double>(length)); }
  // Returns whether a longer draft can still have a higher value.
  bool can_grow() const { return probability >= cost * best; }
};

}  // namespace agentspec
