#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace agentspec {

// Measures the thread's CPU time since it was made. Work that is slow for some texts ends by it: no step waits.
class Stopwatch {
 public:
  bool over(std::int64_t nanoseconds) const { return now() - begin_ > nanoseconds; }

  // Lets the stopwatches of the whole process run. Tests against the oracle, which knows no clock, switch them off:
  // then a slow machine gives the same answers as a fast one.
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
