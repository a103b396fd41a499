// Saves and loads the entries of a cache, without running requests: the calls of Cache and those of CacheEntries.
#include <algorithm>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "cache/cache.hpp"

namespace agentspec {
namespace {

constexpr std::uint64_t kEndOfEntries = 0, kOfTenant = 1, kOfEntry = 2;  // say what comes next in a snapshot
constexpr std::size_t kSavedAtOnce = std::size_t{128} << 10;  // bytes; larger entries are frozen and copied in slices

// Saves or loads `learned`, if there is any. Does not load a reranker whose size differs, as under another budget.
template <class Archive>
void describe(Archive& archive, std::shared_ptr<Learned>& learned, const PolicySettings& settings, unsigned bits) {
  std::uint64_t there = learned != nullptr;
  archive.number(there);
  if (!there) return;
  if (!learned) learned = std::make_shared<Learned>(settings, bits);
  learned->table.describe(archive);
  learned->reranker.describe(archive);
}

template <class Archive>
void describe(Archive& archive, CacheEntry& entry) {
  if (entry.is(EntryKind::kSession)) {
    static_cast<Session&>(entry).describe(archive);
  } else {
    static_cast<Group&>(entry).describe(archive);
  }
}

}  // namespace

template <class Entry>
bool CacheEntries::save_some(const EntryMap<Entry>& map, SnapshotWriter& writer, Cursor& next,
                             std::shared_ptr<CacheEntry>& frozen) {
  auto at = next.begun ? map.by_key.upper_bound(next.key) : map.by_key.begin();
  for (; at != map.by_key.end(); ++at) {
    CacheEntry& entry = *at->second;
    const bool large = entry.size().bytes > kSavedAtOnce;
    if (writer.gathered() > 0 && (large || writer.gathered() > kSavedAtOnce)) return true;
    next.begun = true;
    next.key = entry.key;
    if (entry.tenant && entry.tokens() == 0) continue;  // it exists only for a running request
    writer.number(entry.tenant ? kOfEntry : kOfTenant);
    writer.name(entry.key);
    if (entry.tenant) writer.name(entry.tenant->key);
    if (!entry.tenant) writer.number(static_cast<Tenant&>(entry).written);
    writer.name(entry.owner->name);
    writer.number(entry.used);
    writer.defer(large);
    describe(writer, entry.learned, settings_, learned_bits(entry));
    describe(writer, entry);
    writer.defer(false);
    if (!large) continue;
    frozen = at->second;
    frozen->freeze(true);
    count(entry);
    return true;
  }
  return false;
}

// Saves the tenants in the order of their keys, then sessions and groups.
bool CacheEntries::save_some(SnapshotWriter& writer, Cursor& next, std::shared_ptr<CacheEntry>& frozen) {
  if (!next.tenants_done) {
    if (save_some(tenants_, writer, next, frozen)) return true;
    next = {};
    next.tenants_done = true;
  }
  if (save_some(entries_, writer, next, frozen)) return true;
  writer.number(kEndOfEntries);
  return false;
}

void CacheEntries::thaw(CacheEntry& entry) {
  entry.freeze(false);
  count(entry);
}

// Makes the next entry of a snapshot, still empty. Returns null behind the last one.
std::shared_ptr<CacheEntry> CacheEntries::load_name(SnapshotReader& reader) {
  const std::uint64_t kind = reader.number();
  if (kind == kEndOfEntries) return nullptr;
  if (kind != kOfTenant && kind != kOfEntry) reader.damaged("neither a tenant nor a session nor a group");
  const std::string key = reader.name();
  if (kind == kOfTenant) {
    if (tenants_.find(key)) reader.damaged("a tenant is there twice");
    const std::uint64_t written = reader.number();
    const std::string owner = reader.name();
    const auto loaded = tenant(&key, &owner);
    loaded->written = written;
    return loaded;
  }
  const std::string tenant_key = reader.name(), owner = reader.name();
  if (key.empty() || entries_.find(key)) reader.damaged("a session or group is there twice");
  const auto its_tenant = tenant(&tenant_key, nullptr);
  const std::string name = key.substr(1);
  const Names of_session{.session = &name, .shared = true, .owner = &owner};
  const Names of_group{.group = &name, .shared = true, .owner = &owner};
  switch (static_cast<EntryKind>(key.front())) {
    case EntryKind::kSession: return session(of_session, its_tenant);
    case EntryKind::kFamily: return family(name, its_tenant, of_session);
    case EntryKind::kGroup: return group(of_group, its_tenant);
  }
  reader.damaged("neither a session nor a group");
}

void CacheEntries::load(SnapshotReader& reader, std::int64_t vocab_size, bool same_window) {
  std::vector<std::pair<std::uint64_t, CacheEntry*>> uses;
  while (const auto loaded = load_name(reader)) {
    const std::uint64_t used = reader.number();
    describe(reader, loaded->learned, settings_, learned_bits(*loaded));
    describe(reader, *loaded);
    if (!same_window && !loaded->is(EntryKind::kSession)) {
      auto& group = static_cast<Group&>(*loaded);
      group.corpus.set_written(now(group.tenant ? *group.tenant : static_cast<Tenant&>(group)));
    }
    if (loaded->is(EntryKind::kFamily)) {
      auto& family = static_cast<Group&>(*loaded);
      const std::string root = entry_key(EntryKind::kSession, family.name());
      if (family.corpus.holds_other_than(root)) family.tenant->groups.insert(family.key);
    }
    const auto text = loaded->index().text();
    const bool legal = std::ranges::none_of(text.subspan(loaded->index().released()),
                                            [&](Token token) { return token >= vocab_size; });
    if (!legal) reader.damaged("a token is not in the vocabulary");
    uses.emplace_back(used, loaded.get());
    count(*loaded);
  }
  std::ranges::stable_sort(uses, {}, [](const auto& use) { return use.first; });
  for (const auto& [used, entry] : uses) touch(*entry);
}

Cache::Thawing::~Thawing() {
  if (!entry) return;
  try {
    const Change change(cache);
    cache.entries_.thaw(*entry);
    cache.want_indexing();  // of what was added meanwhile
  } catch (const std::bad_alloc&) {  // the cache is empty now
  }
}

bool Cache::save(const std::string& path, const std::string& identity, const std::string& note) {
  std::lock_guard saving(saving_);
  SnapshotWriter writer(path);
  writer.string(identity);
  writer.string(note);
  writer.number(static_cast<std::uint64_t>(vocab_size_));
  CacheEntries::Cursor next;
  std::uint64_t erasures = 0;
  {
    std::lock_guard lock(mutex_);
    erasures = entries_.erasures;
    writer.number(static_cast<std::uint64_t>(entries_.window.unit));
    writer.number(entries_.periods);
  }
  for (bool more = true, again = false; more;) {
    const auto mark = writer.mark();
    const CacheEntries::Cursor here = next;
    Thawing thawing{*this, nullptr};
    {
      const Change change(*this);
      try {
        more = entries_.save_some(writer, next, thawing.entry);
      } catch (...) {
        refused_ = !thawing.entry;  // gathering changes nothing, freezing an entry does
        throw;
      }
    }
    const bool whole = writer.flush([&](const auto& copy) {
      std::this_thread::sleep_for(kBetweenSlices);
      std::lock_guard lock(mutex_);
      return !thawing.entry->gone && thawing.entry->index().frozen() && copy();
    });
    if (whole) {
      again = false;
    } else {  // it was erased, evicted or cut meanwhile: saves it once more, as it is now
      writer.rewind(mark);
      if (!again) next = here;
      more = true;
      again = !again;
    }
    std::this_thread::sleep_for(kBetweenSlices);
  }
  writer.flush([](const auto&) { return true; });
  writer.finish();
  const std::lock_guard placing(placing_);  // an erasure waits for this before it returns
  {
    std::lock_guard lock(mutex_);
    if (entries_.erasures != erasures) return false;
  }
  writer.commit();
  return true;
}

std::string Cache::load(const std::string& path, const std::string& identity) {
  SnapshotReader reader(path);
  if (const std::string its = reader.string(); its != identity) {
    const std::string what = its.empty() ? "nothing in particular" : its;
    throw std::runtime_error("it was saved for " + what + ", not for " + identity);
  }
  std::string note = reader.string();
  const auto vocabulary = static_cast<std::int64_t>(reader.number());
  if (vocabulary > vocab_size_) {
    throw std::runtime_error("it was saved with vocab_size=" + std::to_string(vocabulary) + ", which is more than " +
                             std::to_string(vocab_size_) + ": it belongs to another model");
  }
  const auto limits = [&] {
    std::lock_guard lock(mutex_);
    return entries_.limits;
  }();
  CacheEntries loaded(settings_, limits, entries_.window);
  const bool same_window = static_cast<HistoryWindow::Unit>(reader.number()) == loaded.window.unit;
  const std::uint64_t periods = reader.number();
  if (same_window) loaded.periods = periods;
  loaded.load(reader, vocab_size_, same_window);
  std::lock_guard lock(mutex_);
  if (!entries_.empty()) throw std::runtime_error("the cache is in use already: load into a new one");
  loaded.set_limits(entries_.limits);
  if (entries_.erasures > 0) throw std::runtime_error("a session was erased while it was read");
  loaded.periods += entries_.periods;  // those that began since this cache was made
  entries_ = std::move(loaded);
  return note;
}

}  // namespace agentspec
