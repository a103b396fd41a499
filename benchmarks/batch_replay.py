"""Decode recorded sessions on a simulated server that is always full, with a drafter, and count its steps.

Rows are always busy: a session's turns run in order, the next session takes the place of a finished one, and when the
recording ends it starts again with other token ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
from drafters import ngram_rule
from trace_files import VOCABULARY, Tokens, accepted_tokens

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.cache.policy import MAX_DRAFT
from agentspec.server_ext.pricing import StepPricing
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import AcceptanceLength

END_TOKEN = 2
RENUMBERING = 7_919


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
    truth = row.turn.text[row.done : row.done + len(row.draft)].tolist()
    return min(accepted_tokens(row.draft, truth) + 1, len(row.turn.text) - row.done)
