#include "cache.hpp"

#include <algorithm>
#include <utility>

namespace agentspec {
namespace {

std::size_t common_prefix(std::span<const Token> a, std::span<const Token> b) {
  const std::size_t limit = std::min(a.size(), b.size());
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(limit), b.begin()).first -
                                  a.begin());
}

std::span<const Token> last_of(std::span<const Token> tokens, std::size_t count) {
  return tokens.last(std::min(tokens.size(), count));
}

void advance_some(TextIndex& index, std::size_t& budget) {
  budget -= index.advance(std::min(budget, kIndexPerRequest));
}

// Appends one finished turn to the session's text, in place where the prompt repeats all that came before.
void append_turn(Session& session, std::size_t kept, std::span<const Token> prompt_tail,
                 std::span<const Token> response) {
  if (kept < session.last.size()) {
    session.last.resize(kept);
    session.index.append_boundary();
    session.index.append(last_of(session.last, kOverlap), false);
  }
  session.index.append(prompt_tail);
  session.index.append(response);
  session.last.insert(session.last.end(), prompt_tail.begin(), prompt_tail.end());
  session.last.insert(session.last.end(), response.begin(), response.end());
}

}  // namespace

void Tenant::add(const std::string& session, std::span<const Token> context, std::span<const Token> response) {
  const auto begin = static_cast<Position>(index.size());
  index.append_boundary();
  index.append(last_of(context, kOverlap), false);
  const auto findable = static_cast<Position>(index.size());
  index.append(response);
  documents.push_back({session, begin, findable, static_cast<Position>(index.size())});
}

template <class Keep>
void Tenant::rebuild(Keep&& keep) {
  const TextIndex before = std::exchange(index, TextIndex{});
  const auto old = std::exchange(documents, {});
  for (const Document& document : old) {
    if (!keep(document)) continue;
    const auto text = before.text();
    add(document.session, text.subspan(document.begin + 1, document.findable - document.begin - 1),
        text.subspan(document.findable, document.end - document.findable));
  }
}

Cache::Cache(PolicySettings settings, std::size_t max_tokens, std::int64_t vocab_size)
    : settings_(std::move(settings)), max_tokens_(max_tokens), vocab_size_(vocab_size) {}

Request& Cache::request(std::size_t slot) { return *requests_.at(slot); }

std::shared_ptr<Session> Cache::session(const std::string& key, bool own_odds) {
  auto& entry = sessions_[key];
  if (!entry) {
    entry = std::make_shared<Session>();
    entry->key = key;
    if (own_odds) entry->odds = std::make_shared<Odds>(settings_);
  }
  touch(*entry);
  return entry;
}

std::shared_ptr<Tenant> Cache::tenant(const std::string& key) {
  auto& entry = tenants_[key];
  if (!entry) {
    entry = std::make_shared<Tenant>();
    entry->odds = std::make_shared<Odds>(settings_);
  }
  entry->used = ++tick_;
  return entry;
}

void Cache::touch(Session& session) {
  by_use_.erase(session.used);
  session.used = ++tick_;
  by_use_[session.used] = sessions_.at(session.key);
}

void Cache::start(std::size_t slot, std::span<const Token> prompt, const std::string* session_key,
                  const std::string* tenant_key) {
  std::lock_guard lock(mutex_);
  auto fresh = std::make_unique<Request>();
  if (tenant_key) fresh->tenant = tenant(*tenant_key);
  if (session_key) {
    fresh->session = session(*session_key, !tenant_key);
    ++fresh->session->running;
  }
  fresh->odds = tenant_key    ? fresh->tenant->odds
                : session_key ? fresh->session->odds
                              : std::make_shared<Odds>(settings_);
  const std::size_t kept = fresh->session ? common_prefix(prompt, fresh->session->last) : 0;
  fresh->prompt_length = prompt.size();
  fresh->index.append(prompt.first(kept), false);
  fresh->index.append(prompt.subspan(kept));
  if (slot >= requests_.size()) requests_.resize(slot + 1);
  requests_[slot] = std::move(fresh);
  ++running_;
  std::size_t budget = kIndexPerCall;
  advance(*requests_[slot], budget);
}

void Cache::extend(std::size_t slot, std::span<const Token> tokens) {
  std::lock_guard lock(mutex_);
  BySource accepted{}, drafted{};
  take(request(slot), tokens, kMaxDraft, accepted, drafted);
}

std::optional<Turn> Cache::finish(std::size_t slot, std::optional<std::size_t> output_limit) {
  std::lock_guard lock(mutex_);
  Request& current = request(slot);
  const auto session = current.session;
  const auto tenant = current.tenant;
  if ((!session && !tenant) || (session && session->erased)) {
    release(slot);
    return std::nullopt;
  }
  const auto prompt = current.index.text().first(current.prompt_length);
  auto response = current.index.text().subspan(current.prompt_length);
  if (output_limit) response = response.first(std::min(response.size(), *output_limit));
  Turn turn;
  if (session) turn.kept = common_prefix(prompt, session->last);
  const auto tail = session ? prompt.subspan(turn.kept) : last_of(prompt, kOverlap);
  turn.prompt_tail.assign(tail.begin(), tail.end());
  turn.response.assign(response.begin(), response.end());
  keep(session, tenant, turn.kept, turn.prompt_tail, turn.response);
  release(slot);
  evict();
  return turn;
}

void Cache::abort(std::size_t slot) {
  std::lock_guard lock(mutex_);
  release(slot);
}

void Cache::release(std::size_t slot) {
  const auto session = request(slot).session;
  requests_[slot].reset();
  --running_;
  if (session) {
    --session->running;
    forget_if_empty(session);
  }
}

void Cache::forget_if_empty(const std::shared_ptr<Session>& session) {
  if (session->erased || session->running > 0 || session->tokens() > 0) return;
  by_use_.erase(session->used);
  sessions_.erase(session->key);
}

void Cache::restore(const std::string* session_key, const std::string* tenant_key, std::size_t kept,
                    std::span<const Token> prompt_tail, std::span<const Token> response) {
  std::lock_guard lock(mutex_);
  const auto to_tenant = tenant_key ? tenant(*tenant_key) : nullptr;
  const auto to_session = session_key ? session(*session_key, !tenant_key) : nullptr;
  if (!to_session || kept > to_session->last.size()) kept = 0;  // what the turn continued is no longer there
  keep(to_session, to_tenant, kept, prompt_tail, response);
  if (to_session) forget_if_empty(to_session);
  evict();
}

void Cache::keep(const std::shared_ptr<Session>& session, const std::shared_ptr<Tenant>& tenant, std::size_t kept,
                 std::span<const Token> prompt_tail, std::span<const Token> response) {
  std::size_t budget = kIndexPerCall;
  if (tenant && !response.empty()) {
    std::vector<Token> context;
    if (session) {
      const auto before = last_of(std::span<const Token>(session->last).first(kept), kOverlap);
      context.assign(before.begin(), before.end());
    }
    context.insert(context.end(), prompt_tail.begin(), prompt_tail.end());
    tenant->add(session ? session->key : std::string(), context, response);
    tenant->used = ++tick_;
    advance_some(tenant->index, budget);
  }
  if (session && !(prompt_tail.empty() && response.empty())) {
    session_tokens_ -= session->tokens();
    append_turn(*session, kept, prompt_tail, response);
    session_tokens_ += session->tokens();
    touch(*session);
    advance_some(session->index, budget);
  }
}

std::size_t Cache::kept_tokens() const {
  std::size_t total = session_tokens_;
  for (const auto& [key, tenant] : tenants_) total += tenant->index.size();
  return total;
}

// Makes room: a global tree that fills more than half of the budget loses its older half; otherwise the session that
// was used least recently goes. Sessions with running requests stay.
void Cache::evict() {
  while (max_tokens_ > 0) {
    const std::size_t total = kept_tokens();
    if (total <= max_tokens_) return;
    auto idle = std::find_if(by_use_.begin(), by_use_.end(), [](const auto& entry) {
      return entry.second->running == 0 && entry.second->tokens() > 0;
    });
    if (2 * (total - session_tokens_) <= max_tokens_ && idle != by_use_.end()) {
      const auto session = idle->second;
      session_tokens_ -= session->tokens();
      sessions_.erase(session->key);
      by_use_.erase(idle);
      continue;
    }
    Tenant* oldest = nullptr;
    for (const auto& [key, tenant] : tenants_) {
      if (tenant->index.size() > 0 && (!oldest || tenant->used < oldest->used)) oldest = tenant.get();
    }
    if (!oldest) return;
    const Position half = static_cast<Position>(oldest->index.size() - oldest->index.size() / 2);
    oldest->rebuild([&](const Tenant::Document& document) { return document.begin >= half; });
  }
}

void Cache::remove_session(const std::string& session_key, const std::string* tenant_key) {
  std::lock_guard lock(mutex_);
  if (const auto found = sessions_.find(session_key); found != sessions_.end()) {
    const auto session = found->second;
    session->erased = true;
    session_tokens_ -= session->tokens();
    by_use_.erase(session->used);
    sessions_.erase(found);
  }
  if (!tenant_key) return;
  const auto found = tenants_.find(*tenant_key);
  if (found == tenants_.end()) return;
  const auto& documents = found->second->documents;
  auto of_session = [&](const Tenant::Document& document) { return document.session == session_key; };
  if (std::none_of(documents.begin(), documents.end(), of_session)) return;
  found->second->rebuild([&](const Tenant::Document& document) { return !of_session(document); });
}

bool Cache::has_session(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto found = sessions_.find(key);
  return found != sessions_.end() && found->second->tokens() > 0;
}

std::size_t Cache::catch_up(std::size_t budget) {
  std::lock_guard lock(mutex_);
  const std::size_t whole = budget;
  for (const auto& [key, session] : sessions_) budget -= session->index.advance(budget);
  for (const auto& [key, tenant] : tenants_) budget -= tenant->index.advance(budget);
  for (const auto& current : requests_) {
    if (current) budget -= current->index.advance(budget);
  }
  return whole - budget;
}

Stats Cache::stats() {
  std::lock_guard lock(mutex_);
  Stats stats;
  stats.tokens = kept_tokens();
  stats.sessions = static_cast<std::size_t>(
      std::count_if(sessions_.begin(), sessions_.end(), [](const auto& entry) { return entry.second->tokens() > 0; }));
  stats.requests = running_;
  stats.tenants = tenants_.size();
  auto add = [&](const TextIndex& index) {
    stats.bytes += index.bytes();
    stats.pending += index.pending();
  };
  for (const auto& [key, session] : sessions_) {
    add(session->index);
    stats.bytes += session->last.capacity() * sizeof(Token);
  }
  for (const auto& [key, tenant] : tenants_) add(tenant->index);
  for (const auto& current : requests_) {
    if (current) add(current->index);
  }
  return stats;
}

void Cache::advance(Request& request, std::size_t& budget) {
  advance_some(request.index, budget);
  if (request.session) advance_some(request.session->index, budget);
  if (request.tenant) advance_some(request.tenant->index, budget);
}

// Adds verified tokens, the first of which answer the draft; only `scheduled` tokens of that were verified.
void Cache::take(Request& request, std::span<const Token> tokens, std::size_t scheduled, BySource& accepted,
                 BySource& drafted) {
  if (tokens.empty()) return;
  const DraftPath& draft = request.draft;
  bool right = true;
  for (std::size_t d = 0; d < std::min(draft.drafted, scheduled); ++d) {
    const Candidate& taken = draft.path[d].taken();
    right = right && d < tokens.size() && tokens[d] == taken.token;
    ++drafted[taken.source];
    if (right) ++accepted[taken.source];
  }
  learn(draft, tokens, *request.odds);
  request.index.append(tokens);
  request.draft.clear();
}

void Cache::draft_into(Request& request, std::size_t room, Drafts& drafts) {
  Sources sources{&request.index, nullptr, nullptr};
  if (request.session && !request.session->erased) sources[1] = &request.session->index;
  if (request.tenant) sources[2] = &request.tenant->index;
  draft(settings_, *request.odds, sources, request.index.text(), room, request.draft);
  for (std::size_t d = 0; d < request.draft.drafted; ++d) {
    const Candidate& taken = request.draft.path[d].taken();
    drafts.tokens.push_back(taken.token);
    drafts.sources.push_back(taken.source);
    drafts.probabilities.push_back(static_cast<float>(taken.probability));
  }
}

Drafts Cache::propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> room) {
  return step(slots, {nullptr, 0, 0}, {}, {}, room, {});
}

Drafts Cache::step(std::span<const std::int32_t> slots, TokenTable table, std::span<const std::int32_t> rows,
                   std::span<const std::int32_t> lengths, std::span<const std::int32_t> room,
                   std::span<const std::int32_t> scheduled) {
  std::lock_guard lock(mutex_);
  Drafts drafts;
  std::size_t budget = kIndexPerCall;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Request& current = request(static_cast<std::size_t>(slots[i]));
    BySource accepted{}, drafted{};
    bool sound = true;
    if (table.data) {
      const std::size_t known = current.index.size();
      const auto length = static_cast<std::size_t>(lengths[i]);
      const Token* row = table.data + static_cast<std::size_t>(rows[i]) * table.columns;
      std::size_t end = std::min(known, length);
      while (end < length && legal(row[end])) ++end;
      take(current, {row + std::min(known, end), end - std::min(known, end)}, static_cast<std::size_t>(std::max(scheduled[i], 0)),
           accepted, drafted);
      sound = current.index.size() == length;  // otherwise a draft would continue another text than the engine's
    }
    advance(current, budget);
    current.draft.clear();
    if (sound) draft_into(current, static_cast<std::size_t>(std::max(room[i], 0)), drafts);
    drafts.offsets.push_back(static_cast<std::int32_t>(drafts.tokens.size()));
    drafts.match_lengths.push_back(static_cast<std::int32_t>(current.draft.match_length));
    drafts.accepted.push_back(accepted);
    drafts.drafted.push_back(drafted);
  }
  return drafts;
}

}  // namespace agentspec
