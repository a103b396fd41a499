#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "storage/buffer.hpp"

namespace agentspec {

inline constexpr std::size_t kFeatures = 11;  // hashed features of a candidate

// Slots of a candidate's features, kept until the candidate is learned from.
using FeatureSlots = std::array<std::uint32_t, kFeatures>;

// Corrects the acceptance table by a logistic regression, learned online, over hashed features that see which tokens
// are proposed. A candidate's log-odds are the table's plus its features' weights. AdaGrad sets the rates. A weight and
// its squared errors lie side by side, so that a feature costs one cache line.
//
// There are 2^bits weights. While few were learned, a hash table holds only these; later an array holds all.
class Reranker {
 public:
  static constexpr std::size_t kBytesPerWeight = 8;

  explicit Reranker(unsigned bits) : shift_(64 - bits) { static_assert(sizeof(Weight) == kBytesPerWeight); }

  std::uint32_t slot(std::uint64_t key) const {
    return static_cast<std::uint32_t>((key * 0xD6E8FEB86659FD93u) >> shift_);
  }
  void prefetch(std::uint32_t slot) const {
    if (dense()) {
      __builtin_prefetch(&all_[slot]);
    } else if (!some_.empty()) {
      __builtin_prefetch(&some_[home(slot)]);
    }
  }

  double correction(const FeatureSlots& features) const {
    double sum = 0;
    for (const std::uint32_t slot : features) {
      if (const Weight* const weight = find(slot)) sum += weight->value;
    }
    return sum;
  }

  void learn(const FeatureSlots& features, double error, double rate) {
    constexpr double kCalm = 2;  // keeps the first steps of a weight short
    for (const std::uint32_t slot : features) {
      Weight& weight = make(slot);
      weight.squares = static_cast<float>(weight.squares + error * error);
      weight.value = static_cast<float>(weight.value + rate * error / std::sqrt(weight.squares + kCalm));
    }
  }

  std::size_t bytes() const { return some_.bytes() + all_.bytes(); }  // in memory, beside the object itself

  // Saves or loads the weights. Drops those of the file if their number differs, as under another budget.
  template <class Archive>
  void describe(Archive& archive) {
    std::uint64_t size = this->size(), dense = this->dense();
    archive.number(size);
    archive.number(dense);
    if constexpr (Archive::kLoading) {
      Buffer<Weight> all;
      Buffer<Entry> some;
      dense ? archive.array(all) : archive.array(some);
      if (size != this->size()) return;
      bool sound = !dense || all.size() == size;
      for (std::size_t i = 0; sound && i < all.size(); ++i) sound = all[i].sound();
      for (std::size_t i = 0; sound && i < some.size(); ++i) {
        sound = some[i].slot <= size && some[i].weight.sound();
        if (sound && some[i].slot > 0) make(some[i].slot - 1) = some[i].weight;
      }
      if (!sound) archive.damaged("weights of a reranker");
      if (dense) all_ = std::move(all);
    } else {
      dense ? archive.array(all_) : archive.array(some_);
    }
  }

 private:
  struct Weight {
    float value, squares;

    bool sound() const { return std::isfinite(value) && squares >= 0; }
  };
  struct Entry {
    std::uint32_t slot;  // from 1 on; 0: free
    Weight weight;
  };

  std::size_t size() const { return std::size_t{1} << (64 - shift_); }
  bool dense() const { return !all_.empty(); }
  std::size_t home(std::uint32_t slot) const { return slot * 0x9E3779B1u & (some_.size() - 1); }

  // Returns the entry of a slot, or the free one where it belongs. There is always a free one.
  std::size_t probe(std::uint32_t slot) const {
    std::size_t at = home(slot);
    while (some_[at].slot != 0 && some_[at].slot != slot + 1) at = (at + 1) & (some_.size() - 1);
    return at;
  }

  const Weight* find(std::uint32_t slot) const {
    if (dense()) return &all_[slot];
    if (some_.empty()) return nullptr;
    const Entry& entry = some_[probe(slot)];
    return entry.slot != 0 ? &entry.weight : nullptr;
  }

  Weight& make(std::uint32_t slot) {
    if (!dense()) {
      if (!some_.empty()) {
        Entry& entry = some_[probe(slot)];
        if (entry.slot != 0) return entry.weight;
      }
      if (4 * (count_ + 1) > 3 * some_.size()) grow();
    }
    if (dense()) return all_[slot];
    Entry& entry = some_[probe(slot)];
    entry.slot = slot + 1;
    ++count_;
    return entry.weight;
  }

  // Doubles the hash table, or switches to an array of all weights if that takes hardly more.
  void grow() {
    constexpr std::size_t kFewest = 16, kPays = 4;
    const Buffer<Entry> before = std::exchange(some_, {});
    const std::size_t slots = std::max(2 * before.size(), kFewest);
    if (kPays * slots > size()) {
      all_.resize(size());
      std::memset(static_cast<void*>(all_.data()), 0, size() * sizeof(Weight));
    } else {
      some_.resize(slots);
      std::memset(static_cast<void*>(some_.data()), 0, slots * sizeof(Entry));
    }
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (before[i].slot == 0) continue;
      if (dense()) {
        all_[before[i].slot - 1] = before[i].weight;
      } else {
        some_[probe(before[i].slot - 1)] = before[i];
      }
    }
  }

  unsigned shift_;
  std::size_t count_ = 0;  // entries in `some_` that are not free
  Buffer<Entry> some_;     // open addressing; empty if nothing was learned or all_ is in use
  Buffer<Weight> all_;     // empty while some_ is in use
};

}  // namespace agentspec
