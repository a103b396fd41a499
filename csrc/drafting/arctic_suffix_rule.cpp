#include "drafting/arctic_suffix_rule.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "drafting/copied_draft.hpp"
#include "drafting/draft_value.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kMaxDepth = 256;  // upper bound of ArcticSettings::max_depth

// Lengths of context that are tried, besides the longest, if a match cannot list all occurrences.
constexpr std::array<std::size_t, 15> kSampled{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192};
constexpr double kSlack = 1 + 1e-9;  // because a sum of probabilities may be rounded up

const Token* end_of(std::span<const Token> text) { return text.data() + text.size(); }

// Holds, for each context length in tokens, the most tokens that may be drafted after it.
class DraftLimits {
 public:
  DraftLimits(const ArcticSettings& settings, std::size_t context, std::size_t limit) {
    const std::size_t lengths = std::min({settings.max_depth, context, kMaxDepth});
    for (std::size_t length = 1; length < lengths; ++length) {
      const double allowed = static_cast<double>(length) * settings.max_spec_factor + settings.max_spec_offset + 1e-6;
      const auto most = static_cast<double>(std::min(limit, settings.max_depth - length));
      limits_[length] = allowed < 1 ? 0 : static_cast<std::size_t>(std::min(allowed, most));
    }
    longest_ = lengths == 0 ? 0 : lengths - 1;
  }

  std::size_t longest() const { return longest_; }  // tokens of context
  std::size_t operator[](std::size_t length) const { return limits_[length]; }

  // Returns the length in [low, high] that allows the most tokens; of several, the longest.
  std::size_t widest(std::size_t low, std::size_t high) const {
    std::size_t best = high;
    for (std::size_t length = high; length-- > low;) {
      if (limits_[length] > limits_[best]) best = length;
    }
    return best;
  }

  // Returns the longest length up to `high` that allows at least `limit` tokens; there must be one.
  std::size_t longest_with(std::size_t limit, std::size_t high) const {
    while (limits_[high] < limit) --high;
    return high;
  }

 private:
  std::array<std::size_t, kMaxDepth> limits_;
  std::size_t longest_;
};

// Holds the best draft so far.
struct Best {
  Draft& draft;
  std::size_t length = 0;  // tokens of context that it was copied behind
  double score = 0;
  std::uint8_t source = kSources;
};

// Refers to the running response: the request's text from `begin` on. The rule counts it among the responses of all.
struct RunningResponse {
  const SuffixIndex* index = nullptr;
  std::size_t begin = 0;
};

// Finds the best draft of one source. It tries only drafts that can still win: the sum of the probabilities of a draft
// is at most its length. Contexts of neighbouring lengths mostly have the same occurrences, and so the same draft.
class SourceSearch {
 public:
  // `open`: contexts up to this length count their own end as an occurrence that nothing has followed yet.
  SourceSearch(double min_token_prob, const DraftLimits& limits, const SuffixIndex* index, RunningResponse running,
               std::span<const Token> context, std::size_t open, std::uint8_t source, Best& best)
      : limits_(limits), index_(index), running_(running), context_(context), open_(open), source_(source),
        copied_(min_token_prob, {index ? end_of(index->text()) : nullptr,
                                 running.index ? end_of(running.index->text()) : nullptr}),
        best_(best) {}

  // Finds the longest context that occurred and returns its length. `known`: the longest that occurs in the request's
  // text.
  std::size_t begin(std::size_t known) {
    if (!index_ || limits_.longest() == 0) return 0;
    index_->look_up(context_.last(limits_.longest()), longest_.match);
    known_ = running_.index ? std::min({known, open_, limits_.longest()}) : 0;
    length_ = std::max<std::size_t>(longest_.match.length, known_);
    if (length_ > longest_.match.length) {
      find(length_, longest_);
    } else if (length_ > 0) {
      add_running(length_, longest_);
    }
    return length_;
  }

  void run() {
    if (length_ == 0) return;
    std::size_t top = length_;  // longer contexts have been considered
    if (longest_.whole) {
      top = listed(top);
    } else {
      consider(top, top, places_of(longest_), longest_.count());
      --top;
    }
    sampled(top);
  }

 private:
  struct Found {
    Match match;        // in the index
    Match own;          // in the running response
    bool whole = true;  // every occurrence is listed

    std::uint32_t count() const { return match.count + own.count; }
  };

  void find(std::size_t length, Found& found) const {
    index_->look_up(context_, length, found.match);
    add_running(length, found);
  }

  // Adds the occurrences in the running response, if all are known.
  void add_running(std::size_t length, Found& found) const {
    found.own.clear();
    found.whole = found.match.complete();
    if (!found.whole || length > known_) return;
    running_.index->look_up(context_, length, found.own);
    found.whole = found.own.complete();
    std::uint32_t kept = 0;
    for (std::uint32_t k = 0; k < found.own.listed && found.whole; ++k) {
      if (found.own.positions[k] >= running_.begin + length) found.own.positions[kept++] = found.own.positions[k];
    }
    found.own.count = found.own.listed = kept;
  }

  // Returns whether a draft of `limit` tokens from contexts of at most `length` tokens can be the best.
  bool can_win(std::size_t length, std::size_t limit, double probability = 1) const {
    const double most = static_cast<double>(limit) * probability * kSlack;
    return limit > 0 && (most > best_.score || (most >= best_.score && wins_level(length)));
  }
  bool can_win(std::size_t length) const { return can_win(length, limits_[length]); }

  // Returns whether a draft that scores the same as the best one replaces it: the request's own text goes before other
  // sources, then the longer match.
  bool wins_level(std::size_t length) const {
    return best_.source == source_ ? length > best_.length : source_ < best_.source;
  }

  double occurrences(std::size_t length, std::uint32_t count) const { return count + (length <= open_ ? 1.0 : 0.0); }

  Places places_of(const Found& found) const {
    Places places;
    for (std::uint32_t k = found.match.listed; k-- > 0;) {
      places.add(index_->text().data() + found.match.positions[k]);
    }
    // An incomplete match lists them in the order of their contexts.
    if (!found.match.complete()) std::sort(places.at.begin(), places.at.begin() + places.size);
    for (std::uint32_t k = found.own.listed; k-- > 0;) {
      places.add(running_.index->text().data() + found.own.positions[k]);
    }
    return places;
  }

  // Considers the contexts of all lengths in [low, high], which have the same occurrences.
  void consider(std::size_t low, std::size_t high, const Places& places, std::uint32_t count) {
    if (low <= open_ && open_ < high) {
      consider(open_ + 1, high, places, count);
      high = open_;
    }
    const double whole = occurrences(high, count);
    const std::size_t limit = limits_[limits_.widest(low, high)];
    if (count == 0 || !can_win(high, limit, count / whole)) return;
    copied_.grow(places, count, whole, limit);
    const std::size_t length = limits_.longest_with(copied_.size(), high);
    if (copied_.score() > best_.score || (copied_.score() == best_.score && wins_level(length))) take(length, count);
  }

  void take(std::size_t length, std::uint32_t count) {
    best_.length = length;
    best_.score = copied_.score();
    best_.source = source_;
    best_.draft.taken.clear();
    auto match_length = static_cast<std::uint32_t>(length);
    for (const CopiedDraft::Step& step : copied_.steps()) {
      best_.draft.taken.push_back({step.token, source_, 0, match_length++, count, step.probability, step.probability});
      count = step.places;
    }
    best_.draft.match_length = best_.draft.taken.empty() ? 0 : length;
  }

  // Scores the contexts of up to `top` tokens whose occurrences are all listed, except those that cannot beat the best
  // draft. Returns the longest length not yet scored; 0: none.
  std::size_t listed(std::size_t top) {
    std::size_t low = first_guess();
    Found wide;
    while (low <= top) {
      if (low < length_) find(low, wide);
      const Found& found = low < length_ ? wide : longest_;
      if (!found.whole) return first_listed(low, top);
      by_agreement(low, found, top);
      top = low - 1;
      low = 1;
      while (low <= top && !can_win(low)) ++low;
    }
    return 0;
  }

  // Returns the shortest length that could win if all lengths down to the one that allows the most tokens have the same
  // occurrences.
  std::size_t first_guess() {
    std::size_t low = limits_.widest(1, length_);
    if (longest_.count() == 0) return low;
    copied_.grow(places_of(longest_), longest_.count(), occurrences(low, longest_.count()), limits_[low]);
    for (std::size_t length = low; length-- > 1;) {
      if (static_cast<double>(limits_[length]) > copied_.score()) low = length;
    }
    return low;
  }

  // Finds the shortest length above `low` whose occurrences are all listed, and scores from there to `top`.
  std::size_t first_listed(std::size_t low, std::size_t top) {
    Found found[2];
    std::size_t high = top + 1, at = 0;
    while (high - low > 1) {
      const std::size_t length = (low + high) / 2;
      find(length, found[1 - at]);
      if (found[1 - at].whole) {
        high = length;
        at = 1 - at;
      } else {
        low = length;
      }
    }
    if (high <= top) by_agreement(high, found[at], top);
    return high - 1;
  }

  // Scores the lengths from `low` to `top` by how far each occurrence agrees. `found`: lists all occurrences of `low`.
  void by_agreement(std::size_t low, const Found& found, std::size_t top) {
    const Places places = places_of(found);
    std::array<std::size_t, kPlaces> agreed;
    for (std::size_t k = 0; k < places.size; ++k) {
      // Text before the running response does not count as part of it. Nor must anything in front of a text be read, if
      // a forged snapshot lists a place that does not agree.
      const Token* const start =
          k < found.match.listed ? index_->text().data() : running_.index->text().data() + running_.begin;
      agreed[k] = agreement(places.at[k], low, std::min<std::size_t>(top, places.at[k] - start));
    }
    for (std::size_t length = top; length >= low;) {
      Places some;
      std::size_t next = low - 1;  // the longest context with more occurrences
      for (std::size_t k = 0; k < places.size; ++k) {
        if (agreed[k] >= length) {
          some.add(places.at[k]);
        } else {
          next = std::max(next, agreed[k]);
        }
      }
      consider(next + 1, length, some, static_cast<std::uint32_t>(some.size));
      length = next;
    }
  }

  // Counts the tokens before `here` that agree with the context: at least `from`, at most `most`.
  std::size_t agreement(const Token* here, std::size_t from, std::size_t most) const {
    const Token* end = end_of(context_);
    std::size_t length = from;
    while (length < most && *(here - length - 1) == *(end - length - 1)) ++length;
    return length;
  }

  // Scores contexts of at most `top` tokens that have more occurrences than are listed, at the lengths of kSampled.
  void sampled(std::size_t top) {
    std::size_t size = 0, widest = 0;
    while (size < kSampled.size() && kSampled[size] <= top) ++size;
    for (std::size_t k = 0; k < size; ++k) {
      if (limits_[kSampled[k]] >= limits_[kSampled[widest]]) widest = k;
    }
    Found found;
    for (std::size_t k = 0; k < size; ++k) {
      // Starts with the length that allows the most.
      const std::size_t length = kSampled[k == 0 ? widest : k <= widest ? widest - k : k];
      if (!can_win(length)) continue;
      find(length, found);
      consider(length, length, places_of(found), found.count());
    }
  }

  const DraftLimits& limits_;
  const SuffixIndex* const index_;
  const RunningResponse running_;
  const std::span<const Token> context_;
  const std::size_t open_;
  const std::uint8_t source_;
  Found longest_;           // occurrences of the longest context
  std::size_t length_ = 0;  // its length
  std::size_t known_ = 0;   // contexts up to this length may occur in the running response
  CopiedDraft copied_;
  Best& best_;
};

}  // namespace

void ArcticSuffixRule::start(SuffixIndex& own, std::span<const Token> prompt, std::size_t, std::size_t) const {
  own.append(prompt);
  while (own.advance(prompt.size()) > 0) {
  }
}

void ArcticSuffixRule::draft(DraftRequest request, std::size_t limit, double) {
  request.draft.clear();
  if (limit == 0) return;
  const std::span<const Token> text = request.text;
  const std::span<const Token> tail = text.last(std::min({settings_.max_depth, kMaxDepth, text.size()}));
  const DraftLimits limits(settings_, tail.size(), limit);
  const SuffixIndex *own = request.sources[kRequest], *global = request.sources[kGlobal];
  const std::size_t begin = request.state.begin;
  Best best{request.draft};
  SourceSearch in_own(settings_.min_token_prob, limits, own, {}, tail, tail.size(), kRequest, best);
  SourceSearch in_all(settings_.min_token_prob, limits, global, {own, begin}, tail, text.size() - begin, kGlobal, best);
  const std::size_t matched = in_own.begin(0), shared = in_all.begin(matched);
  // Runs the source with the longer match first, because it often leaves the other nothing to win.
  if (shared > matched) in_all.run();
  in_own.run();
  if (shared <= matched) in_all.run();
}

void ArcticSuffixRule::merge_draft(DraftRequest request, const ExternalDraft& external, std::size_t limit,
                                   double cost) {
  Draft& draft = request.draft;
  DraftValue present{kCaution * cost};
  for (const Candidate& taken : draft.taken) present.add(taken.probability);
  DraftValue offered{kCaution * cost, std::max(present.value(), 1.0)};
  const std::size_t shared = external.shared_with(draft.taken);
  std::vector<Candidate> taken;
  for (std::size_t d = 0; d < std::min(limit, external.size()) && offered.can_grow(); ++d) {
    taken.push_back(d < shared ? draft.taken[d] : Candidate{external.tokens[d], kModel});
    taken.back().probability = external.probabilities[d];
    offered.add(taken.back().probability);
  }
  if (offered.best_length == 0) return;
  taken.resize(offered.best_length);
  draft.taken = std::move(taken);
  if (shared == 0) draft.match_length = 0;
}

void ArcticSuffixRule::learn(DraftRequest request, std::span<const Token> verified) {
  if (!verified.empty()) request.draft.open = false;
}

}  // namespace agentspec
