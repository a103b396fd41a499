#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "storage/buffer.hpp"

namespace agentspec {

// Counts how often proposals were accepted: by kind, match length, agreement among the occurrences, rank of the
// successor and depth. Priors outweigh the counts until there are enough. A row of cells takes memory only once one of
// its cells was counted in, so a table that learned little is small.
class AcceptanceTable {
 public:
  using Cell = std::uint32_t;
  static constexpr std::size_t kKinds = 8;       // kinds of proposals: one for each source, and the resume point's
  static constexpr std::size_t kResumeKind = 4;  // sources from this number on have the kinds behind it

  AcceptanceTable(double prior_weight, double memory);

  // Returns the cell of a token that follows `winner` of `count` occurrences. `second`: another token follows more of
  // them. `length`, `depth`: tokens of the match, and tokens drafted before this one.
  static Cell cell(std::size_t kind, std::size_t length, std::size_t count, std::size_t winner, bool second,
                   std::size_t depth);
  static std::size_t length_bucket(std::size_t length);  // 0 to 8

  double probability(Cell cell) const {
    const Tally tally = at(cell);
    return tally.hits / tally.total;
  }
  double log_odds(Cell cell) const;
  void learn(Cell cell, bool hit);
  std::size_t bytes() const;  // in memory, beside the object itself

  // Saves or loads the counts, row by row.
  template <class Archive>
  void describe(Archive& archive) {
    std::vector<std::uint64_t> numbers = row_numbers();
    archive.vector(numbers);
    if constexpr (Archive::kLoading) {
      if (!make_rows(numbers)) archive.damaged("rows of an acceptance table");
    }
    archive.vector(rows_);
    if constexpr (Archive::kLoading) {
      if (rows_.size() != numbers.size() || !sound()) archive.damaged("counts of an acceptance table");
    }
  }

 private:
  static constexpr std::size_t kCells = 6;   // in a row: ranks times depths
  static constexpr std::size_t kRows = 864;  // kinds times lengths times shapes

  struct Tally {
    double hits, total;
  };
  using Row = std::array<Tally, kCells>;

  Tally at(Cell cell) const;
  Row& row_of(std::size_t number);
  std::vector<std::uint64_t> row_numbers() const;
  bool make_rows(const std::vector<std::uint64_t>& numbers);
  bool sound() const;

  // For each row its place in `rows_`, from 1 on; 0: nothing was counted in it. Null until anything was counted.
  std::unique_ptr<std::array<std::uint16_t, kRows>> places_;
  std::vector<Row> rows_;
  double prior_weight_, memory_;
};

}  // namespace agentspec
