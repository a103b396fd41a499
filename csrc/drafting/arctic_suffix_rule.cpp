#include "drafting/arctic_suffix_rule.hpp"

#include <algorithm>
#include <array>

#include "drafting/fixed_draft.hpp"

namespace agentspec {
namespace {

using fixed::Growth;
using fixed::kMaxDepth;
using fixed::Places;
using fixed::Rooms;

constexpr std::uint8_t kRequest = 0, kGlobal = kSources - 1;

// Of contexts with more occurrences than a match lists, these lengths are tried, and the longest.
constexpr std::array<std::size_t, 15> kSampled{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192};
constexpr double kSlack = 1 + 1e-9;  // a sum of probabilities may be rounded up

const Token* end_of(std::span<const Token> text) { return text.data() + text.size(); }

// The best draft so far.
struct Best {
  std::array<Growth::Step, kMaxDraft> steps;
  std::size_t size = 0, length = 0;  // tokens drafted and matched
  std::uint32_t count = 0;           // occurrences of the matched context
  double score = 0;
  std::uint8_t source = kSources;
};

// The running response, which counts as one of all responses: the request's text from `begin` on.
struct Running {
  const SuffixIndex* index = nullptr;
  std::size_t begin = 0;
};

// Finds the best draft of one source. Drafts are tried only where they can still win: room for n tokens bounds the sum
// of probabilities. Contexts of neighbouring lengths mostly have the same occurrences, and so the same draft.
class Search {
 public:
  // `open`: up to this length of context, its own end counts as an occurrence, one that nothing followed yet.
  Search(const FixedSettings& settings, const Rooms& rooms, const SuffixIndex* index, Running running,
         std::span<const Token> context, std::size_t open, std::uint8_t source, Best& best)
      : rooms_(rooms), index_(index), running_(running), context_(context), open_(open), source_(source),
        growth_(settings.min_token_prob, {index ? end_of(index->text()) : nullptr,
                                          running.index ? end_of(running.index->text()) : nullptr}),
        best_(best) {}

  // Finds the longest context that occurred and returns its length. `known`: no longer one occurs in the request.
  std::size_t begin(std::size_t known) {
    if (!index_ || rooms_.longest() == 0) return 0;
    index_->look_up(context_.last(rooms_.longest()), longest_.match);
    known_ = running_.index ? std::min({known, open_, rooms_.longest()}) : 0;
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
    std::size_t top = length_;  // longer contexts are done with
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
    bool whole = true;  // whether every occurrence is listed

    std::uint32_t count() const { return match.count + own.count; }
  };

  void find(std::size_t length, Found& found) const {
    index_->look_up(context_, length, found.match);
    add_running(length, found);
  }

  // Occurrences in the running response, where all are known.
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

  // Whether a draft from contexts of `length` tokens or fewer with this room can be the best.
  bool can_win(std::size_t length, std::size_t room, double probability = 1) const {
    const double most = static_cast<double>(room) * probability * kSlack;
    return room > 0 && (most > best_.score || (most >= best_.score && wins_level(length)));
  }
  bool can_win(std::size_t length) const { return can_win(length, rooms_[length]); }

  // Of drafts that score the same, the request's wins, then the longest match.
  bool wins_level(std::size_t length) const {
    return best_.source == source_ ? length > best_.length : source_ < best_.source;
  }

  double occurrences(std::size_t length, std::uint32_t count) const { return count + (length <= open_ ? 1.0 : 0.0); }

  Places places_of(const Found& found) const {
    Places places;
    for (std::uint32_t k = found.match.listed; k-- > 0;) {
      places.add(index_->text().data() + found.match.positions[k]);
    }
    // Listed in the order of their contexts where there are more of them.
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
    const std::size_t room = rooms_[rooms_.widest(low, high)];
    if (count == 0 || !can_win(high, room, count / whole)) return;
    growth_.grow(places, count, whole, room);
    const std::size_t length = rooms_.longest_with(growth_.size(), high);
    if (growth_.score() > best_.score || (growth_.score() == best_.score && wins_level(length))) take(length, count);
  }

  void take(std::size_t length, std::uint32_t count) {
    std::ranges::copy(growth_.steps(), best_.steps.begin());
    best_.size = growth_.size();
    best_.length = length;
    best_.count = count;
    best_.score = growth_.score();
    best_.source = source_;
  }

  // Considers the contexts of at most `top` tokens all of whose occurrences are listed, where they can win. Returns the
  // longest length that is left.
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

  // The shortest context that could win if the occurrences were the same down to the length that leaves the most room.
  std::size_t first_guess() {
    std::size_t low = rooms_.widest(1, length_);
    if (longest_.count() == 0) return low;
    growth_.grow(places_of(longest_), longest_.count(), occurrences(low, longest_.count()), rooms_[low]);
    for (std::size_t length = low; length-- > 1;) {
      if (static_cast<double>(rooms_[length]) > growth_.score()) low = length;
    }
    return low;
  }

  // At `low` not all occurrences are listed, above `top` they are: finds where that begins and considers from there on.
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

  // All occurrences at `low` are listed: how far each agrees says which contexts of up to `top` tokens it belongs to.
  void by_agreement(std::size_t low, const Found& found, std::size_t top) {
    const Places places = places_of(found);
    std::array<std::size_t, fixed::kPlaces> agreed;
    for (std::size_t k = 0; k < places.size; ++k) {
      std::size_t most = top;
      if (k >= found.match.listed) {  // what the running response repeats of itself begins where it does
        most = std::min<std::size_t>(top, places.at[k] - (running_.index->text().data() + running_.begin));
      }
      agreed[k] = agreement(places.at[k], low, most);
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

  // Tokens before `here` that agree with the context: `from` are known to, more than `most` do not matter.
  std::size_t agreement(const Token* here, std::size_t from, std::size_t most) const {
    const Token* end = end_of(context_);
    std::size_t length = from;
    while (length < most && *(here - length - 1) == *(end - length - 1)) ++length;
    return length;
  }

  // Considers contexts of at most `top` tokens that have more occurrences than are listed, at some lengths.
  void sampled(std::size_t top) {
    std::size_t size = 0, widest = 0;
    while (size < kSampled.size() && kSampled[size] <= top) ++size;
    for (std::size_t k = 0; k < size; ++k) {
      if (rooms_[kSampled[k]] >= rooms_[kSampled[widest]]) widest = k;
    }
    Found found;
    for (std::size_t k = 0; k < size; ++k) {
      // The one that leaves the most room first.
      const std::size_t length = kSampled[k == 0 ? widest : k <= widest ? widest - k : k];
      if (!can_win(length)) continue;
      find(length, found);
      consider(length, length, places_of(found), found.count());
    }
  }

  const Rooms& rooms_;
  const SuffixIndex* const index_;
  const Running running_;
  const std::span<const Token> context_;
  const std::size_t open_;
  const std::uint8_t source_;
  Found longest_;           // occurrences of the longest context
  std::size_t length_ = 0;  // its length
  std::size_t known_ = 0;   // contexts up to this length may occur in the running response
  Growth growth_;
  Best& best_;
};

void write(const Best& best, DraftPath& result) {
  result.taken.resize(best.size);
  for (std::size_t k = 0; k < best.size; ++k) {
    Candidate& candidate = result.taken[k];
    candidate.token = best.steps[k].token;
    candidate.probability = candidate.share = best.steps[k].probability;
    candidate.source = best.source;
    candidate.rank = 0;
    candidate.match_length = static_cast<std::uint32_t>(best.length + k);
    candidate.count = k == 0 ? best.count : best.steps[k - 1].places;
  }
  result.match_length = best.size ? best.length : 0;
}

}  // namespace

void draft_fixed(const FixedSettings& settings, const Sources& sources, std::span<const Token> context,
                 std::size_t begin, std::size_t room, DraftPath& result) {
  result.clear();
  const std::size_t limit = std::min(room, kMaxDraft);
  if (limit == 0) return;
  const std::span<const Token> tail = context.last(std::min({settings.max_depth, kMaxDepth, context.size()}));
  const Rooms rooms(settings, tail.size(), limit);
  const SuffixIndex *request = sources[kRequest], *global = sources[kGlobal];
  Best best;
  Search own(settings, rooms, request, {}, tail, tail.size(), kRequest, best);
  Search all(settings, rooms, global, {request, begin}, tail, context.size() - begin, kGlobal, best);
  const std::size_t matched = own.begin(0), shared = all.begin(matched);
  // The longer match first: it often leaves nothing to the other.
  if (shared > matched) all.run();
  own.run();
  if (shared <= matched) all.run();
  write(best, result);
}

}  // namespace agentspec
