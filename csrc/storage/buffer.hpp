#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace agentspec {

// Returns the bytes that the heap takes for a block of `bytes`, with header and rounding (glibc, 64 bits).
inline constexpr std::size_t heap_bytes(std::size_t bytes) {
  return bytes == 0 ? 0 : std::max<std::size_t>(32, (bytes + 8 + 15) / 16 * 16);
}

// Holds a growing array of plain data, whose new elements are uninitialised.
//
// Large arrays live in address space of their own: growing moves page tables instead of bytes (Linux), pages that were
// never touched cost nothing, and memory freed by shrinking or release_front really goes back to the system. Small
// arrays grow by an eighth, so that the memory that budgets count is nearly the memory that is used.
template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  ~Buffer() { release(); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }

  // Makes an array of zeros. Those of a large one take memory when they are written, not before.
  static Buffer zeroed(std::size_t size) {
    Buffer made;
    made.reserve(size);
    if (!made.mapped_) std::memset(static_cast<void*>(made.data_), 0, size * sizeof(T));
    made.size_ = made.touched_ = size;
    return made;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }

  // Returns the most bytes that it can take in memory now.
  std::size_t bytes() const {
    if (!mapped_) return heap_bytes(capacity_ * sizeof(T));
    const std::size_t end = std::max(size_, touched_) * sizeof(T);
    return (end + granule() - 1) / granule() * granule() - released_;
  }

  void resize(std::size_t size) {
    if (size > capacity_) {
      reserve(std::max<std::size_t>({size, capacity_ + capacity_ / 8, (kLeast + sizeof(T) - 1) / sizeof(T)}));
    } else if (size < size_) {
      shrink(size);
    }
    size_ = size;
    if (size > touched_) {
      if (mapped_) populate(touched_ * sizeof(T), size * sizeof(T));
      touched_ = size;
    }
  }

  void push_back(const T& item) {
    const T copy = item;  // it may be one of this array
    resize(size_ + 1);
    data_[size_ - 1] = copy;
  }

  // Frees the memory of the first `count` elements, which must not be used again. Positions stay the same. Does nothing
  // for small arrays.
  void release_front(std::size_t count) {
    if (!mapped_) return;
    const std::size_t end = count * sizeof(T) / granule() * granule();
    if (end < released_ + kSlack) return;
    discard(released_, end);
    released_ = end;
  }

  // Returns whether the array has address space of its own, so that release_front gives memory back.
  bool mapped() const { return mapped_; }

  // Gives back up to `most` bytes from the end, for an array that is not used any more. Returns whether all are gone.
  bool dispose(std::size_t most) {
    const std::size_t bytes = this->bytes();
    if (!mapped_ || bytes <= most) {
      *this = Buffer();
      return true;
    }
    const std::size_t end = released_ + bytes, begin = (end - most) / granule() * granule();
    discard(begin, end);
    size_ = touched_ = begin / sizeof(T);
    return false;
  }

  // Returns how many elements in front have given their memory back.
  std::size_t released() const { return released_ / sizeof(T); }

  static constexpr std::size_t kMapped = 256 * 1024;  // bytes from which on an array has address space of its own

 private:
  // Bytes from which on huge pages are requested, because random reads of so much memory mostly wait for address
  // translation. Smaller arrays would lose more by the pause in which such a page is cleared.
  static constexpr std::size_t kHuge = 64 << 20;
  static constexpr std::size_t kHugePage = 2 << 20;
  static constexpr std::size_t kLeast = 56;  // bytes of the smallest array
  static constexpr std::size_t kSmall = 1024;  // bytes of an array on the heap from which on shrinking pays
  static constexpr std::size_t kPopulated = 64 * 1024;  // fewest bytes of new elements that are worth a system call
  static constexpr std::size_t kSlack = 256 * 1024;  // fewest bytes that are worth a system call to give them back

  static std::size_t page() {
#if defined(__unix__) || defined(__APPLE__)
    static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return size;
#else
    return 4096;
#endif
  }

  // Returns the unit in which memory is given back: a huge page goes as a whole or not at all.
  std::size_t granule() const { return huge_ ? kHugePage : page(); }

  static std::size_t whole_pages(std::size_t count) { return (count * sizeof(T) + page() - 1) / page() * page(); }

  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    std::swap(touched_, other.touched_);
    std::swap(released_, other.released_);
    std::swap(mapped_, other.mapped_);
    std::swap(huge_, other.huge_);
  }

  void release() {
    if (!data_) return;
#if defined(__unix__) || defined(__APPLE__)
    if (mapped_) {
      munmap(data_, whole_pages(capacity_));
      data_ = nullptr;
      return;
    }
#endif
    std::free(data_);
    data_ = nullptr;
  }

  void discard([[maybe_unused]] std::size_t begin, [[maybe_unused]] std::size_t end) {
#if defined(__unix__) || defined(__APPLE__)
    if (begin < end) madvise(reinterpret_cast<char*>(data_) + begin, end - begin, MADV_DONTNEED);
#endif
  }

  // Gets the memory of many new elements in one go, because getting it page by page as they are written takes twice as
  // long. Does nothing if the system cannot do it.
  void populate([[maybe_unused]] std::size_t begin, [[maybe_unused]] std::size_t end) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
    begin = begin / page() * page();
    if (huge_ || end < begin + kPopulated) return;
    madvise(reinterpret_cast<char*>(data_) + begin, end - begin, MADV_POPULATE_WRITE);
#endif
  }

  void reserve(std::size_t capacity) {
#if defined(__unix__) || defined(__APPLE__)
    if (capacity * sizeof(T) >= kMapped) return reserve_mapped(whole_pages(capacity));
#endif
    T* const data = static_cast<T*>(std::realloc(data_, capacity * sizeof(T)));
    if (!data) throw std::bad_alloc();
    data_ = data;
    capacity_ = capacity;
  }

#if defined(__unix__) || defined(__APPLE__)
  void reserve_mapped(std::size_t bytes) {
    void* fresh = MAP_FAILED;
#if defined(__linux__)
    if (bytes >= kHuge) return reserve_huge(bytes);
    if (mapped_) fresh = mremap(data_, whole_pages(capacity_), bytes, MREMAP_MAYMOVE);
    if (fresh != MAP_FAILED) return take(fresh, bytes);
#endif
    fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    copy_to(fresh, bytes);
  }

  void copy_to(void* fresh, std::size_t bytes) {
    std::copy_n(reinterpret_cast<const char*>(data_) + released_, size_ * sizeof(T) - released_,
                static_cast<char*>(fresh) + released_);
    release();
    take(fresh, bytes);
  }

#if defined(__linux__)
  // Reserves much more address space than is needed yet, or less where that is limited. It begins at the boundary of a
  // huge page.
  void reserve_huge(std::size_t needed) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    std::size_t bytes = 0;
    void* mapped = MAP_FAILED;
    for (const std::size_t times : {16, 2, 1}) {
      bytes = (times * needed + kHugePage - 1) / kHugePage * kHugePage;
      mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, flags, -1, 0);
      if (mapped != MAP_FAILED) break;
    }
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    char* const space = static_cast<char*>(mapped);
    const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(space) % kHugePage) % kHugePage;
    char* const fresh = space + before;
    if (before > 0) munmap(space, before);
    munmap(fresh + bytes, kHugePage - before);
    madvise(fresh, bytes, MADV_HUGEPAGE);
    const std::size_t old = whole_pages(capacity_);
    if (mapped_ && mremap(data_, old, old, MREMAP_MAYMOVE | MREMAP_FIXED, fresh) != MAP_FAILED) {
      madvise(fresh, old, MADV_HUGEPAGE);
      take(fresh, bytes);
    } else {
      copy_to(fresh, bytes);
    }
    huge_ = true;
    released_ = released_ / kHugePage * kHugePage;  // dispose() needs a multiple of granule(), which has grown
  }
#endif

  void take(void* data, std::size_t bytes) {
    data_ = static_cast<T*>(data);
    capacity_ = bytes / sizeof(T);
    mapped_ = true;
  }
#endif

  void shrink(std::size_t size) {
    if (!mapped_) {
      const std::size_t capacity = size + size / 8 + 1;
      if (capacity_ * sizeof(T) <= kSmall || 2 * size >= capacity_) return;
      T* const data = static_cast<T*>(std::realloc(data_, capacity * sizeof(T)));
      if (!data) return;  // it stays as large as it is
      data_ = data;
      capacity_ = capacity;
      return;
    }
    const std::size_t begin = (size * sizeof(T) + granule() - 1) / granule() * granule();
    const std::size_t end = std::min(whole_pages(touched_), whole_pages(capacity_));
    if (end < begin + kSlack + std::min(begin / 32, kSlack)) return;
    discard(begin, end);
    touched_ = begin / sizeof(T);
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
  std::size_t touched_ = 0;   // elements that may be in memory
  std::size_t released_ = 0;  // bytes in front that are not in memory
  bool mapped_ = false;
  bool huge_ = false;
};

}  // namespace agentspec
