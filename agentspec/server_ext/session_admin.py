"""Answer the questions of the HTTP routes about sessions, in an engine: list, read, extend and erase them.

``begin`` and ``poll`` run between two decode steps, so they never wait: a thread asks the store, and the routes poll
for its answer. All names here are keys (`Identity.session`), so whoever asks must have made the key for itself.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from agentspec.cache import SuffixCache
from agentspec.cache.store import Erasure, NewEntry, Store, TurnRecord, decode
from agentspec.errors import AgentSpecError, InvalidInputError, RecordError, StoreError
from agentspec.server_ext.metrics import Recorder
from agentspec.server_ext.persistence import Persistence
from agentspec.server_ext.step import RequestState
from agentspec.server_ext.warm_restart import SnapshotKeeper

logger = logging.getLogger(__name__)

_KEPT_JOBS = 256
_PART_BYTES = 256 * 1024
"""Bytes of records that one answer holds, because the engine passes it on between two steps."""


class SessionAdmin:
    """Run jobs on the sessions of one engine.

    running: its running requests, by id. recorder: its step record, if one is written. keeper: of its snapshot, if
    there is one.
    """

    def __init__(
        self,
        cache: SuffixCache,
        persistence: Persistence,
        running: Mapping[str, RequestState],
        recorder: Recorder | None = None,
        keeper: SnapshotKeeper | None = None,
    ) -> None:
        self._cache = cache
        self._persistence = persistence
        self._running = running
        self._recorder = recorder
        self._keeper = keeper
        self._tickets: OrderedDict[str, int] = OrderedDict()  # by the job's name, which the asker chose
        # by name of an erasure: when the step record is without the session
        self._blanked: dict[str, Future[None]] = {}

    def begin(self, job: str, what: str, *args: Any) -> dict[str, Any]:
        """Begin a job under a name of the asker's choice. Returns {} or an error as ``poll`` does.

        "list", principal, any principal, how many: the sessions used last, as dicts. "read", session: its records.
        "write", session, records: append those that it lacks, and load it; the number of new ones. "tenants", session:
        under which tenants it holds text. "erase", session, tenants: remove it everywhere.
        """
        try:
            self._tickets[job] = self._submit(job, what, *args)
        except AgentSpecError as error:
            return _failure(error)
        if len(self._tickets) > _KEPT_JOBS:
            self._blanked.pop(self._tickets.popitem(last=False)[0], None)
        return {}

    def poll(self, job: str, offset: int = 0) -> dict[str, Any]:
        """Return {} while the job runs, {"value": …, "more": bool}, or {"error": kind, "message": text}.

        offset: how many records of the job's value the asker has; "more" says whether others follow.
        """
        try:
            result = self._persistence.result(self._tickets.get(job, -1))
        except InvalidInputError as error:
            return _failure(error)
        blanked = self._blanked.get(job)
        if result is None or (blanked is not None and not blanked.done()):
            return {}
        failed = result.error or (None if blanked is None else blanked.exception())
        if failed is not None:
            return _failure(failed)
        value = result.value
        if isinstance(value, Erasure):
            return {"value": asdict(value), "more": False}
        if not (isinstance(value, list) and value and isinstance(value[0], bytes)):
            return {"value": value, "more": False}
        part: list[bytes] = []
        size = 0
        while offset + len(part) < len(value) and (not part or size < _PART_BYTES):
            part.append(value[offset + len(part)])
            size += len(part[-1])
        return {"value": part, "more": offset + len(part) < len(value)}

    def _submit(self, job: str, what: str, *args: Any) -> int:
        namespace = self._persistence.namespace
        if what == "erase":
            return self._erase(job, *args)
        if what == "list":
            principal, anybody, count = args
            return self._persistence.submit(lambda store: _list(store, namespace, principal, anybody, count))
        session = args[0]
        if what == "write":
            return self._persistence.submit(lambda store: self._write(store, *args))
        if what == "tenants":
            held = {state.identity.tenant for state in self._of(session)}
            return self._persistence.submit(lambda store: _tenants(store, namespace, session, held))
        return self._persistence.submit(
            lambda store: [entry.payload for entry in store.read(namespace, session=session)]
        )

    def _erase(self, job: str, session: str, tenants: Sequence[str | None]) -> int:
        def forget() -> None:
            for tenant in tenants:
                self._cache.remove_session(tenant, session)
            if self._keeper is not None:
                self._keeper.erased()

        for state in self._of(session):  # the rest of their lines in the step record is without a session
            state.identity = replace(state.identity, session=None, session_name=None)
        if self._recorder is not None:
            self._blanked[job] = self._recorder.erase(session)
        return self._persistence.erase(session, forget)

    def _of(self, session: str) -> list[RequestState]:
        return [state for state in self._running.values() if state.identity.session == session]

    def _write(self, store: Store, session: str, tenant: str | None, payloads: Sequence[bytes]) -> int:
        namespace = self._persistence.namespace
        held = {_name_of(record) for record in _turns(store, namespace, session)}
        new = [payload for payload in payloads if _name_of(decode(payload)) not in held]
        if new:
            store.append(namespace, [NewEntry(session, payload) for payload in new])
        self._persistence.load_again(tenant, session)
        return len(new)


def _list(store: Store, namespace: str, principal: str | None, anybody: bool, count: int) -> list[dict[str, Any]]:
    """Return the sessions of a principal, or of anybody: the ``count`` that were used last."""
    found: list[dict[str, Any]] = []
    for usage in sorted(store.sessions(namespace), key=lambda usage: -usage.used):
        if not usage.session or len(found) >= count:
            continue
        newest = next(iter(_turns(store, namespace, usage.session, newest=1)), None)
        if newest is None or not (anybody or newest.principal == principal):
            continue
        tokens = sum(len(turn.prompt_tail) + len(turn.response) for turn in _turns(store, namespace, usage.session))
        found.append(
            {
                "id": newest.session_name,
                "key": usage.session,
                "tokens": tokens,
                "turns": usage.records,
                "bytes": usage.bytes,
                "used": usage.used,
                "group": newest.group_name,
            }
        )
    return found


def _tenants(store: Store, namespace: str, session: str, held: set[str | None]) -> list[str | None]:
    return [*held | {turn.tenant for turn in _turns(store, namespace, session)}]


def _turns(store: Store, namespace: str, session: str, newest: int | None = None) -> Iterable[TurnRecord]:
    for entry in store.read(namespace, session=session, newest=newest):
        try:
            record = decode(entry.payload)
        except RecordError:
            continue
        if isinstance(record, TurnRecord):
            yield record


def _name_of(record: Any) -> tuple[str, int]:
    return record.writer, record.number


def _failure(error: BaseException) -> dict[str, Any]:
    """Return an error as an answer. Only errors of agentspec are quoted: theirs hold no secret."""
    if isinstance(error, AgentSpecError):
        kind = "unavailable" if isinstance(error, StoreError) else "invalid"
        return {"error": kind, "message": str(error)}
    logger.error("agentspec: a job on a session failed", exc_info=error)
    return {"error": "failed", "message": type(error).__name__}
