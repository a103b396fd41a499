// Indexes text that waits, evicts, and gives memory back: in the steps, in catch_up, and in a thread of its own.
#ifdef __linux__
#include <sys/resource.h>
#include <unistd.h>
#endif

#include <exception>
#include <thread>

#include "cache/cache.hpp"

namespace agentspec {
namespace {

constexpr double kPiece = 1e-4;           // CPU time between two looks at whether a step waits, in s, about
constexpr std::int64_t kSlice = 200'000;  // longest CPU time for which the indexing thread keeps the lock, in ns

// Gives this thread the lowest priority, so that the engine's threads come first. Only Linux has priorities of threads.
void yield_to_others() {
#ifdef __linux__
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 19);
#endif
}

void index(SuffixIndex& index, WorkBudget& budget) {
  budget.run([&] { return index.pending() > 0; }, [&](std::size_t most) { return index.piece(most); },
             [&](std::size_t most) { return index.advance(most); });
}

}  // namespace

// Indexes pending positions of a request (a prediction before its text, quotable text after it) and of its entries, and
// removes dropped ones.
void Cache::advance(Request& request, WorkBudget& budget) {
  for (SuffixIndex* waiting : request.in_order()) {
    if (waiting->pending() == 0) continue;
    if (waiting == &request.index) waiting->advance(kOwnPerStep);
    index(*waiting, budget);
  }
  if (request.session) entries_.advance(*request.session, budget);
  if (request.group) entries_.advance(*request.group, budget);
  if (request.tenant && !(has_thread() && request.tenant->waits_for_others())) {
    entries_.advance(*request.tenant, budget);
  }
}

// Does a part of the work that waits. Returns how much was done.
std::size_t Cache::work(WorkBudget& budget) {
  entries_.evict_tenants(budget);
  entries_.work(budget);
  for (const auto& current : requests_) {
    if (!current || current->pending() == 0) continue;
    for (SuffixIndex* waiting : current->in_order()) index(*waiting, budget);
    count(*current);
  }
  return budget.used() == 0 && entries_.has_work() ? 1 : budget.used();
}

std::size_t Cache::catch_up(WorkBudget budget) {
  const Change change(*this);
  const std::size_t done = work(budget);
  worked_ += budget.spent();
  return done;
}

bool Cache::index_some() {
  const Change change(*this);
  const Stopwatch stopwatch;
  do {
    WorkBudget budget(WorkBudget::kAtOnce, kPiece);
    if (work(budget) == 0) return false;
  } while (calling_ == 0 && !stopwatch.over(kSlice));
  return true;
}

void Cache::index_until_closed() {
  yield_to_others();
  indexing_ = true;
  while (!closed_) {
    wanted_ = false;
    try {
      while (!closed_ && index_some()) std::this_thread::sleep_for(kBetweenSlices);
    } catch (const std::exception&) {  // the cache is empty now, and the thread goes on
    }
    if (!closed_) wanted_.wait(false);
  }
}

void Cache::close() {
  closed_ = true;
  wanted_ = true;
  wanted_.notify_all();
}

void Cache::want_indexing() {
  const bool waits = entries_.held().pending > 0 || entries_.has_work();
  if (indexing_ && waits && !wanted_.exchange(true)) wanted_.notify_one();
}

}  // namespace agentspec
