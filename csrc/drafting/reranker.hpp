#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

namespace agentspec {

inline constexpr std::size_t kFeatures = 11;  // hashed features of a candidate

// Slots of a candidate's features, kept until the candidate is learned from.
using FeatureSlots = std::array<std::uint32_t, kFeatures>;

// Online logistic regression over hashed features: a candidate's log-odds are the table's plus its features' weights.
// AdaGrad; a weight and its squared errors lie side by side, so that a feature costs one cache line.
class Reranker {
 public:
  explicit Reranker(unsigned bits);  // 2^bits slots, all zero: memory is touched only where something was learned

  std::uint32_t slot(std::uint64_t key) const {
    return static_cast<std::uint32_t>((key * 0xD6E8FEB86659FD93u) >> shift_);
  }
  void prefetch(std::uint32_t slot) const { __builtin_prefetch(&weights_[slot]); }
  double correction(const FeatureSlots& features) const;  // sum of the weights
  void learn(const FeatureSlots& features, double error, double rate);

  std::size_t slots() const { return std::size_t{1} << (64 - shift_); }
  std::span<const std::byte> bytes() const;
  bool load(std::span<const std::byte> bytes);  // false, and nothing changed, where the size is another

 private:
  struct Weight {
    float value, squares;
  };
  struct Free {
    void operator()(Weight* weights) const { std::free(weights); }
  };

  unsigned shift_;
  std::unique_ptr<Weight[], Free> weights_;
};

// Well-mixed key of two numbers.
inline std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = (a ^ b * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
  return z ^ z >> 32;
}

}  // namespace agentspec
