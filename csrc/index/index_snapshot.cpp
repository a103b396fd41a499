// Saving and loading of SuffixIndex and SortedPositions: their arrays as they are, so that loading is mapping.
#include <algorithm>
#include <vector>

#include "storage/snapshot.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

void SuffixIndex::save(SnapshotWriter& writer) const {
  const Position by = save_offset();
  const std::size_t kept = size() - by;
  writer.number(kept);
  writer.number(released_ - by);
  writer.number(version_);
  std::vector<Token> front(kPad + released_ - by, kBoundary);
  writer.begin_array(sizeof(Token), kPad + kept);
  writer.part(std::span<const Token>(front));
  writer.part(text().subspan(released_));
  writer.end_array();
  const std::size_t word = std::min<std::size_t>(by / kMarks, marks_.size());
  writer.array(std::span<const std::uint64_t>(marks_.data() + word, marks_.size() - word));
  std::vector<Range> ranges;
  for (const Range& range : pending_) ranges.push_back({range.begin - by, range.end - by});
  writer.array(std::span<const Range>(ranges));
  order_.save(writer, by);
}

void SuffixIndex::load(SnapshotReader& reader) {
  const std::size_t kept = reader.number();
  const std::size_t released = reader.number();
  version_ = reader.number() + 1;
  reader.array(text_);
  reader.array(marks_);
  pending_count_ = 0;
  pending_.clear();
  std::size_t end = released;
  for (const Range& range : reader.array<Range>()) {
    if (range.begin < end || range.end <= range.begin || range.end > kept) reader.damaged("pending positions");
    end = range.end;
    pending_.push_back(range);
    pending_count_ += range.end - range.begin;
  }
  const bool padded = text_.size() == kPad + kept && std::all_of(text_.data(), text_.data() + kPad, [](Token token) {
                        return token == kBoundary;
                      });
  if (!padded || released > kept || marks_.size() > kept / kMarks + 1) reader.damaged("text");
  released_ = static_cast<Position>(released);
  order_.load(reader, kept);
}

void SortedPositions::save(SnapshotWriter& writer, Position by) const {
  writer.number(size_);
  std::vector<std::uint8_t> counts(owners_.size());
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    for (std::uint32_t k = 0; k < chunks_[i].size; ++k) counts[chunks_[i].leaves[k]] = chunks_[i].counts[k];
  }
  writer.begin_array(sizeof(Position), positions_.size());
  std::array<Position, kLeaf> leaf;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    leaf.fill(0);
    for (std::uint32_t k = 0; k < counts[i]; ++k) leaf[k] = positions_[i * kLeaf + k] - by;
    writer.part(std::span<const Position>(leaf));
  }
  writer.end_array();
  writer.array(std::span<const std::uint32_t>(owners_.data(), owners_.size()));
  writer.begin_array(sizeof(Chunk), chunks_.size());
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    Chunk chunk{};
    chunk.size = chunks_[i].size;
    for (std::uint32_t k = 0; k < chunk.size; ++k) {
      chunk.keys[k] = chunks_[i].keys[k];
      chunk.firsts[k] = chunks_[i].firsts[k] - by;
      chunk.leaves[k] = chunks_[i].leaves[k];
      chunk.counts[k] = chunks_[i].counts[k];
    }
    writer.part(std::span<const Chunk>(&chunk, 1));
  }
  writer.end_array();
  writer.array(std::span<const std::uint32_t>(row_.chunks));
}

void SortedPositions::load(SnapshotReader& reader, std::size_t end) {
  size_ = reader.number();
  reader.array(positions_);
  reader.array(owners_);
  reader.array(chunks_);
  const auto chunks = reader.array<std::uint32_t>();
  row_ = {};
  row_.chunks.assign(chunks.begin(), chunks.end());
  check(reader, end);
  for (const std::uint32_t number : row_.chunks) {
    const Chunk& chunk = chunks_[number];
    row_.keys.push_back(chunk.keys[0]);
    row_.firsts.push_back(chunk.firsts[0]);
    std::uint32_t count = 0;
    for (std::uint32_t k = 0; k < chunk.size; ++k) count += chunk.counts[k];
    row_.counts.push_back(count);
  }
}

// The arrays must refer to each other, and to the text, as they do in an index.
void SortedPositions::check(SnapshotReader& reader, std::size_t end) const {
  std::vector<bool> seen(chunks_.size());
  for (const std::uint32_t number : row_.chunks) {
    if (number >= chunks_.size() || seen[number]) reader.damaged("row of chunks");
    seen[number] = true;
  }
  std::size_t leaves = 0, size = 0;
  bool right = row_.chunks.size() == chunks_.size() && positions_.size() == owners_.size() * kLeaf;
  for (std::uint32_t number = 0; right && number < chunks_.size(); ++number) {
    const Chunk& chunk = chunks_[number];
    right = chunk.size > 0 && chunk.size <= kChunk;
    for (std::uint32_t k = 0; right && k < chunk.size; ++k, ++leaves) {
      const std::uint32_t leaf = chunk.leaves[k];
      right = leaf < owners_.size() && owners_[leaf] == number && chunk.counts[k] > 0 && chunk.counts[k] <= kLeaf &&
              chunk.firsts[k] == positions_[std::size_t{kLeaf} * leaf];
      size += chunk.counts[k];
    }
  }
  if (!right || leaves != owners_.size() || size != size_) reader.damaged("chunks");
  Position largest = 0;
  for (std::size_t i = 0; i < positions_.size(); ++i) largest = std::max(largest, positions_[i]);
  if (!positions_.empty() && largest >= end) reader.damaged("positions");
}

}  // namespace agentspec
