#include "index/stopwatch.hpp"

#include <atomic>
#include <ctime>

namespace agentspec {
namespace {

std::atomic<bool> clock_watched = true;

}  // namespace

void watch_clock(bool watched) { clock_watched = watched; }

std::int64_t Stopwatch::now() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  if (!clock_watched.load(std::memory_order_relaxed)) return 0;
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
#else
  return 0;
#endif
}

}  // namespace agentspec
