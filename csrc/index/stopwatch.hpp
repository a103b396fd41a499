#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace agentspec {

// Measures the thread's CPU time since it was made. It ends work that is slow for some texts early, so that no step
// waits for it.
class Stopwatch {
 public:
  bool over(std::int64_t nanoseconds) const { return spent() > nanoseconds; }
  std::int64_t spent() const { return now() - begin_; }  // nanoseconds

  // Lets the stopwatches of the whole process run. Tests against the oracle, which knows no clock, switch them off, so
  // that a slow machine gives the same answers as a fast one.
  static inline std::atomic<bool> watched = true;

 private:
  static std::int64_t now() {
    timespec time{};
    if (watched.load(std::memory_order_relaxed)) clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
  }

  std::int64_t begin_ = now();
};

// Limits the work of one call beside its drafting: in positions, and in CPU time. Only pieces of work large enough to
// matter are timed, because reading the clock takes as long as indexing a position.
class WorkBudget {
 public:
  WorkBudget(std::size_t positions, double seconds)
      : positions_(positions),
        left_(positions),
        most_at_once_(positions < kAll || seconds < kPatient ? kAtOnce : positions),
        time_(static_cast<std::int64_t>(std::min(std::max(0.0, seconds), 1e6) * 1e9)) {}

  std::size_t left() const { return left_; }
  std::size_t used() const { return positions_ - left_; }
  bool late() const { return spent_ >= time_; }
  std::int64_t spent() const { return spent_; }  // nanoseconds

  void use(std::size_t positions) { left_ -= std::min(left_, positions); }

  // Calls `work` with how much it may do, as long as `has_more()` says that there is something to do and the budget
  // lasts. `work` returns how much it did. Each time it may do kPiece, or more if piece(most) says so.
  template <class HasMore, class Piece, class Work>
  void run(HasMore has_more, Piece piece, Work work) {
    while (left_ > 0 && !late() && has_more()) {
      const std::size_t most = std::max(kPiece, piece(std::min({left_, most_at_once_, sortable()})));
      const std::size_t done = timed([&] { return work(std::min(left_, most)); });
      use(done);
      if (done == 0) return;
    }
  }

  // Calls `work` with a budget that ends when half of this one's time is spent. What it uses counts here, too.
  template <class Work>
  void halved(Work work) {
    WorkBudget half = *this;
    half.time_ /= 2;
    work(half);
    left_ = half.left_;
    spent_ = half.spent_;
  }

  // Calls `work`, whose time counts.
  template <class Work>
  auto timed(Work work) {
    const Stopwatch stopwatch;
    const auto result = work();
    spent_ += stopwatch.spent();
    return result;
  }

  static constexpr std::size_t kPiece = 64;     // positions between two looks at the clock
  static constexpr std::size_t kAtOnce = 2048;  // most positions that are sorted between two looks at the clock: .2 ms

 private:
  // Returns how many positions can be sorted in the time that is left.
  std::size_t sortable() const {
    return static_cast<std::size_t>(std::max<std::int64_t>(time_ - spent_, 0)) / kSortTime;
  }

  // A caller with budgets from these on waits until all is done, so all pending positions may be sorted in one go.
  static constexpr std::size_t kAll = std::size_t{1} << 24;
  static constexpr double kPatient = 10.0;
  static constexpr std::size_t kSortTime = 100;  // ns that sorting a position takes at most, as in a text that repeats

  std::size_t positions_, left_, most_at_once_;
  std::int64_t time_, spent_ = 0;  // nanoseconds
};

}  // namespace agentspec
