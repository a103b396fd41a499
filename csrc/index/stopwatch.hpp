#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace agentspec {

// CPU time of this thread since it was made. What may take long for some texts ends early by it, so that no step waits.
class Stopwatch {
 public:
  bool over(std::int64_t nanoseconds) const { return now() - begin_ > nanoseconds; }

  // Whether stopwatches run, in the whole process. Without them a slow machine gives the same answers as a fast one:
  // comparisons with the oracle, which knows no clock, switch them off.
  static inline std::atomic<bool> watched = true;

 private:
  static std::int64_t now() {
    timespec time{};
    if (watched.load(std::memory_order_relaxed)) clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
  }

  std::int64_t begin_ = now();
};

}  // namespace agentspec
