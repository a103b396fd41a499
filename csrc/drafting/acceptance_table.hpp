#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace agentspec {

inline constexpr std::size_t kKinds = 5;  // kinds of proposals: one for each source, and the resume point's

// Counts how often proposals were accepted: by kind, match length, agreement among the occurrences, rank of the
// successor and depth. Priors stand in until there is enough to count.
class AcceptanceTable {
 public:
  using Cell = std::uint32_t;

  AcceptanceTable(double prior_weight, double memory);

  // Returns the cell of a token that follows `winner` of `count` occurrences. `second`: another one follows more often.
  static Cell cell(std::size_t kind, std::size_t length, std::size_t count, std::size_t winner, bool second,
                   std::size_t depth);
  static std::size_t length_bucket(std::size_t length);  // 0 to 8

  double probability(Cell cell) const { return table_[cell].hits / table_[cell].total; }
  double log_odds(Cell cell) const;
  void learn(Cell cell, bool hit);

  template <class Archive>
  void describe(Archive& archive) {
    archive.fixed(std::span(table_));
  }

 private:
  struct Tally {
    double hits, total;
  };
  std::vector<Tally> table_;
  double memory_;
};

}  // namespace agentspec
