"""Move finished turns to the store, and stored turns into the cache.

Only background threads touch the store. Every call returns at once, except ``warm_up``, which is called before the
engine serves. Loading at start and loading after an eviction are one operation: the store's records of a session, a
group or a tenant's corpus are applied, and the cache ignores those that it holds. From then on the process follows what
others write.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.cache.core import PreparedSession
from agentspec.cache.store import (
    BackgroundLoader,
    BackgroundWriter,
    Erasure,
    Follower,
    LogNames,
    Record,
    Retention,
    Store,
    StoreJobs,
    TurnRecord,
    Wanted,
)
from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS
from agentspec.cache.types import DEFAULT_MAX_BYTES
from agentspec.errors import StoreError, StoreUnavailableError
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.snapshot_erasures import SnapshotErasures
from agentspec.server_ext.persistence.stored_turns import StoredTurns
from agentspec.server_ext.persistence.turn_records import record_of, turn_of
from agentspec.server_ext.settings import MemoryShares

logger = logging.getLogger(__name__)

_ERASE_SECONDS = 5.0
"""Longest time that an erasure waits for records of its session that are on their way to the store."""
_SETTLE_SECONDS = 1.0
"""Longest time that closing waits for erasures of sessions whose turns came late to the store."""
_ENDS_SECONDS = 1.0
"""Longest time that the start waits, after all else, until it is known where the logs end."""
_NOBODY = "nobody"
"""Owner of the logs that are followed for an erasure by the administrator."""
_LEARNED_TOKENS = 2048
"""Tokens of another process's response that are learned from, at most: the turns behind it wait meanwhile."""
_PAUSE_SECONDS = 0.002
"""Pause between two looks at how far the loader is."""
_WARM_UP_SECONDS = 0.1
"""How long turns are applied in one go before serving. Between two goes another thread may erase a session."""

Result = TypeVar("Result")


class SessionHolder:
    """Forget what a process holds of erased sessions beside its cache: here, nothing. Any thread may call it."""

    def forget_session(self, session: str) -> object:
        """Forget a session's name, and let its running requests leave nothing of it behind."""

    def forget_drafts(self, session: str, tenants: Collection[str | None]) -> None:
        """Forget drafts of a session's text, of its own requests and of those of these tenants."""

    def delete_snapshots(self) -> None:
        """Delete the files that may hold a session which has left the cache. Raises StoreError."""


class Persistence:
    """Move turns between an engine's cache and the logs of a model in the store, one for each tenant.

    logs: their names. preload: how many of a tenant's newest turns to load into its corpus. retention: limits of the
    store; None: this process removes nothing from it. queue_bytes: limit of the records that wait to be written, and of
    those that wait to be applied. snapshot_erasures: None if nothing is followed. The engine's thread makes all calls
    but those that say otherwise, and ``stats``.
    """

    def __init__(
        self,
        cache: SuffixCache,
        store: Store,
        logs: LogNames,
        preload: int,
        retention: Retention | None = None,
        queue_bytes: int = MemoryShares.of(DEFAULT_MAX_BYTES).queue,
    ) -> None:
        self.logs = logs
        self.cache = cache
        self._preload = preload
        self._store = store
        self._writer = BackgroundWriter(
            store,
            retention=retention,
            max_bytes=queue_bytes,
            before_append=self._begin_to_write,
        )
        self._loader = BackgroundLoader(
            store, max_ready_bytes=queue_bytes, before_read=self._begin_following, prepare=self._index_session
        )
        self._turns = StoredTurns(cache, self._loader, self._is_erased)
        self._follower: Follower | None = None
        self.snapshot_erasures: SnapshotErasures | None = None
        self._jobs = StoreJobs(store)
        self._holder = SessionHolder()
        self._writer_id = secrets.token_hex(8)
        self._number = 0

    def follow(self, holder: SessionHolder) -> None:
        """Apply from now on what other processes store and erase, in a thread. Call it once, before any load.

        holder: what else of this process must forget a session that is erased, here or elsewhere. A store in this
        process's memory has no other writers, so there is nothing to follow.
        """
        self._holder = holder
        if not self._store.shared:
            return
        self._follower = Follower(
            self._store,
            self._writer_id,
            take=self._turns.add,
            forget_sessions=self._forget_sessions,
            unwritten=self._writer.waiting_sessions,
            erase_again=self.erase_again,
            learn=self._learn_from,
            forget_tenant=self.cache.forget_tenant,
        )
        self.snapshot_erasures = SnapshotErasures(self.cache, self._store, self.logs, self._follower)

    def is_current(self) -> bool:
        """Return whether this process knows every erasure by others that is older than a second.

        False after this process was frozen, until it has asked the store. True while the store is away.
        """
        return self._follower is None or self._follower.is_current()

    def outdated(self) -> frozenset[str | None]:
        """Return the tenants to be forgotten as soon as none of their requests runs. Nothing may be drafted before."""
        if self._follower is None or self.snapshot_erasures is None:
            return frozenset()
        return self.snapshot_erasures.outdated | self._follower.outdated

    def next_name(self) -> tuple[str, int]:
        """Return writer and number for the next turn, for ``SuffixCache.finish``."""
        self._number += 1
        return self._writer_id, self._number

    def save(self, turn: FinishedTurn, identity: Identity) -> None:
        """Queue a finished turn for the store. turn: finished under a name from ``next_name``."""
        self._writer.put(self.logs.of(turn.tenant), record_of(turn, identity))

    def request_load(self, identity: Identity, *, group: str | None, family: str | None) -> None:
        """Request what the store holds of a request's session, group and tenant, unless the cache has it all.

        group: the request's. family: the root of its session's family, if that is another session.
        """
        if identity.scope == "none":
            return
        tenant, session = identity.tenant, identity.session
        log = self.logs.of(tenant)
        if self._follower is not None:
            self._follower.use(log, identity.tenant_owner)
        if session is not None and not identity.final and self._needs_session(tenant, session):
            self._loader.request(Wanted(log, tenant, session=session))
        if group is not None and identity.scope == "tenant":
            if self.cache.needs_load(tenant, group=group):
                self._loader.request(Wanted(log, tenant, group=group))
        elif family is not None and self.cache.needs_load(tenant, family=family):
            if self._needs_session(tenant, family):  # the root's own turns
                self._loader.request(Wanted(log, tenant, session=family))
            self._loader.request(Wanted(log, tenant, family=family))
        if identity.scope == "tenant" and self.cache.needs_load(tenant):
            self._loader.request(Wanted(log, tenant), self._preload)

    def has_loaded(self) -> bool:
        """Return whether there may be something to do for ``apply_loaded``."""
        return self._turns.has_work()

    def has_loaded_of(self, identity: Identity) -> bool:
        """Return whether ``apply_loaded`` will apply turns of a request's session, unless it has them already."""
        session, tenant = identity.session, identity.tenant
        if session is None or not self._turns.has_ready():  # mostly, so no log is named and no lock taken
            return False
        return self._turns.has_ready_of(Wanted(self.logs.of(tenant), tenant, session=session))

    def apply_loaded(self, seconds: float = DEFAULT_WORK_SECONDS) -> int:
        """Put loaded turns into the cache for about so much CPU time (`StoredTurns.apply`). Return their number."""
        return self._turns.apply(seconds)

    def warm_up(self, timeout: float, tenant: str | None = None) -> int:
        """Load a tenant's newest turns before serving, in at most ``timeout`` seconds. Return their number."""
        corpus = Wanted(self.logs.of(tenant), tenant)
        self._loader.request(corpus, self._preload)
        earlier = None if self._follower is None else self._follower.earlier
        reading = () if earlier is None else (self.submit(lambda _: earlier.read(self.logs.prefix)),)
        deadline = time.monotonic() + timeout
        count, pending = 0, True
        while (pending or self._turns.has_ready()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            pending = self._loader.is_pending(corpus)  # asked before applying, so that nothing is left unapplied
            count += self.apply_loaded(_WARM_UP_SECONDS)
        if pending:
            logger.warning("agentspec: the store is slow or away; what it holds arrives while serving")
        self.cache.catch_up()
        wait(reading, min(_ENDS_SECONDS, max(deadline - time.monotonic(), 0.0)))
        if earlier is not None:
            earlier.stop()
        return count

    def load_again(self, tenant: str | None, session: str, timeout: float = 0.0) -> None:
        """Load what was added to a session in the store since it was loaded. Any thread may call it.

        Waits for at most ``timeout`` seconds until it is read, so that the session's next request drafts from it.
        """
        wanted = Wanted(self.logs.of(tenant), tenant, session=session)
        self._loader.request(wanted)
        until = time.monotonic() + timeout
        while self._loader.is_reading(wanted) and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)

    def erase(self, session: str, tenants: Iterable[str | None], owner: str | None = None) -> "Future[Erasure]":
        """Erase a session from queues, cache and snapshots, these tenants' logs and every other log that holds it.

        These logs are of all models, and tell other processes, too. session: its key; from now on nothing of it is
        loaded. Once this call has returned, call ``SessionHolder.forget_session`` for its running requests. owner: as
        for ``submit``. Raises StoreUnavailableError if too many jobs wait, and changes nothing then.
        """
        erase = partial(self._erase_in_job, session=session, tenants=set(tenants), owner=owner or _NOBODY)
        job = self._turns.begin_erasure(session, lambda: self._jobs.submit(erase, owner))
        self._writer.forget(session)
        self._loader.forget(session)
        return job

    def erase_again(self, tenant: str | None, session: str) -> None:
        """Erase a session here and from the store once more, as a turn of this process came behind its tombstone.

        A request that used the session again may have loaded that turn from the store. Not for the engine's thread.
        """
        erasure = Future[Erasure]()
        self._turns.begin_erasure(session, lambda: erasure)  # so nothing of it is loaded meanwhile
        try:
            self._forget_sessions(tenant, [session])
            self._erase_in_store(self._store, self.logs.of(tenant), session)
            self._loader.forget(session)
        finally:
            erasure.cancel()

    def submit(self, job: Callable[[Store], Result], owner: str | None = None) -> "Future[Result]":
        """Run ``job(store)`` in a thread. owner: whoever asked, because owners take turns (``StoreJobs``).

        Raises StoreUnavailableError if too many jobs of the owner wait, or of all owners together.
        """
        return self._jobs.submit(job, owner)

    def flush(self, seconds: float) -> None:
        """Wait until the store has all turns saved so far, or for ``seconds``. Not for the engine's thread.

        While some of them cannot be written, as where the store is away or refuses one log, this does not wait.
        """
        if not self._writer.stats().refused_logs:
            self._writer.flush(seconds, once=True)

    def settle(self, seconds: float) -> None:
        """Wait until what other processes have stored and erased by now was read, or for ``seconds``."""
        if self._follower is not None:
            self._follower.settle(seconds)

    def unwritten(self, session: str) -> list[TurnRecord]:
        """Return the turns of a session that wait for the store, oldest first."""
        return [record for record in self._writer.waiting(session) if isinstance(record, TurnRecord)]

    def stats(self) -> dict[str, Any]:
        """Return the state of writer, loader and follower, as JSON.

        refused: turns that cannot be used, by kind. lost, missing: as ``Losses`` counts them. follower: None where
        nothing can be followed. Its "applied": turns of others that the cache was given.
        adopted_sessions: large sessions that were indexed before they reached the cache.
        """
        writer, loader, losses = self._writer.stats(), self._loader.stats(), self._store.losses()
        turns = self._turns
        follower = None if self._follower is None else self._follower.stats()
        damaged = loader.damaged + (follower.damaged if follower else 0)
        unknown = loader.unknown + (follower.unknown if follower else 0)
        kinds = {"damaged": damaged, "unknown_version": unknown, **turns.refused}
        return {
            "writer": asdict(writer),
            "loader": asdict(loader),
            "follower": None if follower is None else {**asdict(follower), "applied": turns.followed},
            "lost": losses.lost,
            "missing": losses.missing,
            "restored": turns.restored + turns.followed,
            "adopted_sessions": turns.adopted,
            "refused": sum(kinds.values()),
            "refused_by_kind": {kind: count for kind, count in kinds.items() if count},
            "memory_bytes": self._store.held_bytes,
            "queued_bytes": writer.queued_bytes + loader.ready_bytes,
            "jobs": self._jobs.waiting(),
        }

    def close(self) -> None:
        """Write the queued turns, then close the store."""
        self._jobs.close()
        self._writer.close()
        self._loader.close()
        if self._follower is not None:
            if self._follower.stats().state == "closed":  # otherwise the store does not answer
                self._follower.settle(_SETTLE_SECONDS)
            self._follower.close()
        self._store.close()

    def _needs_session(self, tenant: str | None, session: str) -> bool:
        """Return whether turns of a session are to be loaded: the cache may lack some, and nobody erases it."""
        return not self._turns.is_erasing(session) and self.cache.needs_load(tenant, session)

    def _begin_following(self, log: str, tenant: str | None, owner: str | None = None) -> None:
        if self._follower is not None:
            if owner is not None:
                self._follower.use(log, owner)
            self._follower.begin(log, tenant)

    def _begin_to_write(self, log: str, record: Record) -> None:
        """Follow a log before a record is appended to it, so that it does not come behind its session's tombstone."""
        if isinstance(record, TurnRecord):
            self._begin_following(log, record.tenant)

    def _forget_sessions(self, tenant: str | None, sessions: Sequence[str]) -> int:
        """Forget sessions that other processes have erased in the store. Return this process's newest turn's number.

        Runs in the follower's thread, and in those that begin to follow a log. Raises StoreError.
        """
        self._loader.forget(*sessions)
        self._turns.wait()
        for session in sessions:
            self._holder.forget_session(session)  # from here on its requests leave nothing behind
            self.cache.remove_session(tenant, session)
            self._holder.forget_drafts(session, {tenant})
        if self._may_be_saved(tenant):
            with contextlib.suppress(StoreError):  # the next start asks the store what was erased
                self._holder.delete_snapshots()
        for session in self._writer.waiting_sessions().intersection(sessions):
            self._writer.forget(session)
        return self._number

    def _may_be_saved(self, tenant: str | None) -> bool:
        """Return whether a snapshot may hold what was erased of a tenant just now. Raises StoreError.

        One that is saved while the tenant's log is followed holds nothing of the tombstones from before that.
        """
        if self._follower is None or self.snapshot_erasures is None or self._follower.follows(self.logs.of(tenant)):
            return True
        return self.snapshot_erasures.may_be_saved(tenant)

    def _erase_in_job(self, store: Store, session: str, tenants: set[str | None], owner: str) -> Erasure:
        """Do what `erase` says, in the job's thread. Raises StoreError if a snapshot or the store still holds it."""
        self._turns.wait()  # no other turn of the session is restored from now on
        known = self.cache.tenants()  # the cache may hold turns that the store never got, or no longer has
        tenants |= {tenant for tenant in known if self.cache.has_session(tenant, session)}
        for tenant in {*tenants, *known}:
            self.cache.remove_session(tenant, session)
        self._holder.forget_drafts(session, tenants)
        for tenant in tenants:  # so that `settle` waits for the same erasure by the server's other engines
            with contextlib.suppress(Exception):  # if the store is at fault, the erasure says so
                self._begin_following(self.logs.of(tenant), tenant, owner)
        try:
            self._holder.delete_snapshots()
        finally:  # also if a snapshot stays
            erasure = self._erase_in_logs(store, session, tenants)
        return erasure

    def _erase_in_logs(self, store: Store, session: str, tenants: Iterable[str | None]) -> Erasure:
        """Erase a session from the logs of these tenants and from every other log that holds it. Raises StoreError."""
        if not self._writer.forget(session, _ERASE_SECONDS):
            raise StoreUnavailableError("the store does not answer, so the session is not erased; try again later")
        tenants = set(tenants)
        logs = [self.logs.of(tenant) for tenant in tenants]
        # Since the tenants were named, a turn of the session may have been stored under another one. And servers of
        # other models may hold the session, also where the store has nothing of it or of its tenant.
        logs += store.namespaces(session=session)
        logs += self.logs.of_any_model(tenants, store.namespaces())
        erased = [self._erase_in_store(store, log, session) for log in dict.fromkeys(logs)]
        self._loader.forget(session)
        # The last one has emptied SQLite's write-ahead log of what all of them removed.
        return Erasure(sum(each.records for each in erased), erased[-1].complete)

    def _erase_in_store(self, store: Store, log: str, session: str) -> Erasure:
        """Erase a session from one log, so that the follower does not take that for another process's erasure."""
        return (store if self._follower is None else self._follower.own).erase_session(log, session)

    def _is_erased(self, log: str, session: str) -> bool:
        """Return whether records that were read of a session may be older than its erasure."""
        return self._follower is not None and self._follower.own.may_be_older(log, session)

    def _index_session(self, records: Sequence[TurnRecord]) -> PreparedSession | None:
        """Index a session's turns in the loader's thread. Return None if one of them cannot be used."""
        try:
            return self.cache.prepare([turn_of(record) for record in records])
        except Exception as error:  # each is tried alone when it is applied, and counted there
            logger.debug("agentspec: a stored session cannot be indexed as a whole: %s", error)
            return None

    def _learn_from(self, record: TurnRecord) -> None:
        with contextlib.suppress(Exception):  # restoring it will count that it cannot be used
            self.cache.learn_from(turn_of(record, _LEARNED_TOKENS))
