#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>

namespace agentspec {

inline constexpr std::size_t kFeatures = 11;  // hashed features of a candidate

// Slots of a candidate's features, kept until the candidate is learned from.
using FeatureSlots = std::array<std::uint32_t, kFeatures>;

// Corrects the acceptance table by a logistic regression, learned online, over hashed features that see which tokens
// are proposed. A candidate's log-odds are the table's plus its features' weights. AdaGrad sets the rates. A weight and
// its squared errors lie side by side, so that a feature costs one cache line.
class Reranker {
 public:
  // Makes 2^bits weights. calloc gives untouched zero pages: memory is used only where something was learned.
  explicit Reranker(unsigned bits)
      : shift_(64 - bits), weights_(static_cast<Weight*>(std::calloc(size(), sizeof(Weight)))) {
    if (!weights_) throw std::bad_alloc();
  }

  std::uint32_t slot(std::uint64_t key) const {
    return static_cast<std::uint32_t>((key * 0xD6E8FEB86659FD93u) >> shift_);
  }
  void prefetch(std::uint32_t slot) const { __builtin_prefetch(&weights_[slot]); }

  double correction(const FeatureSlots& features) const {
    double sum = 0;
    for (const std::uint32_t slot : features) sum += weights_[slot].value;
    return sum;
  }

  void learn(const FeatureSlots& features, double error, double rate) {
    constexpr double kCalm = 2;  // keeps the first steps of a weight short
    for (const std::uint32_t slot : features) {
      Weight& weight = weights_[slot];
      weight.squares = static_cast<float>(weight.squares + error * error);
      weight.value = static_cast<float>(weight.value + rate * error / std::sqrt(weight.squares + kCalm));
    }
  }

  template <class Archive>
  void describe(Archive& archive) {
    archive.fixed(std::span(weights_.get(), size()));
  }

 private:
  struct Weight {
    float value, squares;
  };
  struct Free {
    void operator()(Weight* weights) const { std::free(weights); }
  };

  std::size_t size() const { return std::size_t{1} << (64 - shift_); }

  unsigned shift_;
  std::unique_ptr<Weight[], Free> weights_;
};

// Hashes two numbers.
inline std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = (a ^ b * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
  return z ^ z >> 32;
}

}  // namespace agentspec
