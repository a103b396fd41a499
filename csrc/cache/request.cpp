#include "cache/request.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace agentspec {
namespace {

bool is_same(Token in_text, Token in_row) {
  return in_text == in_row || (in_text < kBoundary && in_row == placeholder_of(in_text));
}

// Makes other requests forget a sibling whose text goes or changes.
void forget_in_siblings(const Request& gone) {
  for (Request* member : gone.group->members) {
    if (member->sibling == &gone) member->forget_sibling();
  }
}

// Returns whether siblings may draft from a request, and it from them. A request of an erased session takes no part.
bool takes_part(const Request& request) { return !request.session || !request.session->gone; }

}  // namespace

void Request::begin(const Drafter& drafter, std::span<const Token> prompt) {
  prompt_length = state.begin = prompt.size();
  std::size_t held_from = 0, held_to = 0;  // the part of the prompt that the session holds
  if (session && !session->gone) {
    blocks.clear();
    ContextHash().add(prompt, blocks);
    if (const auto known = session->find(prompt, blocks)) {
      held_to = known->length;
      held_from = std::min<std::size_t>(session->missing_at(known->position), held_to);
    }
  }
  drafter.start(index, prompt, held_from, held_to);
}

void Request::predict(const Drafter& drafter, std::span<const Token> prompt, std::span<const Token> expected,
                      std::span<const Token> quotable) {
  quotes = expected.empty() && !quotable.empty();
  if (quotes) {
    prediction.append(quotable);
  } else if (!expected.empty()) {
    prediction.append(last_of(prompt, drafter.kept_context()), false);
    prediction.append(expected);
  }
}

bool Request::goes_on_in(std::span<const Token> row) const {
  const auto text = index.text();
  if (row.size() < text.size()) return false;
  const auto end = last_of(text, kMaxDraft + 1), in_row = row.subspan(text.size() - end.size(), end.size());
  if (end.empty() || std::memcmp(end.data(), in_row.data(), end.size_bytes()) == 0) return true;
  return std::ranges::equal(end, in_row, is_same);
}

void Request::rewind(const Drafter& drafter, std::span<const Token> row) {
  if (group) forget_in_siblings(*this);
  const auto text = index.text();
  const auto common = std::ranges::mismatch(text, row, is_same).in1;
  const std::vector<Token> kept(text.begin(), common);
  const std::span<const Token> prompt = std::span(kept).first(std::min(kept.size(), prompt_length));
  index.clear();
  begin(drafter, prompt);
  index.append(std::span(kept).subspan(prompt.size()));
  draft.clear();
  MatchState fresh;
  fresh.ends = std::move(state.ends);
  fresh.begin = state.begin;
  state = std::move(fresh);
}

Verified Request::take(Drafter& drafter, const SuffixIndex* public_corpus, std::span<const Token> tokens,
                       std::size_t num_verified) {
  Verified verified;
  if (tokens.empty()) return verified;
  bool right = true;
  for (std::size_t d = 0; d < std::min(draft.taken.size(), num_verified); ++d) {
    // kBoundary: the token was forgotten. It was accepted if tokens follow: a step gives those accepted and one more.
    const Token token = draft.taken[d].token;
    right = right && d < tokens.size() && (token == kBoundary ? d + 1 < tokens.size() : tokens[d] == token);
    const std::size_t source = source_of(draft.taken[d]);
    ++verified.drafted[source];
    if (right) ++verified.accepted[source];
  }
  drafter.learn(for_drafter(public_corpus), tokens);
  index.append(tokens);
  return verified;
}

Turn Request::turn(std::optional<std::size_t> output_limit) const {
  const auto text = index.text();
  const auto prompt = text.first(prompt_length);
  const std::size_t response = std::min(text.size() - prompt.size(), output_limit.value_or(text.size()));
  Turn turn;
  turn.prompt_tail = std::min(prompt.size(), kOverlap);
  if (session) {
    const auto known = session->find(prompt, blocks);
    if (known) turn.kept = known->length;
    if (turn.kept >= kBlock) turn.block = blocks[turn.kept / kBlock - 1];
    ContextHash parent{turn.block, turn.kept / kBlock * kBlock};
    for (const Token token : prompt.subspan(parent.length, turn.kept - parent.length)) parent.add(token);
    turn.parent = parent.value;
    turn.prompt_tail = prompt.size() - turn.kept;
  }
  const auto added = text.subspan(prompt.size() - turn.prompt_tail, turn.prompt_tail + response);
  turn.tokens.assign(added.begin(), added.end());
  return turn;
}

void Request::join() {
  if (group) group->members.push_back(this);
}

void Request::leave() {
  if (!group || std::erase(group->members, this) == 0) return;
  if (group->members.empty()) group->members = {};
  forget_in_siblings(*this);
}

void Request::choose_sibling() {
  Request* const before = sibling;
  if (!group || group->members.size() < 2 || !takes_part(*this)) return;
  sibling = nullptr;
  Match& best = state.matches[kSibling];
  Match match;
  std::size_t asked = 0;
  best.clear();
  const auto ask = [&](Request* other) {
    if (!takes_part(*other)) return;
    if (other == before) {
      other->index.look_up(index.text(), match, &state.sibling_end);
    } else {
      other->index.look_up(last_of(index.text(), kAskedTokens), match);
    }
    ++asked;
    if (match.length <= best.length) return;
    best = match;
    sibling = other;
    state.versions[kSibling] = other->index.version();
  };
  if (before) ask(before);
  const auto& members = group->members;
  std::size_t passed = 0;
  for (; passed < members.size() && asked < kAskedSiblings; ++passed) {
    Request* const member = members[(next_asked + passed) % members.size()];
    if (member != this && member != before) ask(member);
  }
  next_asked = (next_asked + passed) % members.size();
  if (sibling != before) {
    state.sibling_end = {};
    if (state.resume.source == kSibling) state.resume.drop();
  }
}

void Request::forget_sibling() {
  sibling = nullptr;
  state.forget(kSibling);
}

Size Request::size() const {
  Size size;
  size.bytes = heap_bytes(sizeof *this) + index.bytes() + prediction.bytes() +
               heap_bytes(blocks.capacity() * sizeof(std::uint64_t)) +
               heap_bytes(state.ends.capacity() * sizeof(Token)) +
               heap_bytes(draft.path.capacity() * sizeof(ScoredPosition)) +
               heap_bytes(draft.taken.capacity() * sizeof(Candidate));
  if (!session && !shared) size.bytes += learned->bytes();
  size.pending = pending();
  return size;
}

void Request::forget_public() {
  state.forget(kPublic);
  draft.forget_tokens();
}

DraftRequest Request::for_drafter(const SuffixIndex* public_corpus) {
  const auto index_of = [](const CacheEntry* entry) { return entry && !entry->gone ? &entry->index() : nullptr; };
  const Sources sources{&index, index_of(session.get()), index_of(group.get()),
                        shared ? &tenant->corpus.index() : nullptr, shared ? public_corpus : nullptr,
                        sibling ? &sibling->index : nullptr, prediction.size() > 0 ? &prediction : nullptr};
  return {sources, index.text(), state, draft, *learned};
}

}  // namespace agentspec
