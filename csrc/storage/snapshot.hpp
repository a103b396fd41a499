#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "storage/buffer.hpp"

namespace agentspec {

// A snapshot is one file: a header of 64 bytes, then values that are read in the order in which they were written.
//
// Layout, in the byte order of the machine (another one is refused): a number is 8 bytes; a string or a vector its
// length and its bytes, padded to 8; an array its length, how many elements in front have no memory, and the bytes of
// the others. The bytes of an array of at least kSnapshotMap begin at a multiple of kSnapshotPage, so that they can be
// mapped. A checksum covers all of it: a file that passes is taken for what a writer wrote.
//
// SnapshotWriter and SnapshotReader have the same functions, so that one function of a class, `describe(archive)`, both
// saves and loads it. They throw std::runtime_error that says which file and what is wrong with it.
inline constexpr std::size_t kSnapshotMap = 256 * 1024;
inline constexpr std::size_t kSnapshotPage = 4096;

// Computes a 64-bit checksum over whole 8-byte words, in four independent lanes.
class Checksum {
 public:
  void add(const void* data, std::size_t bytes);  // `bytes`: a multiple of 8
  std::uint64_t value() const;

 private:
  std::uint64_t lanes_[4] = {0x243F6A8885A308D3u, 0x13198A2E03707344u, 0xA4093822299F31D0u, 0x082EFA98EC4E6C89u};
  std::uint64_t words_ = 0;
};

// Writes to a temporary file beside `path`, which commit() renames: readers see the old or the new snapshot, never a
// half. Without commit() the temporary file is removed.
class SnapshotWriter {
 public:
  static constexpr bool kLoading = false;

  explicit SnapshotWriter(std::string path);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  void number(std::uint64_t value) { write(&value, sizeof value); }
  void string(const std::string& value) { values(std::span(value)); }
  template <class T>
  void vector(const std::vector<T>& value) {
    values(std::span(value));
  }
  template <class T>
  void fixed(std::span<T> value) {
    values(value);
  }
  template <class T>
  void array(const Buffer<T>& buffer) {
    const std::size_t released = buffer.released(), bytes = (buffer.size() - released) * sizeof(T);
    number(buffer.size());
    number(released);
    if (bytes >= kSnapshotMap) align();
    write(buffer.data() + released, bytes);
  }

  void commit();

 private:
  template <class T>
  void values(std::span<T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    number(values.size());
    write(values.data(), values.size_bytes());
  }
  void write(const void* data, std::size_t bytes);
  void put(const void* data, std::size_t bytes);
  void align();
  [[noreturn]] void fail(const char* what) const;

  std::string path_, temporary_;
  std::FILE* file_ = nullptr;
  std::uint64_t size_ = 0;
  Checksum checksum_;
};

// Reads a snapshot: maps the file and verifies all of it.
class SnapshotReader {
 public:
  static constexpr bool kLoading = true;

  explicit SnapshotReader(std::string path);
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
  std::string string() {
    const auto read = values<char>();
    return {read.begin(), read.end()};
  }
  template <class T>
  void vector(std::vector<T>& value) {
    const auto read = values<T>();
    value.assign(read.begin(), read.end());
  }
  // Leaves the values as they are if the file holds another number of them.
  template <class T>
  void fixed(std::span<T> value) {
    const auto read = values<T>();
    if (read.size() == value.size()) std::memcpy(value.data(), read.data(), read.size_bytes());
  }
  // Leaves a large array in the file and maps it privately: pages are copied when they are first written to, and the
  // file may be replaced meanwhile.
  template <class T>
  void array(Buffer<T>& buffer) {
    const std::size_t size = number(), released = number();
    if (released > size || size >> 40 != 0) damaged("length of an array");
    const std::size_t bytes = (size - released) * sizeof(T);
    if (bytes >= kSnapshotMap) align();
    const char* const data = take(bytes);
    std::size_t capacity = 4 * size * sizeof(T) + (std::size_t{64} << 20);  // address space only
    if (void* mapped = map(data, bytes, released * sizeof(T), capacity)) {
      buffer.adopt(static_cast<T*>(mapped), size, capacity / sizeof(T), released);
      return;
    }
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
  void verify() const;
  void align();
  const char* take(std::size_t bytes);
  void* map(const char* begin, std::size_t bytes, std::size_t front, std::size_t& capacity) const;
  void close_file();
  [[noreturn]] void fail(const std::string& what) const;

  std::string path_;
  int file_ = -1;
  const char* data_ = nullptr;
  std::size_t size_ = 0, cursor_ = 0;
};

}  // namespace agentspec
