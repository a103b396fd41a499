"""Follow the logs that other processes append to, so that each process drafts from what the others said.

An erasure is a tombstone in the log:

- The follower applies a tombstone of another process at once, even if records before it have to wait (`_look_ahead`).
  It remembers the tombstone (`recent_tombstones`), because it reads it again after those records.
- A turn of this process that was on its way to the store then lies behind the tombstone. When the follower reads the
  turn (`_skip`), it has the session erased again (`late_turns`).
- The follower does not apply this process's own tombstones (`own_erasures.py`).
- A Redis that was restarted, or failed over, may go back to a state before an erasure. So after each failure, and once
  a minute, the follower looks for the erasures that it remembers, and has lost ones repeated (`lost_erasures.py`).
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace

from agentspec.cache.store.background.breaker import CircuitBreaker
from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.cache.store.background.earlier_erasures import EarlierErasures
from agentspec.cache.store.background.followed import FollowedLog, FollowedLogs, FollowerStats
from agentspec.cache.store.background.gaps import LogGaps
from agentspec.cache.store.background.lost_erasures import LostErasures
from agentspec.cache.store.background.own_erasures import OwnErasures
from agentspec.cache.store.base import Store, check_namespace, entry_name
from agentspec.cache.store.record_reader import RecordReader
from agentspec.cache.store.records import EraseRecord, TurnRecord
from agentspec.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

LIFE_SECONDS = 1.0
"""Seconds without a sign of life after which the follower may have missed an erasure, as in a frozen process."""
MAX_LOGS = 256
"""Most logs that a process follows: those used last."""

_WAIT_SECONDS = 0.25  # longest wait for new entries
_READ_SECONDS = 0.25  # longest time to read logs, all together, before looking at the others and for tombstones
_SLICE = 64  # most entries that are read between two looks at the time
_SLICE_BYTES = 1 << 20  # about the most bytes that are read between two looks at the time
_LEARN_SECONDS = 0.02  # time in each slice in which learning from a record may begin
_RETRY_SECONDS = 0.05  # pause until a tenant with running requests, or a log that is not read yet, is looked at again
_MAX_ERASED = 1024  # most erased sessions of a log that are remembered once all of it was read


class Follower:
    """Read what other processes append to the logs in use, in a thread.

    writer: this process's name in the store; the follower skips its records unless they were imported.
    take(log, record): hands on a record of another process, to be drafted from. learn(record): learns from the record
    before that, if there is time. forget_sessions(tenant, sessions): removes erased sessions from this process, and
    returns the number of the process's newest turn. unwritten(): returns the sessions with turns of this process that
    wait for the store. erase_again(tenant, session): erases the session here and in the
    store again, because a turn of this process arrived there behind its tombstone; if it raises, it is called again.
    forget_tenant(tenant): makes the cache forget a tenant whose log is not followed any more, and returns whether it
    could. At most ``max_logs`` are followed, unless tenants cannot be forgotten. Close the follower before the store.

    own: erases sessions from the store for this process. earlier: what was erased before it served.
    """

    def __init__(
        self,
        store: Store,
        writer: str,
        *,
        take: Callable[[str, TurnRecord], None],
        forget_sessions: Callable[[str | None, Sequence[str]], int],
        erase_again: Callable[[str | None, str], None],
        unwritten: Callable[[], Set[str]] = frozenset,
        learn: Callable[[TurnRecord], None] = lambda record: None,
        forget_tenant: Callable[[str | None], bool],
        max_logs: int = MAX_LOGS,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._store = store
        self._writer = writer
        self._take = take
        self._forget_sessions, self._forget_tenant = forget_sessions, forget_tenant
        self._unwritten, self._learn = unwritten, learn
        self._breaker = breaker or CircuitBreaker(max_pause=5.0)
        self._reader = RecordReader()
        self._logs = FollowedLogs(max_logs)
        self.own, self.earlier = OwnErasures(store, self.follows), EarlierErasures(store)
        self._refused: set[str] = set()  # logs that the store refuses to read
        self._unerased: set[str] = set()  # logs with a tombstone that could not be applied here
        self._lost = LostErasures(store, self.own, self._alone, erase_again)
        self._gaps = LogGaps(store, self._alone, self._forget, self._look_ahead)
        self._counts = FollowerStats()
        self._alive = self._asked = time.monotonic()
        self._closed = False
        self._wake = threading.Condition(threading.Lock())  # never held during a call to the store
        self._thread = threading.Thread(target=self._run, name="agentspec-store-follower", daemon=True)
        self._thread.start()

    def use(self, namespace: str, owner: str | None = None) -> bool:
        """Note that a request uses a log. Returns whether the log is followed.

        owner: the log's owner. If there are too many logs, the owner with the most loses one.
        """
        return self._logs.use(namespace, owner)

    def begin(self, namespace: str, tenant: str | None) -> None:
        """Follow a log from its present end. Call it in a thread that may wait for the store.

        Call it before the log is read, and before it is appended to: only behind the place from which it is followed
        does the follower find turns of this process that come behind their session's tombstone. The call also erases
        here the sessions that other processes erased since this one serves, unless they have entries since and none
        that wait for the store: those may be older than the erasure. Raises StoreError.
        """
        if self.use(check_namespace(namespace)):
            return
        begun = time.monotonic()
        log, erased = self._log_at_end(namespace, tenant)
        if erased := self.earlier.without(namespace, erased):
            used = {usage.session for usage in self._store.sessions(namespace)} - self._unwritten()
            erased = [session for session in erased if session not in used]
        self._add(namespace, log, erased, begun)

    def catch_up(self, namespace: str, tenant: str | None, after: str | None) -> None:
        """Erase here all sessions that other processes erased, and follow the log, as `begin` does.

        Call it if this process may hold text from before those erasures, as from a snapshot. A session with entries
        since is erased, too. after: cursor up to which erasures were applied before; None: none was. Raises StoreError.
        """
        begun = time.monotonic()
        log, erased = self._log_at_end(check_namespace(namespace), tenant, after)
        self._add(namespace, log, erased, begun)

    @property
    def outdated(self) -> frozenset[str | None]:
        """Return the tenants to forget as soon as none of their requests runs."""
        return self._gaps.outdated

    def follows(self, namespace: str) -> bool:
        """Return whether a log is followed."""
        return namespace in self._logs

    def places(self) -> dict[str, str]:
        """Return, for each followed log, the cursor up to which other processes' erasures were applied here."""
        return {name: log.tombstones_applied_to for name, log in self._logs.all().items()}

    def is_current(self) -> bool:
        """Return whether all erasures older than LIFE_SECONDS were applied here, as far as the store answers."""
        return not self._logs or not (self._unerased or time.monotonic() - self._alive >= LIFE_SECONDS)

    def settle(self, timeout: float) -> None:
        """Wait until all logs are read up to their present ends and late turns are erased, or for ``timeout`` seconds.

        Call it when this process writes no more, so that no turn of it stays behind its session's tombstone.
        """
        until = time.monotonic() + timeout
        with suppress(StoreError):
            ends = [(log, entry_name(self._store.newest(name))) for name, log in self._logs.all().items()]
            while not all(log.is_settled(end) for log, end in ends) and time.monotonic() < until:
                time.sleep(_RETRY_SECONDS)

    def close(self, timeout: float = 1.0) -> None:
        """Stop following."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self.own.close()
        self._thread.join(timeout)

    def stats(self) -> FollowerStats:
        """Return the current counts."""
        with self._wake:
            return replace(
                self._counts,
                damaged=self._reader.damaged,
                unknown=self._reader.unknown,
                logs=len(self._logs),
                refused=len(self._refused),
                undone=self._lost.undone,
                state=self._breaker.state,
            )

    def _log_at_end(
        self, namespace: str, tenant: str | None, after: str | None = None
    ) -> tuple[FollowedLog, Sequence[str]]:
        """Return a log as it is followed from its present end, and the sessions that other processes erased in it.

        after: return only sessions with a tombstone behind this cursor; None: all.
        """
        end = self._store.newest(namespace)
        tombstones = self._store.tombstones(namespace, after=after)
        recent = OrderedDict([(entry_name(mark), session) for session, mark in tombstones.items()][-_MAX_ERASED:])
        erased = [session for session, mark in tombstones.items() if not self._is_own(namespace, session, mark)]
        return FollowedLog(tenant, end, end, recent), erased

    def _add(self, namespace: str, log: FollowedLog, erased: Sequence[str], begun: float) -> None:
        """Erase these sessions here, and follow a log unless it is followed. begun: when the store was asked first."""
        self._erase_here(log, erased)
        if self.use(namespace):
            return
        with self._wake:
            if not self._logs:
                self._alive = begun
            self._logs.add(namespace, log)
            self._wake.notify()
        self._leave_idlest()

    def _run(self) -> None:
        while not self._closed:
            if not self._may_call():
                continue
            begun = time.monotonic()
            try:
                self._lost.find(self._to_follow(), begun)
                logs = self._to_follow()
                unsure = logs.keys() if begun - self._asked >= LIFE_SECONDS else self._refused | self._unerased
                whole = self._gaps.leave(logs, set(unsure)) and self._follow()
            except Exception as error:  # a store may raise anything, and the thread must survive it
                self._fail(error)
                if time.monotonic() - begun < LIFE_SECONDS:  # otherwise the process may have been frozen meanwhile
                    self._alive = time.monotonic()
                continue
            if self._breaker.success():
                logger.warning("agentspec: the logs of other processes can be followed again")
            if whole:
                self._alive = self._asked = begun
            else:
                time.sleep(_RETRY_SECONDS)

    def _may_call(self) -> bool:
        """Wait for a log, or for the breaker. Returns whether the store may be called now."""
        begun = time.monotonic()
        with self._wake:
            if not self._logs:
                self._wake.wait_for(lambda: self._logs or self._closed)
                return False
            pause = self._breaker.wait()
            if pause > 0:
                if self._breaker.state == "open" or begun - self._alive < LIFE_SECONDS:
                    self._alive = begun  # the store was known to be away before any freeze
                self._wake.wait_for(lambda: self._closed, min(pause, _WAIT_SECONDS))
                return time.monotonic() - begun > LIFE_SECONDS  # if frozen meanwhile: the store may be back
        return self._breaker.allow()

    def _follow(self) -> bool:
        """Wait for new entries once, and deal with them. Returns False if a log has a gap that cannot be left yet."""
        self._lost.repeat(self._to_follow())
        logs = self._to_follow()
        found = set(self._store.wait({name: log.cursor for name, log in logs.items()}, _WAIT_SECONDS))
        begun = time.monotonic()
        # A part of the store may have been away while the others were followed.
        unsure = {name for name in found if begun - logs[name].checked_at >= LIFE_SECONDS} | (found & self._gaps.unsure)
        if not self._gaps.leave(logs, unsure, found):
            return False
        to_read = sorted((found | (self._refused & logs.keys())) - self._gaps.unsure, key=lambda n: logs[n].read_at)
        behind = 0
        for place, name in enumerate(to_read):
            log, now = logs[name], time.monotonic()
            share = (begun + _READ_SECONDS - now) / (len(to_read) - place)
            with self._alone(name, log):
                if name in found and not ((place == 0 or share > 0) and self._read(name, log, now + share)):
                    log.tombstones_applied_to = max(log.tombstones_applied_to, self._look_ahead(name, log))
                    behind += 1
                log.checked_at = now
                self._refused.discard(name)
                if log.breaker.success():
                    logger.warning("agentspec: the log %s can be followed again", name)
        with self._wake:
            self._counts.behind = behind
        return True

    def _to_follow(self) -> dict[str, FollowedLog]:
        """Return the logs that may be read now: all but those that the store has refused to read lately."""
        logs = self._logs.all()
        self._refused &= logs.keys()
        for name in self._refused:
            if logs[name].breaker.wait() > 0.0:
                del logs[name]
        return logs

    @contextmanager
    def _alone(self, name: str, log: FollowedLog) -> Iterator[None]:
        """Leave a log alone for a while if the store refuses it, so that the others are followed meanwhile."""
        try:
            yield
        except StoreUnavailableError:
            raise
        except StoreError as error:
            with self._wake:
                self._counts.failed += 1
            self._refused.add(name)
            if log.breaker.failure():
                logger.warning("agentspec: the log %s cannot be followed, the others are: %s", name, error)

    def _read(self, namespace: str, log: FollowedLog, until: float) -> bool:
        """Deliver a log's new records, a slice at least, until this time. Returns whether all were delivered."""
        courtesy, batch, seen, size, at = Courtesy(), list[TurnRecord](), 0, 0, log.cursor
        log.read_at = time.monotonic()
        self.own.note_read_begun(namespace)
        for entry, record in self._reader.read(self._store.read(namespace, after=log.cursor)):
            if isinstance(record, EraseRecord):
                self._deliver(namespace, batch, courtesy)
                batch = []
                self._apply(namespace, log, record.session, entry.sequence)
            elif isinstance(record, TurnRecord) and record.writer == self._writer and not record.imported:
                self._skip(log, record)
            elif isinstance(record, TurnRecord):
                batch.append(record)
            seen, at = seen + 1, entry.sequence
            size += len(entry.payload) if record is None else record.size
            if seen >= _SLICE or size >= _SLICE_BYTES:
                self._deliver(namespace, batch, courtesy)
                batch, seen, size, log.cursor = [], 0, 0, at
                if self._closed or time.monotonic() >= until:
                    return False
            courtesy.pause()
        self._deliver(namespace, batch, courtesy)
        log.cursor = at
        log.tombstones_applied_to = max(log.tombstones_applied_to, at)
        log.forget_oldest_erasures(_MAX_ERASED)  # only now: up to the log's end any tombstone may come again
        return True

    def _look_ahead(self, namespace: str, log: FollowedLog) -> str:
        """Apply the tombstones of a log before its records are read. Returns the end up to which they were applied."""
        end = self._store.newest(namespace)
        for session, cursor in self._store.tombstones(namespace, after=log.tombstones_applied_to).items():
            self._apply(namespace, log, session, cursor)
        return end

    def _apply(self, namespace: str, log: FollowedLog, session: str, cursor: str) -> None:
        """Apply a tombstone unless it was applied before."""
        tombstone = entry_name(cursor)
        if tombstone in log.recent_tombstones:
            return
        if self._is_own(namespace, session, cursor):
            self.own.note_tombstone_read(namespace, session)
        else:
            try:
                self._erase_here(log, [session])
            except Exception:
                self._unerased.add(namespace)
                raise
            self._unerased.discard(namespace)
        log.recent_tombstones[tombstone] = session  # only now, so that an erasure that fails is tried again

    def _erase_here(self, log: FollowedLog, sessions: Sequence[str]) -> None:
        if not sessions:
            return
        log.note_erased(sessions, self._forget_sessions(log.tenant, sessions))
        with self._wake:
            self._counts.erased += len(sessions)

    def _is_own(self, namespace: str, session: str, cursor: str) -> bool:
        """Return whether a tombstone is this process's. Waits LIFE_SECONDS / 2 at most, so that drafting goes on."""
        return self.own.wrote(namespace, session, cursor, LIFE_SECONDS / 2)

    def _skip(self, log: FollowedLog, record: TurnRecord) -> None:
        """Skip a record of this process. If it is older than its session's erasure, have the session erased again."""
        with self._wake:
            self._counts.skipped += 1
        if record.number <= log.own_turn_at_erasure.get(record.session, 0):
            log.late_turns.add(record.session)

    def _deliver(self, namespace: str, records: Sequence[TurnRecord], courtesy: Courtesy) -> None:
        if not records:
            return
        learned, until = 0, time.monotonic() + _LEARN_SECONDS
        for record in records:
            if time.monotonic() < until:
                self._learn(record)
                learned += 1
            self._take(namespace, record)
            courtesy.pause()
        with self._wake:
            self._counts.delivered += len(records)
            self._counts.learned += learned
            if said := [record for record in records if not record.imported]:  # imported ones are as old as they say
                self._counts.delay_ms = max(0.0, 1e3 * (time.time() - said[-1].created))

    def _leave_idlest(self) -> None:
        """Stop following logs if there are too many and the cache can forget their tenants.

        A log in which a session must still be erased again stays.
        """
        for name, log in self._logs.beyond_most():
            if not log.to_erase_again() and self._forget(name, log):
                self._logs.remove(name)

    def _forget(self, name: str, log: FollowedLog) -> bool:
        """Forget a log's tenant. Returns False if that is not possible now."""
        forgotten = self._forget_tenant(log.tenant)
        if forgotten:
            self._unerased.discard(name)
            self._gaps.drop(name)
        return forgotten

    def _fail(self, error: Exception) -> None:
        self._lost.suspect()  # the store may come back in an older state
        with self._wake:
            self._counts.failed += 1
        if self._breaker.failure():
            logger.warning("agentspec: the logs of other processes cannot be followed: %s", error)
