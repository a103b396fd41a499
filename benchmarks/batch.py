"""Simulate a GPU server on recorded sessions, 1 to 128 at once, with agentspec's own drafting code.

    python benchmarks/batch.py --traces DIR [--workloads A,B] [--sessions 1,8,32,128] [--save | --json]

No GPU takes part. Drafts, prices and budgets come from agentspec's own objects, the target's tokens from the recording.
A decode step takes a + b x (tokens verified) milliseconds, where each row verifies one token and its draft. a and b are
fitted to published decode times of an 8B and a 70B model (MODELS). Prefill and the time that drafting itself takes are
left out. The counts do not depend on the machine.

Rows are always busy: a session's turns run in order, the next session takes the place of a finished one, and when the
recording ends it starts again with other token ids. A replay ends after --tokens tokens for each concurrent session.
ArcticInference's best setting is the best of 12 at the price of a token in that batch, by the counts that drafting.py
keeps. Throughput is given relative to the same server without speculation. It is given once more for servers that lose
3 % or 30 % without asynchronous scheduling, which vLLM's V1 runner switches off for host-side drafters.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any, Protocol

import arctic
import numpy as np
from drafters import ARCTIC_DEFAULTS, OtherDrafters, Setting, best_settings, ngram_rule
from report import names, positive, print_json, print_table, save, say
from trace_files import VOCABULARY, WORKLOADS, Tokens, records

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.cache.core import without_clock
from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import AgentSpecError
from agentspec.server_ext.pricing import StepPricing
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import AcceptanceLength

SESSIONS = (1, 8, 32, 128)
LEAST_TOKENS, TOKENS_A_SESSION = 20_000, 2_400
END_TOKEN = 2
RENUMBERING = 7_919
OURS, UNLIMITED, NGRAM = "agentspec", "agentspec, longest_step null", "ngram"
DEFAULT, BEST = "suffix, default", "suffix, best of 12"
METHODS = (OURS, UNLIMITED, BEST, DEFAULT, NGRAM)
ASYNC_GAINS = (0.03, 0.30)
"""Shares of the plain throughput that synchronous scheduling costs: published reports range from 3 to 30 %."""


@dataclass(frozen=True, slots=True)
class Model:
    """Hold a target's published decode times: pairs of requests in flight and milliseconds between tokens."""

    name: str
    published: tuple[tuple[int, float], ...]

    def step(self) -> tuple[float, float]:
        """Fit a and b to the published times by least squares. Return them in milliseconds."""
        rows, times = np.array(self.published).T
        b, a = np.polyfit(rows, times, 1)
        return float(a), float(b)

    def price(self, rows: int) -> float:
        """Return the price of verifying one more token in a batch of `rows`, as a share of a row's step."""
        a, b = self.step()
        return b * rows / (a + b * rows)


SOURCE = "https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance"
"""NVIDIA NIM's performance page. The times are the ITL column of each model's first table, up to 150 requests. The page
names the GPU, an H100, for another model only.
b is measured per row and used per verified token. A row adds attention too, so drafts look dearer than they are."""
MODELS = (
    Model("Llama-3.1-8B", ((1, 4.63), (5, 4.58), (25, 5.19), (50, 5.91), (100, 7.57), (150, 9.81))),
    Model("Llama-3.1-70B", ((1, 13.21), (5, 12.64), (25, 15.31), (50, 17.42), (100, 23.28), (150, 27.73))),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold one recorded call. text: int32 [P + R], prompt and response; begin: P."""

    name: str
    session: str
    group: str | None
    text: Tokens
    begin: int
    end_token: int


@dataclass(slots=True)
class Row:
    """Hold one running request. done: verified tokens of its text; draft: the tokens drafted behind them."""

    turn: Turn
    done: int
    draft: list[int]


@dataclass(slots=True)
class Counts:
    """Count what a replay did. rows: row-steps, which verify a token and a draft each; drafted_rows: with a draft."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    drafted_rows: int = 0

    def milliseconds(self, a: float, b: float) -> float:
        """Return the time of all steps, in milliseconds."""
        return a * self.steps + b * (self.rows + self.drafted)


class Drafter(Protocol):
    """Draft for the rows of a batch."""

    def start(self, slot: int, turn: Turn) -> None: ...

    def draft(self, rows: Sequence[Row], drafted: int) -> None:
        """Set every row's draft. drafted: number of draft tokens that the last step verified."""

    def finish(self, row: Row) -> None:
        """End a request whose whole response is verified."""


class IndexDrafter:
    """Draft from suffix indexes, under agentspec's policy or ArcticInference's rule.

    step: a and b of the simulated server. agentspec measures the price of a token from its step times, as in serving.
    None: the policy knows no price. settings: how long steps may take.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        slots: int,
        width: int,
        step: tuple[float, float] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._cache = SuffixCache(policy=policy)
        self._table: Tokens = np.zeros((slots, width), np.int32)
        self._step = step
        settings = settings or Settings()
        self._pricing = StepPricing(None, settings.step_draft_tokens, longest_step=settings.longest_step)
        self._measures: dict[str, AcceptanceLength] = {}
        self._steps = 0
        self._slots: dict[str, int] = {}
        self._names: tuple[str, ...] = ()

    def start(self, slot: int, turn: Turn) -> None:
        self._table[slot, : len(turn.text)] = turn.text
        self._slots[turn.name] = slot
        ends = (turn.end_token,)
        prompt = turn.text[: turn.begin]
        self._cache.start(turn.name, prompt, session=turn.session, group=turn.group, end_tokens=ends)

    def draft(self, rows: Sequence[Row], drafted: int) -> None:
        names = tuple(row.turn.name for row in rows)
        self._names = self._names if names == self._names else names
        n = len(rows)
        batch = len(self._table)  # rows without a draft start or finish in the next step
        allowance = None
        if self._step is not None:
            a, b = self._step
            self._steps += 1
            self._pricing.cost.observe(batch, drafted, 1e-3 * (a + b * (batch + drafted)))
            allowance = self._pricing.allow([(self._measure(row), row.done) for row in rows], batch, self._steps)
        drafts = self._cache.step(
            self._names,
            self._table,
            np.array([self._slots[name] for name in names], np.int32),
            np.array([row.done for row in rows], np.int32),
            np.full(n, MAX_DRAFT, np.int32),
            np.array([len(row.draft) for row in rows], np.int32),
            cost=None if allowance is None else allowance.cost,
            most=MAX_DRAFT if allowance is None else allowance.row_tokens,
        )
        lists = drafts.lists() if allowance is None else self._pricing.cut(drafts, allowance, batch)
        for row, draft in zip(rows, lists, strict=True):
            row.draft = draft

    def _measure(self, row: Row) -> AcceptanceLength:
        measure = self._measures.get(row.turn.name)
        if measure is None:
            measure = self._pricing.acceptance_lengths.begin(row.done, self._steps)
            self._measures[row.turn.name] = measure
        return measure

    def finish(self, row: Row) -> None:
        name = row.turn.name
        self._measures.pop(name, None)
        # The index does not have the tokens of the last step yet.
        place, length, max_draft, checked = np.array(
            [[self._slots.pop(name)], [row.done], [0], [len(row.draft)]], np.int32
        )
        self._cache.step((name,), self._table, place, length, max_draft, checked)
        self._cache.finish(name)


class NgramDrafter:
    """Draft by vLLM's n-gram look-up in the request's own text, with its defaults."""

    def __init__(self) -> None:
        rule = ngram_rule()
        assert rule is not None
        self._rule = rule

    def start(self, slot: int, turn: Turn) -> None:
        pass

    def draft(self, rows: Sequence[Row], drafted: int) -> None:
        for row in rows:
            row.draft = list(self._rule(row.turn.text[: row.done]))

    def finish(self, row: Row) -> None:
        pass


def sessions(recorded: Sequence[dict[str, Any]]) -> Iterator[list[Turn]]:
    """Yield the sessions in file order without end: as recorded, then again and again with other token ids."""
    by_session: dict[int, list[dict[str, Any]]] = {}
    for record in recorded:
        by_session.setdefault(record["session"], []).append(record)
    for copy in count():
        shift = copy * RENUMBERING
        for session, calls in by_session.items():
            yield [
                Turn(
                    name=f"{copy}-{session}-{number}",
                    session=f"{copy}-{session}",
                    group=None if call["group"] is None else f"{copy}-{call['group']}",
                    text=(np.concatenate([call["prompt"], call["response"]]) + shift) % VOCABULARY,
                    begin=len(call["prompt"]),
                    end_token=(END_TOKEN + shift) % VOCABULARY,
                )
                for number, call in enumerate(calls)
                if len(call["response"])
            ]


def replay(recorded: Sequence[dict[str, Any]], slots: int, tokens: int, drafter: Drafter) -> Counts:
    """Decode with `slots` sessions at once until they have `tokens` tokens.

    As in serving, a response's first token has no draft, and each step gives a row its accepted tokens and one more.
    Drafts may run past the end of a response; those tokens are verified too.
    """
    waiting = sessions(recorded)
    left: list[list[Turn]] = [[] for _ in range(slots)]
    running: list[Row | None] = [None] * slots
    counts = Counts()
    while counts.tokens < tokens:
        drafted = 0
        going = []
        for slot, row in enumerate(running):
            if row is None:
                while not left[slot]:
                    left[slot] = next(waiting)
                turn = left[slot].pop(0)
                drafter.start(slot, turn)
                row = running[slot] = Row(turn, turn.begin, [])
            drafted += len(row.draft)
            counts.drafted_rows += bool(row.draft)
            given = verify(row)
            counts.tokens += given
            row.done += given
            if row.done == len(row.turn.text):
                drafter.finish(row)
                running[slot] = None
            else:
                going.append(row)
        counts.steps += 1
        counts.rows += slots
        counts.drafted += drafted
        if going:
            drafter.draft(going, drafted)
    return counts


def verify(row: Row) -> int:
    """Return the number of tokens that a step gives: the draft's tokens up to the first wrong one, and one more."""
    accepted = 0
    truth = row.turn.text[row.done : row.done + len(row.draft)].tolist()
    for token, right in zip(row.draft, truth, strict=False):
        if token != right:
            break
        accepted += 1
    return min(accepted + 1, len(row.turn.text) - row.done)


@without_clock()
def measure(traces: Path, workload: str, slots: int, tokens: int, best: Sequence[Setting]) -> list[dict[str, Any]]:
    """Return the rows of one workload and number of sessions: every method on every model.

    best: ArcticInference's best setting for each model.
    """
    recorded = list(records(traces, workload))
    width = max(len(record["prompt"]) + len(record["response"]) for record in recorded)

    def run(drafter: Drafter) -> Counts:
        return replay(recorded, slots, tokens, drafter)

    def arctic_rule(setting: Setting) -> Counts:
        rule = DraftPolicy.fixed(
            max_depth=setting.depth,
            max_spec_factor=setting.factor,
            min_token_prob=setting.probability,
            max_draft=setting.limit,
        )
        return run(IndexDrafter(rule, slots, width))

    at_best = {setting: arctic_rule(setting) for setting in set(best)}
    default = arctic_rule(ARCTIC_DEFAULTS["ArcticInference library"])
    ngram = run(NgramDrafter()) if ngram_rule() is not None else None
    rows = []
    for model, setting in zip(MODELS, best, strict=True):
        ours, unlimited = (
            run(IndexDrafter(DraftPolicy(), slots, width, model.step(), settings))
            for settings in (Settings(), Settings(longest_step=None))
        )
        methods = {OURS: ("", ours), UNLIMITED: ("", unlimited)}
        methods |= {BEST: (str(setting), at_best[setting]), DEFAULT: ("", default)}
        if ngram is not None:
            methods[NGRAM] = ("", ngram)
        rows += [figures(workload, slots, model, method, *found) for method, found in methods.items()]
    return rows


def figures(workload: str, slots: int, model: Model, method: str, setting: str, counts: Counts) -> dict[str, Any]:
    """Return one object of the output. `ratio`: throughput over the same server without speculation."""
    a, b = model.step()
    speed = counts.tokens / counts.milliseconds(a, b)
    ratio = speed / (slots / (a + b * slots))
    return {
        "workload": workload,
        "sessions": slots,
        "model": model.name,
        "method": method,
        "setting": setting,
        "steps": counts.steps,
        "tokens": counts.tokens,
        "drafted": counts.drafted,
        "drafted_rows": counts.drafted_rows,
        "tokens_per_row_step": round(counts.tokens / counts.rows, 4),
        "tokens_per_second": round(1e3 * speed, 1),
        "ratio": round(ratio, 4),
        **{f"ratio_async_{round(100 * gain)}": round(ratio * (1 - gain), 4) for gain in ASYNC_GAINS},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 2 for input that cannot work."""
    options = _parser().parse_args(arguments)
    try:
        rows = run_all(options)
    except AgentSpecError as error:
        say(f"error: {error}")
        return 2
    result = {
        "tokens_a_session": options.tokens,
        "source": SOURCE,
        "models": [
            {"name": model.name, "published_ms": model.published, "a_ms": round(a, 3), "b_ms": round(b, 4)}
            for model in MODELS
            for a, b in [model.step()]
        ],
        "rows": rows,
    }
    if options.save:
        save("batch", "simulated: recorded tokens, a step takes a + b x (tokens verified) ms", result)
    if options.json:
        print_json(result)
    else:
        _print_tables(rows)
    return 0


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every workload at every number of sessions, `--jobs` at a time."""
    from rich.console import Console
    from rich.progress import Progress

    rule = ngram_rule()
    if rule is None:
        say("vLLM is not installed: its ngram is left out")
    else:
        rule(np.zeros(8, np.int32))  # compile once, before the processes start
    others = OtherDrafters(options.traces, options.peer_dir)
    cells = []
    for workload, slots in product(options.workloads, options.sessions):
        prices = [model.price(slots) for model in MODELS]
        best = best_settings(others.settings(workload), prices)
        tokens = max(LEAST_TOKENS, options.tokens * slots)
        cells.append((workload, slots, tokens, [best[price][0] for price in prices]))
    with Progress(console=Console(stderr=True)) as progress, ProcessPoolExecutor(options.jobs) as pool:
        task = progress.add_task("simulating", total=len(cells))
        futures = [pool.submit(measure, options.traces, *cell) for cell in cells]
        rows = []
        for (workload, slots, *_), future in zip(cells, futures, strict=True):
            progress.update(task, description=f"{workload}, {slots} sessions")
            rows += future.result()
            progress.advance(task)
    return rows


def _print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Print each method's throughput over no speculation, one line for each workload and number of sessions."""
    gains = [f"agentspec less {100 * gain:.0f} %" for gain in ASYNC_GAINS]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
        for row in rows:
            if row["model"] == model:
                cells.setdefault((row["workload"], row["sessions"]), {})[row["method"]] = row
        lines = []
        for (workload, slots), found in cells.items():
            ratios = [f"{found[name]['ratio']:.2f}" if name in found else "" for name in METHODS]
            less = [f"{found[OURS][f'ratio_async_{round(100 * gain)}']:.2f}" for gain in ASYNC_GAINS]
            lines.append((workload, str(slots), *ratios, *less))
        columns = ("workload", "sessions", *METHODS, *gains)
        print_table(f"simulated throughput over no speculation, {model}", columns, lines, left=("workload",))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=Path, required=True, metavar="DIR", help="folder with load.py and .tok.npz")
    add("--workloads", type=names, default=list(WORKLOADS), metavar="A,B", help="only these (all six)")
    add("--sessions", type=_numbers, default=list(SESSIONS), metavar="N,M", help="sessions at once (1,8,32,128)")
    add(
        "--tokens",
        type=positive,
        default=TOKENS_A_SESSION,
        metavar="N",
        help=f"length of a replay, for each session at once (%(default)s; at least {LEAST_TOKENS} together)",
    )
    add("--jobs", type=positive, default=1, metavar="J", help="replays at the same time (%(default)s)")
    arctic.add_option(parser)
    add("--save", action="store_true", help="write results/batch.json, which plot.py reads")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
