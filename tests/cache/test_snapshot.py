"""Test saving and loading whole caches, and loading damaged files."""

import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from agentspec.cache import DraftPolicy, FinishedTurn, Scope, SuffixCache
from agentspec.errors import SnapshotError
from tests.cache.mutations import VOCABULARY, seal

TEXT = list(range(100, 160))


def fill(cache: SuffixCache) -> None:
    for number in range(8):
        name = f"s{number}"
        group, tenant = "g" if number % 2 else None, "t" if number > 2 else None
        scope: Scope = "session" if number in (2, 6) else "tenant"
        cache.start("r", [1, 2, number], session=name, group=group, tenant=tenant, scope=scope)
        cache.extend("r", [token + 100 * number for token in TEXT])
        cache.propose(["r"], 8)
        cache.extend("r", [7, 8])
        cache.finish("r")


def answers(cache: SuffixCache) -> list[object]:
    """Return the cache's drafts for many contexts."""
    seen: list[object] = []
    for number in range(8):
        for tenant in (None, "t", "u"):
            cache.start("q", [1, 2, number], session=f"s{number}", group="g", tenant=tenant)
            cache.extend("q", [token + 100 * number for token in TEXT[10:14]])
            draft = cache.propose(["q"], 16)[0]
            seen.append((draft.token_ids.tolist(), draft.probabilities.tolist(), draft.source, draft.match_length))
            cache.abort("q")
    return seen


def test_a_loaded_cache_answers_the_same(tmp_path: Path) -> None:
    cache = SuffixCache()
    fill(cache)
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot")
    assert loaded.stats().tokens == cache.stats().tokens > 0
    assert loaded.stats().sessions == cache.stats().sessions
    assert answers(loaded) == answers(cache)


def test_a_loaded_cache_goes_on_and_can_be_saved_again(tmp_path: Path) -> None:
    cache = SuffixCache()
    fill(cache)
    for name in ("one", "two"):
        cache.save(tmp_path / name)
        cache = SuffixCache.load(tmp_path / name)
        cache.start("r", [1, 2, 3], session="new", tenant="t")
        cache.extend("r", [41, 42, 43, 44])
        cache.finish("r")
    cache.save(tmp_path / "one")  # over a file that may still be mapped
    assert len(answers(cache)) > 0
    cache.start("q", [], tenant="t")
    cache.extend("q", [41, 42, 43])
    assert cache.propose(["q"], 1)[0].token_ids.tolist() == [44]


def test_what_was_erased_is_not_saved(tmp_path: Path) -> None:
    cache = SuffixCache()
    cache.start("r", [], session="s", tenant="t")
    cache.extend("r", [0x5EC2E7 + n for n in range(40)])
    cache.finish("r")
    cache.save(tmp_path / "before")
    secret = (0x5EC2E7).to_bytes(4, "little")
    assert secret in (tmp_path / "before").read_bytes()
    cache.remove_session("t", "s")
    cache.save(tmp_path / "after")
    assert secret not in (tmp_path / "after").read_bytes()
    assert SuffixCache.load(tmp_path / "after").stats().tokens == 0


def test_what_waits_to_be_indexed_is_indexed_after_a_save(tmp_path: Path) -> None:
    """The text is too large to be indexed while the cache is saved."""
    cache = SuffixCache()
    cache.start("r", [1, 2], tenant="t")
    cache.extend("r", np.arange(100_000, dtype=np.int32))
    cache.finish("r")
    cache.save(tmp_path / "snapshot")
    assert cache.stats().pending > 0
    cache.catch_up()
    assert cache.stats().pending == 0


def test_another_policy_may_load_it(tmp_path: Path) -> None:
    cache = SuffixCache()
    fill(cache)
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot", policy=DraftPolicy.fixed())
    loaded.start("q", [], tenant="t")
    loaded.extend("q", [410, 411, 412])
    assert loaded.propose(["q"], 1)[0].token_ids.tolist() == [413]


@pytest.mark.parametrize("harm", ["empty", "cut", "flipped", "other", "missing"])
def test_a_damaged_file_is_refused(tmp_path: Path, harm: str) -> None:
    cache = SuffixCache()
    fill(cache)
    path = tmp_path / "snapshot"
    cache.save(path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "empty": b"",
        "cut": whole[: middle + 1],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :],
        "other": b"something else entirely " * 50,
    }
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged[harm])
    with pytest.raises(SnapshotError, match=str(path)):
        SuffixCache.load(path)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    cache = SuffixCache(policy=DraftPolicy(rerank=False))
    cache.start("r", [1, 2], session="s", tenant="t")
    cache.extend("r", [3, 4, 5])
    cache.finish("r")
    path = tmp_path / "snapshot"
    cache.save(path)
    whole = bytearray(path.read_bytes())
    step = max(len(whole) // 400, 1)
    for at in range(0, len(whole), step):
        whole[at] ^= 1
        path.write_bytes(whole)
        whole[at] ^= 1
        with pytest.raises(SnapshotError):
            SuffixCache.load(path)


# Of three documents of 80, 81 and 82 tokens, as words of the snapshot: a session, a record, a range, and when it was
# written. In front is how many of them were evicted, how many are gone, their number, and how many have no memory. The
# last three of these follow for the erased ones.
DOCUMENTS = [*(0, 0, 3, 0), *(0, 0, 80 << 32, 0), *(0, 0, 161 << 32 | 80, 0), *(0, 0, 243 << 32 | 161, 0), 0, 0, 0]
FIRST, SECOND, THIRD = DOCUMENTS[4:8], DOCUMENTS[8:12], DOCUMENTS[12:16]


@pytest.mark.parametrize(
    "forged",
    [
        [4, *DOCUMENTS[1:]],  # more are evicted than there are
        [0, 0, 3, 0, *SECOND, *FIRST, *THIRD, 0, 0, 0],  # not in their order
        [0, 0, 3, 0, 0, 0, 83 << 32, 0, *DOCUMENTS[8:]],  # the first ends in the second, whose end is not indexed
        [0, 0, 4, 0, *FIRST, *SECOND, *THIRD, 0, 0, 240 << 32 | 243, 0, 0, 0, 0],  # one ends before it begins
        [*DOCUMENTS[:14], 250 << 32 | 161, 0, 0, 0, 0],  # the last one ends behind the text
        [0, 0, 2, 0, *FIRST, *SECOND, 0, 0, 0],  # the text goes on behind the last one
        [*DOCUMENTS[:16], 0, 1, 0, *SECOND],  # one is erased and there, too
        [0, 1, *DOCUMENTS[2:]],  # the first one is gone, but not its text
    ],
)
def test_documents_that_do_not_fit_their_text_are_refused(forged: list[int], tmp_path: Path) -> None:
    """The file's checksum is right. Later, eviction would remove such a document at the wrong place."""
    cache, path = SuffixCache(vocab_size=VOCABULARY), tmp_path / "snapshot"
    for number in range(3):
        cache.start("r", [1, 2], tenant="t")
        cache.extend("r", range(100 * number, 100 * number + 77 + number))
        cache.finish("r")
    cache.catch_up()
    cache.save(path)
    whole, documents = path.read_bytes(), np.array(DOCUMENTS, np.uint64).tobytes()
    assert whole.count(documents) == 1
    path.write_bytes(seal(bytearray(whole.replace(documents, np.array(forged, np.uint64).tobytes()))))
    with pytest.raises(SnapshotError, match="a document lies outside its text"):
        SuffixCache.load(path, vocab_size=VOCABULARY)


def test_a_snapshot_with_a_token_beyond_its_vocabulary_is_refused(tmp_path: Path) -> None:
    cache, path = SuffixCache(vocab_size=VOCABULARY), tmp_path / "snapshot"
    text = np.arange(VOCABULARY - 40, VOCABULARY, dtype=np.int32)
    cache.start("r", [1, 2], session="s", scope="session")
    cache.extend("r", text)
    cache.finish("r")
    cache.save(path)
    whole = path.read_bytes()
    assert text.tobytes() in whole
    path.write_bytes(seal(bytearray(whole.replace(text.tobytes(), (text + 1).tobytes()))))
    with pytest.raises(SnapshotError, match="a token is not in the vocabulary"):
        SuffixCache.load(path, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("there", "forged", "fault"),
    [
        (b"acmf", b"acme", "a tenant is there twice"),
        (b"session-two", b"session-one", "a session or group is there twice"),
        (b"\x12" + bytes(7) + b"s4:acmesession-two" + bytes(6), bytes(8), "a session or group is there twice"),
        (b"s4:acmesession-two", b"x4:acmesession-two", "neither a session nor a group"),
    ],
    ids=["tenant", "session", "nameless", "kind"],
)
def test_a_snapshot_that_names_an_entry_twice_or_not_at_all_is_refused(
    there: bytes, forged: bytes, fault: str, tmp_path: Path
) -> None:
    cache, path = SuffixCache(vocab_size=VOCABULARY), tmp_path / "snapshot"
    for tenant, session in (("acme", "session-one"), ("acme", "session-two"), ("acmf", None)):
        cache.start("r", [1, 2], session=session, tenant=tenant)
        cache.extend("r", range(50))
        cache.finish("r")
    cache.save(path)
    whole = path.read_bytes()
    assert there in whole
    path.write_bytes(seal(bytearray(whole.replace(there, forged))))
    with pytest.raises(SnapshotError, match=fault):
        SuffixCache.load(path, vocab_size=VOCABULARY)


def test_a_snapshot_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    SuffixCache(vocab_size=VOCABULARY).save(tmp_path / "snapshot")
    with pytest.raises(SnapshotError, match="vocab_size=1000, which is more than 999: it belongs to another model"):
        SuffixCache.load(tmp_path / "snapshot", vocab_size=VOCABULARY - 1)
    assert SuffixCache.load(tmp_path / "snapshot", vocab_size=VOCABULARY + 1).stats().tokens == 0


def test_a_cache_that_is_in_use_loads_nothing(tmp_path: Path) -> None:
    cache, used = SuffixCache(), SuffixCache()
    fill(cache)
    cache.save(tmp_path / "snapshot")
    used.start("r", [1, 2], session="own", tenant="t")
    with pytest.raises(SnapshotError, match="the cache is in use already: load into a new one"):
        used.load_snapshot(tmp_path / "snapshot")
    used.extend("r", TEXT)
    assert used.finish("r") and used.has_session("t", "own") and used.stats().sessions == 1


def test_a_session_that_has_said_nothing_is_not_saved(tmp_path: Path) -> None:
    """The request that holds it is not saved either, so a loaded cache would never forget the session."""
    cache = SuffixCache()
    cache.start("r", [1, 2], session="silent", tenant="t")
    cache.save(tmp_path / "snapshot")
    assert b"silent" not in (tmp_path / "snapshot").read_bytes()


def test_positions_out_of_order_leave_with_their_text(tmp_path: Path) -> None:
    """A forged file has a right checksum. A position that outlived its text would be read out of bounds later."""
    rng, path = np.random.default_rng(1), tmp_path / "snapshot"
    cache = SuffixCache(vocab_size=VOCABULARY)
    for _ in range(40):
        cache.start("r", rng.integers(0, 900, 8), tenant="t")
        cache.extend("r", rng.integers(0, 900, 100))
        cache.finish("r")
    cache.catch_up()
    cache.save(path)
    path.write_bytes(seal(out_of_order(bytearray(path.read_bytes()))))
    loaded = SuffixCache.load(path, vocab_size=VOCABULARY)
    loaded.resize(max_tokens=3000)
    loaded.catch_up()
    assert 0 < loaded.stats().tokens < cache.stats().tokens
    loaded.save(path)
    assert SuffixCache.load(path, vocab_size=VOCABULARY).stats().tokens == loaded.stats().tokens
    loaded.resize(max_tokens=1000)  # the kept text moves to the front of its memory
    loaded.catch_up()
    loaded.start("r", rng.integers(0, 900, 8), tenant="t")
    loaded.extend("r", rng.integers(0, 900, 100))
    assert loaded.propose(["r"], 8) and loaded.finish("r")


def out_of_order(data: bytearray) -> bytearray:
    """Swap positions of the first and the last leaves of the snapshot's only index."""
    leaves = leaves_of(data)
    for number in range(len(leaves) // 2):
        first, last = leaves[number], leaves[-1 - number]
        first[1], last[1] = last[1], int(first[1])
    return data


def leaves_of(data: bytearray) -> NDArray[np.uint32]:
    """Return the leaves [n, 64] of the snapshot's only index, which has 1,000 to 8,000 positions."""
    words = np.frombuffer(data, np.uint64)
    arrays = (at for at in range(8, len(words) - 1) if words[at + 1] == 0)  # with nothing released
    begin = next(at for at in arrays if words[at] % 64 == 0 and 1000 <= words[at] <= 16_000)
    return np.frombuffer(data, np.uint32, int(words[begin]), 8 * (begin + 2)).reshape(-1, 64)


def test_arctics_rule_reads_nothing_in_front_of_a_text(tmp_path: Path) -> None:
    """A forged file lists a position with too short a context. The address sanitizer watches this."""
    path, policy = tmp_path / "snapshot", DraftPolicy.fixed(max_depth=256, max_draft=64)
    cache = SuffixCache(vocab_size=VOCABULARY, policy=policy)
    for number in range(8):  # all begin alike, and half of them end alike
        cache.start("r", [], tenant="t")
        end = range(180, 200) if number % 2 else range(500 + 20 * number, 520 + 20 * number)
        cache.extend("r", [*range(180), *end])
        cache.finish("r")
    cache.catch_up()
    cache.save(path)
    for low, high in ((2, 583), (3, 1387)):  # put a position near the text's start among those behind 180 tokens
        data = bytearray(path.read_bytes())
        leaves = leaves_of(data)
        few, many = np.argwhere(leaves == low)[0], np.argwhere(leaves == high)[0]
        leaves[tuple(few)], leaves[tuple(many)] = high, low
        path.with_name("forged").write_bytes(seal(data))
        loaded = SuffixCache.load(path.with_name("forged"), vocab_size=VOCABULARY, policy=policy)
        for length in range(100, 181):
            loaded.start("q", list(range(length)), tenant="t")
            assert len(loaded.propose(["q"], 64)[0].token_ids) <= 64
            loaded.abort("q")


def test_a_snapshot_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="nowhere"):
        SuffixCache().save(tmp_path / "nowhere" / "snapshot")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SnapshotError, match="cannot be put in place"):
        SuffixCache().save(tmp_path / "folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("error", [MemoryError, OSError, RuntimeError])
def test_a_lack_of_memory_is_named_as_any_other_fault(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Core:
        def save(self, *_: object) -> bool:
            raise error("short of it")

        load = save

    cache = SuffixCache()
    monkeypatch.setattr(cache, "_core", Core())
    for call in (cache.save, cache.load_snapshot):
        with pytest.raises(SnapshotError, match=r"snapshot: cannot (save|load) the snapshot: short of it"):
            call(tmp_path / "snapshot")


def test_what_eviction_gave_back_is_not_saved(tmp_path: Path) -> None:
    cache = SuffixCache(max_tokens=150_000)
    rng = np.random.default_rng(1)
    for _ in range(30):
        cache.start("r", [1, 2], tenant="t")
        cache.extend("r", rng.integers(0, 50_000, 20_000, np.int32))
        cache.finish("r")
        cache.catch_up()
    newest = rng.integers(0, 50_000, 20_000, np.int32)
    cache.start("r", [1, 2], tenant="t")
    cache.extend("r", newest)
    cache.finish("r")
    cache.catch_up()
    for name in ("one", "two"):
        cache.save(tmp_path / name)
        loaded = SuffixCache.load(tmp_path / name, max_tokens=150_000)
        assert loaded.stats().tokens == cache.stats().tokens
        assert (tmp_path / name).stat().st_size < 14 * cache.stats().tokens + 2_300_000
        for at in (100, 19_000):
            loaded.start("q", newest[:at], tenant="t")
            assert loaded.propose(["q"], 8, cost=0.0)[0].token_ids.tolist()[:4] == newest[at : at + 4].tolist()
            loaded.abort("q")
        cache = loaded


GROWS_WHILE_SAVED = """
#include <cstdio>
#include "drafting/reranker.hpp"
#include "storage/snapshot.hpp"

using namespace agentspec;

int main(int, char** arguments) {
  Reranker reranker(20);
  std::uint32_t next = 0;
  const auto learn = [&](unsigned candidates) {
    for (; candidates > 0; --candidates) {
      FeatureSlots slots;
      for (std::uint32_t& slot : slots) slot = next++;
      reranker.learn(slots, 1, 1);
    }
  };
  learn(2000);
  SnapshotWriter writer(arguments[1]);
  writer.defer(true);
  reranker.describe(writer);
  unsigned slices = 0;
  const bool whole = writer.flush([&](const auto& copy) {
    if (++slices == 2) learn(1000);
    return copy();
  });
  std::printf("%d slices, whole: %d", slices, whole);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_table_that_grows_while_it_is_copied_is_copied_again(tmp_path: Path) -> None:
    """A reranker's table is replaced when it grows. A copy with half of each table would lose half of the weights."""
    source = tmp_path / "grows.cpp"
    source.write_text(GROWS_WHILE_SAVED)
    core = Path(__file__).parents[2] / "csrc"
    sources = [str(source), str(core / "storage/snapshot.cpp")]
    subprocess.run(["g++", "-std=c++20", f"-I{core}", *sources, "-o", str(tmp_path / "grows")], check=True)
    done = subprocess.run([tmp_path / "grows", tmp_path / "snapshot"], check=True, capture_output=True, text=True)
    assert done.stdout == "2 slices, whole: 0"


def test_no_file_with_erased_text_is_put_in_place_once_the_erasure_has_returned(tmp_path: Path) -> None:
    random, path = np.random.default_rng(0), tmp_path / "snapshot"
    cache = SuffixCache(vocab_size=2**30)
    prompt = np.arange(3, dtype=np.int32)
    for number in range(1, 101):
        said = random.integers(0, 50_000, 3_000).astype(np.int32)
        cache.restore(FinishedTurn("t", None, 0, prompt, said, writer="w", number=number))
    cache.catch_up()
    late = 0
    for number in range(1, 61):
        path.unlink(missing_ok=True)
        erased = np.arange(40, dtype=np.int32) + 10_000_000 + 100 * number
        cache.restore(FinishedTurn("t", "s", 0, prompt, erased, writer="x", number=number))
        cache.catch_up()
        saving = threading.Thread(target=cache.save, args=(path,))
        saving.start()
        time.sleep(0.02 * random.random())
        cache.remove_session("t", "s")
        there = path.exists()
        saving.join()
        if not there:
            late += 1
            assert erased.tobytes() not in path.read_bytes()
    assert late, "none was put in place after its erasure"
