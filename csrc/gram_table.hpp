#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

namespace agentspec {

using Token = std::int32_t;
using Position = std::uint32_t;

inline constexpr Position kNowhere = 0xFFFFFFFFu;

// Newest position after each distinct k-gram, as an open-addressing table.
//
// Keys are not stored: a slot's position says where in the text its gram can be read, so a hit is always verified
// and chains never mix grams. The table doubles at half load; slots move to the new table a few at a time, on the
// inserts that follow, so that no single insert pays for the whole move.
class GramTable {
 public:
  // Position after the newest occurrence of the gram, or kNowhere. `same(position)` compares it with the one sought.
  template <class Same>
  Position find(std::uint32_t hash, Same&& same) const {
    if (const Slot* slot = now_.find(hash, same)) return slot->after - 1;
    if (const Slot* slot = old_.find(hash, same)) return slot->after - 1;
    return kNowhere;
  }

  // Makes `position` the newest one of its gram; returns the one that was newest before, or kNowhere.
  template <class Same>
  Position replace(std::uint32_t hash, Position position, Same&& same) {
    if (2 * (now_.used + 1) > now_.size) grow();
    migrate(4);
    if (Slot* slot = now_.find(hash, same)) return std::exchange(slot->after, position + 1) - 1;
    Position previous = kNowhere;
    if (Slot* slot = old_.find(hash, same)) previous = std::exchange(slot->after, kDead) - 1;
    now_.put(hash, position + 1);
    return previous;
  }

  void prefetch(std::uint32_t hash) const {
    if (now_.size) __builtin_prefetch(&now_.slots[hash & (now_.size - 1)]);
  }

  std::size_t bytes() const { return (now_.size + old_.size) * sizeof(Slot); }

 private:
  struct Slot {
    std::uint32_t after;  // position + 1; 0 means empty, so that a fresh zeroed table needs no filling
    std::uint32_t hash;
  };
  static constexpr std::uint32_t kDead = 0xFFFFFFFFu;  // moved away; probing goes on past it

  struct Release {
    void operator()(Slot* slots) const { std::free(slots); }
  };

  struct Slots {
    std::unique_ptr<Slot[], Release> slots;
    std::size_t size = 0;
    std::size_t used = 0;

    template <class Same>
    Slot* find(std::uint32_t hash, Same&& same) const {
      if (size == 0) return nullptr;
      for (std::size_t i = hash & (size - 1);; i = (i + 1) & (size - 1)) {
        Slot& slot = slots[i];
        if (slot.after == 0) return nullptr;
        if (slot.hash == hash && slot.after != kDead && same(slot.after - 1)) return &slot;
      }
    }

    void put(std::uint32_t hash, std::uint32_t after) {
      std::size_t i = hash & (size - 1);
      while (slots[i].after != 0) i = (i + 1) & (size - 1);
      slots[i] = {after, hash};
      ++used;
    }
  };

  void grow() {
    migrate(old_.size);  // never much: moving four slots an insert ends long before the next doubling
    const std::size_t size = now_.size ? 2 * now_.size : 16;
    Slots next;
    // calloc gives untouched zero pages for large tables: allocating them costs no time here.
    next.slots.reset(static_cast<Slot*>(std::calloc(size, sizeof(Slot))));
    if (!next.slots) throw std::bad_alloc();
    next.size = size;
    old_ = std::exchange(now_, std::move(next));
    moved_ = 0;
  }

  void migrate(std::size_t count) {
    if (old_.size == 0) return;
    for (; count > 0 && moved_ < old_.size; --count, ++moved_) {
      Slot& slot = old_.slots[moved_];
      if (slot.after == 0 || slot.after == kDead) continue;
      now_.put(slot.hash, slot.after);
      slot.after = kDead;
    }
    if (moved_ == old_.size) old_ = Slots{};
  }

  Slots now_, old_;
  std::size_t moved_ = 0;
};

}  // namespace agentspec
