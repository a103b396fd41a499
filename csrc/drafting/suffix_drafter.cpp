#include "drafting/suffix_drafter.hpp"

#include <algorithm>
#include <utility>

#include "drafting/scoring.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kTail = 256;          // tokens of context that look-ups within a draft see
constexpr std::uint32_t kLongEnough = 32;   // tokens of a match from which on other sources need not be searched
constexpr std::uint32_t kListedEnough = 4;  // fewest listed occurrences that may stand for all of them

// Drops the match in each source that has changed since it was found, and the resume point in it. One in the request's
// own text stays, because that text only grows.
void drop_outdated(const Sources& sources, MatchState& state) {
  for (std::size_t s = 0; s < kSources; ++s) {
    const bool same = sources[s] && sources[s]->version() == state.versions[s];
    if (!same) state.matches[s].clear();
    if (state.resume.source == s && !same && (s != kRequest || !sources[s])) state.resume.drop();
  }
}

// Updates the matches: keeps those that were followed and searches for the others. The sibling's is up to date unless
// its index has changed since it was chosen.
void refresh(const Sources& sources, std::span<const Token> text, MatchState& state) {
  if (state.started) drop_outdated(sources, state);
  for (std::size_t s = 0; s < kSources; ++s) {
    Match& match = state.matches[s];
    if (!sources[s]) {
      match.clear();
      continue;
    }
    const std::uint64_t version = sources[s]->version();
    const bool followed = state.started && match.listed > 0 && match.complete();
    if (version == state.versions[s] && (state.fresh || followed || s == kSibling)) continue;
    sources[s]->look_up(text, match, state.known_end(s));
    state.versions[s] = version;
  }
  state.started = state.fresh = true;
}

// Returns whether any source has something to propose.
bool has_proposal(const MatchState& state) {
  const auto listed = [](const Match& match) { return match.listed > 0; };
  return state.resume.active() || std::any_of(state.matches.begin(), state.matches.end(), listed);
}

// Follows a match with a drafted token. Returns false if the source must be searched instead.
bool follow(const SuffixIndex& index, Token token, Match& match) {
  if (match.listed == 0) return false;
  const std::uint32_t enough = match.complete() ? 1 : kListedEnough;
  match.count = match.listed;
  return index.follow(token, match) && match.listed >= enough;
}

// Moves the front past one drafted token, the last of `tail`.
void move_on(const Sources& sources, std::span<const Token> tail, DraftFront& front) {
  const Token token = tail.back();
  std::uint32_t longest = 0;
  std::array<bool, kSources> search{};
  for (std::size_t s = 0; s < kSources; ++s) {
    if (!sources[s]) continue;
    search[s] = !follow(*sources[s], token, front.matches[s]);
    if (!search[s]) longest = std::max(longest, front.matches[s].length);
  }
  for (std::size_t s = 0; s < kSources; ++s) {
    if (!search[s]) continue;
    if (longest < kLongEnough) {
      sources[s]->look_up(tail, front.matches[s]);
    } else {
      front.matches[s].clear();
    }
  }
  advance(sources, token, front.resume);
}

// Makes the first `length` tokens of the path the draft.
void take(std::size_t length, Draft& draft) {
  for (std::size_t d = 0; d < length; ++d) draft.taken.push_back(draft.path[d].taken);
  if (length > 0) draft.match_length = draft.taken[0].match_length;
}

}  // namespace

void SuffixDrafter::start(SuffixIndex& own, std::span<const Token> prompt, std::size_t begin,
                          std::size_t end) const {
  own.append(prompt.first(begin));
  own.append(prompt.subspan(begin, end - begin), false);
  own.append(prompt.subspan(end));
}

void SuffixDrafter::draft(DraftRequest request, std::size_t limit, double cost) {
  request.draft.clear();
  DraftValue value{kCaution * cost};
  grow(request, {}, limit, value, request.draft.path);
  take(value.best_length, request.draft);
}

void SuffixDrafter::merge_draft(DraftRequest request, const ExternalDraft& external, std::size_t limit, double cost) {
  Draft& draft = request.draft;
  DraftValue present{kCaution * cost};
  const std::size_t shared = external.shared_with(draft.taken);
  for (std::size_t d = 0; d < draft.taken.size(); ++d) {
    if (d < shared) draft.taken[d].probability = external.probabilities[d];
    present.add(draft.taken[d].probability);
  }
  draft.taken.resize(present.best_length);
  if (draft.taken.empty()) draft.match_length = 0;
  if (external.size() == 0) return;
  merged_.clear();  // an exception may have left something
  merged_.open = true;
  DraftValue offered{kCaution * cost, present.best};
  const auto before = request.state.versions;
  grow(request, external, limit, offered, merged_.path);
  for (std::size_t s = 0; s < kSources; ++s) {  // the request's own text only grows
    if (s != kRequest && before[s] != request.state.versions[s]) draft.outdated.set(s);
  }
  if (offered.best_length > 0) {
    take(offered.best_length, merged_);
    std::swap(draft, merged_);
  }
  merged_.clear();  // so that no erased text is left in it
}

// Grows the path while that can still raise the value: first by another drafter's tokens, then by the likeliest
// candidates.
void SuffixDrafter::grow(const DraftRequest& request, const ExternalDraft& external, std::size_t limit,
                         DraftValue& value, std::vector<ScoredPosition>& path) const {
  if (limit == 0) return;
  const auto& [sources, text, state, draft, learned] = request;
  refresh(sources, text, state);
  if (external.size() == 0 && !has_proposal(state)) return;
  std::array<Token, kTail + kMaxDraft> tail;  // end of the text, then the draft as it grows
  const std::size_t known = std::min(text.size(), kTail);
  std::copy(text.end() - static_cast<std::ptrdiff_t>(known), text.end(), tail.begin());
  DraftFront front{state.matches, state.resume};
  const std::size_t written = text.size() - state.begin;
  for (std::size_t depth = 0; depth < limit; ++depth) {
    ScoredPosition& scored = path.emplace_back();
    const ScoringContext context{{tail.data(), known + depth}, depth, state.begin, written + depth, state.outcome};
    score(settings_, learned, sources, front, context, scored);
    if (depth < external.size()) {
      scored.take(external.tokens[depth], external.probabilities[depth]);
    } else if (scored.count == 0) {
      path.pop_back();
      break;
    }
    const Token token = scored.taken.token;
    value.add(scored.taken.probability);
    if (!value.can_grow() || depth + 1 == limit) break;
    if (std::find(state.ends.begin(), state.ends.end(), token) != state.ends.end()) break;
    tail[known + depth] = token;
    mark_resume_point(scored, token, front.resume);
    move_on(sources, {tail.data(), known + depth + 1}, front);
  }
}

// Learns from every position whose predecessors were all right, then follows the matches with the verified tokens.
void SuffixDrafter::learn(DraftRequest request, std::span<const Token> verified) {
  if (verified.empty()) return;
  const auto& [sources, text, state, draft, learned] = request;
  drop_outdated(sources, state);
  const std::size_t right = learn_path(request, verified);
  state.outcome = draft.taken.empty() ? 0 : right >= draft.taken.size() ? 1 : 2;
  for (std::size_t d = 0; d < verified.size(); ++d) {
    if (d <= right && d < draft.path.size() && !draft.is_outdated(draft.path[d])) {
      mark_resume_point(draft.path[d], verified[d], state.resume);
    }
    advance(sources, verified[d], state.resume);
    for (std::size_t s = 0; s < kSources; ++s) {
      Match& match = state.matches[s];
      if (match.listed > 0 && !sources[s]->follow(verified[d], match)) match.clear();
    }
  }
  draft.path.clear();
  draft.open = state.fresh = false;
}

// Learns from the path. Returns how many of its tokens were right.
std::size_t SuffixDrafter::learn_path(const DraftRequest& request, std::span<const Token> verified) const {
  const std::vector<ScoredPosition>& path = request.draft.path;
  Learned& learned = request.learned;
  for (std::size_t d = 0; d < std::min(path.size(), verified.size()); ++d) {
    const ScoredPosition& scored = path[d];
    for (std::size_t i = 0; i < scored.proposed; ++i) {
      learned.table.learn(scored.proposals[i].cell, scored.proposals[i].token == verified[d]);
    }
    for (std::size_t c = 0; settings_.rerank && c < scored.count; ++c) {
      const ScoredCandidate& candidate = scored.candidates[c];
      const double error = (candidate.token == verified[d] ? 1.0 : 0.0) - candidate.probability;
      learned.reranker.learn(candidate.features, error, settings_.learning_rate);
    }
    if (scored.taken.token != verified[d]) return d;
  }
  return std::min(path.size(), verified.size());
}

}  // namespace agentspec
