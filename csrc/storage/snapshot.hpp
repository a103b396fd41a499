#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "storage/buffer.hpp"

namespace agentspec {

// A snapshot is one file: a header of 64 bytes, then values that are read in the order in which they were written.
//
// Layout, in the byte order of the machine (another one is refused): a number is 8 bytes; a string or a vector its
// length and its bytes, padded to 8; an array its length, how many elements in front have no memory, and the bytes of
// the others. A checksum covers all of it. Readers also check that the values make sense.
//
// SnapshotWriter and SnapshotReader have the same functions, so that one function of a class, `describe(archive)`, both
// saves and loads it. They throw std::runtime_error that says what is wrong with the file; the caller names it.

// Computes a 64-bit checksum over whole 8-byte words, in four independent lanes.
class Checksum {
 public:
  void add(const void* data, std::size_t bytes);  // `bytes`: a multiple of 8
  std::uint64_t value() const;

 private:
  std::uint64_t lanes_[4] = {0x243F6A8885A308D3u, 0x13198A2E03707344u, 0xA4093822299F31D0u, 0x082EFA98EC4E6C89u};
  std::uint64_t words_ = 0;
};

// Writes to a temporary file beside `path`, which finish() completes and commit() renames: readers see the old or the new
// snapshot, never a half. Without commit() the temporary file is removed. Its name, `path` with ".tmp" and six
// characters, is unique, also among containers that share the folder. The file is locked (flock) while it is written, so
// a file without a lock was left by a process that was killed.
//
// Values are gathered in memory until flush() writes them to the file, so that a caller who holds a lock for the values
// need not wait for the file. Large arrays can be deferred: see defer().
class SnapshotWriter {
 public:
  static constexpr bool kLoading = false;
  static constexpr std::size_t kSlice = std::size_t{128} << 10;  // bytes of an array that are copied in one go

  // Remembers how much of the file was written at some time.
  struct Mark {
    std::uint64_t size;
    Checksum checksum;
  };

  explicit SnapshotWriter(std::string path);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Sets whether large arrays are copied later, by flush() and in slices, and must not change until then. If not, they
  // are gathered at once.
  void defer(bool deferring) { deferring_ = deferring; }
  std::size_t gathered() const { return memory_.size(); }

  void number(std::uint64_t value) { gather(&value, sizeof value); }
  void string(std::string_view value) { values(std::span(value)); }
  void name(std::string_view value) { string(value); }
  template <class T>
  void vector(const std::vector<T>& value) {
    values(std::span(value));
  }
  // `is_text`: it may grow at its end before flush(), and elements in front may have no memory. If another array has
  // another size at flush(), it is another table by then.
  template <class T>
  void array(const Buffer<T>& buffer, bool is_text = false) {
    const std::size_t size = buffer.size(), released = buffer.released(), bytes = (size - released) * sizeof(T);
    number(size);
    number(released);
    if (!deferring_ || bytes < kSlice) return gather(buffer.data() + released, bytes);
    const auto data = [&buffer, size, released, is_text]() -> const char* {
      const bool sized = is_text ? buffer.size() >= size : buffer.size() == size;
      const bool same = sized && buffer.released() == released;
      return same ? reinterpret_cast<const char*>(buffer.data() + released) : nullptr;
    };
    deferred_.push_back({data, bytes, memory_.size()});
  }

  // Writes the gathered values and the deferred arrays. `copy_locked(copy)` must call copy(), which copies a slice of
  // an array, under the array's lock, and return its result; or return false if the array must not be read any more. If
  // it returns false, flush() does too, and the caller must rewind().
  template <class CopyLocked>
  bool flush(CopyLocked copy_locked) {
    std::size_t at = 0;
    for (const Deferred& array : deferred_) {
      put(memory_.data() + at, array.at - at);
      at = array.at;
      for (std::size_t done = 0; done < array.bytes; done += kSlice) {
        const std::size_t bytes = std::min(kSlice, array.bytes - done);
        const auto copy = [&] {
          const char* const data = array.data();
          if (data) std::memcpy(slice_.data(), data + done, bytes);
          return data != nullptr;
        };
        if (!copy_locked(copy)) return false;
        std::memset(slice_.data() + bytes, 0, (8 - bytes % 8) % 8);
        put(slice_.data(), (bytes + 7) / 8 * 8);
      }
    }
    put(memory_.data() + at, memory_.size() - at);
    forget();
    return true;
  }
  Mark mark() const { return {size_, checksum_}; }
  void rewind(const Mark& mark);  // forgets all that was written and gathered since the mark
  void finish();  // waits for the disk
  void commit();

 private:
  struct Deferred {
    std::function<const char*()> data;  // null: the array changed
    std::size_t bytes, at;              // the array's bytes, and its place in `memory_`
  };

  template <class T, std::size_t Extent>
  void values(std::span<T, Extent> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    number(values.size());
    gather(values.data(), values.size_bytes());
  }
  void gather(const void* data, std::size_t bytes);  // padded to whole words
  void forget();
  void put(const void* data, std::size_t bytes);
  [[noreturn]] void fail(const char* what) const;

  std::string path_, temporary_;
  std::FILE* file_ = nullptr;
  std::uint64_t size_ = 0;
  Checksum checksum_;
  bool deferring_ = false;
  std::vector<char> memory_, slice_;
  std::vector<Deferred> deferred_;
};

// Reads a snapshot: maps the file and verifies all of it.
class SnapshotReader {
 public:
  static constexpr bool kLoading = true;

  explicit SnapshotReader(const std::string& path);
  ~SnapshotReader();
  SnapshotReader(const SnapshotReader&) = delete;
  SnapshotReader& operator=(const SnapshotReader&) = delete;

  std::uint64_t number();
  template <class T>
  void number(T& value) {
    const std::uint64_t read = number();
    value = static_cast<T>(read);
    if (value != read) damaged("number");
  }
  void string(std::string& value) {
    const auto read = values<char>();
    value.assign(read.begin(), read.end());
  }
  std::string string() {
    std::string value;
    string(value);
    return value;
  }
  // Reads a string that must be UTF-8, because Python decodes it.
  void name(std::string& value);
  std::string name() {
    std::string value;
    name(value);
    return value;
  }
  template <class T>
  void vector(std::vector<T>& value) {
    const auto read = values<T>();
    value.assign(read.begin(), read.end());
  }
  // `is_text`: elements in front may have no memory in the file.
  template <class T>
  void array(Buffer<T>& buffer, bool is_text = false) {
    const std::size_t size = number(), released = number();
    if (released > size || size > kMostBytes / sizeof(T)) damaged("length of an array");
    const std::size_t bytes = (size - released) * sizeof(T);
    const char* const data = take(bytes);
    if (released > 0 && (!is_text || size * sizeof(T) < Buffer<T>::kMapped)) damaged("length of an array");
    buffer.resize(size);
    if (bytes > 0) std::memcpy(buffer.data() + released, data, bytes);
    buffer.release_front(released);
  }

  // Throws because a value makes no sense.
  [[noreturn]] void damaged(const std::string& what) const;

 private:
  template <class T>
  std::span<const T> values() {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 8);
    const std::size_t count = number();
    if (count > size_ / sizeof(T)) damaged("ends early");
    return {reinterpret_cast<const T*>(take(count * sizeof(T))), count};
  }
  static constexpr std::size_t kMostBytes = std::size_t{1} << 35;  // of an array, elements without memory included

  void verify() const;
  const char* take(std::size_t bytes);
  void close_file();
  [[noreturn]] void fail(const std::string& what) const;

  int file_ = -1;
  const char* data_ = nullptr;
  std::size_t size_ = 0, cursor_ = 0;
};

}  // namespace agentspec
