#include "storage/snapshot.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace agentspec {
namespace {

struct Header {
  std::array<char, 8> magic{'A', 'G', 'S', 'P', 'S', 'N', 'A', 'P'};
  std::uint32_t version = 10, byte_order = 0x01020304;
  std::uint64_t size = 0;      // of the file, in bytes
  std::uint64_t contents = 0;  // checksum of everything behind the header
  std::uint64_t reserved[3]{};
  std::uint64_t checksum = 0;  // of the header up to here

  std::uint64_t sum() const;
};
static_assert(sizeof(Header) == 64);

constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15u;

std::uint64_t mix(std::uint64_t lane, std::uint64_t word) { return std::rotl((lane ^ word) * kFactor, 29); }

std::uint64_t checksum_of(const void* data, std::size_t bytes) {
  Checksum checksum;
  checksum.add(data, bytes);
  return checksum.value();
}

std::uint64_t Header::sum() const { return checksum_of(this, offsetof(Header, checksum)); }

std::size_t to_next(std::size_t offset, std::size_t multiple) { return (multiple - offset % multiple) % multiple; }

// Makes a file and locks it, if the file system has locks. `name`: ends with XXXXXX, which is replaced. Returns -1 if
// the file cannot be made. Other processes delete such a file if it has no lock, because a killed process may have left
// it. If they delete this one before it is locked, another one is made.
int make_locked(std::string& name) {
  constexpr int kTries = 16;  // for a file system that counts no links, on which each file looks deleted
  const std::string pattern = name;
  for (int left = kTries;; --left) {
    name = pattern;
    const int file = mkostemp(name.data(), O_CLOEXEC);  // readable by its owner alone
    if (file < 0) return file;
    while (flock(file, LOCK_EX) != 0 && errno == EINTR) {
    }
    struct stat made;
    if (left == 0 || (fstat(file, &made) == 0 && made.st_nlink > 0)) return file;
    close(file);
  }
}

// Returns whether a text is UTF-8 as Python decodes it: no longer form than needed, and no half of a surrogate pair.
bool is_utf8(std::string_view text) {
  const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  for (std::size_t at = 0; at < text.size(); ++at) {
    const unsigned first = byte(at);
    if (first < 0x80) continue;
    if (first < 0xC2 || first > 0xF4) return false;
    unsigned least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;  // of the second byte
    unsigned most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    for (unsigned more = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3; more > 0; --more, least = 0x80, most = 0xBF) {
      if (byte(++at) < least || byte(at) > most) return false;
    }
  }
  return true;
}

}  // namespace

void Checksum::add(const void* data, std::size_t bytes) {
  const char* from = static_cast<const char*>(data);
  const std::uint64_t end = words_ + bytes / 8;
  const auto add_word = [&] {
    std::uint64_t word;
    std::memcpy(&word, from, 8);
    std::uint64_t& lane = lanes_[words_++ % 4];
    lane = mix(lane, word);
    from += 8;
  };
  while (words_ < end && words_ % 4 != 0) add_word();
  for (; end - words_ >= 4; words_ += 4, from += 32) {
    std::array<std::uint64_t, 4> four;
    std::memcpy(four.data(), from, sizeof four);
    for (std::size_t k = 0; k < 4; ++k) lanes_[k] = mix(lanes_[k], four[k]);
  }
  while (words_ < end) add_word();
}

std::uint64_t Checksum::value() const {
  std::uint64_t sum = words_ * kFactor;
  for (const std::uint64_t lane : lanes_) sum = mix(sum, lane ^ lane >> 32);
  sum = (sum ^ sum >> 30) * 0xBF58476D1CE4E5B9u;
  return sum ^ sum >> 31;
}

SnapshotWriter::SnapshotWriter(std::string path)
    : path_(std::move(path)), temporary_(path_ + ".tmpXXXXXX"), slice_(kSlice + 8) {
  const int file = make_locked(temporary_);
  file_ = file < 0 ? nullptr : fdopen(file, "w");
  if (!file_) fail("cannot be created");
  const Header empty;
  put(&empty, sizeof empty);
  checksum_ = {};
}

SnapshotWriter::~SnapshotWriter() {
  if (!file_) return;
  std::fclose(file_);
  unlink(temporary_.c_str());
}

void SnapshotWriter::fail(const char* what) const {
  throw std::runtime_error(std::string("it ") + what + ": " + std::strerror(errno));
}

void SnapshotWriter::put(const void* data, std::size_t bytes) {
  checksum_.add(data, bytes);
  if (bytes > 0 && std::fwrite(data, 1, bytes, file_) != bytes) fail("cannot be written");
  size_ += bytes;
}

void SnapshotWriter::gather(const void* data, std::size_t bytes) {
  const char* const from = static_cast<const char*>(data);
  memory_.insert(memory_.end(), from, from + bytes);
  memory_.resize(memory_.size() + to_next(bytes, 8));
}

void SnapshotWriter::forget() {
  memory_.clear();
  deferred_.clear();
}

void SnapshotWriter::rewind(const Mark& mark) {
  forget();
  if (std::fflush(file_) != 0 || std::fseek(file_, static_cast<long>(mark.size), SEEK_SET) != 0 ||
      ftruncate(fileno(file_), static_cast<off_t>(mark.size)) != 0) {
    fail("cannot be written");
  }
  size_ = mark.size;
  checksum_ = mark.checksum;
}

void SnapshotWriter::finish() {
  Header header;
  header.size = size_;
  header.contents = checksum_.value();
  header.checksum = header.sum();
  std::rewind(file_);
  put(&header, sizeof header);
  if (std::fflush(file_) != 0 || fsync(fileno(file_)) != 0) fail("cannot be written");
}

void SnapshotWriter::commit() {
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be put in place");
  std::fclose(std::exchange(file_, nullptr));
}

SnapshotReader::SnapshotReader(const std::string& path) : cursor_(sizeof(Header)) {
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (file_ < 0 || fstat(file_, &status) != 0) fail(std::string("it cannot be opened: ") + std::strerror(errno));
  try {
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ < sizeof(Header)) fail("it is not a snapshot (shorter than a header)");
    int flags = MAP_PRIVATE;
#if defined(MAP_POPULATE)
    flags |= MAP_POPULATE;  // all of it is read for the checksum
#endif
    void* const data = mmap(nullptr, size_, PROT_READ, flags, file_, 0);
    if (data == MAP_FAILED) fail(std::string("it cannot be mapped: ") + std::strerror(errno));
    data_ = static_cast<const char*>(data);
    verify();
  } catch (...) {
    close_file();
    throw;
  }
}

SnapshotReader::~SnapshotReader() { close_file(); }

void SnapshotReader::close_file() {
  if (data_) munmap(const_cast<char*>(data_), size_);
  close(file_);
}

void SnapshotReader::fail(const std::string& what) const { throw std::runtime_error(what); }

void SnapshotReader::damaged(const std::string& what) const { fail("damaged snapshot: " + what); }

void SnapshotReader::verify() const {
  const Header expected;
  Header header;
  std::memcpy(&header, data_, sizeof header);
  if (header.magic != expected.magic) fail("it is not a snapshot");
  if (header.byte_order != expected.byte_order) fail("snapshot of a machine with another byte order");
  if (header.version != expected.version) {
    fail("snapshot of version " + std::to_string(header.version) + "; this build reads version " +
         std::to_string(expected.version));
  }
  if (header.checksum != header.sum()) damaged("header");
  if (size_ != header.size) {
    fail("truncated snapshot: " + std::to_string(size_) + " of " + std::to_string(header.size) + " bytes");
  }
  if (size_ % 8 != 0 || checksum_of(data_ + sizeof header, size_ - sizeof header) != header.contents) {
    damaged("wrong checksum");
  }
}

const char* SnapshotReader::take(std::size_t bytes) {
  const std::size_t padded = bytes + to_next(bytes, 8);
  if (padded < bytes || padded > size_ - cursor_) damaged("ends early");
  return data_ + std::exchange(cursor_, cursor_ + padded);
}

void SnapshotReader::name(std::string& value) {
  string(value);
  if (!is_utf8(value)) damaged("a name is not UTF-8");
}

std::uint64_t SnapshotReader::number() {
  std::uint64_t value;
  std::memcpy(&value, take(sizeof value), sizeof value);
  return value;
}

}  // namespace agentspec
