"""Replay recorded sessions spread over 1 to 8 replicas, which share a store or don't, and count tokens a step.

    python benchmarks/replicas.py --traces DIR [--workloads A,B] [--store sqlite|redis] [--jobs J]
        [--json | --save]

A replica is a suffix cache with an engine's own persistence around it, in this process. Calls run one at a time in file
order, as in `agentspec simulate`. Each goes to the replica that the spread names:

- turn by turn: a session's turns go around all replicas, so no turn runs where the one before it ran.
- by session: a session stays on one replica.

Replicas that share use one store, and follow what the others finished before the next call begins. Replicas that don't
share have a store each. Counts do not depend on the machine.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import trace_files
from report import exit_status, names, positive, print_json, print_table, rounded, save, say
from trace_files import WORKLOADS, calls

from agentspec.cache import SOURCES, DraftPolicy, FinishedTurn, SuffixCache
from agentspec.cache.arguments import TokenIds
from agentspec.cache.core import without_clock
from agentspec.cache.store import LogNames, open_store
from agentspec.cache.types import Scope
from agentspec.errors import StoreUnavailableError
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence, SessionHolder
from agentspec.simulate import Figures, simulate
from agentspec.testing.redis_server import RedisServer

REPLICAS = (2, 4, 8)
SPREADS: dict[str, Callable[[int, int], int]] = {
    "turn by turn": lambda session, turn: session + turn,
    "by session": lambda session, turn: session,
}
"""By name: which replica, modulo their number, gets a turn of a session. Both are counted from 0."""
TARGET = 0.97
"""Least share of one replica's tokens a step that replicas which share must reach."""
NAMES = LogNames("0123456789abcdef", b"replicas")
_ALL = 1_000_000
_WAIT_SECONDS = 30.0
"""Longest time to wait for the store. Beyond it the replay fails."""


@dataclass(slots=True)
class Log:
    """Count the turns that the replicas of one store have saved."""

    url: str
    turns: int = 0


class Replica(SuffixCache):
    """Hold a cache that loads, follows and saves turns through a store, as an engine does. Close it."""

    def __init__(self, log: Log, policy: DraftPolicy | None = None) -> None:
        super().__init__(policy=policy)
        self._log = log
        self._identities: dict[str, Identity] = {}
        self.persistence = Persistence(self, open_store(log.url), NAMES, preload=_ALL)
        self.persistence.follow(SessionHolder())
        self.persistence.warm_up(_WAIT_SECONDS)

    def settle(self) -> None:
        """Apply and index what others have saved, as an engine does between two of their turns."""
        self._wait(self._has_followed)
        self.catch_up()

    def start(
        self,
        request_id: str,
        prompt: TokenIds,
        *,
        session: str | None = None,
        group: str | None = None,
        tenant: str | None = None,
        scope: Scope = "tenant",
        **options: Any,
    ) -> None:
        """Begin a request, and wait until all that the store has of it is applied, as its prefill would.

        Raises StoreUnavailableError if that takes too long.
        """
        super().start(request_id, prompt, session=session, group=group, tenant=tenant, scope=scope, **options)
        identity = self._identities[request_id] = Identity(tenant=tenant, session=session, group=group, scope=scope)
        self.persistence.request_load(identity, group=group, family=None)
        self._wait(lambda: self._has_all(identity))
        self.catch_up()

    def finish(self, request_id: str, **options: Any) -> FinishedTurn | None:
        """End a request, and wait until its turn is saved."""
        turn = super().finish(request_id, name=self.persistence.next_name(), **options)
        identity = self._identities.pop(request_id)
        if turn is not None:
            self.persistence.save(turn, identity)
            self._log.turns += 1
            self._wait(lambda: self.persistence.stats()["writer"]["queued"] == 0)
        return turn

    def close(self) -> None:
        """Close the store."""
        self.persistence.close()

    def _has_followed(self) -> bool:
        followed = self.persistence.stats()["follower"]
        return bool(followed["delivered"] + followed["skipped"] == self._log.turns)

    def _has_all(self, of: Identity) -> bool:
        return not (
            self.needs_load(of.tenant)
            or (of.session is not None and self.needs_load(of.tenant, of.session))
            or (of.group is not None and self.needs_load(of.tenant, group=of.group))
        )

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            finished = done()  # ask first, so that the call below applies all of it
            if not self.persistence.apply_loaded(_WAIT_SECONDS) and finished and not self.persistence.has_loaded():
                return
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"the store did not answer within {_WAIT_SECONDS:.0f} s")
            time.sleep(0.0005)


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what one replay counted. ratio: its tokens a step over one replica's. target: only if they share."""

    workload: str
    replicas: int
    spread: str
    shared: bool
    tokens: int
    steps: int
    drafted: int
    tokens_per_step: float
    ratio: float
    target: float | None = None
    met: bool | None = None
    accepted_by_source: dict[str, int] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    counted = partial(measure, options.traces, options.store)
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            rows = [row for found in pool.map(counted, options.workloads) for row in found]
    else:
        rows = [row for name in options.workloads for row in counted(name)]
    if options.save:
        kind = "counts: recorded sessions replayed over replicas, drafts verified greedily"
        save("replicas", kind, {"rows": [rounded(asdict(row)) for row in rows]})
    if options.json:
        print_json([rounded(asdict(row)) for row in rows])
    else:
        _print(rows)


def measure(traces: Path, store: str, workload: str) -> list[Row]:
    """Return the rows of one recording: one replica first, then each number of them, spread and shared both ways."""
    with without_clock():
        one = replay(traces, workload, 1, "by session", store, shared=True)
        rows = [_row(workload, 1, "by session", True, one, one)]
        for count, spread, shared in product(REPLICAS, SPREADS, (True, False)):
            rows.append(
                _row(workload, count, spread, shared, replay(traces, workload, count, spread, store, shared), one)
            )
        return rows


def replay(traces: Path, workload: str, count: int, spread: str, store: str, shared: bool) -> Figures:
    """Replay a recording over `count` replicas. store: "sqlite" or "redis"."""
    total, sessions = Figures(), dict[str, int]()
    with _replicas(count, store, shared) as replicas:
        for call in calls(traces, workload):
            number = sessions.setdefault(call.session, len(sessions))
            _add(total, simulate([call], replicas[SPREADS[spread](number, call.turn) % count]))
            for replica in replicas if shared else ():
                replica.settle()
    return total


def _add(total: Figures, call: Figures) -> None:
    for name in ("tokens", "steps", "drafted", "accepted"):
        setattr(total, name, getattr(total, name) + getattr(call, name))
    for source in SOURCES:
        total.accepted_by_source[source] += call.accepted_by_source[source]


@contextmanager
def _replicas(count: int, store: str, shared: bool) -> Iterator[list[Replica]]:
    """Give new replicas on one new store, or on one each."""
    with ExitStack() as stack:
        logs = []
        for _ in range(1 if shared else count):
            if store == "redis":
                url = stack.enter_context(RedisServer({"appendonly": "no"})).url
            else:
                url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/log.db"
            logs.append(Log(url))
        replicas = [Replica(log) for log in (logs * count if shared else logs)]
        for replica in replicas:
            stack.callback(replica.close)
        yield replicas


def _row(workload: str, count: int, spread: str, shared: bool, found: Figures, one: Figures) -> Row:
    ratio = found.tokens_per_step / one.tokens_per_step
    aimed = shared and count > 1
    row = Row(
        workload,
        count,
        spread,
        shared,
        found.tokens,
        found.steps,
        found.drafted,
        found.tokens_per_step,
        ratio,
        TARGET if aimed else None,
        ratio >= TARGET if aimed else None,
        dict(found.accepted_by_source),
    )
    say(f"{workload}, {count}, {spread}, {'shared' if shared else 'apart'}: {row.tokens_per_step:.4f}, {ratio:.4f}")
    return row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    trace_files.add_option(parser)
    add("--workloads", type=names, default=list(WORKLOADS), metavar="A,B", help="only these (all six)")
    add("--store", choices=("sqlite", "redis"), default="sqlite", help="what the replicas share (%(default)s)")
    add("--jobs", type=positive, default=1, metavar="J", help="recordings at a time, each in a process (%(default)s)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    form.add_argument("--save", action="store_true", help="write results/replicas.json too, which plot.py reads")
    return parser


def _print(rows: Sequence[Row]) -> None:
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    columns = ("recording", "replicas", "spread", "shared", "tokens a step", "over one replica's", "target", "met")
    cells = [
        (
            row.workload,
            str(row.replicas),
            row.spread,
            "yes" if row.shared else "no",
            f"{row.tokens_per_step:.3f}",
            f"{row.ratio:.3f}",
            "" if row.target is None else f"{row.target:g}",
            marks[row.met],
        )
        for row in rows
    ]
    print_table("tokens a step, sessions spread over replicas", columns, cells, left=("recording", "spread"))


if __name__ == "__main__":
    sys.exit(main())
