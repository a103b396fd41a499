#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "storage/buffer.hpp"

namespace agentspec {

// A snapshot is one file of named sections, each a sequence of values that are read in the order they were written.
//
// Layout, in the byte order of the machine (another one is refused), version 2: a header of 64 bytes (SnapshotHeader),
// the sections, the table of sections (SnapshotEntry). A number is 8 bytes; a string its length and its bytes, padded
// to 8; an array its element size, its count and its bytes, padded to 8. The bytes of an array of at least kSnapshotMap
// begin at a multiple of kSnapshotPage in the file, so that they can be mapped. Every section has a checksum, the table
// and the header too: a file that passes is taken for what a writer wrote.
//
// The writer writes to a temporary file beside `path` and renames it on commit(): a reader sees the old or the new
// snapshot, never a half. All functions throw std::runtime_error that says which file and what is wrong with it.
inline constexpr std::size_t kSnapshotMap = 256 * 1024;
inline constexpr std::size_t kSnapshotPage = 4096;

// A 64-bit checksum over whole 8-byte words, in four independent lanes.
class Checksum {
 public:
  void add(const void* data, std::size_t bytes);  // a multiple of 8
  std::uint64_t value() const;

 private:
  void add_word(std::uint64_t word);

  std::array<std::uint64_t, 4> lanes_{0x243F6A8885A308D3u, 0x13198A2E03707344u, 0xA4093822299F31D0u,
                                      0x082EFA98EC4E6C89u};
  std::uint64_t words_ = 0;
};

struct SnapshotHeader {
  std::array<char, 8> magic;
  std::uint32_t version, byte_order;
  std::uint64_t file_size, table_offset, sections, table_checksum, reserved, checksum;
};

struct SnapshotEntry {
  std::array<char, 24> name;  // padded with zeros
  std::uint64_t offset, size, checksum;
};

class SnapshotWriter {
 public:
  explicit SnapshotWriter(std::string path);
  ~SnapshotWriter();  // without commit() the temporary file is removed
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  void section(std::string_view name);  // at most 23 bytes; what follows belongs to it
  void number(std::uint64_t value) { write(&value, sizeof value); }
  void string(std::string_view value);

  template <class T>
  void array(std::span<const T> values) {
    begin_array(sizeof(T), values.size());
    part(values);
    end_array();
  }

  // An array in parts, of `count` elements altogether.
  void begin_array(std::size_t element, std::size_t count);
  template <class T>
  void part(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    write(values.data(), values.size_bytes());
  }
  void end_array() { pad(8); }

  void commit();

 private:
  void write(const void* data, std::size_t bytes);
  void pad(std::size_t multiple);
  void flush();
  void end_section();
  std::uint64_t offset() const { return flushed_ + filled_; }
  [[noreturn]] void fail(const char* what) const;

  std::string path_, temporary_;
  int file_ = -1;
  std::vector<char> buffer_;
  std::size_t filled_ = 0;
  std::uint64_t flushed_ = 0;
  Checksum checksum_;
  std::vector<SnapshotEntry> table_;
};

class SnapshotReader {
 public:
  // Maps the file and verifies sizes and all checksums.
  explicit SnapshotReader(std::string path);
  ~SnapshotReader();
  SnapshotReader(const SnapshotReader&) = delete;
  SnapshotReader& operator=(const SnapshotReader&) = delete;

  std::string_view peek() const;        // name of the next section, empty at the end
  void section(std::string_view name);  // enters the next section, which must have this name
  std::uint64_t number();
  std::string string();

  // A view into the file, valid as long as the reader.
  template <class T>
  std::span<const T> array() {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 8);
    const std::size_t count = array_header(sizeof(T));
    return {reinterpret_cast<const T*>(take(count * sizeof(T))), count};
  }

  // Fills a buffer. A large array stays in the file, which the buffer maps for itself, privately: pages are copied
  // when they are first written to, and the file may be replaced meanwhile.
  template <class T>
  void array(Buffer<T>& buffer) {
    const std::span<const T> values = array<T>();
    std::size_t capacity = 4 * values.size_bytes() + (std::size_t{64} << 20);  // address space only
    if (void* mapped = map(values.data(), values.size_bytes(), capacity)) {
      buffer.adopt(static_cast<T*>(mapped), values.size(), capacity / sizeof(T));
      return;
    }
    buffer.resize(values.size());
    if (!values.empty()) std::memcpy(buffer.data(), values.data(), values.size_bytes());
  }

  // For a reader of values that make no sense.
  [[noreturn]] void damaged(const std::string& what) const;

 private:
  void verify();
  std::size_t array_header(std::size_t element);
  const char* take(std::size_t bytes);
  void* map(const void* begin, std::size_t bytes, std::size_t& capacity) const;
  [[noreturn]] void fail(const std::string& what) const;

  std::string path_;
  int file_ = -1;
  const char* data_ = nullptr;
  std::size_t size_ = 0;
  std::span<const SnapshotEntry> table_;
  std::size_t next_ = 0;               // section to be entered next
  std::size_t cursor_ = 0, end_ = 0;   // of the section that was entered
};

}  // namespace agentspec
