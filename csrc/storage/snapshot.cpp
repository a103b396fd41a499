#include "storage/snapshot.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace agentspec {
namespace {

constexpr std::array<char, 8> kMagic{'A', 'G', 'S', 'P', 'S', 'N', 'A', 'P'};
constexpr std::uint32_t kVersion = 2;
constexpr std::uint32_t kByteOrder = 0x01020304;
constexpr std::size_t kBuffer = 1 << 20;
constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15u;

static_assert(sizeof(SnapshotHeader) == 64 && sizeof(SnapshotEntry) == 48);

template <class T>
std::uint64_t checksum_of(const T* data, std::size_t bytes) {
  Checksum checksum;
  checksum.add(data, bytes);
  return checksum.value();
}

std::uint64_t header_checksum(const SnapshotHeader& header) {
  return checksum_of(&header, offsetof(SnapshotHeader, checksum));
}

std::uint64_t mix(std::uint64_t lane, std::uint64_t word) { return std::rotl((lane ^ word) * kFactor, 29); }

}  // namespace

void Checksum::add_word(std::uint64_t word) {
  auto& lane = lanes_[words_++ % 4];
  lane = mix(lane, word);
}

void Checksum::add(const void* data, std::size_t bytes) {
  const char* from = static_cast<const char*>(data);
  std::size_t words = bytes / 8;
  std::uint64_t word;
  for (; words > 0 && words_ % 4 != 0; --words, from += 8) {
    std::memcpy(&word, from, 8);
    add_word(word);
  }
  auto lanes = lanes_;
  words_ += words / 4 * 4;
  for (; words >= 4; words -= 4, from += 32) {
    std::array<std::uint64_t, 4> four;
    std::memcpy(four.data(), from, sizeof four);
    for (std::size_t k = 0; k < 4; ++k) lanes[k] = mix(lanes[k], four[k]);
  }
  lanes_ = lanes;
  for (; words > 0; --words, from += 8) {
    std::memcpy(&word, from, 8);
    add_word(word);
  }
}

std::uint64_t Checksum::value() const {
  std::uint64_t sum = words_ * kFactor;
  for (const std::uint64_t lane : lanes_) sum = mix(sum, lane ^ lane >> 32);
  sum = (sum ^ sum >> 30) * 0xBF58476D1CE4E5B9u;
  return sum ^ sum >> 31;
}

SnapshotWriter::SnapshotWriter(std::string path)
    : path_(std::move(path)), temporary_(path_ + ".tmp" + std::to_string(getpid())), buffer_(kBuffer) {
  file_ = open(temporary_.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0) fail("cannot be created");
  const SnapshotHeader empty{};
  write(&empty, sizeof empty);
}

SnapshotWriter::~SnapshotWriter() {
  if (file_ < 0) return;
  close(file_);
  unlink(temporary_.c_str());
}

void SnapshotWriter::fail(const char* what) const {
  throw std::runtime_error(path_ + ": the snapshot " + what + ": " + std::strerror(errno));
}

void SnapshotWriter::write(const void* data, std::size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const std::size_t some = std::min(bytes, kBuffer - filled_);
    std::memcpy(buffer_.data() + filled_, from, some);
    filled_ += some;
    from += some;
    bytes -= some;
    if (filled_ == kBuffer) flush();
  }
}

void SnapshotWriter::flush() {
  if (!table_.empty()) checksum_.add(buffer_.data(), filled_);  // the header belongs to no section
  for (std::size_t done = 0; done < filled_;) {
    const ssize_t some = ::write(file_, buffer_.data() + done, filled_ - done);
    if (some < 0 && errno != EINTR) fail("cannot be written");
    if (some > 0) done += static_cast<std::size_t>(some);
  }
  flushed_ += filled_;
  filled_ = 0;
}

void SnapshotWriter::pad(std::size_t multiple) {
  static constexpr std::array<char, kSnapshotPage> zeros{};
  write(zeros.data(), (multiple - offset() % multiple) % multiple);
}

void SnapshotWriter::string(std::string_view value) {
  number(value.size());
  write(value.data(), value.size());
  pad(8);
}

void SnapshotWriter::begin_array(std::size_t element, std::size_t count) {
  number(element);
  number(count);
  if (element * count >= kSnapshotMap) pad(kSnapshotPage);
}

void SnapshotWriter::end_section() {
  flush();
  if (table_.empty()) return;
  table_.back().size = offset() - table_.back().offset;
  table_.back().checksum = checksum_.value();
}

void SnapshotWriter::section(std::string_view name) {
  end_section();
  SnapshotEntry entry{};
  std::copy_n(name.begin(), std::min(name.size(), entry.name.size() - 1), entry.name.begin());
  entry.offset = offset();
  table_.push_back(entry);
  checksum_ = {};
}

void SnapshotWriter::commit() {
  end_section();
  SnapshotHeader header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.byte_order = kByteOrder;
  header.table_offset = offset();
  header.sections = table_.size();
  header.table_checksum = checksum_of(table_.data(), table_.size() * sizeof(SnapshotEntry));
  write(table_.data(), table_.size() * sizeof(SnapshotEntry));
  flush();
  header.file_size = offset();
  header.checksum = header_checksum(header);
  if (pwrite(file_, &header, sizeof header, 0) != sizeof header) fail("cannot be written");
  if (fsync(file_) != 0) fail("cannot be written");
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be put in place");
  close(file_);
  file_ = -1;
}

SnapshotReader::SnapshotReader(std::string path) : path_(std::move(path)) {
  file_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (file_ < 0 || fstat(file_, &status) != 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
  try {
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ < sizeof(SnapshotHeader)) fail("is not a snapshot (shorter than a header)");
    int flags = MAP_PRIVATE;
#if defined(MAP_POPULATE)
    flags |= MAP_POPULATE;  // all of it is read for the checksums
#endif
    void* const data = mmap(nullptr, size_, PROT_READ, flags, file_, 0);
    if (data == MAP_FAILED) fail(std::string("cannot be mapped: ") + std::strerror(errno));
    data_ = static_cast<const char*>(data);
    verify();
  } catch (...) {
    if (data_) munmap(const_cast<char*>(data_), size_);
    close(file_);
    throw;
  }
}

SnapshotReader::~SnapshotReader() {
  munmap(const_cast<char*>(data_), size_);
  close(file_);
}

void SnapshotReader::fail(const std::string& what) const { throw std::runtime_error(path_ + ": " + what); }

void SnapshotReader::damaged(const std::string& what) const {
  fail("damaged snapshot: section '" + std::string(next_ > 0 ? table_[next_ - 1].name.data() : "") + "': " + what);
}

void SnapshotReader::verify() {
  SnapshotHeader header;
  std::memcpy(&header, data_, sizeof header);
  if (header.magic != kMagic) fail("is not a snapshot");
  if (header.byte_order != kByteOrder) fail("snapshot of a machine with another byte order");
  if (header.version != kVersion) {
    fail("snapshot of version " + std::to_string(header.version) + "; this build reads version " +
         std::to_string(kVersion));
  }
  if (header.checksum != header_checksum(header)) fail("damaged snapshot: header");
  if (size_ != header.file_size) {
    fail("truncated snapshot: " + std::to_string(size_) + " of " + std::to_string(header.file_size) + " bytes");
  }
  if (header.table_offset > size_ || header.sections != (size_ - header.table_offset) / sizeof(SnapshotEntry)) {
    fail("damaged snapshot: table of sections");
  }
  table_ = {reinterpret_cast<const SnapshotEntry*>(data_ + header.table_offset), header.sections};
  if (checksum_of(table_.data(), table_.size_bytes()) != header.table_checksum) {
    fail("damaged snapshot: table of sections");
  }
  for (const SnapshotEntry& entry : table_) {
    ++next_;
    if (entry.offset > size_ || entry.size > size_ - entry.offset) damaged("outside of the file");
    if (checksum_of(data_ + entry.offset, entry.size) != entry.checksum) damaged("wrong checksum");
  }
  next_ = 0;
}

std::string_view SnapshotReader::peek() const {
  return next_ < table_.size() ? std::string_view(table_[next_].name.data()) : std::string_view();
}

void SnapshotReader::section(std::string_view name) {
  if (next_ == table_.size() || peek() != name) {
    fail("damaged snapshot: section '" + std::string(name) + "' expected, found '" + std::string(peek()) + "'");
  }
  cursor_ = table_[next_].offset;
  end_ = cursor_ + table_[next_].size;
  ++next_;
}

const char* SnapshotReader::take(std::size_t bytes) {
  const std::size_t padded = (bytes + 7) / 8 * 8;
  if (padded < bytes || padded > end_ - cursor_) damaged("ends early");
  return data_ + std::exchange(cursor_, cursor_ + padded);
}

std::uint64_t SnapshotReader::number() {
  std::uint64_t value;
  std::memcpy(&value, take(sizeof value), sizeof value);
  return value;
}

std::string SnapshotReader::string() {
  const std::size_t size = number();
  return {take(size), size};
}

std::size_t SnapshotReader::array_header(std::size_t element) {
  if (number() != element) damaged("another type of array");
  const std::size_t count = number();
  if (count > (end_ - cursor_) / element) damaged("ends early");
  if (element * count >= kSnapshotMap) take((kSnapshotPage - cursor_ % kSnapshotPage) % kSnapshotPage);
  return count;
}

// Maps an array of the file once more, for itself and writable, in front of free address space; null if it cannot be.
void* SnapshotReader::map(const void* begin, std::size_t bytes, std::size_t& capacity) const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(begin) - data_);
  if (bytes < kSnapshotMap || offset % page != 0) return nullptr;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
  flags |= MAP_NORESERVE;
#endif
  capacity = capacity / page * page;
  void* const space = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (space == MAP_FAILED) return nullptr;
  void* const mapped = mmap(space, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file_,
                            static_cast<off_t>(offset));
  if (mapped != MAP_FAILED) return mapped;
  munmap(space, capacity);
  return nullptr;
}

}  // namespace agentspec
