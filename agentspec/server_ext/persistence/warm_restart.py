"""Keep a snapshot of the suffix cache beside the store, so that a restarted server drafts as the old one did.

    keeper = SnapshotKeeper(path, cache, identity, note=step_cost.dump)  # reads the file in a thread, at engine start
    prices = keeper.wait_loaded(60)  # before the cache is used: the snapshot's note or b""; then keeper.start()
    keeper.delete()  # after cache.remove_session(...); and keeper.close() at shutdown, which saves once more

The store has the last word, and a snapshot only saves time. Turns that were stored after the snapshot are applied to it
later; turns that it holds already are recognised by their records' numbers. So a snapshot that is missing, damaged or
of another model costs nothing but time.
"""

import contextlib
import fcntl
import glob
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import agentspec
from agentspec.cache import SuffixCache
from agentspec.cache.store.urls import PLACE_DIGITS
from agentspec.errors import SnapshotError, StoreError
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.persistence.snapshot_erasures import FORGET_SECONDS, SnapshotErasures
from agentspec.server_ext.settings import Settings

logger = logging.getLogger(__name__)

_OF_REDIS = re.compile(f"[0-9a-f]{{{PLACE_DIGITS}}}")
_WRITTEN_SECONDS = 3_600.0
"""Seconds for which a temporary file counts as being written after its last write, if the file system has no locks."""


def snapshot_identity(namespace: str, cache: SuffixCache) -> str:
    """Return the text that a snapshot must have to be used: agentspec's version, the log's name and the policy."""
    return json.dumps({"agentspec": agentspec.__version__, "namespace": namespace, "policy": repr(cache.policy)})


class SnapshotKeeper:
    """Load a snapshot of a cache once, then save it now and then, all in a thread of its own.

    path: the file, readable by its owner alone; each process needs its own. identity: see `snapshot_identity`. note:
    called at each save; `wait_loaded` of the next process returns its bytes. interval: seconds between two saves.
    max_bytes: no snapshot is written while the cache holds more (None: no limit). max_age: seconds after which a
    snapshot beside this store, of whatever model, is deleted unread (None: no limit). erasures: removes from the loaded
    cache what was erased since (None: nothing can be erased elsewhere). Errors are logged and counted, never raised.
    """

    def __init__(
        self,
        path: Path,
        cache: SuffixCache,
        identity: str,
        *,
        note: Callable[[], bytes] = bytes,
        interval: float = 300.0,
        max_bytes: int | None = None,
        max_age: float | None = None,
        erasures: SnapshotErasures | None = None,
    ) -> None:
        self._path, self._cache, self._identity = path, cache, identity
        self._store_name = path.name.rsplit("-", 2)[0]  # `snapshot_path` adds the log and the engine's number
        self._note, self._interval = note, interval
        self._max_bytes, self._max_age, self._erasures = max_bytes, max_age, erasures
        self._loaded_note = b""
        self._loaded = threading.Event()
        self._serving = threading.Event()
        self._wake = threading.Condition()
        self._discards = 0
        self._closing = False
        self._saved_state: object = None
        self._failing = False  # whether the latest save failed
        self._counts = {"saved": 0, "errors": 0, "loaded_tokens": 0}
        self._thread = threading.Thread(target=self._run, name="agentspec-snapshot", daemon=True)
        self._thread.start()

    @classmethod
    def of_engine(
        cls, path: Path, persistence: Persistence, settings: Settings, *, note: Callable[[], bytes]
    ) -> "SnapshotKeeper":
        """Return the keeper of an engine's snapshot, within the limits of its store."""
        days = settings.retention_days
        return cls(
            path,
            persistence.cache,
            snapshot_identity(persistence.logs.of(settings.tenant), persistence.cache),
            note=note,
            max_bytes=settings.retention_bytes,
            max_age=None if days is None else days * 86_400,  # then the store may not know any more what was erased
            erasures=persistence.snapshot_erasures,
        )

    def wait_loaded(self, timeout: float | None = None) -> bytes:
        """Wait until the snapshot was read, and return its note; b"" if there is none or it is not read in time.

        Do not use the cache before this returns. After a timeout (in seconds) use it, but do not draft from it until
        `is_loaded`: the cache ignores a snapshot that comes too late, but one that came in time may hold text that was
        erased since.
        """
        return self._loaded_note if self._loaded.wait(timeout) else b""

    def is_loaded(self) -> bool:
        """Return whether the snapshot was read, and all that was erased since has left the cache."""
        return self._loaded.is_set()

    def start(self) -> None:
        """Begin to save now and then. Call it when the turns stored since the snapshot are in the cache."""
        self._serving.set()

    def delete(self) -> None:
        """Delete the file, because it holds a session that was erased; the next save writes one without it.

        A save that runs meanwhile is discarded. The store's snapshots of other tenants, engines and models are deleted
        too, and so are unfinished files: those of engines that no longer run may hold the session, and the others save
        again.
        Raises StoreError if the file cannot be deleted.
        """
        try:
            self._discard()
        except OSError as error:
            why = f"{self._path}: cannot be deleted, and holds what was erased: {error.strerror}"
            raise StoreError(why) from None
        for path in self._of_this_store():
            with contextlib.suppress(OSError):  # another user's
                path.unlink()
        self._delete_unfinished()

    def save(self) -> bool:
        """Save now, in the calling thread, if anything changed. Return whether the file is up to date."""
        held = self._cache.stats()
        state = (held.tokens, held.bytes, held.sessions)
        try:
            with self._wake:
                if state == self._saved_state and self._path.exists():
                    return True
                discards = self._discards
            if self._max_bytes is not None and held.bytes > self._max_bytes:
                raise SnapshotError(
                    f"{self._path}: the cache holds {held.bytes} bytes, more than retention_bytes={self._max_bytes}; "
                    "raise retention_bytes, or lower max_bytes"
                )
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Before the text, so that later erasures are caught up.
            places = {} if self._erasures is None else self._erasures.places()
            note = json.dumps(places).encode() + b"\n" + self._note()
            self._cache.save(self._path, identity=self._identity, note=note)
            if self._erasures is not None:
                self._erasures.note_saved()
            with self._wake:
                if discards != self._discards:  # erased between the core's last look and the renaming
                    self._path.unlink(missing_ok=True)
                    return False
                self._saved_state = state
        except Exception as error:
            self._counts["errors"] += 1
            if not self._failing:
                logger.warning("agentspec: the suffix indexes are not saved: %s", error)
            self._failing = True
            return False
        if self._failing:
            logger.warning("agentspec: the suffix indexes are saved again")
            self._failing = False
        self._counts["saved"] += 1
        return True

    def stats(self) -> dict[str, int]:
        """Return counters, as JSON."""
        return dict(self._counts)

    def close(self, timeout: float = 10.0) -> None:
        """Save once more, if the cache was served from, and end the thread. Waits at most ``timeout`` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        """Load, then save every interval while serving, and once more at the end. The thread runs this."""
        self._delete_unfinished()
        self._load()
        self._delete_too_old()
        self._loaded.set()
        due = time.monotonic() + self._interval
        while True:
            with self._wake:
                if not self._closing:
                    self._wake.wait(max(due - time.monotonic(), 0.0))
                closing = self._closing
            if self._serving.is_set() and (closing or time.monotonic() >= due):
                self.save()
            if closing:
                return
            if time.monotonic() >= due:
                due = time.monotonic() + self._interval

    def _load(self) -> None:
        """Load the snapshot into the cache, and remove what was erased since it was saved."""
        begin = time.monotonic()
        try:
            if not self._path.exists():
                return
            if self._is_too_old(self._path):
                self._path.unlink()
                raise SnapshotError(f"{self._path}: older than what the store keeps, and deleted")
            note = self._cache.load_snapshot(self._path, identity=self._identity)
        except Exception as error:
            logger.warning("agentspec: the saved suffix indexes are not used, the store is read instead: %s", error)
            return
        try:
            places, _, self._loaded_note = note.partition(b"\n")
            known = json.loads(places or b"{}")
            erased = self._erasures is not None and self._erasures.catch_up(known)
        except Exception as error:  # so it is not known what was erased
            logger.warning("agentspec: the saved suffix indexes are not used: %s", error)
            erased = self._cache.stats().tenants > 0
            while not self._cache.forget_tenants():  # where the start did not wait, their requests make way first
                time.sleep(FORGET_SECONDS)
        if erased:
            with contextlib.suppress(OSError):  # a read-only file system; the next start catches up again
                self._discard()  # but not the files of other engines, which may be reading them
        tokens = self._counts["loaded_tokens"] = self._cache.stats().tokens
        logger.info("agentspec: loaded suffix indexes of %d tokens in %.2f s", tokens, time.monotonic() - begin)

    def _discard(self) -> None:
        with self._wake:
            self._discards += 1
            self._saved_state = None
            self._path.unlink(missing_ok=True)

    def _delete_too_old(self) -> None:
        """Delete old snapshots beside this store, left by models, secrets or engines that are no longer in use."""
        for other in self._of_this_store():
            with contextlib.suppress(OSError):
                if self._is_too_old(other):
                    other.unlink()

    def _delete_unfinished(self) -> None:
        """Delete the unfinished files that processes killed while saving left, of this snapshot and those beside it."""
        for left in self._beside(f"{glob.escape(self._path.name)}.tmp*") + self._of_this_store(ending=".tmp*"):
            with contextlib.suppress(OSError):  # another user's
                _delete_unless_written(left)

    def _of_this_store(self, ending: str = "") -> list[Path]:
        """Return the snapshots beside the same store, of whatever log.

        All Redis servers count as the same store, because one may have several addresses. ending: a pattern for what
        follows the name of a snapshot.
        """
        of_redis = _OF_REDIS.fullmatch(self._store_name)
        store = PLACE_DIGITS * "[0-9a-f]" if of_redis else glob.escape(self._store_name)
        dashes = self._store_name.count("-") + 2  # a store whose name begins so has more
        found = self._beside(f"{store}-*.snapshot{ending}")
        return [path for path in found if path.name.rpartition(".snapshot")[0].count("-") == dashes]

    def _beside(self, pattern: str) -> list[Path]:
        """Return the files in the snapshot's folder that match a pattern; none if the folder cannot be read."""
        try:
            return [*self._path.parent.glob(pattern)]
        except OSError:  # of a network's file system, for example
            return []

    def _is_too_old(self, path: Path) -> bool:
        return self._max_age is not None and time.time() - path.stat().st_mtime > self._max_age


def _delete_unless_written(path: Path) -> None:
    """Delete a temporary file unless a process, maybe in another container, is writing it and so has locked it."""
    # A process that has just made it waits for its lock until this is closed, and then makes another.
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # the file system has no locks
            if time.time() - path.stat().st_mtime < _WRITTEN_SECONDS:
                return
        path.unlink()
