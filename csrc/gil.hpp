// Releases Python's lock during native calls, also while the process ends.
#pragma once

#include <Python.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace agentspec {

// Releases the lock until it goes out of scope.
//
// When a process ends while a daemon thread is in a native call, Python ends that thread as soon as it asks for the
// lock: by unwinding its stack, through functions that must not throw, so that the whole process aborts (until Python
// 3.14, which lets such threads hang). Therefore begin_exit(), called before that, makes threads wait for ever in place
// of asking. It runs before the functions that atexit got before the core was imported: in those, no native call of
// another thread returns.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}

  ~GilRelease() {
    ++asking_;
    if (ends_ && std::this_thread::get_id() != main_) {
      --asking_;
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
    PyEval_RestoreThread(state_);
    --asking_;
  }

  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

  // Lets no further thread but this one ask for the lock, and waits for those that do. Call it with the lock held.
  static void begin_exit() {
    main_ = std::this_thread::get_id();
    ends_ = true;
    PyThreadState* const state = PyEval_SaveThread();
    for (int tries = 0; asking_ > 0 && tries < 10'000; ++tries) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    PyEval_RestoreThread(state);
  }

 private:
  inline static std::atomic<int> asking_ = 0;
  inline static std::atomic<bool> ends_ = false;
  inline static std::thread::id main_;  // written before ends_
  PyThreadState* state_;
};

}  // namespace agentspec
