"""Damaged snapshots whose checksums are right: python -m tests.cache.mutations --files 1000000

Each file is refused or loaded. What was loaded drafts legal tokens only and takes every call.
A child process reads them: if it crashes, hangs or takes too much memory, the parent names the file's seed.
"""

import argparse
import multiprocessing
import random
import resource
import signal
import struct
import tempfile
from pathlib import Path
from typing import Any

from agentspec.cache import DraftPolicy, FinishedTurn, SuffixCache
from agentspec.errors import SnapshotError

VOCABULARY = 1000
HEADER = 64
_FACTOR, _ONES = 0x9E3779B97F4A7C15, 2**64 - 1
_LANES = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
_MEMORY = 8 << 30  # address space of the child, in bytes
_SECONDS = 20  # for one file


def _mix(lane: int, word: int) -> int:
    value = (lane ^ word) * _FACTOR & _ONES
    return (value << 29 | value >> 35) & _ONES


def checksum(data: bytes | bytearray) -> int:
    """Return the checksum of whole 8-byte words, as csrc/storage/snapshot.hpp says."""
    lanes = list(_LANES)
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    for at, word in enumerate(words):
        lanes[at % 4] = _mix(lanes[at % 4], word)
    total = len(words) * _FACTOR & _ONES
    for lane in lanes:
        total = _mix(total, lane ^ lane >> 32)
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 & _ONES
    return total ^ total >> 31


def seal(data: bytearray) -> bytes:
    """Write size and checksums into the header."""
    struct.pack_into("<QQ", data, 16, len(data), checksum(data[HEADER:]))
    struct.pack_into("<Q", data, 56, checksum(data[:56]))
    return bytes(data)


def snapshot(rng: random.Random, path: Path) -> bytearray:
    """Return a snapshot of a small cache with branching sessions, groups, tenants and something learned."""
    cache = SuffixCache(policy=DraftPolicy(rerank=rng.random() < 0.3), vocab_size=VOCABULARY)
    contexts: list[list[int]] = [[]]
    for number in range(rng.randrange(1, 12)):
        base = rng.choice(contexts)
        prompt = base[: rng.choice([len(base), rng.randrange(len(base) + 1)])] + rng.choices(range(50), k=30)
        names = {"session": rng.choice(["s", "s", "other", None]), "group": rng.choice([None, "g"])}
        cache.start("r", prompt, **names, tenant=rng.choice(["t", None]))  # type: ignore[arg-type]
        response = rng.choices(range(50), k=rng.randrange(1, 60))
        for at in range(0, len(response), 5):
            cache.propose(["r"], 4)
            cache.extend("r", response[at : at + 5])
        cache.finish("r", name=("w", number) if rng.random() < 0.7 else None)
        contexts.append(prompt + response)
    cache.save(path)
    return bytearray(path.read_bytes())


def mutate(rng: random.Random, data: bytearray) -> bytearray:
    """Change one to three words, or pieces of words, behind the header."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(HEADER, len(data) - 8) // 4 * 4
        word = struct.unpack_from("<I", data, at)[0]
        kind = rng.randrange(7)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            struct.pack_into("<I", data, at, rng.randrange(2**32))
        elif kind == 2:
            struct.pack_into("<I", data, at, (word + rng.choice([-1, 1, 8, -8, 64])) % 2**32)
        elif kind == 3:
            struct.pack_into("<I", data, at, rng.choice([0, 1, 2**31, 2**32 - 1, 2**32 - 2, len(data), 7]))
        elif kind == 4:
            struct.pack_into("<Q", data, at // 8 * 8, rng.choice([0, 1, 2**63, 2**64 - 1, 2**40, len(data), 2**32]))
        elif kind == 5:
            size = min(rng.choice([4, 8, 64]), len(data) - at)
            other = rng.randrange(HEADER, len(data) - size + 1) // 4 * 4
            data[at : at + size] = data[other : other + size]
        else:
            del data[at // 8 * 8 : at // 8 * 8 + 8 * rng.choice([1, 1, 4])]
    return data


def use(cache: SuffixCache, rng: random.Random, path: Path) -> None:
    """Make every call on a loaded cache."""
    cache.stats()
    for number, session in enumerate(("s", "other", "new")):
        for tenant in ("t", None):
            prompt = rng.choices(range(50), k=80)
            cache.start("r", prompt, session=session, group=rng.choice([None, "g"]), tenant=tenant)
            for _ in range(4):
                draft = cache.propose(["r"], 16, cost=0.0)[0].token_ids.tolist()
                assert all(0 <= token < VOCABULARY for token in draft), draft
                cache.extend("r", [*draft[:3], rng.randrange(50)])
            turn = cache.finish("r", name=("w", 100 + number))
            assert isinstance(turn, FinishedTurn)
            cache.restore(turn)
            cache.needs_load(tenant, session)
    cache.resize(max_tokens=rng.choice([None, 50, 300]))
    cache.catch_up(2000)
    cache.remove_session("t", "s")
    cache.catch_up(100_000)
    cache.save(path)
    SuffixCache.load(path, vocab_size=VOCABULARY)


def check(seed: int, path: Path) -> bool:
    """Return whether a damaged file was loaded."""
    rng = random.Random(seed)
    path.write_bytes(seal(mutate(rng, snapshot(rng, path))))
    try:
        cache = SuffixCache.load(path, vocab_size=VOCABULARY)
    except SnapshotError:
        return False
    use(cache, rng, path)
    return True


def _read(begin: int, end: int, seed: Any, loaded: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    memory = Path("/dev/shm")  # saving waits for the disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for seed.value in range(begin, end):
            signal.alarm(_SECONDS)
            loaded.value += check(seed.value, Path(folder) / "snapshot")


def run(begin: int, end: int) -> int:
    """Check the files of these seeds. Return how many were loaded. Raises AssertionError naming the first bad seed."""
    context = multiprocessing.get_context("fork")
    seed, loaded = context.Value("q", begin), context.Value("q", 0)
    child = context.Process(target=_read, args=(begin, end, seed, loaded))
    child.start()
    child.join()
    assert child.exitcode == 0, f"the file of seed {seed.value}: exit code {child.exitcode}"
    return int(loaded.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    loaded = 0
    for begin in range(options.seed, options.seed + options.files, 10_000):
        end = min(begin + 10_000, options.seed + options.files)
        loaded += run(begin, end)
        print(f"{end - options.seed:,} files, {loaded:,} loaded", flush=True)


if __name__ == "__main__":
    main()
