// Python's view of Cache: arrays in, arrays out. The façade (suffix_cache.py) has checked every argument.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cache.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace agentspec {
namespace {

using Vector = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Key = std::optional<std::string>;

std::span<const std::int32_t> view(const Vector& array) { return {array.data(), array.size()}; }
const std::string* pointer(const Key& key) { return key ? &*key : nullptr; }

// Hands a vector's memory to numpy without copying it.
template <class T>
nb::object to_numpy(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

nb::object to_numpy(std::vector<BySource>&& values) {
  auto* kept = new std::vector<BySource>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<BySource>*>(p); });
  auto* data = reinterpret_cast<std::int32_t*>(kept->data());
  return nb::cast(nb::ndarray<nb::numpy, std::int32_t, nb::ndim<2>>(data, {kept->size(), kSources}, owner));
}

nb::tuple to_python(Drafts&& drafts) {
  return nb::make_tuple(to_numpy(std::move(drafts.tokens)), to_numpy(std::move(drafts.offsets)),
                        to_numpy(std::move(drafts.sources)), to_numpy(std::move(drafts.probabilities)),
                        to_numpy(std::move(drafts.match_lengths)), to_numpy(std::move(drafts.accepted)),
                        to_numpy(std::move(drafts.drafted)));
}

nb::tuple step(Cache& cache, const Vector& slots, const Table& tokens, const Vector& rows, const Vector& lengths,
               const Vector& room, const Vector& scheduled) {
  Drafts drafts;
  {
    nb::gil_scoped_release release;
    drafts = cache.step(view(slots), {tokens.data(), tokens.shape(0), tokens.shape(1)}, view(rows), view(lengths),
                        view(room), view(scheduled));
  }
  return to_python(std::move(drafts));
}

nb::tuple propose(Cache& cache, const Vector& slots, const Vector& room) {
  Drafts drafts;
  {
    nb::gil_scoped_release release;
    drafts = cache.propose(view(slots), view(room));
  }
  return to_python(std::move(drafts));
}

nb::object finish(Cache& cache, std::size_t slot, std::optional<std::size_t> output_limit) {
  std::optional<Turn> turn;
  {
    nb::gil_scoped_release release;
    turn = cache.finish(slot, output_limit);
  }
  if (!turn) return nb::none();
  return nb::make_tuple(turn->kept, to_numpy(std::move(turn->prompt_tail)), to_numpy(std::move(turn->response)));
}

void init(Cache* cache, double cost, std::size_t max_draft, std::size_t min_match, double prior_weight, double memory,
          std::vector<double> priors, std::size_t max_tokens, std::int64_t vocab_size) {
  if (priors.size() != Odds::cells()) throw nb::value_error("priors: one for each cell is needed");
  if (max_draft > kMaxDraft) throw nb::value_error("max_draft: at most 128");
  PolicySettings settings{cost, max_draft, min_match, prior_weight, memory, std::move(priors)};
  new (cache) Cache(std::move(settings), max_tokens, vocab_size);
}

nb::tuple stats(Cache& cache) {
  const Stats stats = cache.stats();
  return nb::make_tuple(stats.tokens, stats.bytes, stats.sessions, stats.requests, stats.tenants, stats.pending);
}

}  // namespace
}  // namespace agentspec

NB_MODULE(_native, module) {
  using namespace agentspec;
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Cache>(module, "Core")
      .def("__init__", &init, "cost"_a, "max_draft"_a, "min_match"_a, "prior_weight"_a, "memory"_a, "priors"_a,
           "max_tokens"_a, "vocab_size"_a)
      .def(
          "start",
          [](Cache& cache, std::size_t slot, const Vector& prompt, const Key& session, const Key& tenant) {
            cache.start(slot, view(prompt), pointer(session), pointer(tenant));
          },
          "slot"_a, "prompt"_a.noconvert(), "session"_a.none(), "tenant"_a.none(), Released())
      .def(
          "extend", [](Cache& cache, std::size_t slot, const Vector& tokens) { cache.extend(slot, view(tokens)); },
          "slot"_a, "tokens"_a.noconvert(), Released())
      .def("propose", &propose, "slots"_a.noconvert(), "room"_a.noconvert())
      .def("step", &step, "slots"_a.noconvert(), "tokens"_a.noconvert(), "rows"_a.noconvert(),
           "lengths"_a.noconvert(), "room"_a.noconvert(), "scheduled"_a.noconvert())
      .def("finish", &finish, "slot"_a, "output_limit"_a.none())
      .def("abort", &Cache::abort, "slot"_a, Released())
      .def(
          "restore",
          [](Cache& cache, const Key& session, const Key& tenant, std::size_t kept, const Vector& prompt_tail,
             const Vector& response) {
            cache.restore(pointer(session), pointer(tenant), kept, view(prompt_tail), view(response));
          },
          "session"_a.none(), "tenant"_a.none(), "kept"_a, "prompt_tail"_a.noconvert(), "response"_a.noconvert(),
          Released())
      .def(
          "remove_session",
          [](Cache& cache, const std::string& session, const Key& tenant) {
            cache.remove_session(session, pointer(tenant));
          },
          "session"_a, "tenant"_a.none(), Released())
      .def("has_session", &Cache::has_session, "session"_a, Released())
      .def("catch_up", &Cache::catch_up, "budget"_a, Released())
      .def("stats", &stats);
}
