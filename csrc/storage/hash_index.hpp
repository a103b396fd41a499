#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "storage/buffer.hpp"

namespace agentspec {

// Finds numbered items by a 64-bit hash that each of them has. It holds the numbers alone: callers pass
// `hash_of(number)`, which returns std::nullopt for an item that is not to be found. Several may have the same hash.
//
// The table has open addresses. When it grows, each insertion moves some of the numbers, so that no call takes long.
class HashIndex {
 public:
  using Number = std::uint32_t;  // may wrap around; the last number is never found

  // Returns one of the items with this hash that `fits(number)`.
  template <class HashOf, class Fits>
  std::optional<Number> find(std::uint64_t hash, HashOf hash_of, Fits fits) const {
    if (table_.slots.empty()) return std::nullopt;
    for (std::size_t slot = table_.home(hash); table_.slots[slot] != 0; slot = table_.behind(slot)) {
      const Number number = table_.slots[slot] - 1;
      if (hash_of(number) == hash && fits(number)) return number;
    }
    return std::nullopt;
  }

  // Makes room for the item that comes next, whose number is the highest so far: call it in front of put(), before the
  // item is there, because it may throw. `oldest`: the lowest number of an item that is still there.
  template <class HashOf>
  void make_room(Number number, Number oldest, HashOf hash_of) {
    if (!larger_ && 2 * (table_.used + 1) > table_.slots.size()) grow(number, oldest);
    if (larger_) move_some(oldest, hash_of);
  }
  void put(Number number, std::uint64_t hash) {
    table_.put(number, hash);
    if (larger_) larger_->table.put(number, hash);
  }

  // Removes an item, whose hash must still be known.
  template <class HashOf>
  void erase(Number number, HashOf hash_of) {
    table_.erase(number, hash_of);
    if (larger_) larger_->table.erase(number, hash_of);
  }

  std::size_t bytes() const {
    return table_.slots.bytes() + (larger_ ? heap_bytes(sizeof *larger_) + larger_->table.slots.bytes() : 0);
  }

 private:
  static constexpr std::size_t kLeast = 16;     // slots
  static constexpr std::size_t kLeastStep = 8;  // fewest numbers that an insertion moves while the table grows

  struct Table {
    Buffer<Number> slots;  // number + 1; 0: empty
    std::size_t used = 0;

    std::size_t home(std::uint64_t hash) const {
      return static_cast<std::size_t>(hash * 0x9E3779B97F4A7C15u >> (65 - std::bit_width(slots.size())));
    }
    std::size_t behind(std::size_t slot) const { return (slot + 1) & (slots.size() - 1); }

    void put(Number number, std::uint64_t hash) {
      if (number + 1 == 0) return;
      std::size_t slot = home(hash);
      while (slots[slot] != 0) slot = behind(slot);
      slots[slot] = number + 1;
      ++used;
    }

    template <class HashOf>
    void erase(Number number, HashOf hash_of) {
      const std::optional<std::uint64_t> hash = hash_of(number);
      if (!hash || slots.empty() || number + 1 == 0) return;
      std::size_t hole = home(*hash);
      while (slots[hole] != number + 1) {
        if (slots[hole] == 0) return;
        hole = behind(hole);
      }
      // The numbers behind it that would no longer be found move up.
      for (std::size_t slot = behind(hole); slots[slot] != 0; slot = behind(slot)) {
        const std::size_t from = home(hash_of(slots[slot] - 1).value_or(0)), last = slots.size() - 1;
        if (((slot - from) & last) < ((slot - hole) & last)) continue;
        slots[hole] = slots[slot];
        hole = slot;
      }
      slots[hole] = 0;
      --used;
    }
  };

  // The table that replaces the present one when the numbers [next, end) are in it, too.
  struct Larger {
    Table table;
    Number next, end;
    std::size_t step;  // numbers that an insertion moves
  };

  // Begins to grow. The table is half full, and all numbers are moved before it is three quarters full.
  void grow(Number number, Number oldest) {
    const std::size_t size = table_.slots.size(), room = size / 4 + 1;
    const std::size_t step = kLeastStep + static_cast<Number>(number - oldest) / room;
    Buffer<Number> slots = Buffer<Number>::zeroed(std::max(kLeast, 2 * size));
    larger_ = std::make_unique<Larger>(Larger{{std::move(slots)}, oldest, number, step});
  }

  template <class HashOf>
  void move_some(Number oldest, HashOf hash_of) {
    Larger& to = *larger_;
    if (to.end - oldest < to.end - to.next) to.next = oldest;  // those in front have been removed
    for (std::size_t left = to.step; left > 0 && to.next != to.end; --left) {
      const Number number = to.next++;
      if (const std::optional<std::uint64_t> hash = hash_of(number)) to.table.put(number, *hash);
    }
    if (to.next != to.end) return;
    table_ = std::move(to.table);
    larger_.reset();
  }

  Table table_;
  std::unique_ptr<Larger> larger_;  // while the table grows
};

}  // namespace agentspec
