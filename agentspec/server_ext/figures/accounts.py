"""Count what each step did for its requests: in their figures, in their traces and in the step record."""

from collections.abc import Sequence

import numpy as np

from agentspec.cache import SOURCES, StepDrafts
from agentspec.identifiers import MAX_ID_LENGTH
from agentspec.server_ext.batch_lookup import BatchLookup
from agentspec.server_ext.figures.metrics import Metrics
from agentspec.server_ext.figures.step_record import StepRecord
from agentspec.server_ext.figures.traces import Traces
from agentspec.server_ext.step import RequestState, Step


class Accounts:
    """Count steps. A row's steps without drafts are counted together, at its next draft or in `settle`.

    step_record: None: none is written.
    """

    def __init__(self, metrics: Metrics, traces: Traces, step_record: StepRecord | None) -> None:
        self._metrics = metrics
        self._traces = traces
        self._step_record = step_record

    @property
    def bytes(self) -> int:
        """Return about how many bytes the figures, traces and waiting lines of the step record take."""
        return self._metrics.bytes + self._traces.bytes + (0 if self._step_record is None else self._step_record.bytes)

    def count(self, step_number: int, lookup: BatchLookup, step: Step, drafts: StepDrafts, ns: int) -> None:
        """Count a step of the rows that get drafts. drafts: for the next step. ns: nanoseconds of drafting for each."""
        lookup.steps += 1
        rows: Sequence[int] = ()
        if self._step_record is not None or self._traces.running:
            rows = range(len(lookup.states))
        elif step.num_draft_tokens:
            rows = np.flatnonzero(lookup.pick(step.num_verified_draft_tokens)).tolist()
        if rows:
            self._count_rows(rows, step_number, lookup, step, drafts, ns)

    def settle(self, lookup: BatchLookup | None) -> None:
        """Add the steps of a batch to those figures of its requests that do not count them yet."""
        if lookup is None or not lookup.steps:
            return
        for state, counted in zip(lookup.states, lookup.counted_steps, strict=True):
            state.response.add_plain_steps(lookup.steps - counted)
        lookup.steps = 0
        lookup.counted_steps = [0] * len(lookup.states)

    def count_undrafted(self, step_number: int, step: Step, states: Sequence[RequestState]) -> None:
        """Count a step of requests that get no drafts, unless it is counted already."""
        for state in states:
            place = step.batch.places.get(state.request_id)
            if place is not None:
                length, row = int(step.lengths[place]), int(step.batch.rows[place])
                if length != state.response.prompt_length + state.response.length:
                    self._count_step(step_number, state, step, row, length, [], [])

    def _count_rows(
        self, rows: Sequence[int], step_number: int, lookup: BatchLookup, step: Step, drafts: StepDrafts, ns: int
    ) -> None:
        """Add a step to the figures of these rows, of the k that get drafts."""
        lengths: list[int] = lookup.pick(step.lengths).tolist()
        engine_rows: list[int] = lookup.rows.tolist()
        drafted_by_source, accepted_by_source = drafts.drafted[rows].tolist(), drafts.accepted[rows].tolist()
        for i, *by_source in zip(rows, drafted_by_source, accepted_by_source, strict=True):
            state = lookup.states[i]
            if plain := lookup.steps - 1 - lookup.counted_steps[i]:
                state.response.add_plain_steps(plain)
            lookup.counted_steps[i] = lookup.steps
            self._count_step(step_number, state, step, engine_rows[i], lengths[i], *by_source)
            begin, end = drafts.offsets[i], drafts.offsets[i + 1]
            if state.trace is not None:
                state.trace.note_draft(drafts.token_ids[begin:end].tolist(), drafts.sources[begin:end].tolist())
            state.draft_source = SOURCES[drafts.sources[begin]] if end > begin else None
            state.draft_ns = ns

    def _count_step(
        self,
        step_number: int,
        state: RequestState,
        step: Step,
        row: int,
        length: int,
        drafted_by_source: list[int],
        accepted_by_source: list[int],
    ) -> None:
        """Count a step of one request in its figures, its trace and the step record.

        row: its row in the engine's token array. length: of its text now, in tokens. drafted_by_source,
        accepted_by_source: tokens of its draft that the step verified and accepted; empty, or all 0: it had no draft.
        """
        response = state.response
        begin = response.prompt_length + response.length
        drafted, accepted = self._metrics.add_draft(response.figures, drafted_by_source, accepted_by_source)
        added, accepted = response.add_step(step.tokens, row, length, accepted, accepted_by_source)
        if state.trace is not None:
            if added < 0:
                self._traces.cut(state.trace, -added)
            self._traces.add(state.trace, step.tokens[row, begin : begin + added].tolist(), drafted, accepted)
        if self._step_record is not None:
            self._step_record.add(
                {
                    "step": step_number,
                    "request": state.request_id[-MAX_ID_LENGTH:],  # its end is vLLM's own, and tells it from others
                    "session": state.identity.session_name,
                    "session_key": state.identity.session,
                    "source": state.draft_source if drafted else None,
                    "drafted": drafted,
                    "accepted": accepted,
                    "tokens": max(added, 0),
                    "ns": state.draft_ns,
                }
            )
