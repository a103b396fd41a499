#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "drafter.hpp"
#include "text_index.hpp"

namespace agentspec {

inline constexpr std::size_t kOverlap = 32;             // context kept in front of a document, so matches span its start
inline constexpr std::size_t kIndexPerRequest = 4096;   // pending tokens indexed for one request and source a call
inline constexpr std::size_t kIndexPerCall = 16384;     // and in one call altogether

// What one conversation leaves behind: its turns as one growing text.
struct Session {
  std::string key;
  bool erased = false;
  std::size_t running = 0;
  std::uint64_t used = 0;  // tick of its last use; key in the order of eviction
  TextIndex index;
  std::vector<Token> last;     // full text of the last finished request
  std::shared_ptr<Odds> odds;  // its own where there is no tenant to share them with

  std::size_t tokens() const { return index.size() + last.size(); }
};

// What all sessions of one tenant share: finished responses and learned odds.
struct Tenant {
  struct Document {
    std::string session;  // empty: none
    Position begin, findable, end;
  };
  std::uint64_t used = 0;
  TextIndex index;
  std::deque<Document> documents;
  std::shared_ptr<Odds> odds;

  void add(const std::string& session, std::span<const Token> context, std::span<const Token> response);
  // Keeps the documents that `keep` chooses; they become findable again as the index advances.
  template <class Keep>
  void rebuild(Keep&& keep);
};

struct Request {
  std::shared_ptr<Session> session;
  std::shared_ptr<Tenant> tenant;
  std::shared_ptr<Odds> odds;
  TextIndex index;  // holds the whole text; findable is what the session does not already hold
  std::size_t prompt_length = 0;
  DraftPath draft;
};

struct Turn {
  std::size_t kept = 0;
  std::vector<Token> prompt_tail, response;
};

using BySource = std::array<std::int32_t, kSources>;

// A step's drafts, one after the other: request i has tokens[offsets[i]:offsets[i + 1]].
struct Drafts {
  std::vector<Token> tokens;
  std::vector<std::int32_t> offsets{0};
  std::vector<std::uint8_t> sources;
  std::vector<float> probabilities;
  std::vector<std::int32_t> match_lengths;
  std::vector<BySource> accepted, drafted;
};

struct Stats {
  std::size_t tokens = 0, bytes = 0, sessions = 0, requests = 0, tenants = 0, pending = 0;
};

// The engine's tokens: row r holds prompt and output of one request.
struct TokenTable {
  const Token* data;
  std::size_t rows, columns;
};

// Requests, sessions and tenants, and the calls on them. Every public call takes the lock.
class Cache {
 public:
  Cache(PolicySettings settings, std::size_t max_tokens, std::int64_t vocab_size);

  // The caller chooses unused slots and has checked the tokens. Null keys: none.
  void start(std::size_t slot, std::span<const Token> prompt, const std::string* session, const std::string* tenant);
  void extend(std::size_t slot, std::span<const Token> tokens);
  std::optional<Turn> finish(std::size_t slot, std::optional<std::size_t> output_limit);
  void abort(std::size_t slot);
  void restore(const std::string* session, const std::string* tenant, std::size_t kept,
               std::span<const Token> prompt_tail, std::span<const Token> response);
  void remove_session(const std::string& session, const std::string* tenant);
  bool has_session(const std::string& session);
  std::size_t catch_up(std::size_t budget);
  Stats stats();

  Drafts propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> room);
  Drafts step(std::span<const std::int32_t> slots, TokenTable table, std::span<const std::int32_t> rows,
              std::span<const std::int32_t> lengths, std::span<const std::int32_t> room,
              std::span<const std::int32_t> scheduled);

 private:
  Request& request(std::size_t slot);
  std::shared_ptr<Session> session(const std::string& key, bool own_odds);
  std::shared_ptr<Tenant> tenant(const std::string& key);
  void touch(Session& session);
  void release(std::size_t slot);
  void forget_if_empty(const std::shared_ptr<Session>& session);
  std::size_t kept_tokens() const;
  void keep(const std::shared_ptr<Session>& session, const std::shared_ptr<Tenant>& tenant, std::size_t kept,
            std::span<const Token> prompt_tail, std::span<const Token> response);
  void evict();
  void advance(Request& request, std::size_t& budget);
  void take(Request& request, std::span<const Token> tokens, std::size_t scheduled, BySource& accepted,
            BySource& drafted);
  void draft_into(Request& request, std::size_t room, Drafts& drafts);
  bool legal(Token token) const { return token >= 0 && token < vocab_size_; }

  std::mutex mutex_;
  PolicySettings settings_;
  std::size_t max_tokens_;   // 0: no limit
  std::int64_t vocab_size_;
  std::uint64_t tick_ = 0;
  std::vector<std::unique_ptr<Request>> requests_;
  std::size_t running_ = 0;
  std::size_t session_tokens_ = 0;
  std::unordered_map<std::string, std::shared_ptr<Session>> sessions_;
  std::map<std::uint64_t, std::shared_ptr<Session>> by_use_;  // least recently used first
  std::unordered_map<std::string, std::shared_ptr<Tenant>> tenants_;
};

}  // namespace agentspec
