"""Replay recorded sessions in steps of a given length, with and without the thread that indexes beside them. No engine.

    python benchmarks/indexing.py --traces DIR --workload NAME [--batch 1 8 32] [--step 6] [--json]

Each step waits as long as a GPU would compute, then verifies and drafts for all rows in one call, as a server does; the
price of a draft token is .01. Prompts count as computed in one step. So many sessions run at once.
Output is a list of {figure, value, target, met}: tokens a step of a row, and how long the calls took.
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import engines
import numpy as np
from report import exit_status, positive, positive_number, print_json, print_table, say
from trace_files import VOCABULARY, accepted_tokens, records

from agentspec.cache import SuffixCache
from agentspec.cache.policy import MAX_DRAFT
from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS

COST, WORK_SHARE = 0.01, 0.02

Record = dict[str, Any]


@dataclass(slots=True)
class Replay:
    """Hold what a replay counted. calls: [steps] wall time of each call that drafts, in milliseconds."""

    tokens: int
    row_steps: int
    calls: list[float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    said = (record for record in records(options.traces, options.workload) if len(record["response"]))
    recorded = islice(said, options.calls)
    by_session: dict[str, list[Record]] = {}
    for record in recorded:
        by_session.setdefault(str(record["session"]), []).append(record)
    sessions = list(by_session.values())
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        for name, thread in (("steps alone", False), ("steps and thread", True)):
            done = replay(sessions, batch, 1e-3 * options.step, thread=thread)
            figures = {
                "tokens a step": done.tokens / done.row_steps,
                "call, median ms": float(np.median(done.calls)),
                "call, p99 ms": float(np.percentile(done.calls, 99)),
                "call, longest ms": max(done.calls),
            }
            rows += [
                {"figure": f"batch {batch}, {name}, {figure}", "value": round(value, 3), "target": None, "met": None}
                for figure, value in figures.items()
            ]
        say(f"batch {batch}: done")
    if options.json:
        print_json(rows)
    else:
        cells = [[str(row["figure"]), str(row["value"])] for row in rows]
        print_table(f"{options.workload}, steps of {options.step:g} ms", ("figure", "value"), cells, left=("figure",))


def replay(sessions: Sequence[Sequence[Record]], batch: int, step_seconds: float, *, thread: bool) -> Replay:
    """Replay the sessions. step_seconds: how long each step waits before its call."""
    cache = SuffixCache(vocab_size=VOCABULARY)
    if thread:
        threading.Thread(target=cache.index_until_closed, daemon=True).start()
    waiting = iter(sessions)
    turns: list[Iterator[Record]] = [iter(()) for _ in range(batch)]
    width = max(len(turn["prompt"]) + len(turn["response"]) for session in sessions for turn in session)
    table = np.zeros((batch, width), np.int32)
    ends, lengths, verified = (np.zeros(batch, np.int32) for _ in range(3))
    names = [""] * batch
    done, started = Replay(0, 0, []), 0
    while True:
        for row in range(batch):  # refill an ended row: the next turn, or the next session's first
            if lengths[row] < ends[row]:
                continue
            if names[row]:
                cache.finish(names[row])
                names[row] = ""
            record = next(turns[row], None)
            if record is None and (session := next(waiting, None)) is not None:
                turns[row] = iter(session)
                record = next(turns[row])
            if record is None:
                continue
            prompt, response, started = record["prompt"], record["response"], started + 1
            names[row] = str(started)
            table[row, : len(prompt) + len(response)] = np.concatenate([prompt, response])
            lengths[row], ends[row], verified[row] = len(prompt) + 1, len(prompt) + len(response), 0
            cache.start(names[row], prompt, session=str(record["session"]), tenant="t")
            done.tokens += 1
        live = np.array([row for row in range(batch) if names[row] and lengths[row] < ends[row]], np.int32)
        if not any(names):
            cache.close()
            return done
        time.sleep(step_seconds)
        if not len(live):
            continue
        most = np.minimum(ends[live] - lengths[live] - 1, MAX_DRAFT).astype(np.int32)
        begin = time.perf_counter()
        drafts = cache.step(
            [names[row] for row in live],
            table,
            live,
            lengths[live],
            most,
            verified[live],
            cost=COST,
            work_seconds=min(WORK_SHARE * step_seconds, DEFAULT_WORK_SECONDS),
        )
        done.calls.append(1e3 * (time.perf_counter() - begin))
        done.row_steps += len(live)
        for i, row in enumerate(live):
            draft = drafts.token_ids[drafts.offsets[i] : drafts.offsets[i + 1]]
            given = accepted_tokens(draft, table[row, lengths[row] : lengths[row] + len(draft)]) + 1
            verified[row] = len(draft)
            lengths[row] += given
            done.tokens += given


def _parser() -> argparse.ArgumentParser:
    parser = engines.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_recording(parser)
    add = parser.add_argument
    add("--calls", type=positive, default=200, help="the first so many that have a response (%(default)s)")
    add("--batch", type=positive, nargs="+", default=[1, 8, 32], metavar="B", help="sessions at once")
    add("--step", type=positive_number, default=6.0, metavar="MS", help="time of a step beside the call (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
