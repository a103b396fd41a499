"""Measure what sharing a Redis server costs and gives: 2, 4 and 8 replicas, each a process with the real cache.

    python benchmarks/store.py --traces DIR [--replicas 2,4,8] [--seconds 20] [--json | --save]

A row is {figure, value, target, met}; the text of a figure gives its unit and the number of replicas. Replicas and the
Redis server share this machine's cores, so with fewer cores than processes, figures in wall time get worse with more
replicas. Figures in CPU time don't: they say what one core does.

- written: all replicas save turns as fast as the store takes them.
- restored: an idle replica loads a tenant's log and indexes it; then a serving replica loads a large session, and no
  step may notice.
- delay: a replica finishes a turn of new text; another, which asks for a draft every 10 ms, gets a draft of that text.
- decode path: all replicas serve in real time, 8 rows a step of 10 ms. In each process an engine on the shared store
  and an engine on a store of its own in memory take turns. The share is the CPU time that a step of the first engine
  takes beyond a step of the second, over 10 ms. For half of the time the second engine has a copy of the first's suffix
  cache, so the share is persistence and following alone. For the other half it has only the text of its own requests,
  so the share includes drafting from the text of all replicas.
- bytes a token: memory of Redis after recorded sessions were served, over the tokens in their records.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import redis
import trace_files
from replica_process import NAMES, RESPONSE, SESSION, STEP_SECONDS, VOCABULARY, Process
from report import exit_status, names, positive, positive_number, print_json, print_table, rounded, save, say
from trace_files import WORKLOADS, Tokens, calls, documents

from agentspec.cache import SuffixCache
from agentspec.cache.store import mac, open_store
from agentspec.errors import ConfigurationError
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.simulate import Call
from agentspec.testing.redis_server import RedisServer

BATCH = 8
WRITTEN_TURNS = 4_000
"""Turns that each replica writes."""
RESTORED_TOKENS = 1_000_000
LARGE_SESSION = 200_000
"""Tokens of the session that a serving replica loads."""
TRIALS = 100
"""Turns whose delay is measured."""
SERVED = {
    "second": "shared store",
    "copy": "its cache without the store",
    "first": "shared store, first half",
    "own": "its own text alone, first half",
}
"""Labels of the engines that serve, as `Replica.serve` names them."""
MOST_QUEUED = 1_000
"""Records that may wait for the store before more are saved."""


@dataclass(frozen=True, slots=True)
class Row:
    """Hold one figure. target: "at most" or "at least" a value, "" without one; met: None without a target."""

    figure: str
    value: float
    target: str = ""
    met: bool | None = None


def at_least(figure: str, value: float, target: float) -> Row:
    """Return the row of a figure that must reach the target."""
    return Row(figure, value, f"at least {target:g}", value >= target)


def at_most(figure: str, value: float, target: float) -> Row:
    """Return the row of a figure that must not exceed the target."""
    return Row(figure, value, f"at most {target:g}", value <= target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    rows: list[Row] = []
    text = np.concatenate(list(islice(documents(options.traces), options.documents)))
    if len(text) <= SESSION:
        raise ConfigurationError(
            f"--documents {options.documents}: they hold {len(text)} tokens; a session needs {SESSION}"
        )
    for measured in (
        bytes_a_token(options.traces, options.workloads),
        restored(text),
        *(shared_by(count, text, options.seconds) for count in options.replicas),
    ):
        for row in measured:
            rows.append(row)
            say(f"{row.figure}: {row.value:.4g} {row.target}")
    if options.save:
        kind = "replica processes with the real cache on one Redis server, on loopback"
        save("store", kind, {"rows": [rounded(asdict(row)) for row in rows]})
    if options.json:
        print_json([rounded(asdict(row)) for row in rows])
    else:
        marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
        cells = [(row.figure, f"{row.value:,.4g}", row.target, marks[row.met]) for row in rows]
        print_table("one Redis server", ("figure", "value", "target", "met"), cells, left=("figure", "target"))


def bytes_a_token(traces: Path, workloads: Sequence[str]) -> Iterator[Row]:
    """Yield Redis' memory over the tokens of the records that it holds, for each recording and for all."""
    total_bytes = total_tokens = 0
    for workload in workloads:
        with RedisServer({"appendonly": "no"}) as server, redis.Redis(port=server.port) as client:
            grown, tokens = _record(calls(traces, workload), server.url, client)
        yield Row(f"bytes a token in Redis, {workload}", grown / tokens)
        total_bytes, total_tokens = total_bytes + grown, total_tokens + tokens
    yield at_most("bytes a token in Redis, all recordings", total_bytes / total_tokens, 4)


def _record(recorded: Iterable[Call], url: str, client: Any) -> tuple[int, int]:
    """Save what an engine would save of these calls.

    Returns the bytes by which Redis' memory grew from the first record on, and the tokens in the records behind it.
    """
    cache = SuffixCache()
    persistence = Persistence(cache, open_store(url), NAMES, preload=0)
    tokens, before = 0, None

    def wait(most: int) -> None:
        while persistence.stats()["writer"]["queued"] > most:
            time.sleep(0.01)

    for call in recorded:
        session, group = (mac(b"", kind, name) for kind, name in (("session", call.session), ("group", call.group)))
        cache.start("request", call.prompt, session=session, group=group)
        cache.extend("request", call.response)
        turn = cache.finish("request", name=persistence.next_name())
        cache.catch_up()
        if turn is not None:
            named = Identity(session=session, session_name=call.session, group=group, group_name=call.group)
            persistence.save(turn, named)
            tokens += len(turn.prompt_tail) + len(turn.response)
        wait(MOST_QUEUED)
        if before is None:  # connections and scripts have their memory now
            wait(0)
            before, tokens = int(client.info("memory")["used_memory"]), 0
    wait(0)
    grown = int(client.info("memory")["used_memory"]) - (before or 0)
    persistence.close()
    return grown, tokens


def restored(text: Tokens) -> Iterator[Row]:
    """Yield how fast stored turns come into live indexes, and what a serving replica's steps notice of it."""
    with RedisServer({"appendonly": "no"}) as server:
        writer = Process(server.url, 0, text, BATCH)
        turns = RESTORED_TOKENS // RESPONSE
        writer.begin("write", time.monotonic() + 1, turns)()
        tokens = turns * RESPONSE
        cache = SuffixCache()
        persistence = Persistence(cache, open_store(server.url), NAMES, preload=turns)
        wall, cpu = time.monotonic(), time.process_time()
        persistence.warm_up(120)
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        persistence.close()
        yield Row(f"tokens/s restored at start, indexing included, {cache.stats().tokens:,} tokens held", tokens / wall)
        yield at_least("tokens restored at start in a second of CPU time", tokens / cpu, 0.8e6)
        turns = LARGE_SESSION // RESPONSE
        writer.begin("write", time.monotonic() + 1, turns, "large")()
        reader = Process(server.url, 1, text, BATCH)
        result = reader.begin("load_beside", "large", time.monotonic() + 5, 15.0)()
        writer.close()
        reader.close()
        before, after = np.array(result["calls"][: result["at"]]), np.array(result["calls"][result["at"] :])
        loaded = result["loaded"]
        what = f"a session of {LARGE_SESSION:,} tokens loaded while serving"
        yield Row(f"{what}: s until drafted from whole", float("inf") if loaded is None else loaded)
        if loaded is not None:
            yield Row(f"{what}: tokens in a second of CPU time outside steps", turns * RESPONSE / result["cpu"])
        for name, times in (("before", before), ("from then on", after)):
            yield Row(
                f"{what}: ms of CPU time of a step's engine calls, p99, {name}", 1e3 * float(np.quantile(times, 0.99))
            )
        yield at_most(
            f"{what}: ms of CPU time of the longest step's engine calls over before's",
            1e3 * float(after.max() - before.max()),
            1,
        )


@contextmanager
def _processes(count: int, url: str, text: Tokens) -> Iterator[list[Process]]:
    found = [Process(url, number, text, BATCH) for number in range(count)]
    try:
        yield found
    finally:
        for process in found:
            process.close()


def shared_by(count: int, text: Tokens, seconds: float) -> Iterator[Row]:
    """Yield the figures of so many replicas on one Redis server."""
    what = f"{count} replicas"
    with (
        RedisServer({"appendonly": "no"}) as server,
        redis.Redis(port=server.port) as client,
        _processes(count, server.url, text) as processes,
    ):
        yield from _delays(what, processes)
        yield from _serving(what, processes, client, seconds)
        yield from _writing(what, processes, client)


def _writing(what: str, processes: Sequence[Process], client: Any) -> Iterator[Row]:
    begin, before = time.monotonic() + 2, _redis_seconds(client)
    waiting = [process.begin("write", begin, WRITTEN_TURNS) for process in processes]
    results = [result() for result in waiting]
    tokens = sum(result["tokens"] for result in results)
    yield Row(f"tokens/s written, {what}", tokens / max(result["wall"] for result in results))
    yield Row(f"tokens written in a second of a replica's CPU time, {what}", tokens / sum(r["cpu"] for r in results))
    yield Row(f"tokens written in a second of Redis' CPU time, {what}", tokens / (_redis_seconds(client) - before))


def _delays(what: str, processes: Sequence[Process]) -> Iterator[Row]:
    random = np.random.default_rng(1)
    nothing = random.integers(5, VOCABULARY - 5, 64, dtype=np.int32)
    for asked in [process.begin("listen", nothing, 32, 0.5) for process in processes]:
        asked()  # a replica follows the tenant from its first request on
    delays: list[float] = []
    missing = 0
    for trial in range(TRIALS):
        text = random.integers(5, VOCABULARY - 5, 64, dtype=np.int32)
        writer = trial % len(processes)
        others = [process for number, process in enumerate(processes) if number != writer]
        listening = [process.begin("listen", text, 32, 2.0) for process in others]
        time.sleep(0.05)
        said = processes[writer].begin("say", text)()
        for heard in listening:
            found = heard()
            if found is None:
                missing += 1
            else:
                delays.append(found - said)
    if not delays:
        delays = [float("inf")]
    yield Row(f"ms from a replica's finish to another's draft, p50, {what}", 1e3 * float(np.quantile(delays, 0.5)))
    yield at_most(
        f"ms from a replica's finish to another's draft, p99, {what}", 1e3 * float(np.quantile(delays, 0.99)), 50
    )
    yield at_most(f"turns that did not come within 2 s, of {TRIALS * (len(processes) - 1)}, {what}", missing, 0)


def _serving(what: str, processes: Sequence[Process], client: Any, seconds: float) -> Iterator[Row]:
    begin, before = time.monotonic() + 1, _redis_seconds(client)
    waiting = [process.begin("serve", begin, seconds) for process in processes]
    results = [result() for result in waiting]
    used = _redis_seconds(client) - before
    calls = {name: np.concatenate([result[name]["calls"] for result in results]) for name in results[0]}
    total = {
        name: sum(result[half][name] for result in results for half in ("first", "second"))
        for name in ("tokens", "finished", "restored")
    }
    mean = {name: float(times.mean()) for name, times in calls.items()}
    added = (mean["second"] - mean["copy"]) / STEP_SECONDS
    in_all = (mean["first"] - mean["own"]) / STEP_SECONDS
    yield Row(f"tokens/s served in real time by all, {what}", total["tokens"] / seconds)
    yield Row(f"turns/s finished by all, {what}", total["finished"] / seconds)
    yield Row(f"followed turns/s of each replica, {what}", total["restored"] / len(results) / seconds)
    for name, label in SERVED.items():
        yield Row(f"ms of CPU time of a step's engine calls, {label}, {what}", 1e3 * mean[name])
    yield at_most(f"% of a step of 10 ms that persistence and following add on the decode path, {what}", 1e2 * added, 1)
    yield Row(f"% of a step of 10 ms that sharing adds with the drafts from what others said, {what}", 1e2 * in_all)
    for name, label in SERVED.items():
        yield Row(
            f"ms of CPU time of a step's engine calls, p99.9, {label}, {what}",
            1e3 * float(np.quantile(calls[name], 0.999)),
        )
    yield Row(f"% of a core that Redis takes, {what}", 1e2 * used / seconds)


def _redis_seconds(client: Any) -> float:
    used = client.info("cpu")
    return float(used["used_cpu_sys"]) + float(used["used_cpu_user"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    trace_files.add_option(parser)
    add("--replicas", type=_counts, default=[2, 4, 8], metavar="N,M", help="how many share a Redis server (2,4,8)")
    add("--workloads", type=names, default=list(WORKLOADS), metavar="A,B", help="for the bytes")
    add("--seconds", type=positive_number, default=20.0, help="how long the replicas serve (%(default)s)")
    add("--documents", type=positive, default=6_000, help="recorded responses to serve from (%(default)s)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    form.add_argument("--save", action="store_true", help="write results/store.json too")
    return parser


def _counts(text: str) -> list[int]:
    counts = [positive(part) for part in text.split(",")]
    if min(counts) < 2:
        raise argparse.ArgumentTypeError(f"one replica shares with nobody, got {text!r}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
