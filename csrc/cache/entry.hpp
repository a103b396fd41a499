// Defines what sessions, groups and tenants have in common, and how budgets count them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "drafting/draft.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

// Limits the tokens and bytes that are held; 0 means no limit.
struct Budget {
  std::size_t tokens = 0, bytes = 0;

  bool operator==(const Budget&) const = default;
};

struct Limits {
  Budget process, tenant, session;
};

// Adds up sizes. `bytes`: all memory. `leaving`: the part of it that was evicted, and that later work gives back.
// `pending`: tokens to be indexed.
struct Size {
  std::size_t tokens = 0, bytes = 0, leaving = 0, pending = 0, sessions = 0;

  Size& operator+=(const Size& other) {
    tokens += other.tokens, bytes += other.bytes, leaving += other.leaving;
    pending += other.pending, sessions += other.sessions;
    return *this;
  }
  Size& operator-=(const Size& other) {
    tokens -= other.tokens, bytes -= other.bytes, leaving -= other.leaving;
    pending -= other.pending, sessions -= other.sessions;
    return *this;
  }
  bool over_tokens(Budget most) const { return most.tokens > 0 && tokens > most.tokens; }
  bool over_bytes(Budget most) const { return most.bytes > 0 && bytes > most.bytes + leaving; }
  bool over(Budget most) const { return over_tokens(most) || over_bytes(most); }
};

// Names the session, group and tenant of a request or a stored turn; null: none. `shared`: it uses its named group and
// its tenant.
struct Names {
  const std::string *session = nullptr, *group = nullptr, *tenant = nullptr;
  bool shared = false;
  // Who is charged for the memory of the session and the group (`owner`), and of the tenant (`tenant_owner`). Null: the
  // present owner, and for new entries the tenant.
  const std::string *owner = nullptr, *tenant_owner = nullptr;
  bool stored = false;  // a stored turn gives the names: `owner` is charged for new entries only
  // The session that started this one, or the root of its family; null: none is known.
  const std::string* family = nullptr;
};

struct Tenant;
struct Owner;

// Tells the kinds of entries of a tenant. A family is the group of a root session, under that session's name.
enum class EntryKind : char { kSession = 's', kGroup = 'g', kFamily = 'o' };

// Returns the key of an entry: the letter of its kind, and its name.
inline std::string entry_key(EntryKind kind, std::string_view name) {
  return std::string(1, static_cast<char>(kind)).append(name);
}

// The base of sessions, groups and tenants.
struct CacheEntry {
  std::string key;                    // see entry_key(); a tenant's is its name
  std::shared_ptr<Tenant> tenant;     // of the session or group; null for a tenant
  std::shared_ptr<Owner> owner;       // who it counts for when memory is scarce
  std::uint64_t used = 0;             // tick of its last use
  std::size_t running = 0;            // requests that draft from it; while there are any, it is not evicted
  bool gone = false;                  // erased or evicted; running requests may still know it
  bool loaded = false;                // all that the store holds of it was restored
  bool waiting = false;               // in the list of entries with work
  Size counted;                       // its part of the sums over all entries
  std::shared_ptr<Learned> learned;   // from a tenant's requests, or a session's unshared ones; null: nothing yet

  virtual ~CacheEntry() = default;
  virtual std::size_t tokens() const = 0;
  virtual std::size_t bytes() const = 0;                // in memory now: the object, its texts and indexes
  virtual std::size_t leaving() const { return 0; }     // the part of bytes() that was evicted and is still there
  virtual const SuffixIndex& index() const = 0;
  virtual bool has_work() const { return index().pending() > 0 && !index().frozen(); }  // for advance()
  virtual void freeze(bool frozen) = 0;                            // see SuffixIndex
  virtual SuffixIndex take_index() = 0;                            // moves the index out of an entry that is gone
  // Indexes pending positions and removes dropped ones, for at most about `budget`. Returns how much of it was used.
  virtual std::size_t advance(std::size_t budget) = 0;

  bool is(EntryKind kind) const { return tenant && key.front() == static_cast<char>(kind); }
  std::string name() const { return key.substr(1); }  // of a session, group or family
  // Returns all that budgets count: its text and index, its learned state, its key, and its places in the maps.
  Size size() const;
};

}  // namespace agentspec
