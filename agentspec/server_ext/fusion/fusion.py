"""DraftFusion: a step's drafts from the trees, made better with a draft model where that is worth its time.

On a machine where the model runs on the host, the trees are asked first, and the model only where they leave something
to gain. A model on a GPU works beside the host: it is launched first, for the rows that the last step makes look worth
it, and the trees are asked meanwhile. Then the model is not made to follow the trees' draft, which is not known yet.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from agentspec.cache import SOURCES, StepDrafts, SuffixCache
from agentspec.server_ext.fusion.alternatives import DraftAlternatives, LoopRow, Offer, opinions, pack
from agentspec.server_ext.fusion.calibrator import AcceptanceCalibrator
from agentspec.server_ext.fusion.draft_model import FREE, Int64, ModelDraft, StepModel
from agentspec.server_ext.fusion.scheduler import DraftModelScheduler, Prices
from agentspec.server_ext.step import Step


@dataclass(slots=True)
class TreeDrafts:
    """The trees' drafts of a step as plain lists, by row; improved in place."""

    tokens: list[list[int]]
    chances: list[list[float]]
    expected: list[float]
    sources: list[str | None]
    """where each draft's first token comes from"""

    @classmethod
    def of(cls, drafts: StepDrafts) -> "TreeDrafts":
        """The same drafts."""
        bounds = drafts.offsets.tolist()
        ends = list(pairwise(bounds))
        chances, sources = drafts.probabilities.tolist(), drafts.sources.tolist()
        return cls(
            drafts.lists(),
            [chances[begin:end] for begin, end in ends],
            drafts.expected(),
            [SOURCES[sources[begin]] if end > begin else None for begin, end in ends],
        )


@dataclass(slots=True)
class _Asked:
    """What the model was asked in this step. For row ``rows[j]``, loop row ``along[j]`` follows the trees' draft and
    ``free[j]`` goes its own way; -1: there is none."""

    rows: list[int]
    along: list[int]
    free: list[int]
    answer: Callable[[], ModelDraft]
    seconds: float
    """spent on asking"""


class DraftFusion:
    """Combines the trees of ``cache`` with a draft model.

    judge: let the model score the trees' draft, and change, cut or drop it. Without that it only offers its own.
    """

    def __init__(self, cache: SuffixCache, *, judge: bool = True) -> None:
        self.arbiter = DraftModelScheduler()
        self.chances = AcceptanceCalibrator()
        self.runs = self.rows = 0
        self.seconds = 0.0
        """spent with the model in the latest step"""
        self._total_seconds = 0.0
        self._cache = cache
        self._judge = judge
        self._pending: dict[str, DraftAlternatives] = {}
        self._promised: dict[str, float] = {}

    def begin(self, step: Step, model: StepModel, cost: float, unit: float | None) -> _Asked | None:
        """Before the trees are asked: learn what this step reveals, and launch a model that works beside the host.

        cost: of verifying one more token, as a share of a step. unit: seconds that stand for one row of a step, None
        where that is not known yet.
        """
        self._learn(step)
        if not model.overlaps:
            return None
        promised = [self._promised.get(request_id, 0.0) for request_id in step.batch.request_ids]
        widths = np.minimum(step.max_draft_tokens, 1).tolist()
        prices = Prices(cost, 1.0 + sum(promised) / max(1, len(promised)), unit)
        rows = self.arbiter.choose(step.batch.request_ids, promised, widths, prices)
        return self._ask(step, model, rows, None) if rows else None

    def improve(
        self,
        step: Step,
        drafts: StepDrafts,
        model: StepModel,
        asked: _Asked | None,
        cost: float,
        unit: float | None,
    ) -> TreeDrafts:
        """The drafts of this step after the model was heard. asked: what ``begin`` returned."""
        result = TreeDrafts.of(drafts)
        tokens = sum(map(len, result.tokens))
        count = len(step.batch.request_ids)
        prices = Prices(cost, (count + sum(result.expected)) / (count + cost * tokens), unit)
        if model.overlaps:
            self._promised = dict(zip(step.batch.request_ids, result.expected, strict=True))
        else:
            widths = [
                0 if room == 0 else 2 if draft and self._judge else 1
                for room, draft in zip(step.max_draft_tokens.tolist(), result.tokens, strict=True)
            ]
            rows = self.arbiter.choose(step.batch.request_ids, result.expected, widths, prices)
            asked = self._ask(step, model, rows, result) if rows else None
        if asked is not None:
            self._hear(step, result, asked, prices, model.positions)
        return result

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._pending.pop(request_id, None)
        self._promised.pop(request_id, None)
        self.arbiter.forget(request_id)

    def stats(self) -> dict[str, Any]:
        """Runs and rows of the model, its time, what it gains and how its tokens fare, as JSON."""
        return {
            "runs": self.runs,
            "rows": self.rows,
            "ms_per_run": 1e3 * self._total_seconds / self.runs if self.runs else 0.0,
            **self.arbiter.stats(),
            "tokens": self.chances.stats(),
        }

    def _learn(self, step: Step) -> None:
        if not self._pending:
            return
        for i, request_id in enumerate(step.batch.request_ids):
            chains = self._pending.pop(request_id, None)
            if chains is not None:
                verified = step.tokens[step.batch.rows[i], chains.length : step.lengths[i]].tolist()
                chains.learn(self.chances, verified)

    def _ask(self, step: Step, model: StepModel, rows: list[int], trees: TreeDrafts | None) -> _Asked:
        begin = time.perf_counter()
        engine_rows: list[int] = []
        proposals: list[list[int]] = []
        along, free = [-1] * len(rows), [-1] * len(rows)
        length = model.positions
        for j, i in enumerate(rows):
            row = int(step.batch.rows[i])
            if trees is not None and self._judge and trees.tokens[i]:
                proposal = trees.tokens[i][:length]
                along[j] = len(engine_rows)
                engine_rows.append(row)
                proposals.append(proposal + [FREE] * (length - len(proposal)))
            free[j] = len(engine_rows)
            engine_rows.append(row)
            proposals.append([FREE] * length)
        wanted: Int64 = np.array(proposals, dtype=np.int64)
        answer = model.launch(engine_rows, wanted)
        return _Asked(rows, along, free, answer, time.perf_counter() - begin)

    def _hear(self, step: Step, drafts: TreeDrafts, asked: _Asked, prices: Prices, width: int) -> None:
        begin = time.perf_counter()
        answer = asked.answer()
        rooms = step.max_draft_tokens.tolist()
        offers: list[Offer] = []
        offered: list[int] = []
        for i, along, free in zip(asked.rows, asked.along, asked.free, strict=True):
            judged = drafts.tokens[i] if self._judge else []
            chains = opinions(
                self.chances,
                int(step.lengths[i]),
                judged,
                drafts.chances[i],
                LoopRow.of(answer, along) if along >= 0 else None,
                LoopRow.of(answer, free) if free >= 0 else None,
                rooms[i],
            )
            self._pending[step.batch.request_ids[i]] = chains
            for offer in chains.offers():
                offers.append(offer)
                offered.append(i)
        before = {i: prices.worth(drafts.expected[i], len(drafts.tokens[i])) for i in asked.rows}
        promised = {i: drafts.expected[i] for i in asked.rows}
        if offers:
            self._offer(step, drafts, offers, offered, prices.cost, width)
        for i in asked.rows:
            gain = prices.worth(drafts.expected[i], len(drafts.tokens[i])) - before[i]
            self.arbiter.learn(step.batch.request_ids[i], promised[i], gain)
        self.seconds = asked.seconds + time.perf_counter() - begin
        self._note(len(answer.tokens))

    def _offer(
        self,
        step: Step,
        drafts: TreeDrafts,
        offers: list[Offer],
        rows: list[int],
        cost: float,
        width: int,
    ) -> None:
        """Let the trees take what pays; each row's last answer is its draft."""
        ids = [step.batch.request_ids[i] for i in rows]
        taken = self._cache.offer(ids, *pack(offers, width), step.max_draft_tokens[rows], cost=cost)
        tokens, expected = taken.lists(), taken.expected()
        offsets, sources, chances = taken.offsets.tolist(), taken.sources.tolist(), taken.probabilities.tolist()
        for at, i in enumerate(rows):
            drafts.tokens[i], drafts.expected[i] = tokens[at], expected[at]
            drafts.chances[i] = chances[offsets[at] : offsets[at + 1]]
            drafts.sources[i] = SOURCES[sources[offsets[at]]] if tokens[at] else None

    def _note(self, loop_rows: int) -> None:
        self.runs += 1
        self.rows += loop_rows
        self._total_seconds += self.seconds
        self.arbiter.time.observe(loop_rows, self.seconds)
