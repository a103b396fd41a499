"""Test budgets in bytes: `stats` counts what the process holds, and leaves out nothing that grows.

Each case runs in a process of its own, whose resident memory is compared with `stats`.
"""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache

BEGIN = """
import resource
from pathlib import Path
import numpy as np
from agentspec.cache import Budget, SuffixCache

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

rng = np.random.default_rng(1)
phrases = rng.integers(0, 2000, (200, 12), np.int32)

def text(tokens):
    # Half of it repeats, so that there is something to draft and to learn.
    pieces = []
    while sum(map(len, pieces)) < tokens:
        pieces.append(phrases[rng.integers(200)] if rng.random() < .5 else rng.integers(0, 30_000, 12, np.int32))
    return np.concatenate(pieces)[:tokens]

def run(cache, name, tokens, **names):
    said = text(tokens)
    cache.start(name, said[: tokens // 2], **names)
    at = tokens // 2
    while at < tokens:
        draft = cache.propose([name], 16)[0].token_ids
        step = 1
        while at + step < tokens and step <= len(draft) and draft[step - 1] == said[at + step - 1]:
            step += 1
        cache.extend(name, said[at : at + step])
        at += step
    cache.finish(name)

# Python, numpy and the core are warm before anything is measured.
warm = SuffixCache()
for number in range(20):
    run(warm, "warm", 200, session=f"s{number}", tenant="t")
del warm
"""

END = """
while cache.catch_up(1 << 20):
    pass
held, said = resident() - before, cache.stats()
assert said.bytes == cache._core.recount()[1], (said, cache._core.recount())
print(held, said.bytes, said.tokens, said.sessions, said.tenants, peak)
"""


def measure(body: str, max_bytes: int | None = 64 << 20) -> list[int]:
    """Return resident bytes, bytes by `stats`, tokens, sessions, tenants and the most bytes that `stats` gave."""
    make = f"cache, before, peak = SuffixCache(max_bytes={max_bytes}), resident(), 0\n"
    code = BEGIN + make + textwrap.dedent(body) + END
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [int(number) for number in result.stdout.split()]


LOADS = {
    "private sessions of one turn": """
        for number in range(3000):
            run(cache, "r", 98, session=f"s{number}", scope="session")
    """,
    "long sessions": """
        for number in range(20):
            for turn in range(5):
                run(cache, "r", 1000, session=f"s{number}", tenant="t")
    """,
    "one corpus": """
        for number in range(150):
            run(cache, "r", 4000, tenant="t")
    """,
    "many tenants": """
        for number in range(2000):
            run(cache, "r", 98, tenant=f"t{number}")
    """,
    "running requests": """
        for number in range(100):
            cache.start(f"r{number}", text(20_000), tenant="t")
            cache.propose([f"r{number}"], 8)
    """,
}


@pytest.mark.parametrize("load", LOADS)
def test_stats_tell_what_the_process_holds(load: str) -> None:
    held, said, *_ = measure(LOADS[load], max_bytes=None)
    assert abs(held - said) < 0.1 * said + (1 << 20), (held, said)


def test_the_hashes_of_a_running_prompt_are_counted() -> None:
    def held(tokens: int, session: str | None) -> int:
        cache = SuffixCache()
        cache.start("r", list(range(tokens)), session=session)
        return cache.stats().bytes

    hashes = held(64_000, "s") - held(0, "s") - (held(64_000, None) - held(0, None))
    assert 8 * 1000 <= hashes < 17 * 1000  # one for each 64 tokens


def test_a_short_private_session_takes_little() -> None:
    held, _, tokens, sessions, *_ = measure(LOADS["private sessions of one turn"])
    assert sessions == 3000 and tokens > 3000 * 90
    assert held < 3000 * 16_000, held  # 360 MB once, 120 KB each


FLOODS = {
    "a new session id with every request": """
        for number in range(4_000):
            run(cache, "r", 98, session=f"s{number}", tenant="t")
            peak = max(peak, cache.stats().bytes)
    """,
    "the same session id for ever": """
        for number in range(400):
            run(cache, "r", 1000, session="s", tenant="t")
            peak = max(peak, cache.stats().bytes)
    """,
    "the same session id for ever, always running": """
        cache.start("stays", [1, 2, 3], session="s", tenant="t")
        for number in range(400):
            run(cache, "r", 1000, session="s", tenant="t")
            peak = max(peak, cache.stats().bytes)
    """,
    "thousands of tenants": """
        for number in range(4_000):
            run(cache, "r", 98, session="s", tenant=f"t{number}")
            peak = max(peak, cache.stats().bytes)
    """,
}


@pytest.mark.parametrize("flood", FLOODS)
def test_ten_times_the_budget_stays_within_it(flood: str) -> None:
    budget = 2 << 20
    held, said, *_, peak = measure(FLOODS[flood], max_bytes=budget)
    assert said <= budget
    assert peak <= 1.15 * budget  # evicted memory is released a little later
    assert held < 1.1 * budget + (2 << 20), (held, said)


def test_an_index_that_grew_beyond_64_mb_behind_a_freed_front_gives_its_memory_back() -> None:
    """Its memory then lies in pages of another size. Freeing it once went on below its beginning, without an end."""
    program = """
import numpy as np
from agentspec.cache import FinishedTurn, SuffixCache

cache = SuffixCache(max_bytes=None, max_tokens=12_000_000)
random, none = np.random.default_rng(0), np.zeros(0, np.int32)

def add(numbers):
    for number in numbers:
        text = random.integers(0, 2**31 - 2, 100_000).astype(np.int32)
        cache.restore(FinishedTurn("t", None, 0, none, text, writer="w" * 16, number=number + 1))
    cache.catch_up()

for begin in range(0, 142, 10):
    add(range(begin, min(begin + 10, 142)))
cache.resize(max_bytes=None, max_tokens=40_000_000)
add(range(142, 175))
assert cache.forget_tenant("t")
calls = 0
while cache.catch_up(1000):
    calls += 1
    assert calls < 1000
assert (cache.stats().bytes, cache.stats().leaving) == (0, 0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


GROWS_IN_LITTLE_SPACE = """
#include <sys/resource.h>
#include <unistd.h>
#include <cstdint>
#include <cstdio>
#include "storage/buffer.hpp"

int main() {
  agentspec::Buffer<std::uint32_t> buffer;
  std::size_t pages = 0;  // a sanitizer takes many
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (!file || std::fscanf(file, "%zu", &pages) != 1) return 1;
  std::fclose(file);
  const rlim_t most = pages * sysconf(_SC_PAGESIZE) + (rlim_t{600} << 20);
  const rlimit limit{most, most};
  setrlimit(RLIMIT_AS, &limit);
  try {
    for (std::uint32_t i = 0;; ++i) buffer.push_back(i);
  } catch (const std::bad_alloc&) {
  }
  bool whole = true;
  for (std::uint32_t i = 0; i < buffer.size(); ++i) whole = whole && buffer[i] == i;
  std::printf("%zu %d", buffer.size() * 4 >> 20, whole);
}
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="limits a process's address space")
def test_an_array_grows_where_address_space_is_limited(tmp_path: Path) -> None:
    """From 64 MiB on, arrays reserve much more than they need: sixteen times as much, where they may."""
    source, core = tmp_path / "grows.cpp", Path(__file__).parents[2] / "csrc"
    source.write_text(GROWS_IN_LITTLE_SPACE)
    subprocess.run(["g++", "-std=c++20", "-O1", f"-I{core}", str(source), "-o", str(tmp_path / "grows")], check=True)
    ended = subprocess.run([tmp_path / "grows"], check=True, capture_output=True, text=True)
    size, whole = map(int, ended.stdout.split())
    assert whole and size > 200, f"{size} MiB of 600"
