#include "cache/prepared_session.hpp"

#include <utility>

namespace agentspec {

std::vector<Token> context_of_response(std::vector<Token> context, const Turn& turn, std::size_t count) {
  const auto tail = last_of(std::span(turn.tokens).first(turn.prompt_tail), kOverlap);
  context.insert(context.end(), tail.begin(), tail.end());
  const auto kept = last_of(std::span<const Token>(context), count);
  return {kept.begin(), kept.end()};
}

void PreparedSession::add(Turn turn, bool own) {
  if (turn.tokens.empty()) return;
  session_.find_parent(turn);
  auto context = session_.context_of(turn);
  bool wanted = true;  // see Cache::keep
  if (!session_.holds(turn.record)) wanted = session_.append(turn) || turn.record != 0;
  if (!own || !wanted || turn.response().empty() || responses_.holds(turn.record)) return;
  const std::string key = entry_key(EntryKind::kSession, key_);
  responses_.add(&key, turn.record, context_of_response(std::move(context), turn, kept_context_), turn.response());
}

void PreparedSession::finish() {
  while (const std::size_t pending = session_.index().pending()) session_.advance(pending);
  while (const std::size_t pending = responses_.index().pending()) responses_.advance(pending);
}

}  // namespace agentspec
