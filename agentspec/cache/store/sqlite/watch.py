"""Watch an SQLite file and the two files beside it, which other programs may remove, replace or cut short.

SQLite notices nothing of that. It would write to files without a name, or behind a gap, and what it acknowledged would
be lost. It also maps the memory that the log's users share, and a look at a page that was cut off kills the process
(SIGBUS).

What is read of these files is read from descriptors that stay open as long as any store of this process uses them,
because closing one drops SQLite's locks.
"""

import logging
import os
import sqlite3
import sys
from contextlib import suppress
from pathlib import Path

from agentspec.cache.store.sqlite.file import BESIDE, FileId, empty_log, file_id, hold, let_go
from agentspec.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

# https://sqlite.org/walformat.html
_INDEX_HEADER = 48
"""Bytes at the beginning of the shared memory that describe the log. A copy of them follows."""
_LOG_HEADER, _FRAME_HEADER = 32, 24
"""Bytes in front of all frames of the log, and in front of the page of each."""


class FileWatch:
    """Compare a database's files with what they were when the store opened them.

    path: of the database, absolute. Make the watch when the connections are open, and close it after them. One thread
    at a time may call `check`, and none another method meanwhile. All raise OSError, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        real = path.resolve()  # SQLite keeps them beside the file that a link leads to
        self._log, self._shared = (real.with_name(f"{real.name}{suffix}") for suffix in BESIDE)
        self._beside = self._files_beside()
        self._file, self._size = self._file_now()
        self._main_fd = hold(path)
        try:
            self._shared_fd = hold(self._shared, os.O_RDWR)
        except BaseException:
            let_go(self._main_fd)
            raise
        self._held: tuple[int, ...] = (self._main_fd, self._shared_fd)
        self._shared_size = os.fstat(self._shared_fd).st_size

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise StoreUnavailableError if a write to the database would be lost. connection: one that writes."""
        file, size = self._file_now()
        if file != self._file:  # SQLite would write to the old file, which has no name and is lost at close
            raise StoreUnavailableError(f"{self._path}: another file has taken its place; restart to use that one")
        if size < self._size:
            self._check_length(size)
        if (beside := self._files_beside()) != self._beside:
            self._give_up_log(connection, beside)
        self._check_log()

    def note_size(self) -> None:
        """Note the database's size after a write."""
        with suppress(OSError):
            self._size = self._path.stat().st_size

    def is_shared_memory_cut(self) -> bool:
        """Return whether the shared memory was cut short, so that `restore_shared_memory` must come before any use."""
        size = os.fstat(self._shared_fd).st_size
        if size >= self._shared_size:
            self._shared_size = size
        return size < self._shared_size

    def restore_shared_memory(self) -> None:
        """Give shared memory that was cut short its size back, such that SQLite reads the log anew.

        No connection of this process may be in use meanwhile.
        """
        if not self.is_shared_memory_cut():
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._shared_fd, 0, self._shared_size)  # this never makes it smaller
        else:  # macOS
            os.ftruncate(self._shared_fd, self._shared_size)
        os.pwrite(self._shared_fd, bytes(2 * _INDEX_HEADER), 0)  # zeros say that it describes no log yet
        logger.warning("agentspec: %s was cut short while in use, and is made anew from the log", self._shared)

    def close(self) -> None:
        """Let go of the descriptors. Does nothing the second time."""
        held, self._held = self._held, ()
        for descriptor in held:
            let_go(descriptor)

    def _file_now(self) -> tuple[FileId, int]:
        """Return the id of the file at the database's path, and its size in bytes.

        Raises StoreUnavailableError if there is no file, or an empty one: its pages are gone, so anything that SQLite
        wrote there would be useless.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError as error:
            raise StoreUnavailableError(
                f"{self._path}: {error.strerror}: it was removed while in use; put it back, or restart all that use it"
                " to begin a new one"
            ) from None
        if found.st_size == 0:
            raise StoreUnavailableError(
                f"{self._path}: it was emptied while in use; stop all that use it, and remove it"
            )
        return file_id(found), found.st_size

    def _check_length(self, size: int) -> None:
        """Raise StoreUnavailableError if a file that shrank to ``size`` bytes has lost pages.

        SQLite would not notice: it writes beyond the end and leaves holes in place of the lost pages. A file that was
        trimmed is as long as its header says. While another process moves its log into the file, the header may say
        more for a moment; the next write checks again.
        """
        header = os.pread(self._main_fd, 32, 0)
        page_bytes, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
        if len(header) < 32 or size < pages * _page_bytes(page_bytes):
            raise StoreUnavailableError(
                f"{self._path}: it was cut short while in use; stop all that use it, and move it away"
            )

    def _files_beside(self) -> tuple[FileId | None, ...]:
        """Return the ids of the files that SQLite keeps beside a database, by BESIDE; None for a missing one."""
        found: list[FileId | None] = []
        for path in (self._log, self._shared):
            try:
                status = path.stat()
            except FileNotFoundError:
                found.append(None)
            else:
                found.append(file_id(status))
        return tuple(found)

    def _give_up_log(self, connection: sqlite3.Connection, beside: tuple[FileId | None, ...]) -> None:
        """Move the write-ahead log into the file, and raise StoreUnavailableError: the log was removed or replaced.

        Such a log has no name, so a kill would lose its records. If another process has made new files, the log is not
        moved, because that could damage what the other process writes. beside: the files beside the database now.
        """
        both = tuple(zip((self._log.name, self._shared.name), beside, self._beside, strict=True))
        if all(found in (None, known) for _, found, known in both):
            empty_log(connection)
        names = " and ".join(name for name, found, known in both if found != known)
        raise StoreUnavailableError(
            f"{self._path}: {names} beside it was removed or replaced while in use; restart all that use it"
        )

    def _check_log(self) -> None:
        """Raise StoreUnavailableError if the log has fewer frames than the shared memory says.

        SQLite would write behind the gap, and at last fill the file's pages from the gap.
        """
        header = self._index_header()
        frames, page = (int.from_bytes(header[at:end], sys.byteorder) for at, end in ((16, 20), (14, 16)))
        if not frames or _size_of(self._log) >= _LOG_HEADER + frames * (_FRAME_HEADER + _page_bytes(page)):
            return
        if self._index_header() == header:  # otherwise another process has moved the log into the file meanwhile
            why = f"{self._log.name} beside it was cut short while in use, and what it held is lost"
            raise StoreUnavailableError(f"{self._path}: {why}; restart all that use it")

    def _index_header(self) -> bytes:
        return os.pread(self._shared_fd, _INDEX_HEADER, 0)


def _size_of(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _page_bytes(said: int) -> int:
    """Return the bytes of a page as a file's header says it: 65,536 does not fit there."""
    return 65_536 if said == 1 else said
