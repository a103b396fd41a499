// Binds Cache to Python: arrays in, arrays out. suffix_cache.py and kept_turns.py check the arguments of all calls but
// step's.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "arguments.hpp"
#include "cache/cache.hpp"
#include "drafting/draft_value.hpp"
#include "gil.hpp"
#include "index/stopwatch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace agentspec {
namespace {

using Vector = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Probabilities = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Name = std::optional<std::string>;

std::span<const std::int32_t> view(const Vector& array) { return {array.data(), array.size()}; }
const std::string* pointer(const Name& key) { return key ? &*key : nullptr; }

// Hands a vector's memory to numpy without copying it. A vector of arrays becomes one row for each array.
template <class T>
nb::object to_numpy(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  if constexpr (std::is_same_v<T, BySource>) {
    auto* data = reinterpret_cast<std::int32_t*>(kept->data());
    const std::initializer_list<std::size_t> shape{kept->size(), std::tuple_size_v<BySource>};
    return nb::cast(nb::ndarray<nb::numpy, std::int32_t, nb::ndim<2>>(data, shape, owner));
  } else {
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
  }
}

// Returns the arrays of the drafts as a tuple, followed by `more`.
template <class... More>
nb::tuple to_python(Drafts& drafts, More&... more) {
  return nb::make_tuple(to_numpy(std::move(drafts.tokens)), to_numpy(std::move(drafts.offsets)),
                        to_numpy(std::move(drafts.sources)), to_numpy(std::move(drafts.probabilities)),
                        to_numpy(std::move(drafts.match_lengths)), to_numpy(std::move(more))...);
}

template <class Call>
auto without_gil(Call call) {
  const GilRelease release;
  return call();
}

// Checks its arguments before anything changes, because Python does not. Returns None if nothing was drafted or
// verified.
nb::object step(Cache& cache, nb::handle slots_, nb::handle tokens_, nb::handle rows_, nb::handle lengths_,
                nb::handle max_draft_, nb::handle num_verified_, double cost, nb::handle work_seconds_,
                nb::handle most_) {
  const Int32Buffer slots(slots_), tokens(tokens_);
  if (!slots.has_dimensions(1)) refuse("slots: give int32 [requests]");
  if (!tokens.has_dimensions(2)) {
    refuse("tokens: give the engine's token array, int32 [rows, columns] and C-contiguous: it is read in place");
  }
  const std::size_t count = slots.size(0);
  const Numbers rows(rows_, "rows", count), lengths(lengths_, "lengths", count),
      max_draft(max_draft_, "max_draft", count), num_verified(num_verified_, "num_verified", count);
  const std::size_t height = tokens.size(0), width = tokens.size(1);
  if (count > 0 && height == 0) refuse("tokens: the array has no rows");
  rows.check("rows", height - 1);
  lengths.check("lengths", width);
  const double work_seconds = seconds(work_seconds_, "work_seconds");
  const std::int32_t most = integer(most_, "most");
  Drafts drafts = without_gil([&] {
    return cache.step({{slots.data(), count}, rows.get(), lengths.get(), max_draft.get(), num_verified.get()},
                      {tokens.data(), height, width}, cost, work_seconds, most);
  });
  const auto idle = [](const BySource& drafted) { return drafted == BySource{}; };
  if (drafts.tokens.empty() && std::all_of(drafts.drafted.begin(), drafts.drafted.end(), idle)) return nb::none();
  return to_python(drafts, drafts.accepted, drafts.drafted);
}

nb::tuple propose(Cache& cache, const Vector& slots, const Vector& max_draft, double cost, double work_seconds) {
  Drafts drafts = without_gil([&] { return cache.propose(view(slots), view(max_draft), cost, work_seconds); });
  return to_python(drafts);
}

nb::tuple merge_drafts(Cache& cache, const Vector& slots, const Table& tokens, const Probabilities& probabilities,
                       const Vector& lengths, const Vector& max_draft, double cost) {
  const ExternalDrafts external{tokens.data(), probabilities.data(), tokens.shape(1)};
  Drafts drafts =
      without_gil([&] { return cache.merge_drafts(view(slots), external, view(lengths), view(max_draft), cost); });
  return to_python(drafts);
}

// Returns the columns of _native.pyi's CandidateArrays, in their order. Each has one row for each candidate.
nb::tuple candidates(Cache& cache, std::size_t slot) {
  const auto path = cache.candidates(slot);
  const auto column = [&]<class T>(T, auto field) {
    std::vector<T> values;
    for (const ScoredPosition& scored : path) {
      for (std::size_t c = 0; c < scored.count; ++c) values.push_back(static_cast<T>(scored.candidates[c].*field));
    }
    return to_numpy(std::move(values));
  };
  std::vector<std::int32_t> depths;
  for (std::size_t depth = 0; depth < path.size(); ++depth) {
    depths.insert(depths.end(), path[depth].count, static_cast<std::int32_t>(depth));
  }
  constexpr std::int32_t integer = 0;
  constexpr std::uint8_t small = 0;
  return nb::make_tuple(to_numpy(std::move(depths)), column(integer, &Candidate::token),
                        column(0.0, &Candidate::probability), column(small, &Candidate::source),
                        column(small, &Candidate::rank), column(integer, &Candidate::match_length),
                        column(integer, &Candidate::count), column(0.0, &Candidate::share));
}

nb::object finish(Cache& cache, std::size_t slot, std::optional<std::size_t> output_limit, std::uint64_t record) {
  std::optional<Turn> turn = without_gil([&] { return cache.finish(slot, output_limit, record); });
  if (!turn) return nb::none();
  return nb::make_tuple(turn->kept, turn->parent, turn->block, turn->prompt_tail, to_numpy(std::move(turn->tokens)));
}

// Returns the hash of a context after each of `tokens`, which follow `kept` tokens that hash to `parent`.
nb::object context_hashes(const Vector& tokens, std::uint64_t parent, std::size_t kept) {
  ContextHash context{parent, kept};
  std::vector<std::uint64_t> hashes;
  hashes.reserve(tokens.size());
  for (const Token token : view(tokens)) {
    context.add(token);
    hashes.push_back(context.value);
  }
  return to_numpy(std::move(hashes));
}

double draft_value(double expected, std::size_t drafted, double cost) {
  DraftValue value{kCaution * cost};
  value.expected += expected;
  value.length = drafted;
  return value.value();
}

// Converts a DraftPolicy, whose fields Python has checked.
PolicySettings settings_of(const nb::object& policy) {
  PolicySettings settings;
  settings.max_draft = nb::cast<std::size_t>(policy.attr("max_draft"));
  settings.min_match = nb::cast<std::size_t>(policy.attr("min_match"));
  settings.rerank = nb::cast<bool>(policy.attr("rerank"));
  settings.prior_weight = nb::cast<double>(policy.attr("prior_weight"));
  settings.memory = nb::cast<double>(policy.attr("memory"));
  settings.learning_rate = nb::cast<double>(policy.attr("learning_rate"));
  if (const nb::object arctic = policy.attr("arctic"); !arctic.is_none()) {
    settings.arctic = ArcticSettings{
        nb::cast<std::size_t>(arctic.attr("max_depth")), nb::cast<double>(arctic.attr("max_spec_factor")),
        nb::cast<double>(arctic.attr("max_spec_offset")), nb::cast<double>(arctic.attr("min_token_prob"))};
  }
  if (settings.max_draft > kMaxDraft) refuse("max_draft: at most " + std::to_string(kMaxDraft));
  return settings;
}

// The fields of CoreTurn: kept, parent, block, prompt_tail, response, record.
using TurnFields = std::tuple<std::size_t, std::uint64_t, std::uint64_t, Vector, Vector, std::uint64_t>;

Turn turn_of(const TurnFields& fields) {
  const auto& [kept, parent, block, prompt_tail, response, record] = fields;
  std::vector<Token> tokens(view(prompt_tail).begin(), view(prompt_tail).end());
  tokens.insert(tokens.end(), view(response).begin(), view(response).end());
  return {kept, parent, block, std::move(tokens), prompt_tail.size(), record};
}

// The fields of CoreNames: session, group, tenant, shared, family.
using NameFields = std::tuple<Name, Name, Name, bool, Name>;

// Returns the names of a request or a turn; the arguments must outlive it.
Names names_of(const NameFields& fields, const Name& owner = {}, const Name& tenant_owner = {}) {
  const auto& [session, group, tenant, shared, family] = fields;
  return {.session = pointer(session), .group = pointer(group), .tenant = pointer(tenant), .shared = shared,
          .owner = pointer(owner), .tenant_owner = pointer(tenant_owner), .family = pointer(family)};
}

using LimitNumbers = std::array<std::size_t, 6>;

Limits limits_of(const LimitNumbers& n) { return {{n[0], n[1]}, {n[2], n[3]}, {n[4], n[5]}}; }

using WindowNumbers = std::array<std::uint64_t, 2>;

HistoryWindow::Unit unit_of(std::uint64_t number) { return static_cast<HistoryWindow::Unit>(number); }

void init(Cache* cache, const nb::object& policy, const LimitNumbers& limits, std::int64_t vocab_size,
          const WindowNumbers& window) {
  new (cache) Cache(settings_of(policy), limits_of(limits), vocab_size, {unit_of(window[0]), window[1]});
}

nb::tuple stats(Cache& cache) {
  const Stats stats = without_gil([&] { return cache.stats(); });
  return nb::make_tuple(stats.tokens, stats.bytes, stats.sessions, stats.requests, stats.tenants, stats.pending,
                        stats.leaving, stats.evictions);
}

nb::tuple recount(Cache& cache) {
  const Size sum = cache.recount();
  return nb::make_tuple(sum.tokens, sum.bytes, sum.sessions, sum.pending, sum.leaving);
}

}  // namespace
}  // namespace agentspec

NB_MODULE(_native, module) {
  using namespace agentspec;
  nb::set_leak_warnings(false);  // a thread that ends with the process may still hold a cache
  using Released = nb::call_guard<GilRelease>;
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&GilRelease::begin_exit));
  module.def("draft_value", &draft_value, "expected"_a, "drafted"_a, "cost"_a);
  module.attr("HASH_BLOCK") = kBlock;
  module.def("context_hashes", &context_hashes, "tokens"_a.noconvert(), "parent"_a, "kept"_a);
  module.def(
      "watch_clock", [](bool watched) { Stopwatch::watched = watched; }, "watched"_a);
  nb::class_<SuffixIndex>(module, "PublicIndex")
      .def(nb::init<>())
      .def(
          "add",
          [](SuffixIndex& index, const Vector& tokens) {
            index.append_boundary();
            index.append(view(tokens));
            while (index.pending() > 0) index.advance(kWorkPerStep);
            return index.bytes();
          },
          "tokens"_a.noconvert(), Released());
  nb::class_<PreparedSession>(module, "PreparedSession")
      .def(
          "add",
          [](PreparedSession& prepared, const TurnFields& turn, bool own) {
            without_gil([&] { prepared.add(turn_of(turn), own); });
          },
          "turn"_a, "own"_a)
      .def_prop_ro("key", &PreparedSession::key)
      .def("finish", &PreparedSession::finish, Released())
      .def("bytes", &PreparedSession::bytes);
  nb::class_<Cache>(module, "Core")
      .def("__init__", &init, "policy"_a, "limits"_a, "vocab_size"_a, "window"_a)
      .def(
          "start",
          [](Cache& cache, std::size_t slot, const Vector& prompt, const NameFields& names, const Name& owner,
             const Name& tenant_owner, const Vector& ends, const Vector& prediction, const Vector& quotable) {
            return without_gil([&] {
              return cache.start(slot, view(prompt), names_of(names, owner, tenant_owner), view(ends),
                                 view(prediction), view(quotable));
            });
          },
          "slot"_a, "prompt"_a.noconvert(), "names"_a, "owner"_a.none(), "tenant_owner"_a.none(),
          "ends"_a.noconvert(), "prediction"_a.noconvert(), "quotable"_a.noconvert())
      .def(
          "extend", [](Cache& cache, std::size_t slot, const Vector& tokens) { cache.extend(slot, view(tokens)); },
          "slot"_a, "tokens"_a.noconvert(), Released())
      .def("propose", &propose, "slots"_a.noconvert(), "max_draft"_a.noconvert(), "cost"_a, "work_seconds"_a)
      .def("merge_drafts", &merge_drafts, "slots"_a.noconvert(), "tokens"_a.noconvert(), "probabilities"_a.noconvert(),
           "lengths"_a.noconvert(), "max_draft"_a.noconvert(), "cost"_a)
      .def("candidates", &candidates, "slot"_a)
      .def("step", &step, "slots"_a, "tokens"_a.none(), "rows"_a.none(), "lengths"_a.none(), "max_draft"_a.none(),
           "num_verified"_a.none(), "cost"_a, "work_seconds"_a.none(), "most"_a.none())
      .def("finish", &finish, "slot"_a, "output_limit"_a.none(), "record"_a)
      .def("abort", &Cache::abort, "slot"_a, Released())
      .def(
          "restore",
          [](Cache& cache, const NameFields& names, const Name& owner, const TurnFields& turn, bool held_only) {
            without_gil([&] { cache.restore(names_of(names, owner), turn_of(turn), held_only); });
          },
          "names"_a, "owner"_a.none(), "turn"_a, "held_only"_a)
      .def("publish", &Cache::publish, "index"_a, Released())
      .def("count_public", &Cache::count_public, "bytes"_a, Released())
      .def(
          "learn_from",
          [](Cache& cache, const NameFields& names, const TurnFields& turn, double cost) {
            return without_gil([&] { return cache.learn_from(names_of(names), turn_of(turn), cost); });
          },
          "names"_a, "turn"_a, "cost"_a)
      .def(
          "prepare", [](const Cache& cache, const std::string& session) { return cache.prepare(session); }, "session"_a)
      .def(
          "adopt",
          [](Cache& cache, PreparedSession& prepared, const std::string& tenant, const Name& family,
             const Name& owner) {
            const Names names{.session = &prepared.key(), .tenant = &tenant, .shared = true, .owner = pointer(owner),
                              .family = pointer(family)};
            return cache.adopt(names, prepared);
          },
          "prepared"_a, "tenant"_a, "family"_a.none(), "owner"_a.none(), Released())
      .def("remove_session", &Cache::remove_session, "session"_a, "tenant"_a, Released())
      .def("free_session", &Cache::free_session, "session"_a, Released())
      .def("has_session", &Cache::has_session, "session"_a, Released())
      .def(
          "needs_load", [](Cache& cache, const NameFields& names) { return cache.needs_load(names_of(names)); },
          "names"_a, Released())
      .def(
          "mark_loaded", [](Cache& cache, const NameFields& names) { cache.mark_loaded(names_of(names)); }, "names"_a,
          Released())
      .def("tenants", [](Cache& cache) { return without_gil([&] { return cache.tenants(); }); })
      .def(
          "begin_period", [](Cache& cache, std::uint64_t unit) { cache.begin_period(unit_of(unit)); }, "unit"_a,
          Released())
      .def("forget_tenant", &Cache::forget_tenant, "tenant"_a, Released())
      .def(
          "catch_up",
          [](Cache& cache, std::size_t budget, double seconds) { return cache.catch_up(WorkBudget(budget, seconds)); },
          "budget"_a, "seconds"_a, Released())
      .def("index_until_closed", &Cache::index_until_closed, Released())
      .def("close", &Cache::close)
      .def(
          "resize", [](Cache& cache, const LimitNumbers& limits) { cache.resize(limits_of(limits)); }, "limits"_a,
          Released())
      .def("stats", &stats)
      .def("worked", &Cache::worked)
      .def("recount", &recount)
      .def(
          "save",
          [](Cache& cache, const std::string& path, const std::string& identity, const nb::bytes& note) {
            const std::string text(note.c_str(), note.size());
            return without_gil([&] { return cache.save(path, identity, text); });
          },
          "path"_a, "identity"_a, "note"_a)
      .def(
          "load",
          [](Cache& cache, const std::string& path, const std::string& identity) {
            const std::string note = without_gil([&] { return cache.load(path, identity); });
            return nb::bytes(note.data(), note.size());
          },
          "path"_a, "identity"_a);
}
