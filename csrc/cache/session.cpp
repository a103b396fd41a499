#include "cache/session.hpp"

#include <utility>

namespace agentspec {
namespace {

// Appends a piece of another index's text. Its boundaries become boundaries here.
void append_text(SuffixIndex& index, std::span<const Token> text) {
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && text[i] != kBoundary) continue;
    index.append(text.subspan(begin, i - begin));
    if (i < text.size()) index.append_boundary();
    begin = i + 1;
  }
}

}  // namespace

void Session::append(std::size_t kept, std::span<const Token> prompt_tail, std::span<const Token> response) {
  if (kept < last.size()) {
    last.resize(kept);
    text.append_boundary();
    text.append(last_of(last, kOverlap), false);
  }
  text.append(prompt_tail);
  text.append(response);
  last.insert(last.end(), prompt_tail.begin(), prompt_tail.end());
  last.insert(last.end(), response.begin(), response.end());
}

void Session::trim(std::size_t tokens) {
  const auto newest = last_of(text.text(), tokens);
  const std::vector<Token> kept(newest.begin(), newest.end());
  text.clear();
  append_text(text, kept);
  if (last.size() > tokens) std::vector<Token>().swap(last);
}

Size Session::size() const {
  const std::size_t tokens = text.size() + last.size();
  if (tokens == 0) return {};
  return {tokens, Size::kBytesPerToken * tokens + (learned ? Size::kBytesPerLearner : 0)};
}

}  // namespace agentspec
