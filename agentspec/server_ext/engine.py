"""Step -> drafts. Needs neither vLLM nor torch: the adapter gives plain data and takes plain lists.

One call a step for the whole batch. Whatever fails here costs drafts and is counted, never the request.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from agentspec.cache import Budget, DraftPolicy, StepDrafts, SuffixCache
from agentspec.server_ext.draft_budget import AIMED_MULTIPLE, STEP_MULTIPLE, DraftBudget, EngineLimits
from agentspec.server_ext.fusion import DraftFusion, StepModel, TreeDrafts
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.metrics import Metrics, RequestFigures
from agentspec.server_ext.persistence import Persistence
from agentspec.server_ext.recorder import Recorder
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from agentspec.server_ext.step_cost import StepCost

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LEAST_SHARED = 2
"""Tokens of the shortest response without a session that is kept. Beam search makes a request of each token."""

_MODEL_FAILURES = 5
"""So many errors of the draft model, and it is not asked again."""


@dataclass(slots=True)
class _Running:
    identity: Identity
    figures: RequestFigures
    length: int
    source: str | None = None
    ns: int = 0


class DraftingEngine:
    """Feeds the trees with verified tokens, asks them for drafts, keeps figures, hands finished turns on."""

    def __init__(
        self,
        settings: Settings,
        persistence: Persistence,
        vocab_size: int,
        max_draft: int,
        limits: EngineLimits | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.cache = SuffixCache(
            max_tokens=settings.max_tokens,
            max_bytes=settings.max_bytes,
            per_session=Budget(tokens=settings.max_session_tokens),
            policy=draft_policy(settings, max_draft),
            vocab_size=vocab_size,
        )
        self.step_cost = StepCost()
        self.budget = DraftBudget(settings.step_draft_tokens, limits)
        self.hybrid = DraftFusion(self.cache, judge=settings.judge)
        self._model_failures = 0
        self._persistence = persistence
        self._recorder = Recorder(settings.record) if settings.record else None
        self._running: dict[str, _Running] = {}
        self._given_up: set[str] = set()  # running requests that failed here once: no more drafts for them
        self._steps = 0
        self._batch: Batch | None = None  # the latest step's requests, if all of them run here
        self._quiet = 0  # steps of that batch without drafts that its figures don't have yet
        self._logged: set[str] = set()

    def warm_up(self) -> int:
        """Read stored turns into the trees, for at most ``preload_timeout`` seconds. Returns how many came."""
        return self._persistence.warm_up(self.cache, self.settings.preload_timeout)

    def knows(self, request_id: str) -> bool:
        """Whether the request was given to ``propose`` before (and has not finished)."""
        return request_id in self._running or request_id in self._given_up

    def propose(self, step: Step, model: StepModel | None = None) -> list[list[int]]:
        """Drafts for the rows of ``step``, in their order; an empty list where none pays. Never raises.

        ``model``: a draft model that may be asked in this step.
        """
        if not self.settings.enabled:
            return [[] for _ in step.batch.request_ids]
        try:
            return self._propose(step, model)
        except Exception as error:  # drafts are optional, the request is not
            self._count_error("propose", error)
            for request_id in step.batch.request_ids:
                self._forget(request_id)
            return [[] for _ in step.batch.request_ids]

    def finish(self, request_id: str, output_limit: int | None = None) -> None:
        """The engine is done with the request: its response stays in the trees and goes to the store.

        ``output_limit``: tokens of the response that the engine really returned. Never raises.
        """
        self._given_up.discard(request_id)
        self.hybrid.forget(request_id)
        self._leave_batch()
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if running.identity.session is None and output_limit is not None and output_limit < _LEAST_SHARED:
            self._drop(request_id)
            return
        try:
            turn = self.cache.finish(request_id, output_limit=output_limit)
            if turn is not None:
                self._persistence.save(turn)
        except Exception as error:
            self._count_error("finish", error)
        self.metrics.counters["finished"] += 1

    def stats(self) -> dict[str, Any]:
        """Counters, tree sizes and the store's state, as JSON."""
        tree = self.cache.stats()
        return {
            "steps": self._steps,
            "running": len(self._running),
            "counters": dict(self.metrics.counters),
            "verify_cost": {"given": self.settings.cost, **self.step_cost.stats()},
            "step_budget": self.budget.stats(),
            "cache": {name: getattr(tree, name) for name in tree.__slots__},
            "store": self._persistence.stats(),
            "model": {**self.hybrid.stats(), "given_up": self._model_failures >= _MODEL_FAILURES},
        }

    def request(self, request_id: str) -> dict[str, Any] | None:
        """Figures of one API request up to now, as JSON; None when it is not known (any more)."""
        self._settle()
        return self.metrics.request(request_id)

    def close(self) -> None:
        """Write what is queued."""
        self._persistence.close()
        if self._recorder is not None:
            self._recorder.close()

    def _propose(self, step: Step, model: StepModel | None) -> list[list[int]]:
        self._persistence.deliver(self.cache)
        for new in step.started:
            self._start(new)
        ids = step.batch.request_ids
        if not ids:
            return []
        if step.batch is not self._batch:
            if not all(request_id in self._running for request_id in ids):
                return self._propose_known(step, model)
            self._leave_batch()
            self._batch = step.batch
        cost = self._cost(step, model is not None)
        limit = self.settings.disable_by_batch_size
        if limit is not None and len(ids) > limit:
            step.max_draft_tokens, model = np.zeros_like(step.max_draft_tokens), None
        budget = self.budget.tokens(len(ids), self._cautious_cost(len(ids)))
        step.max_draft_tokens = self.budget.room(step.max_draft_tokens, budget)
        begin = time.perf_counter_ns()
        drafts, improved = self._draft(step, model, cost)
        self._steps += 1
        if step.num_draft_tokens or self._recorder is not None:
            self._account(step, drafts, improved, (time.perf_counter_ns() - begin) // len(ids))
        else:
            self._quiet += 1
        if improved is not None:
            return self.budget.cut_lists(improved.tokens, improved.chances, budget)
        return self.budget.cut(drafts, budget) if len(drafts.token_ids) else [[] for _ in ids]

    def _draft(self, step: Step, model: StepModel | None, cost: float) -> tuple[StepDrafts, TreeDrafts | None]:
        """The trees' drafts, and what they became where a draft model was heard."""
        asked = unit = None
        if model is not None:
            unit = self.step_cost.row_seconds(len(step.batch.request_ids))
            asked = self._with_model(lambda: self.hybrid.begin(step, model, cost, unit))
        drafts = self.cache.step(
            step.batch.request_ids,
            step.tokens,
            step.batch.rows,
            step.lengths,
            step.max_draft_tokens,
            step.num_verified_draft_tokens,
            cost=cost,
        )
        if model is None:
            return drafts, None
        return drafts, self._with_model(lambda: self.hybrid.improve(step, drafts, model, asked, cost, unit))

    def _with_model(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns; None if it failed, or if the model has failed too often."""
        if self._model_failures >= _MODEL_FAILURES:
            return None
        try:
            return call()
        except Exception as error:
            self._model_failures += 1
            self._count_error("model", error)
            if self._model_failures == _MODEL_FAILURES:
                logger.error("agentspec: the draft model failed %d times and is not asked again", _MODEL_FAILURES)
            return None

    def _cost(self, step: Step, measure: bool) -> float:
        """The price of verifying one more token, as it was set or as it is measured.

        measure: take the step's duration into account even where the price is set. What was spent with the draft
        model after the step before is no part of it.
        """
        rows = len(step.batch.request_ids)
        if step.seconds is not None and (measure or self.settings.cost is None):
            self.step_cost.observe(rows, step.num_draft_tokens, step.seconds - self.hybrid.seconds)
        self.hybrid.seconds = 0.0
        return self.step_cost.cost(rows) if self.settings.cost is None else self.settings.cost

    def _cautious_cost(self, rows: int) -> float:
        """Return the price that bounds how long a step may last: the one that was set, or a cautious measured one."""
        if self.settings.cost is not None:
            return self.settings.cost
        return self.step_cost.cautious_cost(rows, AIMED_MULTIPLE) * (STEP_MULTIPLE - 1.0) / (AIMED_MULTIPLE - 1.0)

    def _propose_known(self, step: Step, model: StepModel | None) -> list[list[int]]:
        """The same for a batch with rows that were given up after an error: those get no draft."""
        known = [i for i, request_id in enumerate(step.batch.request_ids) if request_id in self._running]
        pick = np.asarray(known, dtype=np.int64)
        some = Step(
            started=(),
            batch=Batch(tuple(step.batch.request_ids[i] for i in known), step.batch.rows[pick]),
            tokens=step.tokens,
            lengths=step.lengths[pick],
            max_draft_tokens=step.max_draft_tokens[pick],
            num_verified_draft_tokens=step.num_verified_draft_tokens[pick],
            num_draft_tokens=step.num_draft_tokens,
        )
        result: list[list[int]] = [[] for _ in step.batch.request_ids]
        for i, draft in zip(known, self._propose(some, model), strict=True):
            result[i] = draft
        return result

    def _start(self, new: NewRequest) -> None:
        identity = new.identity
        try:
            self.cache.start(
                new.request_id,
                new.prompt,
                session=identity.session,
                group=identity.group,
                tenant=identity.tenant,
                scope=identity.scope,
                end_tokens=new.end_tokens,
            )
        except Exception as error:  # one odd request must not cost the others their drafts
            self._count_error("start", error)
            self._given_up.add(new.request_id)
            return
        self._running[new.request_id] = _Running(
            identity, self.metrics.begin(new.api_id or new.request_id, identity.session_name), len(new.prompt)
        )
        self.metrics.counters["started"] += 1
        self._persistence.want(self.cache, identity)

    def _account(self, step: Step, drafts: StepDrafts, improved: TreeDrafts | None, ns: int) -> None:
        self._settle()
        lengths = step.lengths.tolist()
        drafted_by_source, accepted_by_source = drafts.drafted.tolist(), drafts.accepted.tolist()
        for i, request_id in enumerate(step.batch.request_ids):
            running = self._running[request_id]
            added = lengths[i] - running.length
            drafted, accepted = self.metrics.judged(running.figures, added, drafted_by_source[i], accepted_by_source[i])
            running.length = lengths[i]
            if self._recorder is None:
                continue
            self._recorder.add(
                {
                    "step": self._steps,
                    "request": request_id,
                    "session": running.identity.session_name,
                    "source": running.source if drafted else None,
                    "drafted": drafted,
                    "accepted": accepted,
                    "tokens": added,
                    "ns": running.ns,
                }
            )
            running.ns = ns
            if improved is None:
                improved = TreeDrafts.of(drafts)
            running.source = improved.sources[i]

    def _settle(self) -> None:
        """Add the steps without drafts to the figures; each of them gave every row one token."""
        quiet, self._quiet = self._quiet, 0
        if not quiet or self._batch is None:
            return
        for request_id in self._batch.request_ids:
            running = self._running[request_id]
            running.figures.tokens += quiet
            running.figures.steps += quiet
            running.length += quiet

    def _leave_batch(self) -> None:
        """The next step is of other requests, or of the same in a new tuple."""
        self._settle()
        self._batch = None

    def _forget(self, request_id: str) -> None:
        self._given_up.add(request_id)
        self._leave_batch()
        if self._running.pop(request_id, None) is not None:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """Take the request out of the cache and keep nothing of it."""
        try:
            self.cache.abort(request_id)
        except Exception:
            logger.debug("agentspec: could not forget %s", request_id, exc_info=True)

    def _count_error(self, where: str, error: Exception) -> None:
        self.metrics.counters[f"errors_{where}"] += 1
        if where not in self._logged:  # once: the counter tells the rest
            self._logged.add(where)
            logger.error("agentspec: %s failed, the engine goes on without its drafts", where, exc_info=error)


def draft_policy(settings: Settings, max_draft: int) -> DraftPolicy:
    """The trees' drafting rule: learned while serving, the peer's where its parameters are given, or none at all."""
    if not settings.suffix:
        return DraftPolicy.fixed(max_spec_factor=0.0, max_draft=max_draft)
    return DraftPolicy(max_draft=max_draft, rule=settings.fixed_rule)
