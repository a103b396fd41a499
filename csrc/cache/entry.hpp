// What sessions, groups and tenants have in common, and how budgets count them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "drafting/draft.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

// Holds what budgets count. Bytes are computed from tokens, not measured: buffers grow in leaps and shrink late, so a
// budget on measured bytes would evict too much.
struct Size {
  static constexpr std::size_t kBytesPerToken = 12, kBytesPerLearner = std::size_t{1} << 17;

  std::size_t tokens = 0, bytes = 0;

  Size& operator+=(Size other) { return tokens += other.tokens, bytes += other.bytes, *this; }
  Size& operator-=(Size other) { return tokens -= other.tokens, bytes -= other.bytes, *this; }
  bool over(Size limit) const {
    return (limit.tokens > 0 && tokens > limit.tokens) || (limit.bytes > 0 && bytes > limit.bytes);
  }
};

// Holds the budgets; 0 means no limit.
struct Limits {
  Size process, tenant, session;
};

// Names what a request belongs to; null: nothing. `shared`: it drafts from its group and tenant and adds to them.
struct Names {
  const std::string *session, *group, *tenant;
  bool shared;
};

struct Tenant;

// The base of sessions, groups and tenants.
struct CacheEntry {
  std::string key;
  std::shared_ptr<Tenant> tenant;     // owner of the session or group; null for a tenant
  std::uint64_t used = 0;             // tick of its last use
  std::size_t running = 0;            // requests that draft from it; while there are any, it is not evicted
  bool gone = false;                  // erased or evicted; running requests may still know it
  bool loaded = false;                // a session or named group: what the store holds of it was restored
  Size counted;                       // its part of the sums over all entries
  std::shared_ptr<Learned> learned;   // by a tenant's requests, or a session's unshared ones; null: nothing yet

  virtual ~CacheEntry() = default;
  virtual Size size() const = 0;          // as budgets count it
  virtual std::size_t bytes() const = 0;  // in memory now
  virtual const SuffixIndex& index() const = 0;
  // Indexes pending positions and removes dropped ones, for at most about `budget`. Returns how much of it was used.
  virtual std::size_t advance(std::size_t budget) = 0;
};

}  // namespace agentspec
