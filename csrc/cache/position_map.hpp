#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "index/context.hpp"
#include "storage/buffer.hpp"
#include "storage/hash_index.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

// Maps hashes to positions of a text, in the order in which the hashes came. So a snapshot can copy the map in slices
// while more come. Entries are not removed.
class PositionMap {
 public:
  struct Entry {
    std::uint64_t hash;
    Position position;
    std::uint32_t unused = 0;
  };

  const Entry* find(std::uint64_t hash) const {
    if (entries_.size() <= kSearched) {
      for (const Entry& entry : entries_) {
        if (entry.hash == hash) return &entry;
      }
      return nullptr;
    }
    const auto any = [](HashIndex::Number) { return true; };
    const auto number = index_.find(hash, [&](HashIndex::Number of) { return hash_of(of); }, any);
    return number ? &entries_[*number] : nullptr;
  }
  bool contains(std::uint64_t hash) const { return find(hash) != nullptr; }
  // Adds an entry. If the hash is there already, returns its position instead, which the caller may change.
  Position* add(std::uint64_t hash, Position position) {
    if (const Entry* const known = find(hash)) return &const_cast<Entry*>(known)->position;
    const auto number = static_cast<HashIndex::Number>(entries_.size());
    const bool indexed = number >= kSearched;
    if (indexed) index_.make_room(number, 0, [&](HashIndex::Number of) { return hash_of(of); });
    entries_.push_back({hash, position});
    if (indexed) index_.put(number, hash);
    return nullptr;
  }

  // Returns a map of those entries whose positions `keep(position)`, with each position lower by `by`.
  template <class Keep>
  PositionMap rest(Keep keep, Position by) const {
    PositionMap rest;
    for (const Entry& entry : entries_) {
      if (keep(entry.position)) rest.add(entry.hash, entry.position - by);
    }
    return rest;
  }

  const Entry* begin() const { return entries_.begin(); }
  const Entry* end() const { return entries_.end(); }
  std::size_t bytes() const { return entries_.bytes() + index_.bytes(); }

  // A position that is changed between the call and the saving of the deferred map may be saved as either.
  template <class Archive>
  void describe(Archive& archive) {
    archive.array(entries_, true);
    if constexpr (Archive::kLoading) {
      Buffer<Entry> all = std::exchange(entries_, {});
      if (all.released() > 0) archive.damaged("a turn's place");
      for (const Entry& entry : all) {
        if (add(entry.hash, entry.position)) archive.damaged("a turn's place");
      }
    }
  }

 private:
  static constexpr std::size_t kSearched = 8;  // most entries that are searched one by one

  std::optional<std::uint64_t> hash_of(HashIndex::Number number) const { return entries_[number].hash; }

  Buffer<Entry> entries_;
  HashIndex index_;  // of `entries_`, if they are more than kSearched
};

}  // namespace agentspec
