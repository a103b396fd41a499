#include "text_index.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace agentspec {
namespace {

// Odd pseudo-random multipliers (splitmix64), one for each distance from the end of the gram.
constexpr std::array<std::uint64_t, kLongest> make_multipliers() {
  std::array<std::uint64_t, kLongest> values{};
  std::uint64_t state = 0x5EEDA6E27B1D4C33u;
  for (auto& value : values) {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    value = (z ^ (z >> 31)) | 1u;
  }
  return values;
}
constexpr auto kMultipliers = make_multipliers();

constexpr Position kBatch = 16;

using Hashes = std::array<std::uint32_t, kLevels.size()>;

// Hashes of the last k tokens before `end` for the levels k <= length; returns the index of the first such level.
std::size_t hash_levels(const Token* end, std::size_t length, Hashes& hashes) {
  std::uint64_t sum = 0;
  std::size_t done = 0;
  std::size_t level = kLevels.size();
  while (level > 0 && kLevels[level - 1] <= length) {
    --level;
    for (; done < kLevels[level]; ++done) {
      sum += (static_cast<std::uint64_t>(static_cast<std::uint32_t>(end[-1 - static_cast<std::ptrdiff_t>(done)])) + 1) *
             kMultipliers[done];
    }
    std::uint64_t mixed = (sum ^ (sum >> 29)) * 0x9E3779B97F4A7C15u;
    hashes[level] = static_cast<std::uint32_t>(mixed >> 32);
  }
  return level;
}

bool equal_before(const Token* a, const Token* b, std::size_t length) {
  return std::memcmp(a - length, b - length, length * sizeof(Token)) == 0;
}

std::size_t common_suffix(const Token* a, const Token* b, std::size_t limit) {
  std::size_t length = 0;
  while (length + 8 <= limit && equal_before(a - length, b - length, 8)) length += 8;
  while (length < limit && a[-1 - static_cast<std::ptrdiff_t>(length)] == b[-1 - static_cast<std::ptrdiff_t>(length)]) {
    ++length;
  }
  return length;
}

}  // namespace

void TextIndex::append(std::span<const Token> tokens, bool findable) {
  if (tokens.empty()) return;
  if (tokens.size() >= kNowhere - 2 - text_.size()) throw std::length_error("an index holds fewer than 2^32 tokens");
  const auto begin = static_cast<Position>(text_.size());
  text_.insert(text_.end(), tokens.begin(), tokens.end());
  const auto end = static_cast<Position>(text_.size());
  if (!findable) return;
  if (pending_ == 0 && levels_[0].previous.empty()) base_ = begin;
  if (!ranges_.empty() && ranges_.back().end == begin) {
    ranges_.back().end = end;
  } else {
    ranges_.push_back({begin, end});
  }
  pending_ += end - begin;
}

void TextIndex::append_boundary() { append(std::span<const Token>(&kBoundary, 1), false); }

std::size_t TextIndex::advance(std::size_t budget) {
  std::size_t done = 0;
  while (done < budget && !ranges_.empty()) {
    Range& range = ranges_.front();
    const auto count = static_cast<Position>(std::min<std::size_t>(budget - done, range.end - range.begin));
    for (auto& level : levels_) level.previous.resize(range.begin + count - base_, kNowhere);
    for (Position left = count; left > 0;) {
      const Position batch = std::min<Position>(left, kBatch);
      insert(range.begin, batch);
      range.begin += batch;
      left -= batch;
    }
    done += count;
    if (range.begin == range.end) ranges_.pop_front();
  }
  pending_ -= done;
  return done;
}

// Several positions at once: all their table slots are on the way from memory before the first is needed.
void TextIndex::insert(Position begin, Position count) {
  const Token* text = text_.data();
  std::array<Hashes, kBatch> hashes;
  std::array<std::size_t, kBatch> first;
  for (Position n = 0; n < count; ++n) {
    const Token* here = text + begin + n;
    const std::size_t limit = std::min<std::size_t>(begin + n, kLongest);
    std::size_t length = 0;
    while (length < limit && here[-1 - static_cast<std::ptrdiff_t>(length)] != kBoundary) ++length;
    first[n] = hash_levels(here, length, hashes[n]);
    for (std::size_t i = first[n]; i < kLevels.size(); ++i) levels_[i].newest.prefetch(hashes[n][i]);
  }
  for (Position n = 0; n < count; ++n) {
    const Position position = begin + n;
    for (std::size_t i = first[n]; i < kLevels.size(); ++i) {
      auto same = [&](Position other) { return equal_before(text + other, text + position, kLevels[i]); };
      levels_[i].previous[position - base_] = levels_[i].newest.replace(hashes[n][i], position, same);
    }
  }
}

void TextIndex::look_up(std::span<const Token> context, Match& match) const {
  match.clear();
  const Token* text = text_.data();
  const Token* end = context.data() + context.size();
  const std::size_t available = std::min(context.size(), kCap);
  Hashes hashes;
  const std::size_t first = hash_levels(end, available, hashes);
  for (std::size_t i = first; i < kLevels.size(); ++i) levels_[i].newest.prefetch(hashes[i]);
  for (std::size_t i = first; i < kLevels.size(); ++i) {
    auto same = [&](Position other) { return equal_before(text + other, end, kLevels[i]); };
    Position position = levels_[i].newest.find(hashes[i], same);
    if (position == kNowhere) continue;
    std::array<Position, kWindow> window;
    std::size_t count = 0;
    for (; position != kNowhere && count < kWindow; position = levels_[i].previous[position - base_]) {
      __builtin_prefetch(text + position);
      window[count++] = position;
    }
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t limit = std::min<std::size_t>(available, window[k]);
      const std::size_t length = common_suffix(text + window[k], end, limit);
      if (length < match.length) continue;
      if (length > match.length) {
        match.length = length;
        match.count = 0;
      }
      match.positions[match.count++] = window[k];
    }
    return;
  }
}

void TextIndex::follow(Token token, Match& match) const {
  std::size_t kept = 0;
  for (std::size_t k = 0; k < match.count; ++k) {
    const Position position = match.positions[k];
    if (text_[position] != token) continue;
    if (position + 1 < text_.size() && text_[position + 1] != kBoundary) match.positions[kept++] = position + 1;
  }
  match.count = kept;
  match.length = kept ? std::min(match.length + 1, kCap) : 0;
}

std::size_t TextIndex::bytes() const {
  std::size_t total = text_.capacity() * sizeof(Token) + sizeof(*this);
  for (const auto& level : levels_) total += level.newest.bytes() + level.previous.capacity() * sizeof(Position);
  return total;
}

}  // namespace agentspec
