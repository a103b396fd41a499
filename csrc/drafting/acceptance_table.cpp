#include "drafting/acceptance_table.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace agentspec {
namespace {

constexpr std::size_t kLengths = 9, kShapes = 12, kRanks = 2, kDepths = 3;

// Prior log-odds: longer matches and more agreement are likelier to go on.
constexpr std::array<double, kLengths> kPriorLength{-2.2, -1.4, -0.9, -0.4, 0.1, 0.6, 1.0, 1.5, 2.2};
constexpr std::array<double, kShapes> kPriorShape{0.0, -0.8, 0.6, -1.8, -1.0, 0.0, 1.0, -2.2, -1.4, -0.6, 0.6, 1.6};
constexpr double kSecondMinus = 1.0, kResumeMinus = 0.5;

constexpr double kLeast = 1e-6;  // fewest hits and misses that log-odds assume, so that they are finite

std::size_t shape_bucket(std::size_t count, std::size_t winner) {
  if (count == 1) return 0;
  if (count == 2) return winner == 2 ? 2 : 1;
  const std::size_t first = count <= 5 ? 3 : 7;
  if (winner == count) return first + (count <= 5 ? 3 : 4);
  if (count <= 5) return first + (2 * winner < count ? 0 : 4 * winner < 3 * count ? 1 : 2);
  return first + (4 * winner < count ? 0 : 2 * winner < count ? 1 : 4 * winner < 3 * count ? 2 : 3);
}

std::vector<double> make_priors() {
  std::vector<double> priors;
  for (std::size_t kind = 0; kind < AcceptanceTable::kKinds; ++kind) {
    const double kind_minus = kind == AcceptanceTable::kResumeKind ? kResumeMinus : 0;
    for (const double length : kPriorLength) {
      for (const double shape : kPriorShape) {
        for (std::size_t rank = 0; rank < kRanks; ++rank) {
          const double minus = (rank == 1 ? kSecondMinus : 0) + kind_minus;
          priors.insert(priors.end(), kDepths, 1 / (1 + std::exp(minus - (length + shape))));
        }
      }
    }
  }
  return priors;
}

// Returns the prior probability of each cell.
const std::vector<double>& priors() {
  static const std::vector<double> all = make_priors();
  return all;
}

}  // namespace

AcceptanceTable::AcceptanceTable(double prior_weight, double memory) : prior_weight_(prior_weight), memory_(memory) {
  static_assert(kCells == kRanks * kDepths && kRows == kKinds * kLengths * kShapes);
}

AcceptanceTable::Tally AcceptanceTable::at(Cell cell) const {
  if (places_) {
    if (const std::size_t place = (*places_)[cell / kCells]) return rows_[place - 1][cell % kCells];
  }
  return {priors()[cell] * prior_weight_, prior_weight_};
}

// Returns a row to count in. A new one begins with the priors.
AcceptanceTable::Row& AcceptanceTable::row_of(std::size_t number) {
  if (!places_) places_ = std::make_unique<std::array<std::uint16_t, kRows>>();
  std::uint16_t& place = (*places_)[number];
  if (place == 0) {
    if (rows_.size() == rows_.capacity()) rows_.reserve(rows_.size() + rows_.size() / 4 + 4);
    Row& row = rows_.emplace_back();
    for (std::size_t k = 0; k < kCells; ++k) row[k] = {priors()[number * kCells + k] * prior_weight_, prior_weight_};
    place = static_cast<std::uint16_t>(rows_.size());
  }
  return rows_[place - 1];
}

std::size_t AcceptanceTable::bytes() const {
  return heap_bytes(places_ ? sizeof *places_ : 0) + heap_bytes(rows_.capacity() * sizeof(Row));
}

// Returns the numbers of the rows that were counted in, in the order of `rows_`.
std::vector<std::uint64_t> AcceptanceTable::row_numbers() const {
  std::vector<std::uint64_t> numbers(rows_.size());
  for (std::size_t number = 0; places_ && number < kRows; ++number) {
    if (const std::size_t place = (*places_)[number]) numbers[place - 1] = number;
  }
  return numbers;
}

// Replaces all rows by new ones with these numbers. Returns false if a number is too large or there twice.
bool AcceptanceTable::make_rows(const std::vector<std::uint64_t>& numbers) {
  places_.reset();
  rows_.clear();
  for (const std::uint64_t number : numbers) {
    if (number >= kRows || (places_ && (*places_)[number] != 0)) return false;
    row_of(number);
  }
  return true;
}

bool AcceptanceTable::sound() const {
  return std::ranges::all_of(rows_, [](const Row& row) {
    return std::ranges::all_of(row, [](const Tally& t) { return t.hits >= 0 && t.total > 0 && t.hits <= t.total; });
  });
}

std::size_t AcceptanceTable::length_bucket(std::size_t length) {
  constexpr std::array<std::size_t, kLengths - 1> bounds{1, 2, 3, 4, 6, 9, 15, 31};
  std::size_t bucket = 0;
  for (const std::size_t bound : bounds) bucket += length > bound;
  return bucket;
}

AcceptanceTable::Cell AcceptanceTable::cell(std::size_t kind, std::size_t length, std::size_t count,
                                            std::size_t winner, bool second, std::size_t depth) {
  const std::size_t row = (kind * kLengths + length_bucket(length)) * kShapes + shape_bucket(count, winner);
  return static_cast<Cell>((row * kRanks + second) * kDepths + std::min(depth, kDepths - 1));
}

double AcceptanceTable::log_odds(Cell cell) const {
  const Tally tally = at(cell);
  return std::log(std::max(tally.hits, kLeast) / std::max(tally.total - tally.hits, kLeast));
}

void AcceptanceTable::learn(Cell cell, bool hit) {
  Tally& tally = row_of(cell / kCells)[cell % kCells];
  if (tally.total >= memory_) {
    tally.hits *= 0.5;
    tally.total *= 0.5;
  }
  tally.total += 1;
  if (hit) tally.hits += 1;
}

}  // namespace agentspec
