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

_LATEST_STEPS = 4
"""Latest steps of a request that are remembered, because the engine may take as many before it hears of a stop text."""


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
        for state in lookup.states:
            self._add_quiet(state, lookup.steps - state.counted_steps)
            state.counted_steps = 0
        lookup.steps = 0

    @staticmethod
    def _add_quiet(state: RequestState, steps: int) -> None:
        """Add steps without drafts. Each of them added one token."""
        state.figures.tokens += steps if state.told_length is None else 0
        state.figures.steps += steps
        state.counted_length += steps

    def count_undrafted(self, step_number: int, step: Step, states: Sequence[RequestState]) -> None:
        """Count a step of requests that get no drafts, unless it is counted already."""
        for state in states:
            place = step.batch.places.get(state.request_id)
            if place is None or step.lengths[place] == state.counted_length:
                continue
            length, row = int(step.lengths[place]), int(step.batch.rows[place])
            added = self._count_gained(state, step, row, length)
            state.figures.tokens += added
            state.figures.steps += 1
            if state.trace is not None:
                said = step.tokens[row, state.counted_length : state.counted_length + added].tolist()
                self._traces.add(state.trace, said, 0, 0)
            state.counted_length = length
            self._record(step_number, state, added)

    @staticmethod
    def _count_gained(state: RequestState, step: Step, row: int, length: int) -> int:
        """Return how many tokens the figures of a request gain. Add those behind its response's end to ``left_out``.

        row: its row in the engine's token array. length: of its text now, in tokens.
        """
        gained = length - state.counted_length
        added = gained if state.told_length is None else 0
        if added > 1 and state.end_tokens:  # an accepted draft may hold the end, and a token was sampled behind it
            new = step.tokens[row, state.counted_length : length].tolist()
            if not state.end_tokens.isdisjoint(new):
                added = next(place for place, token in enumerate(new, 1) if token in state.end_tokens)
        if added > 1 and state.repetition is not None:  # it may have ended the response inside of the draft
            before = state.counted_length - state.prompt_length
            response = step.tokens[row, state.prompt_length : length]
            end = state.repetition.end_of(response[: before + added], before)
            added = added if end is None else end - before
        state.left_out += gained - added
        return added

    def _count_rows(
        self, rows: Sequence[int], step_number: int, lookup: BatchLookup, step: Step, drafts: StepDrafts, ns: int
    ) -> None:
        """Add a step to the figures of these rows, of the k that get drafts."""
        lengths: list[int] = lookup.pick(step.lengths).tolist()
        engine_rows: list[int] = lookup.rows.tolist()
        drafted_by_source, accepted_by_source = drafts.drafted[rows].tolist(), drafts.accepted[rows].tolist()
        for i, *by_source in zip(rows, drafted_by_source, accepted_by_source, strict=True):
            state = lookup.states[i]
            if quiet := lookup.steps - 1 - state.counted_steps:
                self._add_quiet(state, quiet)
            state.counted_steps = lookup.steps
            added = self._count_gained(state, step, engine_rows[i], lengths[i])
            drafted, accepted = self._metrics.add_step(state.figures, added, *by_source)
            if accepted > added:  # the others lie behind the end of the response
                state.figures.leave_out(by_source[1], added)
                accepted = added
            if accepted:
                state.latest_accepted.append((state.counted_length, by_source[1]))
                del state.latest_accepted[:-_LATEST_STEPS]
            begin, end = drafts.offsets[i], drafts.offsets[i + 1]
            if state.trace is not None:
                said = step.tokens[engine_rows[i], state.counted_length : state.counted_length + added].tolist()
                self._traces.add(state.trace, said, drafted, accepted)
                state.trace.note_draft(drafts.token_ids[begin:end].tolist(), drafts.sources[begin:end].tolist())
            state.counted_length = lengths[i]
            self._record(step_number, state, added, drafted, accepted)
            state.draft_source = SOURCES[drafts.sources[begin]] if end > begin else None
            state.draft_ns = ns

    def _record(self, step_number: int, state: RequestState, added: int, drafted: int = 0, accepted: int = 0) -> None:
        """Write a line of the step record, if there is one."""
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
                    "tokens": added,
                    "ns": state.draft_ns,
                }
            )
