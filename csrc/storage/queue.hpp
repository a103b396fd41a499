#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "storage/buffer.hpp"
#include "storage/hash_index.hpp"
#include "storage/snapshot.hpp"

namespace agentspec {

// Holds a queue of plain data in one array. Empty queues hold no memory, because there may be many thousands of them.
//
// Each item has a number, which stays the same for as long as nothing is inserted or erased in front of it. Numbers wrap
// around.
template <class T>
class Queue {
 public:
  using Number = HashIndex::Number;

  T* begin() { return items_.begin() + head_; }
  T* end() { return items_.end(); }
  const T* begin() const { return items_.begin() + head_; }
  const T* end() const { return items_.end(); }
  std::size_t size() const { return items_.size() - head_; }
  bool empty() const { return size() == 0; }
  T& front() { return *begin(); }
  const T& front() const { return *begin(); }
  T& back() { return end()[-1]; }
  T& operator[](std::size_t i) { return begin()[i]; }
  const T& operator[](std::size_t i) const { return begin()[i]; }
  std::size_t bytes() const { return items_.bytes(); }

  Number first() const { return base_ + static_cast<Number>(head_); }  // number of the front item
  Number next() const { return base_ + static_cast<Number>(items_.size()); }  // of the item that is pushed next
  // Returns the place of an item. If that is gone, the place is not less than size().
  std::size_t place_of(Number number) const { return static_cast<Number>(number - first()); }

  void push_back(const T& item) { items_.push_back(item); }
  void pop_back() { items_.resize(items_.size() - 1); }
  void pop_front(std::size_t count = 1) {
    head_ += count;
    if (empty()) return clear();
    items_.release_front(head_);
    if (items_.mapped() || head_ < kMostWaste || 2 * head_ < items_.size()) return;
    base_ = first();
    std::copy(begin(), end(), items_.begin());
    items_.resize(size());
    head_ = 0;
  }
  T* insert(T* at, const T& item) {
    const std::size_t place = static_cast<std::size_t>(at - items_.begin());
    items_.push_back(item);
    std::rotate(items_.begin() + place, end() - 1, end());
    return items_.begin() + place;
  }
  // Erases one item. Returns the place of the next one, or end().
  T* erase(T* at) {
    std::copy(at + 1, end(), at);
    const std::size_t place = static_cast<std::size_t>(at - items_.begin());
    items_.resize(items_.size() - 1);
    return items_.begin() + place;
  }
  void clear() {
    base_ = next();
    items_ = {};
    head_ = 0;
  }

  // More may be pushed, but nothing removed, until a deferred queue is saved.
  template <class Archive>
  void describe(Archive& archive) {
    archive.number(head_);
    archive.array(items_, true);
    if constexpr (Archive::kLoading) {
      if (head_ > items_.size() || items_.released() > head_) archive.damaged("a queue");
    }
  }

 private:
  static constexpr std::size_t kMostWaste = 64;  // fewest removed items in front that are worth moving the others

  Buffer<T> items_;
  std::size_t head_ = 0;  // items in front that are gone
  Number base_ = 0;       // number of items_[0]
};

}  // namespace agentspec
