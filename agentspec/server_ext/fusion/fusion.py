"""Draft one step from the suffix index and, if that is worth its time, from a draft model.

If the model runs on the host, the suffix index drafts first, and the model runs only for rows with something to gain
(``_draft_then_ask``). A model on a GPU runs in parallel to the host. It is launched first, for rows chosen by the last
step, and the suffix index drafts meanwhile (``_ask_early``). Such a model cannot score the suffix draft, which does not
exist yet when it starts.

A drafter of vLLM's own runs over the whole batch behind the suffix index (``_ask_for_batch``, ``StepModel.choices``).
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from agentspec.cache import StepDrafts, SuffixCache
from agentspec.cache.core import draft_value
from agentspec.server_ext import UNFORCED
from agentspec.server_ext.fusion.alternatives import DraftAlternatives, ModelRow, ScoredDraft, pack
from agentspec.server_ext.fusion.calibrator import AcceptanceCalibrator, SuffixToken
from agentspec.server_ext.fusion.draft_model import RESTS, ModelDraft, StepModel, TokenChoices
from agentspec.server_ext.fusion.scheduler import DraftModelScheduler, DraftPromise, Pace, gained_tokens
from agentspec.server_ext.step import DraftRows, RunningMean

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MODEL_FAILURES = 5
"""Disable the draft model after this many errors."""
_USUAL_STEPS = 128
"""Number of latest steps whose mean value is the usual value of a step.

A drafter of whole batches must beat the mean of this step's value and the usual one. In a step with poor suffix drafts
it may only draft what the suffix index would draft a few steps later.
"""


@dataclass(frozen=True, slots=True)
class FusedDrafts:
    """Hold the drafts of a step, and the time that the draft model added to it.

    seconds: for a drafter of whole batches, only its time beyond the least of any step (`PassTime.beyond_least`).
    """

    drafts: StepDrafts
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _SuffixDrafts:
    """Hold the suffix drafts of a step's n rows, which the model may improve."""

    rows: DraftRows
    drafts: StepDrafts
    expected: Sequence[float]
    """[n] expected accepted tokens of each draft"""
    cost: float
    """price of verifying one more token, as a share of a decode step"""

    def value(self) -> float:
        """Return the mean value of the drafts, in tokens per unit of work."""
        lengths = np.diff(self.drafts.offsets).tolist()
        values = [draft_value(e, length, self.cost) for e, length in zip(self.expected, lengths, strict=True)]
        return sum(values) / len(values)

    def tokens_of(self, rows: Sequence[int]) -> list[list[SuffixToken]]:
        """Return the drafts of these rows, token by token."""
        drafts = self.drafts
        columns = (drafts.offsets, drafts.match_lengths, drafts.token_ids, drafts.probabilities, drafts.sources)
        bounds, matched, tokens, probabilities, sources = (column.tolist() for column in columns)
        return [
            [
                SuffixToken(tokens[at], probabilities[at], sources[at], matched[i] + at - bounds[i])
                for at in range(bounds[i], bounds[i + 1])
            ]
            for i in rows
        ]


@dataclass(frozen=True, slots=True)
class _ModelRun:
    """Hold a launched run of the model.

    For the step's row ``rows[j]``, the model's row ``forced[j]`` follows the suffix draft (None: there is no such row),
    and ``unforced[j]`` takes the model's own tokens. seconds: time that the launch took.
    """

    rows: list[int]
    forced: Sequence[int | None]
    unforced: Sequence[int]
    answer: Callable[[], ModelDraft]
    seconds: float


class DraftFusion:
    """Draft from ``cache`` and a draft model together. If the model fails, only its drafts are lost.

    on_error: called with each error of the model. score_suffix_drafts: let the model score the suffix drafts, which
    changes, cuts or drops them; False: the model only drafts tokens.
    """

    def __init__(
        self,
        cache: SuffixCache,
        on_error: Callable[[Exception], None] = lambda error: None,
        *,
        score_suffix_drafts: bool = True,
    ) -> None:
        self.scheduler = DraftModelScheduler()
        self.calibrator = AcceptanceCalibrator()
        self.runs = self.rows = self.rests = 0
        self._seconds = 0.0
        self._usual = RunningMean()
        self._failures = 0
        self._cache = cache
        self._on_error = on_error
        self._scores = score_suffix_drafts

    @property
    def disabled(self) -> bool:
        """Return whether the model has failed too often and no longer runs: ``given_up`` in the stats."""
        return self._failures >= _MODEL_FAILURES

    def draft(self, rows: DraftRows, model: StepModel, cost: float, row_seconds: float | None) -> FusedDrafts:
        """Return the drafts of a step's rows. Raises the cache's errors, but not the model's.

        cost: price of verifying one more token, as a share of a decode step. row_seconds: duration of a step without
        drafts, divided by its rows; None: not measured yet.
        """
        run = self._guarded(lambda: self._begin(rows, model, row_seconds))
        drafts = rows.draft(self._cache, cost)
        fused = self._guarded(
            lambda: self._improve(_SuffixDrafts(rows, drafts, drafts.expected(), cost), model, run, row_seconds)
        )
        return FusedDrafts(drafts) if fused is None else fused

    def stats(self) -> dict[str, Any]:
        """Return the model's runs, rows, time and gains, and how its tokens fare, as JSON.

        rests: steps in which a drafter of whole batches did not run.
        """
        return {
            "runs": self.runs,
            "rows": self.rows,
            "rests": self.rests,
            "ms_per_run": 1e3 * self._seconds / self.runs if self.runs else 0.0,
            **self.scheduler.stats(),
            "tokens": self.calibrator.stats(),
            "given_up": self.disabled,
        }

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``; None if it fails or if the model has failed too often."""
        if self.disabled:
            return None
        try:
            return call()
        except Exception as error:
            self._failures += 1
            self._on_error(error)
            if self.disabled:
                logger.error("agentspec: the draft model failed %d times and is not asked again", _MODEL_FAILURES)
            return None

    def _begin(self, rows: DraftRows, model: StepModel, row_seconds: float | None) -> _ModelRun | None:
        """Learn from this step's verified tokens, and launch the model if it runs in parallel to the host."""
        for i, state in enumerate(rows.states):
            if state.alternatives is not None:
                scored, state.alternatives = state.alternatives, None
                scored.learn(rows.tokens[rows.rows[i], scored.length : rows.lengths[i]].tolist())
        return self._ask_early(rows, model, row_seconds) if model.overlaps else None

    def _ask_early(self, rows: DraftRows, model: StepModel, row_seconds: float | None) -> _ModelRun | None:
        """Launch the model before the suffix index drafts, for rows chosen by the last step; None: for no row."""
        expected = [state.expected_tokens for state in rows.states]
        widths = np.minimum(rows.max_draft_tokens, 1).tolist()
        pace = Pace(1.0 + sum(expected) / len(expected), row_seconds)
        chosen = self.scheduler.choose(rows.states, expected, widths, pace)
        return self._launch(rows, model, chosen, [[]] * len(chosen)) if chosen else None

    def _improve(
        self, suffix: _SuffixDrafts, model: StepModel, early: _ModelRun | None, row_seconds: float | None
    ) -> FusedDrafts:
        """Improve the suffix drafts by the model, if it was launched or is worth running."""
        if model.choices is not None:
            return self._ask_for_batch(suffix, model, model.choices, row_seconds)
        if not model.overlaps:
            return self._draft_then_ask(suffix, model, row_seconds)
        for state, tokens in zip(suffix.rows.states, suffix.expected, strict=True):
            state.expected_tokens = tokens
        return FusedDrafts(suffix.drafts) if early is None else self._merge_answer(suffix, early, model.positions)

    def _draft_then_ask(self, suffix: _SuffixDrafts, model: StepModel, row_seconds: float | None) -> FusedDrafts:
        """Run a model on the host for the rows that are worth its time, also to score their suffix drafts."""
        rows, limits = suffix.rows, suffix.rows.max_draft_tokens.tolist()
        drafts = suffix.drafts.lists() if self._scores else [[]] * len(limits)
        widths = [0 if limit == 0 else 2 if draft else 1 for limit, draft in zip(limits, drafts, strict=True)]
        chosen = self.scheduler.choose(rows.states, suffix.expected, widths, Pace(suffix.value(), row_seconds))
        if not chosen:
            return FusedDrafts(suffix.drafts)
        run = self._launch(rows, model, chosen, [drafts[i] for i in chosen])
        return self._merge_answer(suffix, run, model.positions)

    def _ask_for_batch(
        self, suffix: _SuffixDrafts, model: StepModel, choices: TokenChoices, row_seconds: float | None
    ) -> FusedDrafts:
        """Run a drafter of whole batches for as many tokens as are worth their time, and improve the suffix drafts."""
        rows, drafts, value = suffix.rows, suffix.drafts, suffix.value()
        self._usual.add(value, _USUAL_STEPS)
        if choices.most == 0:  # the drafter cannot run in this step, which says nothing about its time
            return FusedDrafts(drafts)
        limits, worth = rows.max_draft_tokens.tolist(), self.calibrator.worth(choices.most)
        pace = Pace((value + self._usual.value) / 2, row_seconds)
        tokens = self.scheduler.choose_tokens(rows.states, suffix.expected, limits, worth, choices, pace)
        chosen = [i for i, limit in enumerate(limits) if limit > 0] if tokens > 0 else []
        begin = time.perf_counter()
        if tokens == RESTS:
            self.rests += 1
            model.rest()
        else:
            proposals = np.full((len(chosen), tokens), UNFORCED, dtype=np.int64)
            answer = model.launch([int(rows.rows[i]) for i in chosen], proposals)
        seconds = time.perf_counter() - begin
        passes = self.scheduler.passes
        passes.observe(len(rows.states), tokens, seconds)
        if chosen:
            run = _ModelRun(chosen, [None] * len(chosen), range(len(chosen)), answer, seconds)
            drafts = self._merge_answer(suffix, run, model.positions).drafts
        return FusedDrafts(drafts, passes.beyond_least(len(rows.states), tokens))

    @staticmethod
    def _launch(rows: DraftRows, model: StepModel, chosen: list[int], drafts: Sequence[list[int]]) -> _ModelRun:
        """Launch the model for the chosen rows. drafts: for each of these, tokens to follow and score, or none."""
        begin = time.perf_counter()
        engine_rows, forced, unforced = list[int](), list[int | None](), list[int]()
        proposals = np.full((2 * len(chosen), model.positions), UNFORCED, dtype=np.int64)
        for row, draft in zip(rows.rows[chosen].tolist(), drafts, strict=True):
            forced.append(len(engine_rows) if draft else None)
            if draft:
                proposals[len(engine_rows), : len(draft)] = draft[: model.positions]
                engine_rows.append(row)
            unforced.append(len(engine_rows))
            engine_rows.append(row)
        answer = model.launch(engine_rows, proposals[: len(engine_rows)])
        return _ModelRun(chosen, forced, unforced, answer, time.perf_counter() - begin)

    def _merge_answer(self, suffix: _SuffixDrafts, run: _ModelRun, width: int) -> FusedDrafts:
        """Wait for the answer, merge its alternatives into the suffix drafts, and learn how many tokens that gained.

        width: most tokens of an alternative.
        """
        rows = suffix.rows
        begin = time.perf_counter()
        answer = run.answer().finite()
        drafts = suffix.tokens_of(run.rows) if self._scores else [[]] * len(run.rows)
        scored: list[ScoredDraft] = []
        rows_of: list[int] = []
        for i, draft, forced, unforced in zip(run.rows, drafts, run.forced, run.unforced, strict=True):
            alternatives = DraftAlternatives.score(
                self.calibrator,
                int(rows.lengths[i]),
                draft,
                None if forced is None else ModelRow.of(answer, forced),
                ModelRow.of(answer, unforced),
                int(rows.max_draft_tokens[i]),
                self.scheduler.observation_weights,
            )
            rows.states[i].alternatives = alternatives
            found = alternatives.drafts()
            scored += found
            rows_of += [i] * len(found)
        merged = self._merge_drafts(suffix, scored, rows_of, width) if scored else suffix.drafts
        self._learn_gains(suffix, merged, run.rows)
        seconds = run.seconds + time.perf_counter() - begin
        self.runs += 1
        self.rows += len(answer.tokens)
        self._seconds += seconds
        self.scheduler.time.observe(len(answer.tokens), seconds, self.scheduler.observation_weights[-1])
        return FusedDrafts(merged, seconds)

    def _learn_gains(self, suffix: _SuffixDrafts, merged: StepDrafts, asked: list[int]) -> None:
        """Learn how many tokens each of the rows gained for which the model was asked."""
        expected, lengths = merged.expected(), np.diff(merged.offsets).tolist()
        suffix_lengths = np.diff(suffix.drafts.offsets).tolist()
        for i in asked:
            before, after = DraftPromise(suffix.expected[i], suffix_lengths[i]), DraftPromise(expected[i], lengths[i])
            gain = gained_tokens(before, after, suffix.cost)
            self.scheduler.gains.learn(suffix.rows.states[i], suffix.expected[i], gain)

    def _merge_drafts(
        self, suffix: _SuffixDrafts, scored: list[ScoredDraft], rows_of: list[int], width: int
    ) -> StepDrafts:
        """Let the suffix index keep the best draft of each row. Return the drafts of all rows.

        rows_of: the row of each scored draft.
        """
        rows, drafts = suffix.rows, suffix.drafts
        ids = [rows.states[i].request_id for i in rows_of]
        taken = self._cache.merge_drafts(ids, *pack(scored, width), rows.max_draft_tokens[rows_of], cost=suffix.cost)
        latest = {i: at for at, i in enumerate(rows_of)}  # the last result for a row is its draft
        before, after = list(pairwise(drafts.offsets.tolist())), list(pairwise(taken.offsets.tolist()))
        parts = [
            (taken, latest[i], slice(*after[latest[i]])) if i in latest else (drafts, i, slice(*before[i]))
            for i in range(len(before))
        ]
        offsets = np.zeros(len(parts) + 1, np.int32)
        np.cumsum([part.stop - part.start for _, _, part in parts], out=offsets[1:])
        return StepDrafts(
            token_ids=np.concatenate([of.token_ids[part] for of, _, part in parts]),
            offsets=offsets,
            sources=np.concatenate([of.sources[part] for of, _, part in parts]),
            probabilities=np.concatenate([of.probabilities[part] for of, _, part in parts]),
            match_lengths=np.array([of.match_lengths[at] for of, at, _ in parts], np.int32),
            accepted=drafts.accepted,
            drafted=drafts.drafted,
        )
