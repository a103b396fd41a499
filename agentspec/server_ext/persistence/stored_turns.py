"""Put stored turns into the cache: those that the loader has read, and those that the follower reads as they come."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from agentspec.cache import SuffixCache
from agentspec.cache.core import PreparedSession
from agentspec.cache.store import BackgroundLoader, Erasure, Loaded, TurnRecord, Wanted
from agentspec.server_ext.persistence.turn_records import turn_of

logger = logging.getLogger(__name__)


class StoredTurns:
    """Put stored turns into a cache, except those of sessions that are being erased.

    loader: delivers what requests need. is_erased(log, session): returns whether records that were read of a session
    may be older than its erasure. restored, followed: number of the loader's and the follower's turns that were put
    into the cache. adopted: number of sessions that were indexed beforehand. refused: number of turns that cannot be
    used, by type of the error.

    The engine's thread calls `apply`, the follower's calls `add`, and any thread may call the others.
    """

    def __init__(self, cache: SuffixCache, loader: BackgroundLoader, is_erased: Callable[[str, str], bool]) -> None:
        self.restored = self.followed = self.adopted = 0
        self.refused: Counter[str] = Counter()
        self._cache = cache
        self._loader = loader
        self._is_erased = is_erased
        self._arrived: Loaded | None = None  # the loader's delivery that is being applied
        self._applied = 0  # number of its records that were applied
        self._erasures: dict[str, list[Future[Erasure]]] = {}  # by session, which several callers may erase at once
        self._applying = threading.Lock()  # held while records are taken from the loader, checked and restored

    def has_ready(self) -> bool:
        """Return whether turns are ready for ``apply``."""
        return self._arrived is not None or self._loader.ready.has_any()

    def has_ready_of(self, wanted: Wanted) -> bool:
        """Return whether the turns of ``wanted`` are ready for ``apply``."""
        return (self._arrived is not None and self._arrived.wanted == wanted) or self._loader.ready.holds(wanted)

    def has_work(self) -> bool:
        """Return whether ``apply`` may have something to do."""
        return self.has_ready() or bool(self._erasures)

    def is_erasing(self, session: str) -> bool:
        """Return whether a session is being erased by this process."""
        return not all(erasure.done() for erasure in self._erasures.get(session, ()))

    def begin_erasure(self, session: str, submit: Callable[[], "Future[Erasure]"]) -> "Future[Erasure]":
        """Put no turn of a session into the cache until the job that ``submit`` returns has erased it."""
        with self._applying:
            job = submit()
            self._erasures[session] = [*self._erasures.get(session, ()), job]
        return job

    def wait(self) -> None:
        """Wait until no other thread is putting a turn into the cache."""
        with self._applying:
            pass

    def apply(self, seconds: float) -> int:
        """Put loaded turns into the cache for ``seconds`` of this thread's CPU time. Return their number.

        At least one turn is applied if any are ready, even if it takes longer. None is applied while another thread
        applies or erases one, because this call never waits for it.
        """
        if not self._applying.acquire(blocking=False):
            return 0
        try:
            if self._erasures:
                self._erasures = {name: jobs for name, jobs in self._erasures.items() if self.is_erasing(name)}
            return self._apply(seconds)
        finally:
            self._applying.release()

    def add(self, log: str, record: TurnRecord) -> None:
        """Add a turn of another process to what the cache holds of its session, group and tenant."""
        with self._applying:
            if not self._is_erased(log, record.session) and not self.is_erasing(record.session):
                self.followed += self._restore(record, held_only=not self._is_loading(log, record))

    def _apply(self, seconds: float) -> int:
        """Put loaded turns into the cache, as `apply` says. Call it with `_applying` held."""
        count, until = 0, None
        while loaded := self._next_loaded():
            if until is None:
                until = time.thread_time() + seconds
            if loaded.prepared is not None:
                self._adopt(loaded, loaded.prepared)
            while self._applied < len(loaded.records):
                record = loaded.records[self._applied]
                if record.session not in self._erasures and record.session not in loaded.forgotten:
                    restored = self._restore(record)
                    self.restored += restored
                    count += restored
                self._applied += 1
                if time.thread_time() >= until:
                    return count
            self._arrived = None
            wanted = loaded.wanted
            if loaded.complete:
                self._cache.mark_loaded(wanted.tenant, wanted.session, group=wanted.group, family=wanted.family)
            if time.thread_time() >= until:
                break
        return count

    def _next_loaded(self) -> Loaded | None:
        if self._arrived is None:
            self._arrived, self._applied = self._loader.take(), 0
        return self._arrived

    def _adopt(self, loaded: Loaded, prepared: PreparedSession) -> None:
        loaded.prepared = None
        session = loaded.records[0].session
        if session not in self._erasures and session not in loaded.forgotten:
            self.adopted += self._cache.adopt(prepared, turn_of(loaded.records[0]))

    def _is_loading(self, log: str, record: TurnRecord) -> bool:
        """Return whether the session, group or family of a turn is being loaded, and may have been read without it.

        Then the cache must take the turn, because it will count the session, group or family as completely loaded.
        """
        wanted = [Wanted(log, record.tenant, session=record.session)]
        if record.shared_by is not None and record.shared_by == record.group:
            wanted.append(Wanted(log, record.tenant, group=record.group))
        elif record.family is not None:
            wanted.append(Wanted(log, record.tenant, family=record.family))
        arrived = self._arrived
        return any((arrived and arrived.wanted == one) or self._loader.is_pending(one) for one in wanted)

    def _restore(self, record: TurnRecord, *, held_only: bool = False) -> bool:
        """Put a turn into the cache. Return whether it can be used."""
        try:
            self._cache.restore(turn_of(record), held_only=held_only)
        except Exception as error:  # e.g. a token that this model does not have
            self.refused[type(error).__name__] += 1
            if self.refused.total() == 1:
                logger.warning("agentspec: a stored turn cannot be used and is skipped: %s", error)
            return False
        return True
