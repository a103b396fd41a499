"""Move finished turns to the store, and stored turns into the cache.

Only background threads touch the store. Everything here returns at once, except ``warm_up``, which is called before the
engine serves. Load at start, return after eviction and what another process wrote are one operation: the store's
records of a session, a group or a tenant's corpus are applied, and the cache ignores those that it holds.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.cache.store import (
    BackgroundLoader,
    BackgroundWriter,
    Erasure,
    Loaded,
    LogNames,
    Retention,
    Store,
    StoreJobs,
    TurnRecord,
    Wanted,
)
from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS
from agentspec.cache.types import DEFAULT_MAX_BYTES
from agentspec.errors import StoreUnavailableError
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.settings import MemoryShares

logger = logging.getLogger(__name__)

_ERASE_SECONDS = 5.0
"""Longest time that an erasure waits for its session's records to arrive in the store, from which it removes them."""


Result = TypeVar("Result")


class Persistence:
    """Move turns between an engine's cache and the logs of a model in the store, one for each tenant.

    logs: their names. preload: how many of a tenant's newest turns to load into its corpus. retention: limits of the
    store; None: this process leaves it as it is. queue_bytes: limit of the records that wait to be written, and of
    those that wait to be applied. One thread, the engine's, makes all calls but ``stats``.
    """

    def __init__(
        self,
        store: Store,
        logs: LogNames,
        preload: int,
        retention: Retention | None = None,
        queue_bytes: int = MemoryShares.of(DEFAULT_MAX_BYTES).queue,
    ) -> None:
        self.logs = logs
        self._preload = preload
        self._store = store
        self._writer = BackgroundWriter(store, retention=retention, max_bytes=queue_bytes)
        self._loader = BackgroundLoader(store, max_ready_bytes=queue_bytes)
        self._jobs = StoreJobs(store)
        self._writer_id = secrets.token_hex(8)
        self._number = 0
        self._arrived: Loaded | None = None  # of its records, those from _applied on are to be applied
        self._applied = 0
        self._erasures: dict[str, Future[Erasure]] = {}  # by session
        self._restored = 0
        self._refused: Counter[str] = Counter()

    def next_name(self) -> tuple[str, int]:
        """Return writer and number for the next turn, for ``SuffixCache.finish``."""
        self._number += 1
        return self._writer_id, self._number

    def save(self, turn: FinishedTurn, identity: Identity) -> None:
        """Queue a finished turn for the store. turn: finished under a name from ``next_name``."""
        self._writer.put(
            self.logs.of(turn.tenant),
            TurnRecord(
                writer=turn.writer,
                number=turn.number,
                session=turn.session or "",
                kept=turn.kept,
                parent=turn.parent,
                block=turn.block,
                prompt_tail=turn.prompt_tail,
                response=turn.response,
                created=time.time(),
                tenant=turn.tenant,
                principal=identity.principal,
                parent_session=identity.parent_session,
                group=turn.group,
                session_name=identity.session_name,
                group_name=identity.group_name,
                scope=turn.scope,
                weights=identity.weight_version,
            ),
        )

    def request_load(self, cache: SuffixCache, identity: Identity) -> None:
        """Request what the store holds of a request's session, group and tenant, unless the cache has it all."""
        if identity.scope == "none":
            return
        tenant, session, group = identity.tenant, identity.session, identity.group
        log = self.logs.of(tenant)
        if session is not None and session not in self._erasures and cache.needs_load(tenant, session):
            self._loader.request(Wanted(log, tenant, session=session))
        if group is not None and cache.needs_load(tenant, group=group):
            self._loader.request(Wanted(log, tenant, group=group))
        if identity.scope == "tenant" and self._preload and cache.needs_load(tenant):
            self._loader.request(Wanted(log, tenant), self._preload)

    def has_loaded(self) -> bool:
        """Return whether there may be something to do for ``apply_loaded``."""
        return self._arrived is not None or self._loader.has_ready() or bool(self._erasures)

    def apply_loaded(self, cache: SuffixCache, seconds: float = DEFAULT_WORK_SECONDS) -> int:
        """Put loaded turns into the cache until that took so much CPU time of this thread. Return their number.

        At least one turn is applied if any are ready, so a turn that takes longer alone exceeds the budget.
        """
        if self._erasures:
            self._erasures = {session: job for session, job in self._erasures.items() if not job.done()}
        count, until = 0, None
        while loaded := self._next_loaded():
            if until is None:
                until = time.thread_time() + seconds
            while self._applied < len(loaded.records):
                count += self._restore(cache, loaded.records[self._applied])
                self._applied += 1
                if time.thread_time() >= until:
                    return count
            self._arrived = None
            if loaded.complete:
                cache.mark_loaded(loaded.wanted.tenant, loaded.wanted.session, group=loaded.wanted.group)
        return count

    def warm_up(self, cache: SuffixCache, timeout: float, tenant: str | None = None) -> int:
        """Load a tenant's newest turns before serving, in at most ``timeout`` seconds. Return their number."""
        corpus = Wanted(self.logs.of(tenant), tenant)
        if self._preload:
            self._loader.request(corpus, self._preload)
        deadline = time.monotonic() + timeout
        count, pending = 0, True
        while pending and time.monotonic() < deadline:
            time.sleep(0.002)
            pending = self._loader.is_pending(corpus)  # look before applying, so that this gets all of it
            count += self.apply_loaded(cache, max(0.0, deadline - time.monotonic()))
        if pending:
            logger.warning("agentspec: the store is slow or away; what it holds arrives while serving")
        cache.catch_up()
        return count

    def load_again(self, tenant: str | None, session: str) -> None:
        """Load what was added to a session in the store since it was loaded. Any thread may call it."""
        self._loader.request(Wanted(self.logs.of(tenant), tenant, session=session))

    def erase(
        self, session: str, tenants: Iterable[str | None], forget: Callable[[], None] = lambda: None
    ) -> "Future[Erasure]":
        """Erase a session from the queues and from these tenants' logs.

        session: its key; from now on nothing of it is loaded. forget: removes it from the cache and whatever else holds
        it, in the job's thread. Raises StoreUnavailableError if too many jobs wait.
        """
        logs = {self.logs.of(tenant) for tenant in tenants}
        job = self._jobs.submit(lambda store: self._erase(store, session, logs, forget))
        self._erasures[session] = job
        self._writer.forget(session)
        self._loader.forget(session)
        return job

    def submit(self, job: Callable[[Store], Result]) -> "Future[Result]":
        """Run ``job(store)`` in a thread. Raises StoreUnavailableError if too many jobs wait."""
        return self._jobs.submit(job)

    def stats(self) -> dict[str, Any]:
        """Return the state of the writer and the loader, as JSON.

        refused: turns that cannot be used, by kind. lost, missing: as ``Losses`` counts them.
        """
        writer, loader, losses = self._writer.stats(), self._loader.stats(), self._store.losses()
        kinds = {"damaged": loader.damaged, "unknown_version": loader.unknown, **self._refused}
        return {
            "writer": writer.as_dict(),
            "loader": loader.as_dict(),
            "lost": losses.lost,
            "missing": losses.missing,
            "restored": self._restored,
            "refused": sum(kinds.values()),
            "refused_by_kind": {kind: count for kind, count in kinds.items() if count},
            "queued_bytes": writer.queued_bytes + loader.ready_bytes,
            "jobs": self._jobs.waiting(),
        }

    def close(self) -> None:
        """Write the queued turns, then close the store."""
        self._jobs.close()
        self._writer.close()
        self._loader.close()
        self._store.close()

    def _next_loaded(self) -> Loaded | None:
        if self._arrived is None:
            self._arrived, self._applied = self._loader.take(), 0
        return self._arrived

    def _erase(self, store: Store, session: str, logs: Iterable[str], forget: Callable[[], None]) -> Erasure:
        forget()
        if not self._writer.forget(session, _ERASE_SECONDS):
            raise StoreUnavailableError("the store does not answer, so the session is not erased; try again later")
        erased = [store.erase_session(log, session) for log in logs]
        self._loader.forget(session)
        return Erasure(sum(each.records for each in erased), all(each.complete for each in erased))

    def _restore(self, cache: SuffixCache, record: TurnRecord) -> int:
        if record.session in self._erasures:
            return 0
        try:
            cache.restore(
                FinishedTurn(
                    tenant=record.tenant,
                    session=record.session or None,
                    kept=record.kept,
                    prompt_tail=record.prompt_tail,
                    response=record.response,
                    group=record.group,
                    scope=record.scope,
                    parent=record.parent,
                    block=record.block,
                    writer=record.writer,
                    number=record.number,
                    owner=record.principal,
                )
            )
        except Exception as error:  # e.g. a token that this model does not have
            self._refused[type(error).__name__] += 1
            if self._refused.total() == 1:
                logger.warning("agentspec: a stored turn cannot be used and is skipped: %s", error)
            return 0
        self._restored += 1
        return 1
