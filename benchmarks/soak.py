"""Load a real server with mixed traffic for a while, with store outages, and check that it keeps its promises.

    python benchmarks/soak.py --minutes 60 [--save]
    python benchmarks/soak.py --minutes 10 --max-bytes 1000000 --store-bytes 1000000   # reaches the limits as well

The server has the demo's model, a small memory budget and a store with small limits. The traffic is many times both
limits. For half of the time the store is Redis, which is killed and restarted; for the other half it is an SQLite file,
which another process locks. The traffic: agents in sessions of their own, callers that send a new session id with every
request, a caller that sends the same id for ever, long prompts, requests that are aborted, sessions that are erased.

The exit status is 1 if a check fails.
"""

import argparse
import http.client
import json
import math
import statistics
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import report
from engines import Parser
from report import ROOT, print_json, print_table, say
from soak_places import Place, RedisPlace, SQLitePlace
from soak_traffic import MAX_MODEL_LEN, Said, Traffic

from agentspec import AgentSpecError
from agentspec.cache.policy import DEFAULT_COST
from agentspec.cache.store import RecordReader, Store, TurnRecord, open_store
from agentspec.testing.server import ModelServer, ServerFailedError

MODEL = ROOT / "demo" / "model"
TOKEN_BYTES = 12
SAMPLE_SECONDS = 2.0
STALL_SECONDS = 1e-3
USUAL_TIMES = 3.0  # work over STALL_SECONDS and over this many times the usual is a slow step
LEAST_WORK = 1e-4  # least work of a step that starts or ends a request or takes a stored turn, in seconds
WORK_SECONDS = 4e-4  # usual work beside drafting, on a machine with other work
WORK_READS = 20_000
TOUCHED_BYTES = 12 << 30  # several times what all processes of a run take
LEAST_DRAFTS = 8  # two in each quarter
LEAST_DRIFT = 0.9
LEAST_CHANCE = 1e-3  # below this probability, worse drafts at the end are not chance
SHUFFLES = 10_000
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Without this, vLLM's own memory would keep growing during a short run, and hide agentspec's.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "MALLOC_ARENA_MAX": "2",
}
OPTIONS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--max-num-batched-tokens", "2048"),
    *("--block-size", "32", "--num-gpu-blocks-override", "1024"),  # a KV cache that is full at once, and grows no more
)


class FixedWork:
    """Read memory at random in a process of its own, and count how many equal pieces of it take long.

    A piece takes about WORK_SECONDS of CPU time. If some take longer, the machine is the cause.
    """

    def __init__(self) -> None:
        context = get_context("spawn")
        self._ended = context.Event()
        self._result, there = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(self._ended, there), daemon=True)
        self._process.start()

    def stop(self) -> float:
        """Return the share of pieces over STALL_SECONDS, after scaling times to a median of WORK_SECONDS."""
        self._ended.set()
        share: float = self._result.recv()
        self._process.join()
        return share


def _work(ended: Event, result: Connection) -> None:
    memory, chance = np.ones(1 << 24), np.random.default_rng(0)
    pieces = []
    while not ended.wait(0.02):
        places = chance.integers(0, len(memory), WORK_READS)
        begin = time.thread_time()
        memory.take(places)
        pieces.append(time.thread_time() - begin)
    slow = statistics.median(pieces) * STALL_SECONDS / WORK_SECONDS
    result.send(sum(piece >= slow for piece in pieces) / len(pieces))


@dataclass(slots=True)
class Run:
    """Hold what was measured on one kind of store.

    samples: one row each SAMPLE_SECONDS. missing: answered sessions that the store lacks, including those whose records
    a full queue dropped. left: erased sessions that it still has. spare_bytes: what its store takes beside records.
    slow_pieces: the share of FixedWork's pieces that took long meanwhile.
    """

    store: str
    samples: list[dict[str, Any]]
    said: Said
    stats: dict[str, Any]
    missing: int
    left: int
    spare_bytes: int
    slow_pieces: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak. Returns 1 if a check fails or the run does, 2 for input that cannot work."""
    options = _parser().parse_args(arguments)
    stores = ("redis", "sqlite") if options.store == "both" else (options.store,)
    try:
        runs = [soak(store, 60 * options.minutes / len(stores), options) for store in stores]
        rows = [row for run in runs for row in checks(run, options)]
    except AgentSpecError as error:
        say(f"error: {error}")
        return 1
    if options.json:
        print_json(rows)
    else:
        cells = [(row["store"], row["check"], f"{row['value']:,.4g}", row["limit"], _mark(row["met"])) for row in rows]
        title = f"{options.minutes:g} minutes, {sum(run.said.requests.total() for run in runs):,} requests"
        print_table(title, ("store", "check", "value", "limit", "met"), cells, left=("store", "check", "limit"))
    if options.save:
        content = {"minutes": options.minutes, "max_bytes": options.max_bytes, "store_bytes": options.store_bytes}
        samples = [{"store": run.store, **sample} for run in runs for sample in run.samples]
        report.save("soak", "soak", {**content, "checks": rows, "rows": samples})
    return 0 if all(row["met"] for row in rows) else 1


def touch_memory() -> None:
    """Write to much memory in a process of its own, which frees it again, so that the run finds it already mapped.

    The host of a virtual machine provides a page when it is first written. That takes some 130 us a page, and counts as
    CPU time of the step that writes to it.
    """
    count = min(TOUCHED_BYTES, psutil.virtual_memory().available // 2) // 8
    process = get_context("spawn").Process(target=np.ones, args=(count,), daemon=True)
    process.start()
    process.join()


def soak(store: str, seconds: float, options: argparse.Namespace) -> Run:
    """Run the traffic on one kind of store. Raises AgentSpecError if the server dies."""
    touch_memory()
    with tempfile.TemporaryDirectory(prefix="agentspec-soak-") as folder:
        place = RedisPlace() if store == "redis" else SQLitePlace(Path(folder))
        try:
            server = _server(place, options)
            with server:
                return _watch(store, server, place, seconds, options.seed)
        finally:
            place.close()


def _server(place: Place, options: argparse.Namespace) -> ModelServer:
    settings = {
        "max_bytes": options.max_bytes,
        "retention_bytes": options.store_bytes,
        "verify_cost": DEFAULT_COST,  # a measured cost would depend on how busy the machine is
    }
    return ModelServer(
        MODEL,
        options=(*OPTIONS, "--additional-config", json.dumps({"agentspec": settings})),
        name="soak",
        environment={**ENVIRONMENT, "AGENTSPEC_STORE": place.url},
    )


def _watch(store: str, server: ModelServer, place: Place, seconds: float, seed: int) -> Run:
    start = time.monotonic()
    traffic, work = Traffic(server, seed, start), FixedWork()
    samples = []
    outage = False
    while (now := time.monotonic() - start) < seconds:
        wanted = _outage(now, seconds)
        if wanted != outage:
            (place.fail if wanted else place.recover)()
            outage = wanted
        samples.append(_sample(server, place, now, outage, traffic.said))
        if not len(samples) % 15:
            say(f"{store}: {now:.0f} of {seconds:.0f} s, {samples[-1]}")
        time.sleep(max(0.0, SAMPLE_SECONDS - (time.monotonic() - start - now)))
    traffic.stop()
    slow_pieces = work.stop()
    stats = _settled(server)
    say(f"{store}: {stats['store']}\n{stats['seconds']['beside']}")
    with closing(open_store(place.url)) as opened:
        missing, left = compare(opened, traffic.said)
    return Run(store, samples, traffic.said, stats, missing, left, place.spare_bytes, slow_pieces)


def _outage(now: float, seconds: float) -> bool:
    """Return whether the store is away: a tenth of the time, in three outages, none of them near the end."""
    share = now / seconds
    return any(begin < share < begin + 0.04 for begin in (0.25, 0.5, 0.7))


def _sample(server: ModelServer, place: Place, now: float, outage: bool, said: Said) -> dict[str, Any]:
    stats = _stats(server)
    rates = [rate for at, rate in list(said.drafts) if at > now - 20]
    return {
        "seconds": round(now, 1),
        "resident_bytes": _resident(server),
        "cache_bytes": stats["cache"]["bytes"],
        "store_bytes": place.size(),
        "queued_records": stats["store"]["writer"]["queued"],
        "tokens": said.tokens,
        "tokens_per_step": round(statistics.fmean(rates), 3) if rates else None,
        "outage": outage,
    }


def _stats(server: ModelServer, patience: float = 60.0) -> dict[str, Any]:
    """Return the server's statistics. On a busy machine a step may outlast the time that the engine has to answer.

    Raises ServerFailedError if the server does not answer.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return server.stats()
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                raise
        except (OSError, http.client.HTTPException) as error:
            raise ServerFailedError(f"the server does not answer: {error}\n{server.tail()}") from None


def _resident(server: ModelServer) -> int:
    """Return the resident memory of the process that drafts, which is the largest of the server's."""
    processes = psutil.Process(server.process_id).children(recursive=True)
    return max(int(process.memory_info().rss) for process in processes)


def _settled(server: ModelServer) -> dict[str, Any]:
    """Wait until the server has written all its records, and return its statistics."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = _stats(server)
        if not stats["store"]["writer"]["queued"] and not stats["running"]:
            return stats
        time.sleep(0.2)
    raise AgentSpecError("the server has not written its records within a minute after the store came back")


def compare(store: Store, said: Said) -> tuple[int, int]:
    """Return how many sessions the store lacks, and how many it has that were erased.

    Retention removes the oldest records, so a session counts as lacking only if the store has older ones, or none.
    """
    held, oldest = _held(store)
    oldest = oldest if held else 0.0
    erased = sum(name in held for name in said.erased)
    newest = {name: at for at, name in said.finished}  # by session, the time of its last answer
    expected = [name for name, at in newest.items() if name not in said.touched and at > oldest + 2 * SAMPLE_SECONDS]
    return sum(name not in held for name in expected), erased


def _held(store: Store) -> tuple[set[str | None], float]:
    """Return the sessions of all turns in the store, and when the oldest turn was made (epoch seconds)."""
    names: set[str | None] = set()
    oldest = time.time()
    for _, record in chain.from_iterable(RecordReader().read(store.read(log)) for log in store.namespaces()):
        if isinstance(record, TurnRecord):
            names.add(record.session_name)
            oldest = min(oldest, record.created)
    return names, oldest


def checks(run: Run, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the promises, what was measured, and whether they were kept. Raises AgentSpecError for too short a run."""
    if len(run.samples) < 3 or len(run.said.drafts) < LEAST_DRAFTS:
        raise AgentSpecError(f"{run.store}: too few answers to compare; let it run longer (--minutes)")
    samples, writer = run.samples, run.stats["store"]["writer"]
    beside = run.stats["seconds"]["beside"]
    usual = _usual_work(beside)
    stalls, slow = _steps_over(beside, STALL_SECONDS), _steps_over(beside, max(STALL_SECONDS, USUAL_TIMES * usual))
    steps = sum(beside["counts"])
    third = len(samples) // 3
    resident = [sample["resident_bytes"] for sample in samples]
    grown = statistics.median(resident[-third:]) - statistics.median(resident[third : 2 * third])
    drift, chance = _drift([rate for _, rate in run.said.drafts])
    volume = run.said.tokens * TOKEN_BYTES / options.max_bytes
    errors = sum(count for name, count in run.stats["counters"].items() if name.startswith("errors"))
    most_cache = max(sample["cache_bytes"] for sample in samples) / options.max_bytes
    largest = max(sample["store_bytes"] for sample in samples) - run.spare_bytes
    rows: Iterable[tuple[str, float, str, bool]] = (
        ("text said, in budgets of memory", volume, f"at least {options.times:g}", volume >= options.times),
        _at_most("most memory of the cache, in budgets", most_cache, 1.1),
        _at_most("resident memory grown from the second third to the last", grown / resident[-1], 0.05),
        _at_most("largest store beside what it takes empty, in its limits", largest / options.store_bytes, 1.5),
        ("records that retention has removed", writer["trimmed"], "at least 1", writer["trimmed"] >= 1),
        _at_most("steps with more than 1 ms of work beside drafting", stalls, 0),
        _at_most("of these, steps with more than 3 times the usual work", slow, 0),
        _at_most("usual work of a step that has some, ms", 1000 * usual, 1),
        ("of as many pieces of fixed work in another process, over 1 ms", run.slow_pieces * steps, "", True),
        _at_most("acknowledged sessions that the store lacks", max(0, run.missing - writer["dropped"]), 0),
        _at_most("erased sessions that the store still has", run.left, 0),
        _at_most("records that the store refused", writer["refused"], 0),
        _at_most("failed requests", len(run.said.errors), 0),
        _at_most("errors of the extension", errors, 0),
        (
            "drafts in the last quarter over those in the second",
            drift,
            f"at least {LEAST_DRIFT:g}; by chance as low {chance:.2%}",
            drift >= LEAST_DRIFT or chance >= LEAST_CHANCE,
        ),
    )
    for error in sorted(set(run.said.errors))[:5]:
        say(f"{run.store}: {error}")
    return [{"store": run.store, "check": check, "value": value, "limit": limit, "met": met}
            for check, value, limit, met in rows]  # fmt: skip


def _usual_work(beside: dict[str, Any]) -> float:
    """Return the median of the work beside drafting of the steps that have some, in seconds. beside: its histogram."""
    buckets = list(zip([0.0, *beside["bounds"]], [*beside["bounds"], float("inf")], beside["counts"], strict=True))
    buckets = [(least, most, count) for least, most, count in buckets if count and most > LEAST_WORK]
    left = sum(count for _, _, count in buckets) / 2
    for least, most, count in buckets:
        if left <= count:
            return float(least if math.isinf(most) else least + (most - least) * left / count)
        left -= count
    return 0.0


def _steps_over(beside: dict[str, Any], seconds: float) -> int:
    """Return how many steps surely had more than `seconds` of work beside drafting. beside: its histogram."""
    bounds = [0.0, *beside["bounds"]]
    return sum(count for least, count in zip(bounds, beside["counts"], strict=True) if least >= seconds)


def _drift(rates: list[float]) -> tuple[float, float]:
    """Return the mean of the last quarter over the second quarter's, and the probability of as low a mean by chance.

    The second quarter is the first with full memory. The probability is from a permutation test: both quarters, the
    second scaled by LEAST_DRIFT, are shuffled. Rates have two modes, as a correction repeats its answer or doesn't, so
    a standard error of a few rates says little.
    """
    part = len(rates) // 4
    first, last = np.array(rates[part : 2 * part]), np.array(rates[-part:])
    both = np.concatenate((LEAST_DRIFT * first, last))
    shuffled = np.random.default_rng(0).permuted(np.tile(both, (SHUFFLES, 1)), axis=1)
    as_low = shuffled[:, :part].mean(axis=1) <= last.mean() * (1 + 1e-9)
    return float(last.mean() / first.mean()), float(as_low.mean())


def _at_most(check: str, value: float, limit: float) -> tuple[str, float, str, bool]:
    return check, value, f"at most {limit:g}", value <= limit


def _mark(met: bool) -> str:
    return "[green]yes[/]" if met else "[red]no[/]"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=report.positive_number, default=60.0, help="how long, both stores together (%(default)g)")
    add("--store", choices=("redis", "sqlite", "both"), default="both", help="(%(default)s)")
    add("--max-bytes", type=report.positive, default=4_000_000, help="the server's memory budget (%(default)s)")
    add("--store-bytes", type=report.positive, default=8_000_000, help="the limit of its store (%(default)s)")
    add("--times", type=float, default=10.0, help="the text that must be said, in budgets of memory (%(default)g)")
    add("--seed", type=int, default=0, help="of the traffic (%(default)s)")
    add("--json", action="store_true", help="print the checks as JSON")
    add("--save", action="store_true", help="write benchmarks/results/soak.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
