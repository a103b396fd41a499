// Finds the next item to evict: the one used longest ago, of the owners that hold more than their share.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>

namespace agentspec {

// Orders items of many owners by their last use.
//
// An owner whose weight is less than half of the average is left alone, whatever the others do. The owners' weights are
// compared by powers of two, so finding an item takes the same time however many owners and items there are.
template <class Item>
class FairOrder {
 public:
  // Holds one owner's items, least recently used first.
  struct Line {
    std::map<std::uint64_t, Item*> by_use;
    std::size_t weight = 0;

   private:
    friend class FairOrder;
    // The line's place in `levels_`: the number of bits of `weight`, and the first tick of `by_use`. 0: it has none.
    unsigned level = 0;
    std::uint64_t oldest = 0;
  };

  void add(Line& line, std::uint64_t tick, Item& item) {
    line.by_use[tick] = &item;
    file(line);
  }
  void remove(Line& line, std::uint64_t tick) {
    line.by_use.erase(tick);
    file(line);
  }
  void weigh(Line& line, std::size_t before, std::size_t now) {
    if (before == now) return;
    total_ += now - before;
    weighing_ -= line.weight > 0;
    line.weight += now - before;
    weighing_ += line.weight > 0;
    file(line);
  }

  // Returns the item that was used longest ago among those of heavy owners for which `fits` is true; null: there is
  // none. It is fast only if few items do not fit.
  template <class Fits>
  Item* oldest(Fits fits) const {
    std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
    Item* found = nullptr;
    for (unsigned level = kLevels; level-- > 1 && is_heavy(level);) {
      for (const auto& [oldest, line] : levels_[level]) {
        if (oldest >= best) break;
        for (const auto& [tick, item] : line->by_use) {
          if (tick >= best) break;
          if (!fits(*item)) continue;
          best = tick;
          found = item;
          break;
        }
      }
    }
    return found;
  }

 private:
  static constexpr unsigned kLevels = 64;

  // Returns whether weights of so many bits are at least half of the average.
  bool is_heavy(unsigned level) const { return total_ >> level < weighing_; }

  void file(Line& line) {
    const auto level = static_cast<unsigned>(std::bit_width(line.weight));
    const std::uint64_t oldest = line.by_use.empty() ? 0 : line.by_use.begin()->first;
    if (level == line.level && oldest == line.oldest) return;
    if (line.oldest > 0) levels_[line.level].erase(line.oldest);
    line.level = level;
    line.oldest = oldest;
    if (oldest > 0) levels_[level][oldest] = &line;
  }

  std::array<std::map<std::uint64_t, Line*>, kLevels> levels_;  // the owners by their oldest items
  std::size_t weighing_ = 0, total_ = 0;                        // owners with a weight, and their weights' sum
};

}  // namespace agentspec
