#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "storage/buffer.hpp"

namespace agentspec {

// Holds a queue of plain data in one array. Empty queues hold no memory, because there may be many thousands of them.
template <class T>
class Queue {
 public:
  using iterator = typename std::vector<T>::iterator;

  iterator begin() { return items_.begin() + static_cast<std::ptrdiff_t>(head_); }
  iterator end() { return items_.end(); }
  auto begin() const { return items_.begin() + static_cast<std::ptrdiff_t>(head_); }
  auto end() const { return items_.end(); }
  std::size_t size() const { return items_.size() - head_; }
  bool empty() const { return size() == 0; }
  T& front() { return items_[head_]; }
  const T& front() const { return items_[head_]; }
  T& back() { return items_.back(); }
  T& operator[](std::size_t i) { return items_[head_ + i]; }
  const T& operator[](std::size_t i) const { return items_[head_ + i]; }
  std::size_t bytes() const { return heap_bytes(items_.capacity() * sizeof(T)); }

  void push_back(T item) { items_.push_back(std::move(item)); }
  void pop_front() {
    ++head_;
    if (empty()) {
      clear();
    } else if (head_ >= kMostWaste && 2 * head_ >= items_.size()) {
      items_.erase(items_.begin(), begin());
      head_ = 0;
    }
  }
  iterator insert(iterator at, T item) { return items_.insert(at, std::move(item)); }
  // Erases one item. Returns the iterator of the next one, or end().
  iterator erase(iterator at) { return items_.erase(at); }
  template <class Condition>
  void erase_if(Condition condition) {
    std::size_t kept = head_;
    for (std::size_t i = head_; i < items_.size(); ++i) {
      if (!condition(items_[i])) items_[kept++] = items_[i];
    }
    items_.resize(kept);
    if (empty()) clear();
  }
  template <class Iterator>
  void assign(Iterator begin, Iterator end) {
    items_.assign(begin, end);
    head_ = 0;
  }
  void clear() {
    std::vector<T>().swap(items_);
    head_ = 0;
  }

 private:
  static constexpr std::size_t kMostWaste = 64;  // fewest removed items in front that are worth moving the others

  std::vector<T> items_;
  std::size_t head_ = 0;
};

}  // namespace agentspec
