#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cache/corpus.hpp"
#include "cache/session.hpp"

namespace agentspec {

// Builds a session, and the family whose root it is, from stored turns. It does so beside the cache, so that no step
// waits for the indexing.
class PreparedSession {
 public:
  // `key`: the session's. `kept_context`: see Drafter.
  PreparedSession(std::string key, std::size_t kept_context) : key_(std::move(key)), kept_context_(kept_context) {}

  // Adds a turn as restoring does. `own`: its response goes to the family whose root the session is.
  void add(Turn turn, bool own);
  // Indexes all that was added.
  void finish();

  const std::string& key() const { return key_; }
  std::size_t bytes() const { return session_.bytes() + responses_.bytes(); }
  const Session& session() const { return session_; }
  const Corpus& responses() const { return responses_; }

  // Each moves the built session or responses into an entry, and returns the index that was there.
  SuffixIndex move_to(Session& session) { return session.take_over(session_); }
  SuffixIndex move_to(Corpus& corpus) { return corpus.take_over(responses_); }

 private:
  std::string key_;
  std::size_t kept_context_;
  Session session_;
  Corpus responses_;
};

// Returns the last `count` tokens in front of a turn's response. `context`: the end of the context that it continues.
std::vector<Token> context_of_response(std::vector<Token> context, const Turn& turn, std::size_t count);

}  // namespace agentspec
