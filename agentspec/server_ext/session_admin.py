"""Answer the questions of the HTTP routes about sessions, in an engine: list, read, extend and erase them.

``begin`` and ``poll`` run between two decode steps, so they never wait: a thread asks the store, and the routes poll
for its answer.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from agentspec.cache.store import Erasure, Store
from agentspec.errors import AgentSpecError, StoreError, StoreUnavailableError
from agentspec.server_ext.figures.step_record import StepRecord
from agentspec.server_ext.figures.traces import Traces
from agentspec.server_ext.persistence.persistence import Persistence, SessionHolder
from agentspec.server_ext.session_questions import (
    ApplyErasures,
    EraseSession,
    FindEnd,
    FindTenants,
    ImportRecords,
    ListSessions,
    ReadSession,
    SessionQuestion,
)
from agentspec.server_ext.step import RequestState
from agentspec.server_ext.stored_sessions import StoredSessions

logger = logging.getLogger(__name__)

_MOST_JOBS, _MOST_OF_CALLER = 256, 64
"""Most jobs whose answers were not fetched yet: of all askers, and of one caller."""
_ABANDONED_SECONDS = 5.0
"""Time without a poll after which an asker counts as gone. The routes poll every quarter of a second."""
_FLUSH_SECONDS = 1.0
"""Longest wait until queued turns are in the store, before a job reads it."""
_SETTLE_SECONDS = 1.0
"""Longest wait until the erasures of other engines are applied, before an erasure is answered."""
_PART_BYTES = 256 * 1024
"""Bytes of records from which on an answer ends, because the engine passes it on between two steps."""
_SLICE_SECONDS = 0.1
"""How long a job reads in one go, before other jobs that wait for the same thread have a turn."""
_TELL_SECONDS = 60.0
"""Time between two messages about a store that cannot be asked."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """Hold a part of the items that a job yields. more: whether the job goes on behind it."""

    items: list[Any]
    more: bool


@dataclass(slots=True)
class _Job:
    """Hold a job. When all futures have ended, its answer is the first error, or else the first future's value.

    asked: time (``time.monotonic``) of the latest poll. caller: who asks. erases: whether it erases a session. futures:
    empty while the next slice is yet to be submitted. items: yields the items of the next slices, in lists that may be
    empty. A slice may end behind any list.
    """

    asked: float
    caller: str | None
    erases: bool = False
    futures: tuple[Future[Any], ...] = ()
    items: Iterator[list[Any]] = field(default_factory=lambda: iter(()))

    def is_abandoned(self) -> bool:
        """Return whether its asker is gone."""
        return time.monotonic() - self.asked > _ABANDONED_SECONDS

    def check_asker(self) -> None:
        """Raise StoreUnavailableError if the asker is gone."""
        if self.is_abandoned():
            raise StoreUnavailableError("nobody waits for this answer any more")


class SessionAdmin(SessionHolder):
    """Run jobs on the sessions of one engine.

    states: returns the states of the engine's requests. traces, step_record: name sessions, which are erased there too;
    None: there are none. delete_snapshot: called when a session has left the cache; may raise StoreError.
    """

    def __init__(
        self,
        persistence: Persistence,
        states: Callable[[], Iterable[RequestState]],
        traces: Traces | None = None,
        step_record: StepRecord | None = None,
        delete_snapshot: Callable[[], None] = lambda: None,
    ) -> None:
        self._cache, self._persistence = persistence.cache, persistence
        self._stored = StoredSessions(persistence)
        self._states = states
        self._traces = traces
        self._step_record = step_record
        self._delete_snapshot = delete_snapshot
        self._jobs: dict[str, _Job] = {}  # by the name that the asker chose, oldest first
        self.erased_requests = 0  # requests whose session was erased while they ran, so that nothing of them is kept
        self._tell_at = 0.0  # when an error of the store is logged again

    def begin(self, job: str, caller: str | None, question: SessionQuestion) -> dict[str, Any]:
        """Begin a job that answers a question. Returns {}, or an error as ``poll`` does.

        job: a name that the asker chooses. caller: who asks (`Identity.caller`); callers with waiting jobs take turns.
        """
        try:
            self._make_room(caller)
            begun = _Job(time.monotonic(), caller, isinstance(question, EraseSession))
            begun.futures = self._submit(begun, question)
            self._jobs[job] = begun
        except AgentSpecError as error:
            return _failure(error)
        return {}

    def poll(self, job: str) -> dict[str, Any]:
        """Return {} while the job runs, {"value": …, "more": bool}, or {"error": kind, "message": text}.

        Each value or error is returned once. If "more" is true, the value is a part of a list, perhaps an empty one,
        and further polls return the other parts. After the last part, or an error, the job is forgotten.
        """
        begun = self._jobs.get(job)
        if begun is None:
            return _failure(StoreUnavailableError("the answer was not fetched in time and is forgotten; ask again"))
        begun.asked = time.monotonic()
        if not all(future.done() for future in begun.futures):
            return {}
        answer: dict[str, Any] = {}
        if begun.futures:
            answer = self._answer(begun)
            if not answer.get("more"):
                del self._jobs[job]
                return answer
            begun.futures = ()
        with contextlib.suppress(StoreUnavailableError):  # too many jobs wait; the next poll tries again
            begun.futures = (self._persistence.submit(lambda _: _next_slice(begun), begun.caller),)
        return answer

    def _answer(self, begun: _Job) -> dict[str, Any]:
        """Return the value or the error of a job whose futures have ended, as ``poll`` does."""
        for future in begun.futures:
            if future.cancelled():
                return _failure(StoreUnavailableError("the store was closed before the job began"))
            if (error := future.exception()) is not None:
                return _failure(self._error_for_caller(error, begun.erases) if isinstance(error, StoreError) else error)
        value = begun.futures[0].result()
        if isinstance(value, _Slice):
            return {"value": value.items, "more": value.more}
        return {"value": asdict(value) if isinstance(value, Erasure) else value, "more": False}

    def _error_for_caller(self, error: StoreError, erases: bool) -> StoreError:
        """Return an error of the store without its text, which names hosts, files and users. Log it once a minute."""
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TELL_SECONDS
            logger.warning("agentspec: a question about sessions cannot be answered: %s", error)
        what = "the store, or a snapshot beside it, is away or refuses this"
        if erases:
            what += "; the session may be forgotten here, but what was stored of it is not erased"
        return StoreUnavailableError(f"{what}; try again later (the server's log says why)")

    def forget_session(self, session: str) -> tuple[Future[None], ...]:
        """Forget a session in traces and the step record. Later lines about its requests do not name it."""
        self.forget_drafts(session, ())
        for state in {id(state): state for state in self._states_of(session)}.values():  # some are there twice
            state.identity = replace(state.identity, session=None, session_name=None)
            self.erased_requests += 1
        return () if self._step_record is None else (self._step_record.erase(session),)

    def forget_drafts(self, session: str, tenants: Collection[str | None]) -> None:
        if self._traces is not None:
            self._traces.erase(session, tenants)

    def delete_snapshots(self) -> None:
        self._delete_snapshot()

    def _make_room(self, caller: str | None) -> None:
        """Forget jobs whose askers are gone. Raises StoreUnavailableError where too many others wait."""
        for name in [name for name, job in self._jobs.items() if job.is_abandoned()]:
            del self._jobs[name]
        own = sum(job.caller == caller for job in self._jobs.values())
        if own >= _MOST_OF_CALLER or len(self._jobs) >= _MOST_JOBS:
            raise StoreUnavailableError(f"{len(self._jobs)} questions about sessions wait for their answers; try again")

    def _submit(self, begun: _Job, question: SessionQuestion) -> tuple[Future[Any], ...]:
        """Begin to answer a question. Return the futures, as _Job holds them."""
        answer: Callable[[Store], Iterator[list[Any]]]
        match question:
            case ListSessions():
                answer = partial(self._stored.used_last, question)
            case ReadSession(session):
                answer = partial(self._stored.read, session)
            case ImportRecords():
                answer = partial(self._stored.import_records, question)
            case FindEnd(tenant):
                answer = partial(self._stored.end, tenant)
            case FindTenants(session):
                answer = partial(self._stored.tenants, session, {s.identity.tenant for s in self._states_of(session)})
            case EraseSession(session, tenants):
                erasure = self._persistence.erase(session, tenants, begun.caller)
                # Only now that the erasure was accepted, because one that is refused must change nothing.
                return erasure, *self.forget_session(session)
            case ApplyErasures():
                return (self._persistence.submit(lambda _: self._persistence.settle(_SETTLE_SECONDS), begun.caller),)

        def run(store: Store) -> _Slice:
            self._persistence.flush(_FLUSH_SECONDS)  # so that the store has what was said just now
            begun.items = answer(store)
            return _next_slice(begun)

        return (self._persistence.submit(run, begun.caller),)

    def _states_of(self, session: str) -> list[RequestState]:
        return [state for state in self._states() if state.identity.session == session]


def _next_slice(job: _Job) -> _Slice:
    """Return the next items of a job, as many as one answer holds and _SLICE_SECONDS allow.

    Raises StoreUnavailableError if the asker is gone, so that a job that nobody waits for holds up no other.
    """
    found: list[Any] = []
    size, until = 0, time.monotonic() + _SLICE_SECONDS
    job.check_asker()
    for items in job.items:
        job.check_asker()
        found += items
        size += sum(len(item) for item in items if isinstance(item, bytes))
        if size >= _PART_BYTES or time.monotonic() >= until:
            return _Slice(found, more=True)
    return _Slice(found, more=False)


def _failure(error: BaseException) -> dict[str, Any]:
    """Return an error as an answer. Only the texts of agentspec's errors are quoted: they hold no secret."""
    if isinstance(error, AgentSpecError):
        kind = "unavailable" if isinstance(error, StoreError) else "invalid"
        return {"error": kind, "message": str(error)}
    logger.error("agentspec: a job on a session failed", exc_info=error)
    return {"error": "failed", "message": type(error).__name__}
