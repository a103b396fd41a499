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

constexpr double kLeast = 1e-6;  // observations assumed at least; keeps the log-odds finite

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
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    for (const double length : kPriorLength) {
      for (const double shape : kPriorShape) {
        for (std::size_t rank = 0; rank < kRanks; ++rank) {
          const double minus = (rank == 1 ? kSecondMinus : 0) + (kind + 1 == kKinds ? kResumeMinus : 0);
          priors.insert(priors.end(), kDepths, 1 / (1 + std::exp(minus - (length + shape))));
        }
      }
    }
  }
  return priors;
}

}  // namespace

AcceptanceTable::AcceptanceTable(double prior_weight, double memory) : memory_(memory) {
  static const std::vector<double> priors = make_priors();
  table_.reserve(priors.size());
  for (const double prior : priors) table_.push_back({prior * prior_weight, prior_weight});
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
  const Tally& tally = table_[cell];
  return std::log(std::max(tally.hits, kLeast) / std::max(tally.total - tally.hits, kLeast));
}

void AcceptanceTable::learn(Cell cell, bool hit) {
  Tally& tally = table_[cell];
  if (tally.total >= memory_) {
    tally.hits *= 0.5;
    tally.total *= 0.5;
  }
  tally.total += 1;
  if (hit) tally.hits += 1;
}

}  // namespace agentspec
