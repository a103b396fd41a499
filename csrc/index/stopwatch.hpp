#pragma once

#include <cstdint>

namespace agentspec {

// CPU time of this thread since it was made. What may take long for some texts ends early by it, so that no step waits.
class Stopwatch {
 public:
  bool over(std::int64_t nanoseconds) const { return now() - begin_ > nanoseconds; }

 private:
  static std::int64_t now();

  std::int64_t begin_ = now();
};

// Whether stopwatches run (the default), in the whole process. Without them a slow machine gives the same answers as a
// fast one: comparisons with the oracle, which knows no clock, switch them off.
void watch_clock(bool watched);

}  // namespace agentspec
