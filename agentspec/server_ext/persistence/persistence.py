"""Move finished turns to the store, and stored turns into the cache.

Only background threads touch the store. Everything here returns at once, except ``warm_up``, which is called before the
engine serves. Load at start and return after eviction are one operation: the store's records of a session, a group or a
tenant's corpus are applied, and the cache ignores those that it holds. What other processes write is followed from then
on.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.cache.core import PreparedSession
from agentspec.cache.store import (
    BackgroundLoader,
    BackgroundWriter,
    Erasure,
    Follower,
    Loaded,
    LogNames,
    Retention,
    Store,
    StoreJobs,
    TurnRecord,
    Wanted,
)
from agentspec.cache.store.follower import MAX_LOGS
from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS
from agentspec.cache.types import DEFAULT_MAX_BYTES
from agentspec.errors import AgentSpecError, StoreError, StoreUnavailableError
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.turn_records import record_of, turn_of
from agentspec.server_ext.settings import MemoryShares

logger = logging.getLogger(__name__)

_ERASE_SECONDS = 5.0
"""Longest time that an erasure waits for its session's records to arrive in the store, from which it removes them."""
_LEARNED_TOKENS = 2048
"""Longest part of another process's response that is learned from, so that following it does not wait long."""
_FORGET_SECONDS = 0.05
"""Pause between two looks at whether a tenant has requests."""

_WARM_UP_SECONDS = 0.1
"""How long turns are applied before serving until another thread may erase one."""

Result = TypeVar("Result")


class Persistence:
    """Move turns between an engine's cache and the logs of a model in the store, one for each tenant.

    logs: their names. preload: how many of a tenant's newest turns to load into its corpus. retention: limits of the
    store; None: this process leaves it as it is. queue_bytes: limit of the records that wait to be written, and of
    those that wait to be applied. One thread, the engine's, makes all calls but ``stats`` and ``catch_up_erasures``.
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
        self._loader = BackgroundLoader(
            store, max_ready_bytes=queue_bytes, before_read=self._begin_following, prepare=self._prepare
        )
        self._cache: SuffixCache | None = None  # known once it is served from
        self._follower: Follower | None = None
        self._jobs = StoreJobs(store)
        self._writer_id = secrets.token_hex(8)
        self._number = 0
        self._arrived: Loaded | None = None  # what the loader delivered,
        self._applied = 0  # and how many of its records the cache has
        self._erasures: dict[str, Future[Erasure]] = {}  # by session
        self._outdated: frozenset[str | None] = frozenset()  # the tenant of a snapshot that is forgotten
        self._applying = threading.Lock()  # held while records are taken from the loader, checked and restored
        self._restored = self._followed = self._adopted = 0
        self._refused: Counter[str] = Counter()

    def follow(self, cache: SuffixCache, erased: Callable[[str | None, str], None]) -> None:
        """Apply from now on what other processes store and erase, in a thread. Call it once, before any load.

        erased(tenant, session): takes a session from the cache and whatever else holds it, in the follower's thread. A
        store in this process's memory has no other writers, so there is nothing to follow.
        """
        self._cache = cache
        if not self._store.shared:
            return
        self._follower = Follower(
            self._store,
            self._writer_id,
            take=lambda log, record: self._take(cache, log, record),
            erase=lambda tenant, session: self._erase_here(tenant, session, erased),
            erase_again=self._erase_again,
            learn=lambda record: _learn_from(cache, record),
            forget=cache.forget_tenant,
        )

    def places(self) -> dict[str, str]:
        """Return, for each log, the cursor up to which erasures are known, for ``catch_up_erasures``."""
        return {} if self._follower is None else self._follower.places()

    def catch_up_erasures(self, cache: SuffixCache, places: Mapping[str, str]) -> bool:
        """Take from a loaded snapshot what was erased in the store meanwhile. Return whether it held any of that.

        places: as they were when the snapshot was saved. Any thread may call it, before the cache is used. A session
        that was used again since is taken, too: the store has what it said then. Where the store does not tell what was
        erased, or retention may have taken a tombstone since, the tenant is forgotten: its log brings back what it may
        say.
        """
        if self._follower is None:
            return False
        before = self._follower.stats().erased
        tenants = cache.tenants()
        for tenant in tenants[:-MAX_LOGS]:
            self._forget(cache, tenant)
        known, whole = True, len(tenants) <= MAX_LOGS
        for tenant in reversed(tenants[-MAX_LOGS:]):
            log, all_told = self.logs.of(tenant), False
            try:
                if known:
                    self._follower.begin(log, tenant, used_too=True)
                    all_told = log in places and self._store.history(log, places[log]) == "whole"
            except StoreError as error:
                known = False
                logger.warning("agentspec: saved suffix indexes are not used, what was erased is unknown: %s", error)
            if not all_told:
                self._forget(cache, tenant)
                whole = False
        return not whole or self._follower.stats().erased > before

    def is_current(self) -> bool:
        """Return whether every erasure by other processes is known here that is older than a second.

        That is not so where this process was frozen, until it has asked the store. While the store is away it is so.
        """
        return self._follower is None or self._follower.is_current()

    def outdated(self) -> frozenset[str | None]:
        """Return the tenants that will be forgotten, and nothing drafted before, when no request of theirs runs."""
        return self._outdated if self._follower is None else self._outdated | self._follower.outdated

    def next_name(self) -> tuple[str, int]:
        """Return writer and number for the next turn, for ``SuffixCache.finish``."""
        self._number += 1
        return self._writer_id, self._number

    def save(self, turn: FinishedTurn, identity: Identity) -> None:
        """Queue a finished turn for the store. turn: finished under a name from ``next_name``."""
        self._writer.put(self.logs.of(turn.tenant), record_of(turn, identity))

    def request_load(self, cache: SuffixCache, identity: Identity, *, group: str | None, family: str | None) -> None:
        """Request what the store holds of a request's session, group and tenant, unless the cache has it all.

        group: the one that it is in. family: the root of its session's family, if that is another session.
        """
        if identity.scope == "none":
            return
        tenant, session = identity.tenant, identity.session
        log = self.logs.of(tenant)
        if self._follower is not None:
            self._follower.use(log)
        if session is not None and not identity.final and self._needs(cache, tenant, session):
            self._loader.request(Wanted(log, tenant, session=session))
        if group is not None and identity.scope == "tenant":
            if cache.needs_load(tenant, group=group):
                self._loader.request(Wanted(log, tenant, group=group))
        elif family is not None and cache.needs_load(tenant, family=family):
            if self._needs(cache, tenant, family):  # the root's own turns
                self._loader.request(Wanted(log, tenant, session=family))
            self._loader.request(Wanted(log, tenant, family=family))
        if identity.scope == "tenant" and cache.needs_load(tenant):
            self._loader.request(Wanted(log, tenant), self._preload)

    def has_loaded(self) -> bool:
        """Return whether there may be something to do for ``apply_loaded``."""
        return self._has_ready() or bool(self._erasures)

    def apply_loaded(self, cache: SuffixCache, seconds: float = DEFAULT_WORK_SECONDS) -> int:
        """Put loaded turns into the cache until that took so much CPU time of this thread. Return their number.

        At least one turn is applied if any are ready, so a turn that takes longer alone exceeds the budget. None is
        while another thread applies or erases one: this call never waits for it.
        """
        if self._erasures:
            self._erasures = {session: job for session, job in self._erasures.items() if not job.done()}
        if not self._applying.acquire(blocking=False):
            return 0
        try:
            return self._apply_loaded(cache, seconds)
        finally:
            self._applying.release()

    def _apply_loaded(self, cache: SuffixCache, seconds: float) -> int:
        count, until = 0, None
        while loaded := self._next_loaded():
            if until is None:
                until = time.thread_time() + seconds
            if loaded.prepared is not None:
                self._adopt(cache, loaded, loaded.prepared)
            while self._applied < len(loaded.records):
                record = loaded.records[self._applied]
                if record.session not in self._erasures and record.session not in loaded.forgotten:
                    restored = self._restore(cache, record)
                    self._restored += restored
                    count += restored
                self._applied += 1
                if time.thread_time() >= until:
                    return count
            self._arrived = None
            wanted = loaded.wanted
            if loaded.complete:
                cache.mark_loaded(wanted.tenant, wanted.session, group=wanted.group, family=wanted.family)
        return count

    def warm_up(self, cache: SuffixCache, timeout: float, tenant: str | None = None) -> int:
        """Load a tenant's newest turns before serving, in at most ``timeout`` seconds. Return their number."""
        corpus = Wanted(self.logs.of(tenant), tenant)
        self._loader.request(corpus, self._preload)
        deadline = time.monotonic() + timeout
        count, pending = 0, True
        while (pending or self._has_ready()) and time.monotonic() < deadline:
            time.sleep(0.002)
            pending = self._loader.is_pending(corpus)  # look before applying, so that nothing stays behind
            count += self.apply_loaded(cache, _WARM_UP_SECONDS)
        if pending:
            logger.warning("agentspec: the store is slow or away; what it holds arrives while serving")
        cache.catch_up()
        return count

    def load_again(self, tenant: str | None, session: str) -> None:
        """Load what was added to a session in the store since it was loaded. Any thread may call it."""
        self._loader.request(Wanted(self.logs.of(tenant), tenant, session=session))

    def erase(
        self, session: str, tenants: Iterable[str | None], forget: Callable[[], Iterable[str | None]] = tuple
    ) -> "Future[Erasure]":
        """Erase a session from the queues, from these tenants' logs and from every other log that holds turns of it.

        session: its key; from now on nothing of it is loaded. forget: removes it from the cache and whatever else holds
        it, in the job's thread, and returns the tenants under which it was there. Other processes are told in their
        logs, too. Raises StoreUnavailableError if too many jobs wait.
        """
        logs = {self.logs.of(tenant) for tenant in tenants}
        with self._applying:
            job = self._jobs.submit(lambda store: self._erase(store, session, logs, forget))
            self._erasures[session] = job
        self._writer.forget(session)
        self._loader.forget(session)
        return job

    def submit(self, job: Callable[[Store], Result]) -> "Future[Result]":
        """Run ``job(store)`` in a thread. Raises StoreUnavailableError if too many jobs wait."""
        return self._jobs.submit(job)

    def stats(self) -> dict[str, Any]:
        """Return the state of writer, loader and follower, as JSON.

        refused: turns that cannot be used, by kind. lost, missing: as ``Losses`` counts them. follower: None where
        nothing can be followed. Its "applied": turns of others that the cache was given.
        adopted_sessions: large sessions that were indexed before they reached the cache.
        """
        writer, loader, losses = self._writer.stats(), self._loader.stats(), self._store.losses()
        follower = None if self._follower is None else self._follower.stats()
        damaged = loader.damaged + (follower.damaged if follower else 0)
        unknown = loader.unknown + (follower.unknown if follower else 0)
        kinds = {"damaged": damaged, "unknown_version": unknown, **self._refused}
        return {
            "writer": writer.as_dict(),
            "loader": loader.as_dict(),
            "follower": None if follower is None else {**follower.as_dict(), "applied": self._followed},
            "lost": losses.lost,
            "missing": losses.missing,
            "restored": self._restored + self._followed,
            "adopted_sessions": self._adopted,
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
            self._follower.close()
        self._store.close()

    def _needs(self, cache: SuffixCache, tenant: str | None, session: str) -> bool:
        return session not in self._erasures and cache.needs_load(tenant, session)

    def _has_ready(self) -> bool:
        return self._arrived is not None or self._loader.has_ready()

    def _next_loaded(self) -> Loaded | None:
        if self._arrived is None and self._loader.has_ready():
            self._arrived, self._applied = self._loader.take(), 0
        return self._arrived

    def _begin_following(self, log: str, tenant: str | None) -> None:
        if self._follower is not None:
            self._follower.begin(log, tenant)

    def _erase_here(self, tenant: str | None, session: str, erased: Callable[[str | None, str], None]) -> int:
        """Erase from this process a session that another one has erased in the store. Runs in the follower's thread."""
        self._loader.forget(session)
        with self._applying:  # wait for a turn of it that is being restored
            pass
        erased(tenant, session)  # from here on its requests leave nothing behind
        self._writer.forget(session)
        return self._number

    def _erase_again(self, tenant: str | None, session: str) -> None:
        self._erase_in_store(self._store, self.logs.of(tenant), session)

    def _erase_in_store(self, store: Store, log: str, session: str) -> Erasure:
        if self._follower is None:
            return store.erase_session(log, session)
        with self._follower.erasing(log, session):
            erasure = store.erase_session(log, session)
            if erasure.tombstone is not None:
                self._follower.note_own(erasure.tombstone)
        return erasure

    def _erase(self, store: Store, session: str, logs: set[str], forget: Callable[[], Iterable[str | None]]) -> Erasure:
        with self._applying:  # wait for a turn of it that is being restored; from now on none is
            pass
        logs = logs | {self.logs.of(tenant) for tenant in forget()}
        if not self._writer.forget(session, _ERASE_SECONDS):
            raise StoreUnavailableError("the store does not answer, so the session is not erased; try again later")
        # Whoever named the tenants looked before; a turn may have been stored under another one since.
        logs.update(store.namespaces(self.logs.prefix, session=session))
        erased = [self._erase_in_store(store, log, session) for log in logs]
        self._loader.forget(session)
        return Erasure(sum(each.records for each in erased), all(each.complete for each in erased))

    def _take(self, cache: SuffixCache, log: str, record: TurnRecord) -> None:
        """Add a turn of another process to what the cache holds. Runs in the follower's thread."""
        with self._applying:
            erasing = self._follower is not None and self._follower.is_erasing(log, record.session)
            if not erasing and record.session not in self._erasures:
                self._followed += self._restore(cache, record, held_only=not self._is_loading(log, record))

    def _is_loading(self, log: str, record: TurnRecord) -> bool:
        """Return whether what a turn belongs to was read, perhaps without the turn, and will count as loaded."""
        wanted = [Wanted(log, record.tenant, session=record.session)]
        if record.shared_by is not None and record.shared_by == record.group:
            wanted.append(Wanted(log, record.tenant, group=record.group))
        elif record.family is not None:
            wanted.append(Wanted(log, record.tenant, family=record.family))
        arrived = self._arrived
        return any((arrived and arrived.wanted == one) or self._loader.is_pending(one) for one in wanted)

    def _restore(self, cache: SuffixCache, record: TurnRecord, *, held_only: bool = False) -> bool:
        """Put a turn into the cache. Returns whether it can be used."""
        try:
            cache.restore(turn_of(record), held_only=held_only)
        except Exception as error:  # e.g. a token that this model does not have
            self._refused[type(error).__name__] += 1
            if self._refused.total() == 1:
                logger.warning("agentspec: a stored turn cannot be used and is skipped: %s", error)
            return False
        return True

    def _prepare(self, records: Sequence[TurnRecord]) -> PreparedSession | None:
        """Index a session's turns in the loader's thread. Returns None if one of them cannot be used."""
        if self._cache is None:
            return None
        try:
            return self._cache.prepare([turn_of(record) for record in records])
        except Exception as error:  # each is tried alone when it is applied, and counted there
            logger.debug("agentspec: a stored session cannot be indexed as a whole: %s", error)
            return None

    def _forget(self, cache: SuffixCache, tenant: str | None) -> None:
        """Forget a tenant that may hold erased text. Where the start did not wait, its requests make way first."""
        while not cache.forget_tenant(tenant):
            self._outdated = frozenset([tenant])
            time.sleep(_FORGET_SECONDS)
        self._outdated = frozenset()

    def _adopt(self, cache: SuffixCache, loaded: Loaded, prepared: PreparedSession) -> None:
        loaded.prepared = None
        session = loaded.records[0].session
        if session not in self._erasures and session not in loaded.forgotten:
            self._adopted += cache.adopt(prepared, turn_of(loaded.records[0]))


def _learn_from(cache: SuffixCache, record: TurnRecord) -> None:
    with contextlib.suppress(AgentSpecError):  # restoring it will count that it cannot be used
        cache.learn_from(turn_of(record, _LEARNED_TOKENS))
