"""Test stores in processes that were forked off: none loses what another writes, and none waits for another's lock."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.testing.redis_server import RedisServer

BEGIN = """
import os, sys, threading
from agentspec.cache.store import NewEntry, open_store

url = sys.argv[1]

def said(name):
    with_own = open_store(url)
    found = [entry.payload.decode() for entry in with_own.read("ns", session=name)]
    with_own.close()
    return found

def forked(run):
    # Return a forked process's number; it ends with 0 if the function does.
    process = os.fork()
    if process == 0:
        try:
            run()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return process

def wait(*processes):
    for process in processes:
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

def say(store, name, *texts):
    for text in texts:
        store.append("ns", [NewEntry(name, text.encode())])
"""

INHERITED = """
store = open_store(url)
wait(*(forked(lambda: say(store, name, "1", "2")) for name in ("a", "b", "c")))
assert [said(name) for name in ("a", "b", "c")] == [["1", "2"]] * 3
say(store, "parent", "1", "2")
wait(forked(lambda: say(store, "d", "1")), forked(lambda: say(store, "parent", "3")))
say(store, "parent", "4")
assert said("d") == ["1"] and said("parent") == ["1", "2", "3", "4"]
store.close()
"""

CLOSED_BY_THE_PARENT = """
begun, closed = os.pipe(), os.pipe()

def run():
    own = open_store(url)
    for store, name in ((inherited, "inherited"), (own, "own")):
        say(store, name, "1")
    os.write(begun[1], b"x")
    os.read(closed[0], 1)
    for store, name in ((inherited, "inherited"), (own, "own")):
        say(store, name, "2", "3")
        assert [entry.payload for entry in store.read("ns", session=name)] == [b"1", b"2", b"3"]
        store.close()

inherited = open_store(url)
say(inherited, "parent", "1")
process = forked(run)
os.read(begun[0], 1)
inherited.close()
os.write(closed[1], b"x")
wait(process)
assert [said(name) for name in ("inherited", "own", "parent")] == [["1", "2", "3"], ["1", "2", "3"], ["1"]]
"""

WHILE_A_THREAD_WRITES = """
store = open_store(url)
ending, written = threading.Event(), 0

def write():
    global written
    while not ending.is_set():
        say(store, "parent", "x" * 20_000)
        written += 1

thread = threading.Thread(target=write)
thread.start()

def run(name):
    own = open_store(url)
    say(own, name, "own")
    say(store, name, "inherited")
    own.close()
    store.close()

names = [f"child {number}" for number in range(20)]
for name in names:
    wait(forked(lambda: run(name)))
ending.set()
thread.join()
store.close()
assert [said(name) for name in names] == [["own", "inherited"]] * 20
assert len(said("parent")) == written
"""

CLOSED = """
store = open_store(url)
store.close()

def run():
    try:
        say(store, "a", "1")
    except Exception as error:
        assert "closed" in str(error), error
    else:
        raise AssertionError("a closed store came back")

if url.startswith("sqlite"):
    wait(forked(run))
"""


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="forks processes")
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@pytest.mark.parametrize("program", [INHERITED, CLOSED_BY_THE_PARENT, WHILE_A_THREAD_WRITES, CLOSED])
def test_no_process_loses_what_it_writes(
    program: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Forked processes began with one number, which Redis took for a repetition, or with SQLite's old locks."""
    url = f"sqlite:///{tmp_path}/store.db"
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("server")
        url = f"{server.url}?prefix=fork-{abs(hash(program))}"
    command = [sys.executable, "-c", BEGIN + program, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# With a thread that appends all the time, a fork is mostly in the middle of a call.
IN_MEMORY = """
store = open_store(url)
say(store, "parent", "1")
ending = threading.Event()

def write():
    while not ending.is_set():
        say(store, "other", "x" * 200_000)

thread = threading.Thread(target=write)
thread.start()

def run():
    assert [entry.payload for entry in store.read("ns", session="parent")] == [b"1"]
    say(store, "child", "2")
    assert [entry.payload for entry in store.read("ns", session="child")] == [b"2"]

for _ in range(20):
    wait(forked(run))
ending.set()
thread.join()
assert not list(store.read("ns", session="child"))
"""


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="forks processes")
def test_a_store_in_memory_is_used_on_in_a_forked_process() -> None:
    """A forked process waited for ever for the lock of a thread that it lacks."""
    command = [sys.executable, "-c", BEGIN + IN_MEMORY, "memory://"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
