"""Test one thread that decodes while others look, erase, tidy up and save. The thread sanitizer finds more."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.errors import SnapshotError
from tests.store.helpers import wait_until


def test_others_may_call_while_one_thread_decodes(tmp_path: Path) -> None:
    cache = SuffixCache(max_tokens=20_000)
    stop = threading.Event()
    calls = [0] * 4

    def again(number: int, call: Callable[[], object]) -> None:
        while not stop.is_set():
            call()
            calls[number] += 1

    def erase() -> None:
        cache.remove_session("t", "s3")
        time.sleep(0.05)

    def save() -> None:
        with contextlib.suppress(SnapshotError):  # a busy machine may erase during each try
            cache.save(tmp_path / "snapshot")

    others = [cache.stats, erase, lambda: cache.catch_up(100), save]
    threads = [threading.Thread(target=again, args=(n, call)) for n, call in enumerate(others)]
    indexing = threading.Thread(target=cache.index_until_closed)
    for thread in (*threads, indexing):
        thread.start()
    try:
        accepted = decode(cache)
        while not all(calls):  # on a busy machine a thread may begin late
            accepted += decode(cache)
    finally:
        stop.set()
        cache.close()
        for thread in (*threads, indexing):
            thread.join()
    assert accepted > 0
    cache.save(tmp_path / "snapshot")
    assert SuffixCache.load(tmp_path / "snapshot").stats().tokens > 0


def decode(cache: SuffixCache) -> int:
    rng = np.random.default_rng(5)
    phrases = rng.integers(0, 50, (8, 40)).astype(np.int32)
    accepted = 0
    for turn in range(40):
        names = [f"{turn}-{i}" for i in range(4)]
        for i, name in enumerate(names):
            cache.start(name, phrases[i], session=f"s{i}", group="g", tenant="t")
        table = np.tile(phrases[:4], 3).copy()
        for length in range(41, 100, 3):
            rows, lengths = np.arange(4, dtype=np.int32), np.full(4, length, np.int32)
            step = cache.step(names, table, rows, lengths, np.full(4, 16, np.int32), np.full(4, 16, np.int32))
            accepted += int(step.accepted.sum())
            cache.merge_drafts(names, phrases[:4, :3], np.full((4, 3), 0.9), [3] * 4, [16] * 4)
        for name in names:
            cache.finish(name)
    return accepted


def test_a_thread_indexes_what_waits_without_any_step() -> None:
    cache = SuffixCache()
    thread = threading.Thread(target=cache.index_until_closed, daemon=True)
    thread.start()
    try:
        rng = np.random.default_rng(6)
        for number in range(3):  # it waits for work between them
            prompt = rng.integers(0, 30_000, 20_000, np.int32)
            cache.start(f"r{number}", prompt, session="s", tenant="t")
            wait_until_indexed(cache)
            cache.extend(f"r{number}", prompt[100:110])
            draft = cache.propose([f"r{number}"], 8)[0].token_ids.tolist()
            assert len(draft) > 2
            assert draft == prompt[110 : 110 + len(draft)].tolist()
            cache.finish(f"r{number}")
            wait_until_indexed(cache)
    finally:
        cache.close()
    thread.join(60)
    assert not thread.is_alive()
    cache.start("later", [1, 2, 3] * 4)
    assert cache.propose(["later"], 3)[0].token_ids.tolist() == [1, 2, 3]


def test_what_the_thread_has_not_indexed_by_the_second_step_the_steps_do() -> None:
    """This holds for turns of other processes. The cache's own turns are drafted from in the next step."""
    cache = SuffixCache()
    thread = threading.Thread(target=cache.index_until_closed, daemon=True)
    thread.start()
    try:
        cache.restore(said(0))
        for number in range(100, 6000, 20):
            cache.restore(said(number), held_only=True)
            cache.start("r", list(range(number, number + 7)), tenant="t")
            for _ in range(2):
                cache.propose(["r"], 1, cost=0.0)
            assert cache.propose(["r"], 1, cost=0.0)[0].token_ids.tolist() == [number + 7]
            cache.abort("r")
    finally:
        cache.close()
    thread.join(60)


SECRET = np.arange(70_000, 70_040, dtype=np.int32)


def saving(cache: SuffixCache, path: Path) -> threading.Thread:
    """Return a thread that is saving the cache, amid the large index of its only tenant, `t`."""
    rng = np.random.default_rng(7)
    cache.restore(FinishedTurn("t", "gone", 0, SECRET[:0], SECRET, writer="w", number=1))
    for number in range(2, 40):
        response = rng.integers(0, 60_000, 20_000, np.int32)
        cache.restore(FinishedTurn("t", None, 0, response[:0], response, writer="w", number=number))
    cache.catch_up()
    thread = threading.Thread(target=cache.save, args=(path,))
    thread.start()
    while thread.is_alive() and not list(path.parent.glob(f"{path.name}.tmp*")):
        time.sleep(0.0005)
    time.sleep(0.005)
    return thread


def test_what_is_erased_while_a_snapshot_is_saved_is_neither_in_that_nor_drafted(tmp_path: Path) -> None:
    """This holds for evicted text, too, which is still in the index while that is saved."""
    for number in range(10):  # a busy machine may save all before this thread goes on
        folder = tmp_path / str(number)
        folder.mkdir()
        cache = SuffixCache(max_bytes=None)
        thread = saving(cache, folder / "snapshot")
        cache.resize(max_bytes=None, max_tokens=cache.stats().tokens - 1000)
        cache.remove_session("t", "gone")
        in_time = not (folder / "snapshot").exists()
        cache.start("r", SECRET[:20], tenant="t")
        assert cache.propose(["r"], 4, cost=0.0)[0].token_ids.tolist() == []
        thread.join()
        if in_time:
            assert SECRET[:20].tobytes() not in (folder / "snapshot").read_bytes()
            return
    raise AssertionError("each save was over before the erasure")


def test_a_snapshot_that_begins_during_an_erasure_holds_nothing_of_it(tmp_path: Path) -> None:
    """The save begins when the session is gone and its responses are leaving the tenant's index in slices."""
    rng, in_time = np.random.default_rng(7), 0
    for number in range(10):  # a busy machine may erase all before this thread goes on
        path, cache = tmp_path / str(number), SuffixCache(max_bytes=None)
        response = np.concatenate((SECRET, rng.integers(0, 60_000, 200_000, np.int32), SECRET))
        for session, said_in_it in ((None, response[40:20_000]), ("gone", response)):
            cache.restore(FinishedTurn("t", session, 0, response[:0], said_in_it))
        cache.catch_up()
        thread = threading.Thread(target=cache.remove_session, args=("t", "gone"))
        thread.start()
        while cache.has_session("t", "gone"):
            time.sleep(0.0001)
        in_time += thread.is_alive()
        with contextlib.suppress(SnapshotError):  # it may be tried again later
            cache.save(path)
        thread.join()
        assert not path.exists() or SECRET[:20].tobytes() not in path.read_bytes()
        if in_time == 3:
            return
    assert in_time, "each erasure was over before the save"


def test_a_tenant_that_is_forgotten_while_it_is_saved_leaves_nothing(tmp_path: Path) -> None:
    cache = SuffixCache(max_bytes=None)
    thread = saving(cache, tmp_path / "snapshot")
    assert cache.forget_tenant("t")
    thread.join()
    cache.catch_up()
    held = cache.stats()
    assert (held.tokens, held.bytes, held.pending, held.leaving) == (0, 0, 0, 0)


def test_what_came_while_its_tenant_was_saved_is_indexed_without_any_further_call(tmp_path: Path) -> None:
    rng, path, cache = np.random.default_rng(7), tmp_path / "snapshot", SuffixCache(max_bytes=None)
    thread = threading.Thread(target=cache.index_until_closed, daemon=True)
    thread.start()
    for number in range(1, 40):
        response = rng.integers(0, 60_000, 20_000, np.int32)
        cache.restore(FinishedTurn("t", None, 0, response[:0], response, writer="w", number=number))
    try:
        for number in range(6):  # a busy machine may save all before this thread goes on
            wait_until_indexed(cache)
            saving = threading.Thread(target=cache.save, args=(path,))
            saving.start()
            wait_until(lambda: bool(list(tmp_path.glob("snapshot.tmp*"))) or path.exists())
            time.sleep(0.002 * number)
            response = rng.integers(0, 60_000, 3_000, np.int32)
            cache.restore(FinishedTurn("t", None, 0, response[:0], response, writer="x", number=number))
            saving.join()
            path.unlink()
        wait_until(lambda: not cache.stats().pending)
    finally:
        cache.close()
    thread.join(60)


SLOW_RENAME = """
#include <dlfcn.h>
#include <unistd.h>
#include <cstdio>
#include <string>

extern "C" int rename(const char* from, const char* to) noexcept {
  const std::string begun = std::string(to) + ".begun";
  if (begun.ends_with("snapshot.begun")) {
    std::fclose(std::fopen(begun.c_str(), "w"));
    sleep(2);
  }
  return reinterpret_cast<int (*)(const char*, const char*)>(dlsym(RTLD_NEXT, "rename"))(from, to);
}
"""

SAVE_SLOWLY = """
import sys, threading, time
from pathlib import Path
from agentspec.cache import SuffixCache

path, cache = Path(sys.argv[1]), SuffixCache()
cache.start("r", [1, 2], session="s", tenant="t")
cache.extend("r", range(100, 150))
cache.finish("r")
cache.start("r", [1, 2, 3], tenant="t")
threading.Thread(target=cache.save, args=(path,)).start()
while not Path(f"{path}.begun").exists():
    time.sleep(0.001)
cache.propose(["r"], 4)
assert not path.exists(), "the step waited for the disk"
cache.remove_session("t", "s")
assert path.exists(), "the erasure returned before the file with its session was in place"
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="replaces a call of Linux's libc")
def test_an_erasure_waits_while_a_snapshot_is_put_in_place_and_a_step_does_not(tmp_path: Path) -> None:
    """A disk may take long for that. The file is deleted after the erasure, so it must not come later."""
    source, library = tmp_path / "rename.cpp", tmp_path / "rename.so"
    source.write_text(SLOW_RENAME)
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    command = [sys.executable, "-c", SAVE_SLOWLY, str(tmp_path / "snapshot")]
    preloaded = {**os.environ, "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}"}  # behind a sanitizer's
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=preloaded)
    assert (ended.returncode, ended.stderr) == (0, "")


def said(number: int) -> FinishedTurn:
    response = np.arange(number, number + 15, dtype=np.int32)
    return FinishedTurn("t", "s", 0, response[:0], response, writer="w", number=number + 1)


def wait_until_indexed(cache: SuffixCache) -> None:
    deadline = time.monotonic() + 180
    while cache.stats().pending:
        assert time.monotonic() < deadline, "nothing indexes"
        time.sleep(0.001)


def test_budgets_may_change_while_a_snapshot_is_loaded(tmp_path: Path) -> None:
    """The sanitizer of threads watches this."""
    filled = SuffixCache()
    for number in range(200):
        filled.start("r", [number, 1, 2, 3], session=f"s{number}", tenant="t")
        filled.extend("r", list(range(number, number + 50)))
        filled.finish("r")
    filled.save(tmp_path / "snapshot")
    cache = SuffixCache()
    loading = threading.Thread(target=cache.load_snapshot, args=(tmp_path / "snapshot",))
    loading.start()
    for number in range(2000):
        cache.resize(max_tokens=1_000_000 + number)
    loading.join()
    assert cache.stats().tokens == filled.stats().tokens


def test_a_session_that_is_erased_while_a_snapshot_is_loaded_does_not_come_back(tmp_path: Path) -> None:
    saved = SuffixCache()
    random, none = np.random.default_rng(1), np.zeros(0, np.int32)
    for number in range(20):
        text = random.integers(0, 50_000, 50_000).astype(np.int32)
        saved.restore(FinishedTurn("t", f"s{number}", 0, none, text, writer="w", number=number + 1))
    saved.save(tmp_path / "snapshot")
    cache = SuffixCache()
    cache.remove_session("t", "s3")  # as if it came while the file is read
    with pytest.raises(SnapshotError, match="a session was erased while it was read"):
        cache.load_snapshot(tmp_path / "snapshot")
    assert not cache.has_session("t", "s3")


def test_a_corpus_may_be_replaced_while_turns_are_learned_from() -> None:
    """Freeing the former one waits for Python's lock, so that must not happen under the cache's."""
    program = """
import threading, time
import numpy as np
from agentspec.cache import FinishedTurn, SuffixCache

random, none = np.random.default_rng(1), np.zeros(0, np.int32)
text = random.integers(0, 50_000, 3000).astype(np.int32)
cache = SuffixCache()
cache.publish([text], max_bytes=10**8)
cache.restore(FinishedTurn("t", "s", 0, none, text[:200], writer="a", number=1))
learned, end = [0], time.monotonic() + 4

def learn():
    while time.monotonic() < end:
        learned[0] += 1
        cache.learn_from(FinishedTurn("t", "s", 0, text[:50], text, writer="b", number=learned[0]))

def publish():
    while time.monotonic() < end:
        cache.publish([random.integers(0, 50_000, 200).astype(np.int32)], max_bytes=10**8)

def look():
    while time.monotonic() < end:
        cache.stats()

threads = [threading.Thread(target=call) for call in (learn, publish, look, look)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_two_caches_that_save_to_one_path_leave_a_whole_snapshot(tmp_path: Path) -> None:
    """Two containers that share a folder may have processes of the same id, as two threads have."""
    rng, path = np.random.default_rng(3), tmp_path / "snapshot"
    caches = [SuffixCache(), SuffixCache()]
    for cache in caches:
        response = rng.integers(0, 60_000, 100_000, np.int32)
        cache.restore(FinishedTurn("t", None, 0, response[:0], response, writer="w", number=1))
        cache.catch_up()
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            for saved in [pool.submit(cache.save, path) for cache in caches]:
                saved.result()
        assert SuffixCache.load(path).stats().tokens == caches[0].stats().tokens
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot"]


@pytest.mark.parametrize("call", ["cache.index_until_closed()", "cache.publish(texts, max_bytes=1 << 30)", "save()"])
def test_a_process_ends_while_a_thread_is_in_a_native_call(call: str, tmp_path: Path) -> None:
    """Python ends daemon threads by unwinding them, which aborts the process if that happens in a native call."""
    program = f"""
import threading, time
import numpy as np
from agentspec.cache import SuffixCache

def save():
    while True:
        cache.save({str(tmp_path / "snapshot")!r})

random = np.random.default_rng(0)
texts = [random.integers(0, 1000, 200_000).astype(np.int32) for _ in range(10)]
cache = SuffixCache()
for number, text in enumerate(texts):
    cache.start("r", text, session=f"s{{number}}")
    cache.finish("r")
threading.Thread(target=lambda: {call}, daemon=True).start()
time.sleep(0.05)
cache.close()
"""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("erase", [True, False])
def test_memory_goes_back_though_no_request_comes(erase: bool) -> None:
    cache = SuffixCache()
    thread = threading.Thread(target=cache.index_until_closed, daemon=True)
    thread.start()
    cache.start("r", np.random.default_rng(0).integers(0, 50_000, 200_000).astype(np.int32), session="s", tenant="t")
    cache.extend("r", [1, 2, 3])
    cache.finish("r")
    wait_until(lambda: not cache.stats().pending)
    if erase:
        cache.remove_session("t", "s")
    else:
        cache.resize(max_bytes=1 << 20)
    wait_until(lambda: cache.stats().bytes < 1 << 20)
    assert cache.stats().leaving == 0
    cache.close()
    thread.join(60)
