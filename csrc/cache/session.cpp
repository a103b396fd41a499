#include "cache/session.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr std::size_t kSearched = 1024;  // newest documents in which a context is searched for

std::size_t common_prefix(std::span<const Token> a, std::span<const Token> b) {
  return static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

}  // namespace

// Returns where a context ends; nothing if its place is unknown or if more than `most_missing` of its tokens lack their
// text.
std::optional<Position> Session::position_of(std::uint64_t hash, std::size_t most_missing) const {
  const auto* const found = places_.find(hash);
  if (!found || found->position == kNowhere) return std::nullopt;
  if (most_missing < kNowhere && missing_at(found->position) > most_missing) return std::nullopt;
  return found->position;
}

// Returns whether the text at a position leads from a context to one of `length` tokens with this hash.
bool Session::goes_on_to(ContextHash context, Position position, std::size_t length, std::uint64_t hash) const {
  const auto behind = text_.text().subspan(position);
  const std::size_t count = length - context.length;
  if (behind.size() < count) return false;
  for (const Token token : behind.first(count)) {
    if (token == kBoundary) return false;
    context.add(token);
  }
  return context.value == hash;
}

// Returns where the context that a turn continues ends: at a place, or behind the last block boundary before it, or in
// a document that begins between the two.
std::optional<Position> Session::parent_of(const Turn& turn) const {
  if (const auto position = position_of(turn.parent)) return position;
  const ContextHash block{turn.block, turn.kept / kBlock * kBlock};
  if (const auto at = position_of(turn.block); at && goes_on_to(block, *at, turn.kept, turn.parent)) {
    return static_cast<Position>(*at + turn.kept - block.length);
  }
  const auto newest = std::span(documents_.begin(), documents_.end()).last(std::min(documents_.size(), kSearched));
  for (auto it = newest.rbegin(); it != newest.rend(); ++it) {
    const std::size_t length = it->context.length;
    if (length < block.length || length >= turn.kept) continue;
    if (goes_on_to(it->context, it->begin, turn.kept, turn.parent)) {
      return static_cast<Position>(it->begin + turn.kept - length);
    }
  }
  return std::nullopt;
}

std::optional<Prefix> Session::find(std::span<const Token> prompt, std::span<const std::uint64_t> blocks) const {
  return longest({}, position_of(0), prompt, blocks, kNowhere);
}

// Returns the longest known prefix of the context `from` + `tokens` that is at least as long as `from`, and of which at
// most `most_missing` tokens lack their text. `position`: where `from` ends, if that is known.
std::optional<Prefix> Session::longest(ContextHash from, std::optional<Position> position,
                                       std::span<const Token> tokens, std::span<const std::uint64_t> blocks,
                                       std::size_t most_missing) const {
  for (std::size_t b = blocks.size(); b-- > 0;) {
    if (!places_.contains(blocks[b])) continue;
    const ContextHash at{blocks[b], (from.length / kBlock + b + 1) * kBlock};
    const auto behind = tokens.subspan(at.length - from.length);
    const auto prefix = furthest(at, position_of(at.value, most_missing), behind, most_missing);
    if (prefix) return prefix;
  }
  return furthest(from, position, tokens, most_missing);
}

// Returns the furthest known end of a context before the next block boundary: in the text at `position`, or behind one
// of the places on the way.
std::optional<Prefix> Session::furthest(ContextHash at, std::optional<Position> position,
                                        std::span<const Token> tokens, std::size_t most_missing) const {
  tokens = tokens.first(std::min(tokens.size(), kBlock - 1 - at.length % kBlock));
  std::optional<Prefix> best;
  for (;;) {
    if (position) {
      const std::size_t same = common_prefix(tokens, text_.text().subspan(*position));
      if (!best || at.length + same > best->length) {
        best = {at.length + same, static_cast<Position>(*position + same)};
      }
    }
    if (tokens.empty()) return best;
    at.add(tokens.front());
    tokens = tokens.subspan(1);
    position = position_of(at.value, most_missing);
  }
}

std::uint32_t Session::missing_at(Position position) const {
  const auto behind = std::ranges::upper_bound(documents_, position, {}, &Document::begin);
  return std::prev(behind)->missing;
}

std::span<const Token> Session::before(Position position) const {
  const auto text = text_.text().first(position);
  std::size_t count = 0;
  while (count < std::min(kOverlap, text.size()) && text[text.size() - 1 - count] != kBoundary) ++count;
  return text.last(count);
}

std::vector<Token> Session::context_of(const Turn& turn) const {
  const auto parent = parent_of(turn);
  if (!parent) return {};
  const auto tokens = before(*parent);
  return {tokens.begin(), tokens.end()};
}

void Session::find_parent(Turn& turn) const {
  if (turn.kept == 0 || turn.parent != 0) return;
  if (turn.kept == newest_.length) {
    turn.parent = newest_.value;
  } else {
    turn.kept = 0;
  }
}

// Sets the place of a context. If it has one already, which is rare, that stays unless no text is known in front of it.
void Session::set_place(std::uint64_t hash, Position position) {
  Position* const known = places_.add(hash, position);
  if (known && (*known == kNowhere || before(*known).empty())) *known = position;
}

// Begins a document for text that continues a context with the token `first`. `prefix`: where the context ends, if its
// end is here.
void Session::begin_document(const std::optional<Prefix>& prefix, ContextHash context, Token first) {
  const auto start = static_cast<Position>(text_.size());
  if (start > 0) text_.append_boundary();
  auto missing = static_cast<std::uint32_t>(context.length);
  if (prefix) {
    const auto tokens = before(prefix->position);
    text_.append(std::vector<Token>(tokens.begin(), tokens.end()), false);
    missing = missing_at(prefix->position);
  }
  const auto begin = static_cast<Position>(text_.size());
  documents_.push_back({context, prefix ? prefix->position : kNowhere, start, begin, missing});
  if (!prefix) set_place(context.value, begin);
  context.add(first);
  set_place(context.value, begin + 1);
}

// Makes a turn's context the newest one. Returns the context's hashes at the block boundaries behind its first `kept`
// tokens.
std::vector<std::uint64_t> Session::begin_newest(const Turn& turn, std::span<const std::uint64_t> prompt_blocks) {
  std::vector<std::uint64_t> blocks;
  newest_ = {turn.parent, turn.kept};
  if (const std::size_t before = turn.kept / kBlock; prompt_blocks.size() > before) {
    blocks.assign(prompt_blocks.begin() + static_cast<std::ptrdiff_t>(before), prompt_blocks.end());
    newest_ = {blocks.back(), prompt_blocks.size() * kBlock};
  }
  newest_.add(std::span(turn.tokens).subspan(newest_.length - turn.kept), blocks);
  return blocks;
}

// Appends a turn's tokens behind the first `known_of_turn`, which are here, and sets the places of its `blocks` there.
// `known`: the known part of its context, if any. Returns where the turn ends in the text.
Position Session::append_rest(const Turn& turn, const std::optional<Prefix>& known, std::size_t known_of_turn,
                              std::span<const std::uint64_t> blocks) {
  const std::span<const Token> tokens = turn.tokens;
  if (!known || known->position != text_.size()) {
    ContextHash context{turn.parent, turn.kept};
    for (const Token token : tokens.first(known_of_turn)) context.add(token);
    begin_document(known, context, tokens[known_of_turn]);
    if (!known && turn.kept % kBlock != 0) places_.add(turn.block, kNowhere);
  }
  const std::size_t begin_in_text = text_.size() - known_of_turn;  // of the turn, if all of it were appended here
  text_.append(tokens.subspan(known_of_turn));
  std::size_t length = turn.kept / kBlock * kBlock;  // of the context up to a block boundary
  for (const std::uint64_t block : blocks) {
    length += kBlock;
    const std::size_t end_in_turn = length - turn.kept;
    if (end_in_turn > known_of_turn) set_place(block, static_cast<Position>(begin_in_text + end_in_turn));
  }
  return static_cast<Position>(text_.size());
}

bool Session::append(const Turn& turn, std::span<const std::uint64_t> prompt_blocks) {
  const auto blocks = begin_newest(turn, prompt_blocks);
  const auto known = longest({turn.parent, turn.kept}, parent_of(turn), turn.tokens, blocks, turn.kept);
  const std::size_t known_of_turn = known ? known->length - turn.kept : 0;  // those of its tokens that are here
  const bool is_new = known_of_turn < turn.tokens.size();
  Position end = known ? known->position : 0;  // of the turn, in the text
  if (is_new) end = append_rest(turn, known, known_of_turn, blocks);
  set_place(newest_.value, end);
  if (turn.record != 0) records_.add(turn.record, end);
  return is_new;
}

bool Session::holds_all_of(const Session& other) const {
  if (tokens() < other.tokens()) return false;
  return std::ranges::all_of(other.records_, [&](const auto& record) { return holds(record.hash); });
}

SuffixIndex Session::take_over(Session& from) {
  documents_ = std::exchange(from.documents_, {});
  places_ = std::exchange(from.places_, {});
  records_ = std::exchange(from.records_, {});
  newest_ = from.newest_;
  return text_.replace(std::exchange(from.text_, {}));
}

void Session::clear() {
  text_.clear();
  documents_ = {};
  places_ = {};
  records_ = {};
  newest_ = {};
}

SuffixIndex Session::trim(std::size_t tokens) {
  if (tokens >= text_.size()) return {};
  const auto cut = static_cast<Position>(text_.size() - tokens);
  SuffixIndex whole = text_.replace({});
  const std::span<const Token> old = whole.text();
  const Buffer<Document> documents = std::exchange(documents_, {});
  Position first = kNowhere;  // the first position that stays as the text of a turn
  for (std::size_t i = 0; i < documents.size(); ++i) {
    const bool last = i + 1 == documents.size();
    const Position end = last ? static_cast<Position>(cut + tokens) : documents[i + 1].start;
    if (end <= cut) continue;
    Document document = documents[i];
    if (document.begin < cut) {
      for (const Token token : old.subspan(document.begin, cut - document.begin)) document.context.add(token);
      document.begin = document.start = cut;
      document.parent = kNowhere;
    }
    first = std::min(first, document.begin);
    const bool known = document.parent != kNowhere && document.parent >= first;
    document.parent = known ? document.parent - cut : kNowhere;
    document.missing = known ? missing_at(document.parent) : static_cast<std::uint32_t>(document.context.length);
    document.start = std::max(document.start, cut);
    text_.append(old.subspan(document.start, document.begin - document.start), false);
    text_.append(old.subspan(document.begin, end - document.begin));
    document.start -= cut;
    document.begin -= cut;
    documents_.push_back(document);
  }
  places_ = places_.rest([&](Position at) { return at != kNowhere && at >= first; }, cut);
  records_ = records_.rest([&](Position at) { return at > first; }, cut);
  return whole;
}

std::size_t Session::bytes() const {
  return sizeof *this + text_.bytes() + documents_.bytes() + places_.bytes() + records_.bytes() +
         (family.capacity() > 15 ? heap_bytes(family.capacity() + 1) : 0);
}

// Throws unless the documents cover the text in order and the places lie in them.
void Session::restore(SnapshotReader& reader) {
  const auto known = [&](Position at) { return at <= text_.size() || at == kNowhere; };
  places_ = places_.rest(known, 0);  // a place may have got one in newer text, while it was saved
  bool right = documents_.empty() == (text_.size() == 0) && documents_.released() == 0;
  Position last = 0;
  for (std::size_t i = 0; right && i < documents_.size(); ++i) {
    const Document& document = documents_[i];
    right = document.start >= last && document.begin >= document.start && document.begin < text_.size() &&
            (document.parent == kNowhere || (document.parent <= document.start && i > 0));
    last = document.begin + 1;
  }
  const auto in_document = [&](Position position) {
    return position == kNowhere || (!documents_.empty() && position >= documents_[0].begin);
  };
  right = right && std::ranges::all_of(documents_, in_document, &Document::parent) &&
          std::ranges::all_of(places_, in_document, &PositionMap::Entry::position) &&
          std::ranges::all_of(records_, in_document, &PositionMap::Entry::position) &&
          std::ranges::all_of(records_, [&](const auto& record) { return record.position <= text_.size(); });
  if (!right) reader.damaged("a session's turns");
}

}  // namespace agentspec
