"""Turn a decode step into drafts: plain data in, plain lists out, without vLLM and torch.

DraftingEngine makes one call for the whole batch in each step. An error costs drafts and is counted, but no request
fails.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.cache import Budget, StepDrafts, SuffixCache
from agentspec.server_ext.batch_lookup import BatchLookup
from agentspec.server_ext.figures.accounts import Accounts
from agentspec.server_ext.figures.metrics import Metrics
from agentspec.server_ext.figures.step_record import StepRecord
from agentspec.server_ext.figures.traces import Traces
from agentspec.server_ext.fusion import DraftFusion, StepModel
from agentspec.server_ext.identity.prompt_groups import PromptGroups
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.persistence.warm_restart import SnapshotKeeper
from agentspec.server_ext.pricing import EngineLimits, StepPricing
from agentspec.server_ext.public_corpus import PublicCorpus, Tokenize
from agentspec.server_ext.requests.cached import CachedRequests
from agentspec.server_ext.requests.running import RunningRequests
from agentspec.server_ext.requests.turnover import Text
from agentspec.server_ext.session_admin import SessionAdmin
from agentspec.server_ext.settings import MemoryShares, Settings
from agentspec.server_ext.step import NewRequest, RequestState, Step

_JOIN_SECONDS = 1.0
"""How long closing waits for the indexing thread. A process that ends while native code runs in a thread is aborted."""


def make_cache(settings: Settings, vocab_size: int, max_draft: int) -> SuffixCache:
    """Return the suffix cache of an engine.

    vocab_size: the served model's. max_draft: longest draft, in tokens.
    """
    return SuffixCache(
        max_tokens=settings.max_tokens,
        max_bytes=MemoryShares.of(settings.max_bytes, settings.store).cache,
        per_session=Budget(tokens=settings.max_session_tokens),
        policy=settings.draft_policy(max_draft),
        vocab_size=vocab_size,
        history=settings.history_window,
    )


class DraftingEngine:
    """Feed the suffix cache with verified tokens, draft from it, count what happens, and store finished turns.

    persistence: moves turns between the store and the cache to draft from (`make_cache`). limits: those on drafts.
    snapshot: file that keeps indexes and prices over a restart, read in a thread from now on; None: there is none.
    tokenize: returns the tokens of a public text. machine: what decides how long steps take (`StepCost.machine`).
    """

    def __init__(
        self,
        settings: Settings,
        persistence: Persistence,
        limits: EngineLimits | None = None,
        snapshot: Path | None = None,
        tokenize: Tokenize | None = None,
        machine: str = "",
    ) -> None:
        self.settings = settings
        shares = MemoryShares.of(settings.max_bytes, settings.store)
        self.metrics = Metrics(shares.figures // 2)
        self.cache = persistence.cache
        self.pricing = StepPricing(settings.verify_cost, settings.step_draft_tokens, limits, settings.longest_step)
        self.pricing.cost.machine = machine
        self.fusion = DraftFusion(
            self.cache,
            partial(self.metrics.count_error, "model"),
            score_suffix_drafts=settings.score_suffix_drafts,
        )
        self._persistence = persistence
        self._step_record = StepRecord(settings.record, shares.figures // 8) if settings.record else None
        self._traces = Traces(shares.figures // 8)
        self._accounts = Accounts(self.metrics, self._traces, self._step_record)
        self._groups = PromptGroups(shares.figures // 4)
        cached = CachedRequests(persistence, self.metrics, self._groups)
        self._requests = RunningRequests(cached, self.metrics, self._traces, self.pricing.acceptance_lengths)
        self._turnover = self._requests.turnover
        self._work_time = self.pricing.work_time
        self.sessions = SessionAdmin(
            persistence, self._requests.states, self._traces, self._step_record, self._delete_snapshot
        )
        persistence.follow(self.sessions)
        self._keeper: SnapshotKeeper | None = None
        if snapshot is not None:
            self._keeper = SnapshotKeeper.of_engine(snapshot, persistence, settings, note=self.pricing.cost.dump)
        self._public: PublicCorpus | None = None
        if settings.public is not None:
            self._public = PublicCorpus(settings.public, self.cache, shares.cache // 2, tokenize)
        self._new_weights = False  # whether weights were loaded since the latest step
        self._new_epoch = False  # whether an epoch began since the latest step
        self._begun_before_pass = False  # whether requests began before the forward pass of this step
        self._lookup: BatchLookup | None = None  # the latest step's batch; None as soon as one of its requests ends
        self._steps = 0
        self._held_back = 0  # steps whose drafts were dropped, because an erasure by others may have been missed
        self._model_seconds = 0.0  # time that the draft model took in the latest step
        self._indexing: threading.Thread | None = None  # runs from warm_up to close

    def warm_up(self) -> int:
        """Wait for the snapshot, then read stored turns into the cache. Return the number of turns.

        Each of these takes at most ``preload_timeout`` seconds. From then on a thread indexes tokens beside the steps.
        """
        timeout = self.settings.preload_timeout
        if self._keeper is not None:
            self.pricing.cost.restore(self._keeper.wait_loaded(timeout))
        restored = self._persistence.warm_up(timeout, self.settings.tenant)
        if self._keeper is not None:
            self._keeper.start()
        if self._public is not None:
            self._public.start()
        indexing = threading.Thread(target=self.cache.index_until_closed, name="agentspec-indexing", daemon=True)
        indexing.start()
        self._indexing = indexing
        self._work_time.note_cache(self.cache.worked_ns())
        return restored

    def note_new_weights(self) -> None:
        """Note that weights were loaded into the served model. Calls between two steps count as one update."""
        self._new_weights = True

    def note_new_epoch(self) -> None:
        """Note that an epoch of rollouts begins. Calls between two steps count as one."""
        self._new_epoch = True

    def knows(self, request_id: str, prompt_length: int) -> bool:
        """Return whether a request has begun with a prompt of ``prompt_length`` tokens, and not ended.

        The prompt of a request with streamed input grows: by its responses so far, and by the new input.
        """
        state = self._requests.by_id.get(request_id)
        return state is not None and state.response.prompt_length == prompt_length

    def begin(self, started: Sequence[NewRequest]) -> None:
        """Begin requests just before the forward pass that computes their prompts. Never raises.

        Their prompts are indexed, and stored turns loaded, beside that pass. If streamed input has extended the prompt
        of a running request, its response so far ends now. Nobody may tell of it later, if the caller leaves meanwhile.
        Requests that this call has no time for start in the next steps.
        """
        if not self.settings.enabled:
            return
        with self._work_time:
            try:
                self._begin_periods()
                if any(self._persistence.has_loaded_of(new.identity) for new in started):
                    # Do this first, because text of a prompt is not indexed again if the session already holds it.
                    self._work_time.note_stored_turns(waited=False)
                    self._persistence.apply_loaded(self._work_time.for_stored_turns_first())
                fresh = [new for new in started if not self.knows(new.request_id, len(new.prompt))]
                if fresh:
                    self._turn_over(fresh, None, self._work_time.for_begun())
                    self._begun_before_pass = True
            except Exception as error:
                self.metrics.count_error("begin", error)
                self._fail(self._requests.of(new.request_id for new in started))

    def propose(self, step: Step, model: StepModel | None = None) -> list[list[int]]:
        """Return a draft for each row of ``step``, empty if none is worth its cost. Never raises.

        model: a draft model that may run in this step.
        """
        if not self.settings.enabled:
            return _no_drafts(step)
        self._work_time.tick()
        try:
            return self._propose(step, model)
        except Exception as error:  # without drafts the requests still run
            self.metrics.count_error("propose", error)
            states = self._requests.of(step.batch.request_ids)
            self._fail(states)
            with suppress(Exception):  # the error may lie in the step itself
                self._accounts.count_undrafted(self._steps + 1, step, states)
            return _no_drafts(step)

    def finish(
        self,
        request_id: str,
        output_limit: int | None = None,
        text: Text | None = None,
        *,
        may_be_shorter: bool = False,
    ) -> None:
        """Queue a finished request, so that its response is kept for later drafts and in the store. Never raises.

        The next steps do that, or ``finish_if_idle``. output_limit: tokens of the response that the engine returned;
        None: all. text: returns prompt and response, for a request that still waits for its start; without ``text``
        such a request is not kept. may_be_shorter: ``note_lengths`` will say how many tokens the caller got.
        """
        with self._work_time:
            try:
                self._leave_batch()
                self._requests.end(request_id, output_limit, text, may_be_shorter=may_be_shorter)
            except Exception as error:
                self.metrics.count_error("finish", error)
                self._requests.forget(request_id)

    def finish_if_idle(self) -> None:
        """Keep all waiting responses if no request runs. Call it where no step may follow."""
        self._requests.finish_if_idle()
        self._work_time.note_cache(self.cache.worked_ns())

    def note_lengths(self, lengths: Mapping[str, int]) -> None:
        """Note how many tokens of their responses callers got (`RunningRequests.note_lengths`)."""
        self._accounts.settle(self._lookup)
        self._requests.note_lengths(lengths)
        self._requests.finish_if_idle()

    def stats(self) -> dict[str, Any]:
        """Return counters, sizes of the cache and the store's state, as JSON.

        memory: its limit and its present size in bytes, and the parts of that size.
        """
        held, stored = self.cache.stats(), self._persistence.stats()
        parts = {
            "cache": held.bytes,
            "queues": stored["queued_bytes"],
            "store": stored["memory_bytes"],
            "figures": self._accounts.bytes + self._groups.bytes,
        }
        return {
            "memory": {"limit": self.settings.max_bytes, "bytes": sum(parts.values()), **parts},
            "steps": self._steps,
            "steps_held_back": self._held_back,
            "requests_erased": self.sessions.erased_requests,
            "running": len(self._requests.unfailed()),
            **self.metrics.stats(),
            "verify_cost": self.pricing.cost.stats(),
            "step_budget": self.pricing.budget.stats(),
            "cache": {name: getattr(held, name) for name in held.__slots__},
            "store": stored,
            "snapshot": None if self._keeper is None else self._keeper.stats(),
            "public": None if self._public is None else self._public.stats(),
            "record": {"lost": 0 if self._step_record is None else self._step_record.lost},
            "model": self.fusion.stats(),
        }

    def request(
        self, request_id: str, caller: str | None = None, *, call: str | None = None, admin: bool = False
    ) -> dict[str, Any] | None:
        """Return the current figures of one API request of this caller, as JSON; None if there are none.

        call: tells API calls with this id apart; None: the one that began last. admin: return those of any caller.
        """
        self._accounts.settle(self._lookup)
        return self.metrics.request(request_id, caller, call=call, any_caller=admin)

    def close(self) -> None:
        """Write the queued turns and records, and the snapshot. A second call does nothing."""
        self.cache.close()
        if self._public is not None:
            self._public.close()
        self._turnover.finish_all(unreported_too=True)
        if self._keeper is not None:
            self._keeper.close(0.0)  # it saves from now on, because a store that is slow to close may use up the time
        self._persistence.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._step_record is not None:
            self._step_record.close()
        if self._indexing is not None:
            self._indexing.join(_JOIN_SECONDS)

    def _propose(self, step: Step, model: StepModel | None) -> list[list[int]]:
        """Do a step's work, in order: new weights and epochs, starts and ends, prices, drafts, figures. May raise."""
        model_seconds, self._model_seconds = self._model_seconds, 0.0  # of the step that has ended
        self._begin_periods()
        loading = self._persistence.has_loaded()
        if loading or step.started or self._turnover.has_work():
            self._start_and_finish(step, loading)
        if outdated := self._persistence.outdated():
            self._leave_batch()
            self._requests.make_way(outdated)
        lookup = self._look_up(step)
        if lookup.failed:
            self._accounts.count_undrafted(self._steps + 1, step, lookup.failed)
        if not lookup.states:
            self._measure_work()
            return _no_drafts(step)
        count = len(step.batch)
        if step.seconds is not None and (model is not None or self.pricing.cost.given is None):
            self.pricing.cost.observe(count, step.num_draft_tokens, step.seconds - model_seconds)
        if not self.pricing.is_valid(lookup.allowance, self._steps):
            lookup.allowance = self.pricing.allow(lookup.text_lengths(step), count, self._steps)
        begin = time.perf_counter_ns()
        work = self._work_time.for_indexing(lookup.allowance.work, halved=loading)
        drafts, self._model_seconds = self._draft(step, lookup, model, work)
        took = time.perf_counter_ns() - begin
        self.metrics.draft_seconds.observe(1e-9 * (took - self._measure_work()))
        self._steps += 1
        self._accounts.count(self._steps, lookup, step, drafts, took // count)
        return self._deliver(step, lookup, drafts)

    def _begin_periods(self) -> None:
        """Tell the cache of new weights and of a new epoch, once it has kept the responses that ended before."""
        if self._new_weights or self._new_epoch:
            self._turn_over((), None, math.inf)
        if self._new_weights:
            self._new_weights = False
            self.metrics.counters["weight_updates"] += 1
            self.cache.begin_weights()
        if self._new_epoch:
            self._new_epoch = False
            self.metrics.counters["epochs"] += 1
            self.cache.begin_epoch()

    def _look_up(self, step: Step) -> BatchLookup:
        """Return the lookup of the step's batch: the latest step's, unless its requests have changed."""
        if self._lookup is None or self._lookup.batch is not step.batch:
            self._leave_batch()
            self._lookup = BatchLookup.of(step.batch, self._requests.by_id, self.cache)
        return self._lookup

    def _knows_erasures(self) -> bool:
        """Return whether all that other processes erased has left the cache, also what the loaded snapshot held."""
        return self._persistence.is_current() and (self._keeper is None or self._keeper.is_loaded())

    def _start_and_finish(self, step: Step, loading: bool) -> None:
        """Start and finish requests, and apply stored turns, as time allows. loading: whether turns may be ready."""
        with self._work_time:
            work = self._lookup.allowance.work if self._lookup else self._work_time.in_step(None)
            if step.started or self._turnover.has_work():
                # A step with prompts takes long, so more of its time is for this.
                work = max(work, self._work_time.in_latest_step())
                self._turn_over(step.started, step, self._work_time.for_turnover(work))
                self._accounts.count_undrafted(self._steps + 1, step, self._turnover.starting())
            seconds = self._work_time.for_stored_turns(work, any_wait=loading)
            self._work_time.note_stored_turns(waited=seconds is None)
            if seconds is not None:
                self._persistence.apply_loaded(seconds)

    def _turn_over(self, started: Sequence[NewRequest], step: Step | None, seconds: float) -> None:
        """Start and finish requests for about ``seconds`` of CPU time.

        started: requests that begin now. step: has the rows of waiting requests; None: before a forward pass.
        """
        self._leave_batch()
        for new in started:
            self._requests.begin(new, self._steps)
        again = step is not None and self._begun_before_pass
        self._turnover.advance(seconds, started, step, again=again, other_work=self._work_time.must_apply())

    def _measure_work(self) -> int:
        """Count the CPU time of a step's work beside drafting. Return the part in its drafting call, in nanoseconds."""
        self._begun_before_pass = False
        in_call, work = self._work_time.take(self.cache.worked_ns())
        self.metrics.beside_seconds.observe(1e-9 * work)
        return in_call

    def _draft(self, step: Step, lookup: BatchLookup, model: StepModel | None, work: float) -> tuple[StepDrafts, float]:
        """Return drafts for the k rows of ``lookup``, and the draft model's seconds. work: CPU seconds for indexing."""
        allowance, largest = lookup.allowance, self.settings.disable_by_batch_size
        too_large = largest is not None and len(step.batch) > largest  # then the cache only learns from the step
        row_tokens = 0 if too_large else allowance.row_tokens
        rows = lookup.draft_rows(step, work)
        if model is None or too_large or self.fusion.disabled:
            return rows.draft(self.cache, allowance.cost, row_tokens), 0.0
        rows.max_draft_tokens = np.minimum(rows.max_draft_tokens, row_tokens, dtype=np.int32)
        fused = self.fusion.draft(rows, model, allowance.cost, self.pricing.cost.at(len(step.batch)).row_seconds)
        return fused.drafts, fused.seconds

    def _deliver(self, step: Step, lookup: BatchLookup, drafts: StepDrafts) -> list[list[int]]:
        """Return the drafts of all rows of the step, cut to what it may draft."""
        if len(drafts.token_ids) == 0:
            return _no_drafts(step)
        if not self._knows_erasures():
            self._held_back += 1
            return _no_drafts(step)
        return lookup.spread(self.pricing.cut(drafts, lookup.allowance, len(step.batch)))

    def _delete_snapshot(self) -> None:
        """Delete the snapshot, because a session was erased."""
        if self._keeper is not None:
            self._keeper.delete()

    def _leave_batch(self) -> None:
        """Count what the batch of the latest step did, and drop its lookup: the next step has other requests."""
        lookup, self._lookup = self._lookup, None
        self._accounts.settle(lookup)

    def _fail(self, states: Sequence[RequestState]) -> None:
        """Stop drafting for these requests, and keep nothing of them."""
        self._leave_batch()
        self._requests.fail(states)


def _no_drafts(step: Step) -> list[list[int]]:
    return [[] for _ in step.batch.request_ids]
