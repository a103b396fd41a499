// Saving and loading a whole cache. snapshot.hpp has the file's layout; here is what its sections hold:
//   cache    vocabulary, tick, number of tenants, number of holdings
//   tenant   key, tick of last use, what was learned or nothing, corpus           (in order of their keys)
//   session  key, tenant, tick, what was learned or nothing, last context, text   (sessions and groups, least
//   group    key, tenant, tick, corpus                                             recently used first)
#include <stdexcept>

#include "cache/cache.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kEverything = std::size_t{1} << 62;

void save_learned(SnapshotWriter& writer, const Learned* learned) {
  writer.array(learned ? learned->table.bytes() : std::span<const std::byte>());
  writer.array(learned ? learned->judge.bytes() : std::span<const std::byte>());
}

// Null where nothing was saved. What is of another size was learned under other settings: then learning starts anew.
std::shared_ptr<Learned> load_learned(SnapshotReader& reader, const PolicySettings& settings, unsigned bits) {
  const auto table = reader.array<std::byte>();
  const auto judge = reader.array<std::byte>();
  if (table.empty()) return nullptr;
  auto learned = std::make_shared<Learned>(settings, bits);
  learned->table.load(table);
  learned->judge.load(judge);
  return learned;
}

void settle(Corpus& corpus) {
  while (corpus.advance(kEverything) > 0) {
  }
  while (!corpus.swept()) corpus.sweep(kEverything);
}

}  // namespace

void Corpus::save(SnapshotWriter& writer) const {
  std::vector<Document> documents(documents_.begin(), documents_.end());
  for (Document& document : documents) {
    document.begin -= index_.save_offset();
    document.end -= index_.save_offset();
  }
  writer.array(std::span<const Document>(documents));
  index_.save(writer);
}

void Corpus::load(SnapshotReader& reader) {
  const auto documents = reader.array<Document>();
  documents_.assign(documents.begin(), documents.end());
  index_.load(reader);
  for (const Document& document : documents_) {
    if (document.begin > document.end || document.end > index_.size()) reader.damaged("a document lies outside its text");
    tokens_ += document.end - document.begin;
  }
}

void Session::save(SnapshotWriter& writer) const {
  writer.array(std::span<const Token>(last));
  text.save(writer);
}

void Session::load(SnapshotReader& reader) {
  const auto context = reader.array<Token>();
  last.assign(context.begin(), context.end());
  text.load(reader);
}

void Cache::save(const std::string& path) {
  std::lock_guard lock(mutex_);
  std::size_t kept = 0;
  for (const auto& [used, holding] : by_use_) {
    while (advance(*holding, kEverything) > 0) {
    }
    while (holding->sweep(kEverything) > 0) {
    }
    kept += holding->size().tokens > 0;
  }
  SnapshotWriter writer(path);
  writer.section("cache");
  writer.number(static_cast<std::uint64_t>(vocab_size_));
  writer.number(tick_);
  writer.number(tenants_.size());
  writer.number(kept);
  for (const auto& [key, tenant] : tenants_) {
    settle(tenant->corpus);
    writer.section("tenant");
    writer.string(key);
    writer.number(tenant->used);
    save_learned(writer, tenant->learned.get());
    tenant->corpus.save(writer);
  }
  for (const auto& [used, holding] : by_use_) {
    if (holding->size().tokens == 0) continue;  // only a running request knows it
    writer.section(holding->key.front() == 's' ? "session" : "group");
    writer.string(holding->key);
    writer.string(holding->tenant->key);
    writer.number(holding->used);
    if (holding->key.front() == 's') save_learned(writer, static_cast<const Session&>(*holding).learned.get());
    holding->save(writer);
  }
  writer.commit();
}

void Cache::load(const std::string& path) {
  std::lock_guard lock(mutex_);
  SnapshotReader reader(path);
  reader.section("cache");
  const auto vocabulary = static_cast<std::int64_t>(reader.number());
  if (vocabulary > vocab_size_) {
    throw std::runtime_error("it was saved with vocab_size=" + std::to_string(vocabulary) + ", which is more than " +
                             std::to_string(vocab_size_) + ": it belongs to another model");
  }
  tick_ = reader.number();
  const std::uint64_t tenants = reader.number();
  const std::uint64_t holdings = reader.number();
  for (std::uint64_t i = 0; i < tenants; ++i) {
    reader.section("tenant");
    const std::string key = reader.string();
    const auto loaded = tenant(&key);
    tenants_by_use_.erase(loaded->used);
    loaded->used = reader.number();
    tenants_by_use_[loaded->used] = loaded.get();
    loaded->learned = load_learned(reader, settings_, kTenantBits);
    learners_ += loaded->learned != nullptr;
    loaded->corpus.load(reader);
    count(*loaded);
  }
  for (std::uint64_t i = 0; i < holdings; ++i) load_holding(reader);
}

void Cache::load_holding(SnapshotReader& reader) {
  const bool is_session = reader.peek() == "session";
  reader.section(is_session ? "session" : "group");
  const std::string key = reader.string();
  const std::string owner = reader.string();
  if (key.empty() || holdings_.contains(key)) reader.damaged("a session or group is there twice");
  if (!tenants_.contains(owner)) reader.damaged("a session or group belongs to an unknown tenant");
  const auto of = tenants_.at(owner);
  const std::string name = key.substr(1);
  std::shared_ptr<CacheEntry> loaded;
  if (is_session) {
    loaded = session(&name, of);
  } else {
    loaded = holding<Group>(key, of);
  }
  by_use_.erase(loaded->used);
  loaded->used = reader.number();
  by_use_[loaded->used] = loaded;
  if (is_session) static_cast<Session&>(*loaded).learned = load_learned(reader, settings_, kSessionBits);
  loaded->load(reader);
  count(*loaded);
}

}  // namespace agentspec
