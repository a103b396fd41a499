"""Write a client's messages to its store in a thread, and notice when another client wrote to the same session.

A turn is one append: all of its messages or none. An append states the last entry that this client knows of the
session, and fails if there are others behind it. While the store is away or behind, turns wait, up to a limit in bytes.
The largest turn and the one that is being written do not count, so that a turn of any size is stored. Beyond the limit
the session that has most waiting loses its oldest turn. Readers see a gap there.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agentspec.cache.store import NEW_SESSION, CutRecord, MessageRecord, NewEntry, RecordReader, Store, encode
from agentspec.client.history.session_log import ClientView, Said, Stored, conflict_error
from agentspec.errors import InvalidInputError, SessionConflictError, StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

NAMESPACE = "29ac143d2224796d1cd003a9efc0f20782e000ef"
"""Name of the log. Messages do not depend on the model that wrote them, so one log serves every server and model."""

WAIT_S = 0.1
"""Longest time that a call waits for the store to confirm, in seconds."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0  # between attempts while the store is away
_MAX_BYTES = 64 << 20


def read_session(store: Store, session: str) -> Stored:
    """Read a session's messages, oldest first, without those that were taken back.

    A damaged record leaves a gap; a repeated one counts once.
    """
    history: list[Said] = []
    position, last = 0, None
    for entry, record in RecordReader().read(store.read(NAMESPACE, session=session)):
        last = entry.sequence
        if isinstance(record, CutRecord):
            while history and history[-1].position >= record.position:
                history.pop()
            position = record.position
            continue
        if isinstance(record, MessageRecord):
            behind = record.position is not None and record.position < position
            if behind and Said(record.position or 0, record.message) in history:
                continue  # Redis may bring a record back after a crash: see store/redis/store.py
            position = max(position, record.position or 0)
            history.append(Said(position, record.message))
        position += 1
    return Stored(history, position, last)


@dataclass(slots=True, eq=False)
class _Write:
    """Hold messages to append; without any, only check whether another client wrote to the session.

    tried: whether an append failed of which only the answer may have been lost, so that the store may have it.
    """

    view: ClientView
    records: list[MessageRecord | CutRecord]
    size: int = field(init=False)
    tried: bool = False

    def __post_init__(self) -> None:
        self.size = sum(record.size for record in self.records)

    @property
    def messages(self) -> int:
        """Return how many messages it appends."""
        return sum(isinstance(record, MessageRecord) for record in self.records)


class Outbox:
    """Append messages in a thread that starts with the first of them.

    store: function that returns the store, and opens it if need be; may raise anything. max_bytes: limit of the turns
    that wait, beside the largest one and the one that is being written.
    """

    def __init__(self, store: Callable[[], Store], max_bytes: int = _MAX_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._queue: deque[_Write] = deque()
        self._bytes = 0  # of the queue
        self._dropped = 0  # messages dropped since the store last answered
        self._current: _Write | None = None
        self._changed = threading.Condition()  # guards the queue; never held during a call to the store
        self._calling = threading.Lock()  # held during the thread's calls to the store
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None
        self._failures = 0
        self._away = False  # whether a warning was logged that the store is away
        self._refusal_logged = False
        self._slow = False  # whether the latest call took longer than WAIT_S
        self._hurried = False  # whether a caller waits, so that the pause after a failure ends

    def put(self, view: ClientView, said: list[Said], cut: int | None = None) -> None:
        """Queue the messages of one turn. Never blocks, never raises. cut: as for `SessionLog.append`."""
        self._enqueue(_write(view, said, cut))

    def put_now(self, view: ClientView, said: list[Said], cut: int | None, timeout: float) -> None:
        """Store the messages of one turn behind those queued for the session. Blocks.

        If the store is away, try once more: it may have written the messages, and only its answer was lost.

        Raises StoreError if the store fails or is not reached within ``timeout`` seconds, and SessionConflictError.
        """
        if not self.settle(view.session, timeout) or not self._calling.acquire(timeout=timeout):
            raise StoreUnavailableError(
                f"session {view.session!r}: nothing was changed, because the store does not answer; try again later"
            )
        try:
            write = _write(view, said, cut)
            failed = self._perform(write)
            if isinstance(failed, StoreUnavailableError):
                failed = self._perform(write)
        finally:
            self._calling.release()
        if isinstance(failed, StoreError):
            raise failed
        if failed is not None:
            raise StoreError(f"session {view.session!r}: the store failed: {failed}") from failed
        if view.conflict:
            raise conflict_error(view.session)

    def check(self, view: ClientView) -> None:
        """Queue a look at whether another client wrote to the session, unless the store is slow or away."""
        if not self._failures and not self._slow:
            self._enqueue(_Write(view, []))

    def confirm(self, view: ClientView) -> None:
        """Wait until all writes and checks queued for the session are done, for at most WAIT_S.

        Returns at once while the store is slow or away: a conflict then shows at a later call.
        Raises SessionConflictError if another client wrote to the session.
        """
        if not self._failures and not self._slow:
            self._slow = not self.settle(view.session, WAIT_S)
        if view.conflict:
            raise conflict_error(view.session)

    def settle(self, session: str, timeout: float) -> bool:
        """Wait until nothing of the session is queued. Returns False after ``timeout`` seconds."""
        with self._changed:
            self._hurried = self._hurried or self._waits(session)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._waits(session), timeout)

    def wait_for_room(self, timeout: float) -> None:
        """Wait until the queue is within its limit, for at most ``timeout`` seconds and while the store works."""
        with self._changed:
            self._changed.wait_for(lambda: self._failures or self._waiting_bytes() <= self._max_bytes, timeout)

    @contextmanager
    def paused(self, session: str, timeout: float) -> Generator[None, None, None]:
        """Write nothing while the block runs. Then discard all that is queued for the session, unless the block raises.

        Raises StoreUnavailableError if the current call to the store does not end within ``timeout`` seconds.
        """
        if not self._calling.acquire(timeout=timeout):
            raise StoreUnavailableError(f"session {session!r}: the store does not answer; try again later")
        try:
            yield
            with self._changed:
                self._discard(lambda write: write.view.session == session)
        finally:
            self._calling.release()

    def is_this_thread(self) -> bool:
        """Return whether the thread that writes is the one that asks."""
        return self._thread is threading.current_thread()

    def close(self, timeout: float) -> None:
        """Write the queue for at most ``timeout`` seconds, and stop. Messages that are left are lost, and logged."""
        with self._changed:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout
            self._changed.notify_all()
        if self._thread is None:
            self._run()  # at the interpreter's end no thread can be started
        else:
            self._thread.join(timeout + 0.5)
        with self._changed:
            left = sum(write.messages for write in self._queue)
            left += self._current.messages if self._current is not None else 0
            self._discard(lambda write: True)
        if left:
            logger.warning("agentspec: the session store is away; %d messages are lost unwritten", left)

    def _enqueue(self, write: _Write) -> None:
        with self._changed:
            if self._deadline is not None:
                logger.warning("agentspec: session %r: the client is closed; messages are lost", write.view.session)
                return
            self._queue.append(write)
            self._bytes += write.size
            self._make_room()
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        """Start the thread. If that is not possible now, the next message tries it again."""
        thread = threading.Thread(target=self._run, name="agentspec-outbox", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("agentspec: messages wait to be stored, because no thread can be started: %s", error)
        else:
            self._thread = thread

    def _waiting_bytes(self) -> int:
        return self._bytes + (0 if self._current is None else self._current.size)

    def _make_room(self) -> None:
        """Drop turns beyond the limit, and a little more, so that the queue is seldom searched."""
        if self._bytes <= self._max_bytes:
            return
        kept = {write for write in itertools.islice(self._queue, 1) if write.tried}  # it must be sent again unchanged
        rest = [write for write in reversed(self._queue) if write not in kept]
        kept.add(max(rest, key=lambda write: write.size))  # the largest; the newest of equal ones
        limit = self._max_bytes + sum(write.size for write in kept)
        if self._bytes <= limit:
            return
        if not self._dropped:
            logger.warning(
                "agentspec: more than %d bytes of messages wait for the session store; some are dropped, and"
                " their sessions will show gaps",
                self._max_bytes,
            )
        self._drop_messages(kept, limit - self._max_bytes // 16)
        while self._bytes > limit:  # no messages are left to drop, only records of missing ones
            write = next(write for write in self._queue if write not in kept)
            self._queue.remove(write)
            self._bytes -= write.size

    def _drop_messages(self, kept: set[_Write], goal: int) -> None:
        """Take the messages out of writes other than ``kept`` until ``goal`` bytes wait.

        The oldest write of the session that has most bytes waiting goes first. A record stays that shows the gap.
        """
        last = {write.view: write for write in self._queue if write.records}
        waiting: dict[str, deque[_Write]] = defaultdict(deque)
        for write in self._queue:
            if write not in kept and write.messages:
                waiting[write.view.session].append(write)
        heap = [(-sum(write.size for write in writes), session) for session, writes in waiting.items()]
        heapq.heapify(heap)
        left: dict[_Write, _Write] = {}
        while self._bytes > goal and heap:
            negative, session = heap[0]
            write = waiting[session].popleft()
            left[write] = _without_messages(write, is_last=last[write.view] is write)
            self._bytes += left[write].size - write.size
            self._dropped += write.messages
            if waiting[session]:
                heapq.heapreplace(heap, (negative + write.size, session))
            else:
                heapq.heappop(heap)
        self._queue = deque(left.get(write, write) for write in self._queue if write not in left or left[write].records)

    def _discard(self, of: Callable[[_Write], bool]) -> None:
        kept = [write for write in self._queue if not of(write)]
        self._queue = deque(kept)
        self._bytes = sum(write.size for write in kept)
        self._changed.notify_all()

    def _waits(self, session: str) -> bool:
        if self._current is not None and self._current.view.session == session:
            return True
        return any(write.view.session == session for write in self._queue)

    def _run(self) -> None:
        while self._await_work():
            with self._calling:
                with self._changed:
                    if not self._queue:  # it was discarded meanwhile
                        continue
                    write = self._current = self._queue.popleft()
                    self._bytes -= write.size
                begin = time.monotonic()
                error = self._perform(write)
                self._slow = time.monotonic() - begin > WAIT_S
                self._end_write(write, error)

    def _await_work(self) -> bool:
        """Wait for a write, and for the pause after a failure. Returns False when the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._deadline is not None)
            if self._failures:
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (min(self._failures, 20) - 1))
                if self._changed.wait_for(lambda: self._hurried or self._deadline is not None, pause):
                    self._changed.wait(_FIRST_PAUSE_S)  # callers may hurry the thread again and again
                self._hurried = False
            return self._deadline is None or (bool(self._queue) and time.monotonic() < self._deadline)

    def _perform(self, write: _Write) -> Exception | None:
        """Append or check. Returns the error if the store failed."""
        view = write.view
        if view.conflict:
            return None
        try:
            store = self._store()
            if not view.known:
                found = read_session(store, view.session)
                view.offset, view.last, view.known = found.next_position, found.last, True
            self._append(store, view, write.records)
        except SessionConflictError:
            view.conflict = True
        except Exception as error:  # a store may raise anything, and the thread must survive it
            return error
        return None

    def _append(self, store: Store, view: ClientView, records: list[MessageRecord | CutRecord]) -> None:
        """Append to the session, or only check. Raises SessionConflictError if others wrote behind ``view.last``."""
        payloads = [_encode(record, view.offset) for record in records]
        if not payloads:
            if any(store.read(NAMESPACE, session=view.session, after=view.last, newest=1)):
                raise conflict_error(view.session)
            return
        entries = [NewEntry(view.session, payload) for payload in payloads]
        try:
            view.last = store.append(NAMESPACE, entries, expect=view.last or NEW_SESSION)[-1]
        except SessionConflictError:
            behind = list(store.read(NAMESPACE, session=view.session, after=view.last))
            if [entry.payload for entry in behind] != payloads:
                raise
            view.last = behind[-1].sequence  # an earlier attempt wrote them, and its answer was lost

    def _end_write(self, write: _Write, error: Exception | None) -> None:
        """Note how a write went. Queue a failed append again for the next attempt; forget a failed check."""
        refused = isinstance(error, StoreError) and not isinstance(error, StoreUnavailableError)
        with self._changed:
            self._current = None
            was_away, dropped = self._away, self._dropped
            if error is None:
                self._away, self._failures, self._dropped = False, 0, 0
                if write.view.conflict:
                    self._discard(lambda other: other.view is write.view)
            else:
                self._away = was_away or not refused
                self._failures += 1
                write.tried = not refused
                if write.records:
                    self._put_back(write, behind_others=refused)
            self._changed.notify_all()
        if write.view.conflict:
            logger.warning("agentspec: %s", conflict_error(write.view.session))
        if error is None and was_away:
            logger.warning("agentspec: the session store is back; %d messages were dropped", dropped)
        elif refused and not self._refusal_logged:
            self._refusal_logged = True
            logger.warning(
                "agentspec: session %r cannot be stored (%s); its messages wait, and others' that the store refuses",
                write.view.session,
                error,
            )
        elif self._away and not was_away:
            logger.warning("agentspec: the session store is away (%s); messages wait to be written", error)

    def _put_back(self, write: _Write, *, behind_others: bool) -> None:
        """Queue a write again, before the others.

        behind_others: put all writes of its session behind those of other sessions, because the store may refuse this
        session alone.
        """
        self._queue.appendleft(write)
        self._bytes += write.size
        if behind_others:
            self._queue = deque(sorted(self._queue, key=lambda each: each.view.session == write.view.session))


def _write(view: ClientView, said: list[Said], cut: int | None) -> _Write:
    now = time.time()
    records: list[MessageRecord | CutRecord] = [] if cut is None else [CutRecord(view.session, cut)]
    records += [MessageRecord(view.session, message, now, position) for position, message in said]
    return _Write(view, records)


def _without_messages(write: _Write, *, is_last: bool) -> _Write:
    """Return the records that stay of a write whose messages are dropped.

    is_last: whether no later write shows the gap by its position, so that a record must.
    """
    cuts: list[MessageRecord | CutRecord] = [record for record in write.records if isinstance(record, CutRecord)]
    if is_last:
        cuts.append(CutRecord(write.view.session, (write.records[-1].position or 0) + 1))
    return _Write(write.view, cuts)


def _encode(record: MessageRecord | CutRecord, offset: int) -> bytes:
    """Return the record as bytes; for a message that cannot be stored, those of a record that leaves a gap."""
    position = offset + (record.position or 0)
    try:
        return encode(replace(record, position=position))
    except InvalidInputError as error:
        logger.warning("agentspec: session %r: a message cannot be stored: %s", record.session, error)
        return encode(CutRecord(record.session, position + 1))
