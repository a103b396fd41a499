"""Measure time and memory of the index and of ArcticInference's suffix tree, in turns in one process on one core.

    python benchmarks/index.py --traces DIR [--large] [--json]

The text is the recorded responses, repeated with other token ids until there is enough. Every request repeats a part of
a stored response. Times are medians in microseconds, memory is resident memory. A ratio is ArcticInference's figure
over agentspec's.
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns, thread_time_ns

import numpy as np
from drafters import DEPTH, AgentSpecIndex, ArcticIndex, take
from report import Row, add_options, at_most, exit_status, less, pin, say, show
from trace_files import Tokens, documents, records

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.cache.core import without_clock

COST = 0.01
BATCH, ROUNDS, STEPS, ACCEPTED = 16, 21, 12, 4
LENGTH = 2 * DEPTH + STEPS * ACCEPTED
TURN_PROMPT, TURN_NEW, TURNS = 16_000, 500, 12
SIZES = (1_000_000, 5_000_000)
LARGE = 100_000_000
EVICTIONS = 3


@dataclass(slots=True)
class Times:
    """Hold the microseconds of a request (extend: of a token), with one entry for each batch."""

    arctic: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    extend: list[float] = field(default_factory=list)
    peer_extend: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Contenders:
    """Hold agentspec's index, once with ArcticInference's rule and once with its own, and ArcticInference's index."""

    arctic: AgentSpecIndex
    learned: AgentSpecIndex
    peer: ArcticIndex


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--large", action="store_true", help="also 100 M tokens beside 1 M, ours alone (2 GB, minutes)")
    options = parser.parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    pin(options.cpu)
    rows = measure(options.traces, options.peer_dir, options.large)
    show(rows, "index: ours and the peer's", options.json)


def measure(traces: Path, peer_dir: Path | None, large: bool) -> list[Row]:
    """Fill the indexes, measure them, and return all rows."""
    rows: list[Row] = []
    source = documents(traces)
    held: list[Tokens] = []
    all_three = Contenders(
        AgentSpecIndex(DraftPolicy.fixed()), AgentSpecIndex(DraftPolicy(cost=COST)), ArcticIndex(peer_dir)
    )
    memory = {"ours": 0, "peer": 0}
    for size in SIZES:
        new = take(source, size - sum(map(len, held)))
        held += new
        say(f"{size:,} tokens: filling ours, then the peer's")
        memory["ours"] += _growth(lambda new=new: all_three.arctic.fill(new))  # type: ignore[misc]
        all_three.learned.fill(new)
        memory["peer"] += _growth(lambda new=new: all_three.peer.fill(new))  # type: ignore[misc]
        rows += propose_rows(propose_times(all_three, held), f"{size // 1_000_000} M tokens")
    tokens = sum(map(len, held))
    rows += turn_rows(all_three, session_texts(traces))
    rows += memory_rows(memory["ours"] / tokens, memory["peer"] / tokens)
    rows += snapshot_rows(all_three.arctic.cache, all_three.peer.filled)
    del all_three.peer.cache
    gc.collect()
    rows += eviction_rows(held)
    if large:
        rows += large_rows(source)
    return rows


def propose_times(all_three: Contenders, held: Sequence[Tokens]) -> Times:
    """Time batches of requests that repeat stored responses. In each round every contender runs them once."""
    random = np.random.default_rng(len(held))
    long = [document for document in held if len(document) >= LENGTH]
    times = Times()
    runs = (_run_arctic, _run_learned, _run_peer)
    for turn in range(ROUNDS):
        table = np.stack([_matching_text(random, long) for _ in range(BATCH)])
        names = [f"{turn}-{number}" for number in range(BATCH)]
        for number in range(len(runs)):
            runs[(turn + number) % len(runs)](times, all_three, names, table)
    return times


def _run_arctic(times: Times, all_three: Contenders, names: list[str], table: Tokens) -> None:
    ours = all_three.arctic

    def one_by_one() -> None:
        for name in names:
            ours.propose(name)

    with _started(ours, names, table):
        for at in range(2 * DEPTH, LENGTH, ACCEPTED):
            times.arctic.append(_per(BATCH, lambda: ours.step(names, table, at)))  # noqa: B023
            times.single.append(_per(BATCH, one_by_one))
            times.extend.append(_per(BATCH * ACCEPTED, lambda: ours.step(names, table, at + ACCEPTED, max_draft=0)))  # noqa: B023


def _run_learned(times: Times, all_three: Contenders, names: list[str], table: Tokens) -> None:
    ours = all_three.learned
    with _started(ours, names, table):
        ours.step(names, table, 2 * DEPTH)
        for at in range(2 * DEPTH, LENGTH, ACCEPTED):
            times.learned.append(_per(BATCH, lambda: ours.step(names, table, at + ACCEPTED)))  # noqa: B023


def _run_peer(times: Times, all_three: Contenders, names: list[str], table: Tokens) -> None:
    peer = all_three.peer

    def speculate(at: int) -> None:
        for name, text in zip(names, table, strict=True):
            peer.speculate(name, text[at - DEPTH : at])

    def extend(at: int) -> None:
        for name, text in zip(names, table, strict=True):
            peer.extend(name, text[at : at + ACCEPTED])

    with _started(peer, names, table):
        for at in range(2 * DEPTH, LENGTH, ACCEPTED):
            times.peer.append(_per(BATCH, lambda: speculate(at)))  # noqa: B023
            times.peer_extend.append(_per(BATCH * ACCEPTED, lambda: extend(at)))  # noqa: B023


@contextmanager
def _started(contender: AgentSpecIndex | ArcticIndex, names: Sequence[str], table: Tokens) -> Iterator[None]:
    """Run requests whose prompts and responses are the rows' first tokens, and forget them when the block ends."""
    for name, text in zip(names, table, strict=True):
        contender.start(name, text[:DEPTH])
        contender.extend(name, text[DEPTH : 2 * DEPTH])
    yield
    for name in names:
        contender.forget(name)


def _matching_text(random: np.random.Generator, long: Sequence[Tokens]) -> Tokens:
    document = long[int(random.integers(len(long)))]
    begin = int(random.integers(len(document) - LENGTH + 1))
    return document[begin : begin + LENGTH]


def propose_rows(times: Times, size: str) -> list[Row]:
    """Return the rows of the median times, with their targets."""
    theirs = median(times.peer)
    batch = f"batch of {BATCH}, {size}, µs a request"
    return [
        less(f"propose, ArcticInference's rule, {batch}", median(times.arctic), theirs, 10),
        less(f"propose, ArcticInference's rule, one request a call, {size}, µs", median(times.single), theirs),
        less(f"propose, learned rule, learning and extend included, {batch}", median(times.learned), theirs, 3),
        less(f"extend by {ACCEPTED} tokens, {size}, µs a token", median(times.extend), median(times.peer_extend), 10),
    ]


def session_texts(traces: Path) -> list[Tokens]:
    """Return the last prompt of each session, cut to one length, in file order; shorter ones are left out."""
    last: dict[int, Tokens] = {}
    for record in records(traces, "swe_gemini3"):
        last[record["session"]] = record["prompt"]
    need = TURN_PROMPT + TURN_NEW
    return [prompt[:need] for prompt in last.values() if len(prompt) >= need][:TURNS]


def turn_rows(all_three: Contenders, texts: Sequence[Tokens]) -> list[Row]:
    """Time a session's next turn, up to the first decode step that can draft from the whole prompt (CPU time)."""
    say(f"next turns of {len(texts)} sessions")
    ours, at_once, theirs, calls = [], [], [], []
    for number, text in enumerate(texts):
        before, whole = text[: TURN_PROMPT - 300], text
        answer = text[TURN_PROMPT - 300 : TURN_PROMPT]
        session, name = f"turn-{number}", f"turn-{number}"
        all_three.learned.start(name, before, session)
        all_three.learned.extend(name, answer)
        all_three.learned.stop(name)
        all_three.learned.cache.catch_up()
        used: list[float] = []
        used.append(_cpu(lambda: all_three.learned.start(name, whole, session)))  # noqa: B023
        used.append(_cpu(lambda: all_three.learned.propose(name)))  # noqa: B023
        ours.append(1e3 * sum(used))
        assert all_three.learned.cache.stats().pending == 0
        used.append(_cpu(lambda: all_three.learned.extend(name, answer)))  # noqa: B023
        used.append(_cpu(lambda: all_three.learned.stop(name)))  # noqa: B023
        calls.append(max(used))
        at_once.append(1e3 * _cpu(lambda: all_three.arctic.start(name, whole)))  # noqa: B023
        all_three.arctic.forget(name)
        theirs.append(1e3 * _cpu(lambda: all_three.peer.start(name, whole)))  # noqa: B023
        all_three.peer.forget(name)
    what = f"a session's next turn, {TURN_PROMPT // 1000} k-token prompt, {TURN_NEW} new tokens"
    return [
        less(f"{what}, CPU time, µs", median(ours), median(theirs), 50),
        less("the same prompt under ArcticInference's rule, which indexes it whole", median(at_once), median(theirs)),
        at_most("the longest single call of it, CPU time, ms", median(calls), 1, "ms"),
    ]


def memory_rows(ours: float, theirs: float) -> list[Row]:
    return [
        less("resident memory at 5 M tokens, bytes a token", ours, theirs, 15),
        at_most("the same, ours alone", ours, 20, "bytes"),
    ]


def snapshot_rows(cache: SuffixCache, rebuilding: float) -> list[Row]:
    """Time the loading of a snapshot. ArcticInference has none and must build its tree again."""
    say("saving and loading a snapshot")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        cache.save(path)
        seconds = []
        for _ in range(3):
            begin = perf_counter()
            loaded = SuffixCache.load(path, policy=cache.policy)
            seconds.append(perf_counter() - begin)
            assert loaded.stats().tokens == cache.stats().tokens
            del loaded
    return [at_most("load a 5 M-token snapshot (the peer: build its tree), s", median(seconds), 0.3, "s", rebuilding)]


def eviction_rows(held: Sequence[Tokens]) -> list[Row]:
    """Time the calls that evict half of the tokens, a few tokens each.

    The clock that would end a call early is off, so the calls are the same in every run. A call that is long in every
    run is agentspec's fault; one that is long in a single run is the machine's.
    """
    runs = []
    freed = 0
    with without_clock():
        for turn in range(EVICTIONS):
            say(f"evicting half, {turn + 1} of {EVICTIONS}")
            ours = AgentSpecIndex(DraftPolicy.fixed())
            ours.fill(held)
            before = _resident()
            runs.append(_evicting_half(ours.cache))
            freed = before - _resident()
    longest = max(min(calls) for calls in zip(*runs, strict=True))
    total = median(sum(calls) for calls in runs)
    return [
        at_most(f"evicting half of 5 M tokens, {len(runs[0])} calls: the longest, CPU time, ms", longest, 1, "ms"),
        Row("the same: all calls together, CPU time, ms", total),
        Row("the same: resident memory that it gave back, MB", freed / 1e6, target="falls", met=freed > 0),
    ]


def _evicting_half(cache: SuffixCache) -> list[float]:
    """Evict half of the tokens. Return the CPU time of each call, in milliseconds."""
    tokens = cache.stats().tokens
    cache.resize(max_tokens=tokens // 2)
    calls = []
    done: list[int] = []
    gc.collect()
    gc.disable()  # Python's garbage collection over all this text would be the longest call
    try:
        for _ in range(tokens):
            calls.append(_cpu(lambda: done.append(cache.catch_up(512))))
            if not done.pop():
                break
    finally:
        gc.enable()
    assert cache.stats().tokens <= tokens // 2
    return calls


def large_rows(source: Iterator[Tokens]) -> list[Row]:
    """Time agentspec's index with 1 M and with 100 M tokens, in turns."""
    small, large = AgentSpecIndex(DraftPolicy.fixed()), AgentSpecIndex(DraftPolicy.fixed())
    few = take(source, SIZES[0])
    small.fill(few)
    many: list[Tokens] = []  # a sample of the stored text
    held = 0
    while held < LARGE:
        new = take(source, LARGE // 20)
        large.fill(new)
        held += sum(map(len, new))
        many += new[::20]
        say(f"{held:,} tokens in {large.filled:,.0f} s")
    random = np.random.default_rng(1)
    both = [
        (ours, [document for document in documents if len(document) >= LENGTH], list[float]())
        for ours, documents in ((small, few), (large, many))
    ]
    for turn in range(ROUNDS):
        names = [f"{turn}-{number}" for number in range(BATCH)]
        for ours, long, times in both if turn % 2 else both[::-1]:
            table = np.stack([_matching_text(random, long) for _ in names])
            with _started(ours, names, table):
                for at in range(2 * DEPTH, LENGTH, ACCEPTED):
                    times.append(_per(BATCH, lambda: ours.step(names, table, at)))  # noqa: B023
                    ours.step(names, table, at + ACCEPTED, max_draft=0)
    first, second = (median(times) for _, _, times in both)
    return [
        Row(f"propose, ArcticInference's rule, batch of {BATCH}, 1 M tokens, µs a request", first),
        Row(
            "the same, 100 M tokens (ratio: how many times that at 1 M)",
            second,
            ratio=second / first,
            target="at most 2x",
            met=second <= 2 * first,
        ),
    ]


def _per(count: int, action: Callable[[], object]) -> float:
    """Run the action. Return the microseconds that one of its `count` parts took."""
    begin = perf_counter_ns()
    action()
    return (perf_counter_ns() - begin) / 1000 / count


def _cpu(action: Callable[[], object]) -> float:
    """Run the action. Return this thread's CPU time in milliseconds, without the time of other processes."""
    begin = thread_time_ns()
    action()
    return (thread_time_ns() - begin) / 1e6


def _growth(action: Callable[[], object]) -> int:
    """Run the action. Return the bytes by which resident memory grew."""
    gc.collect()
    before = _resident()
    action()
    gc.collect()
    return _resident() - before


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
