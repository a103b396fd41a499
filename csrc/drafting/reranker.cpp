#include "drafting/reranker.hpp"

#include <cmath>
#include <cstring>
#include <new>

namespace agentspec {
namespace {

constexpr double kCalm = 2;  // keeps the first steps of a weight short

}  // namespace

Reranker::Reranker(unsigned bits) : shift_(64 - bits) {
  // calloc gives untouched zero pages for large sizes: allocating them costs no time here.
  weights_.reset(static_cast<Weight*>(std::calloc(slots(), sizeof(Weight))));
  if (!weights_) throw std::bad_alloc();
}

double Reranker::correction(const FeatureSlots& features) const {
  double sum = 0;
  for (const std::uint32_t slot : features) sum += weights_[slot].value;
  return sum;
}

void Reranker::learn(const FeatureSlots& features, double error, double rate) {
  for (const std::uint32_t slot : features) {
    Weight& weight = weights_[slot];
    weight.squares = static_cast<float>(weight.squares + error * error);
    weight.value = static_cast<float>(weight.value + rate * error / std::sqrt(weight.squares + kCalm));
  }
}

std::span<const std::byte> Reranker::bytes() const { return std::as_bytes(std::span(weights_.get(), slots())); }

bool Reranker::load(std::span<const std::byte> bytes) {
  if (bytes.size() != slots() * sizeof(Weight)) return false;
  std::memcpy(weights_.get(), bytes.data(), bytes.size());
  return true;
}

}  // namespace agentspec
