"""Store records in SQLite: in a file that several processes may share, or in this process's memory.

A file has a write-ahead log with ``synchronous=NORMAL``. Once an append returns, its records survive the death of the
process (kill -9). A power cut or kernel crash can lose the latest records but leaves the file consistent. The file must
not lie on a network file system.

Erased payloads leave no byte behind (file.py). Several engines may follow one file: `PRAGMA data_version`
changes when another connection has written.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from agentspec.cache.store import forks
from agentspec.cache.store.base import Retention
from agentspec.cache.store.sqlite.database import Connections, Database
from agentspec.cache.store.sqlite.entries import trim_slice
from agentspec.cache.store.sqlite.file import (
    OPENING,
    PAGE_SIZE,
    close_held,
    connect,
    create_schema,
    empty_log,
    enter_wal,
    pragma,
    prepare_file,
    store_errors,
)
from agentspec.cache.store.sqlite.watch import FileWatch
from agentspec.errors import StoreUnavailableError


class SQLiteStore(Database):
    """Implement Store in one file.

    Raises StoreVersionError for a file of another schema version and StoreError for a file of another program, and then
    does not change the file. Raises StoreUnavailableError if the file cannot be made or opened.
    """

    shared = True
    held_bytes = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        connections, self._files = self._open()
        super().__init__(str(path), connections)
        self._inherited = False  # from the process that this one was forked off, so that the file is to be opened anew
        forks.notify(self)

    def _open(self) -> tuple[Connections, FileWatch]:
        """Return the connections and the watch of the file. Raises as the constructor does."""
        path = self._path
        with OPENING, store_errors(str(path)), ExitStack() as undo:
            prepare_file(path)
            writer = undo.enter_context(closing(connect(str(path))))
            create_schema(writer, path)
            enter_wal(writer)
            empty_log(writer)  # a process that was killed while it erased may have left text in it
            reader, long_reader = (undo.enter_context(closing(connect(str(path)))) for _ in range(2))
            opened = Connections(writer, reader, long_reader), FileWatch(path.absolute())
            undo.pop_all()
            return opened

    def _begin_anew(self, whole: bool) -> None:
        if whole:  # SQLite must forget that this process had locks
            for connection in self._forget_connections():
                connection.close()
            close_held()
        super()._begin_anew(whole)
        self._inherited = whole

    def _reopen(self) -> None:
        """Open the file anew in a forked process. Raises as the constructor does."""
        if self._inherited:
            with self._alone():
                if self._inherited:
                    self._connections, self._files = self._open()
                    self._inherited = False

    def close(self) -> None:
        if self._inherited:
            with suppress(StoreUnavailableError), self._alone():
                self._inherited = False
        if self._connections is None:
            return
        try:
            self._make_ready()
        except StoreUnavailableError:  # the disk is full; the end of the process closes what would now end it
            return
        if self._close_connections():
            self._files.close()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        self._make_ready()
        with super()._write() as connection:
            self._files.check(connection)
            yield connection
            self._files.note_size()

    @contextmanager
    def _read(self, *, long: bool = False) -> Iterator[sqlite3.Connection]:
        self._make_ready()
        with super()._read(long=long) as connection:
            yield connection

    def _make_ready(self) -> None:
        """Open the file anew after a fork, and restore the memory that the log's users share if it was cut short."""
        self._reopen()
        with store_errors(self._name):
            if self._connections is not None and self._files.is_shared_memory_cut():
                with self._alone():
                    if self._connections is not None:
                        self._files.restore_shared_memory()


class MemoryStore(Database):
    """Implement Store in this process's memory, for tests and for servers that must not write to disk.

    The store deletes its oldest entries beyond ``max_bytes``. held_bytes: memory that it took at the latest append.
    """

    shared = False

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        connection = connect(":memory:")
        create_schema(connection, Path(":memory:"))
        super().__init__("memory://", Connections(connection, connection, connection))
        forks.notify(self)

    def _version(self, connection: sqlite3.Connection) -> int:
        return connection.total_changes  # there is no other connection

    def _make_room(self, connection: sqlite3.Connection) -> None:
        retention = Retention(bytes=self._max_bytes)
        while trim_slice(connection, retention):
            pass
        self.held_bytes = pragma(connection, "page_count") * PAGE_SIZE
