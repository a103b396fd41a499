"""Make the stores of the soak run fail and recover: a Redis server that is killed, an SQLite file that is locked."""

import sqlite3
from abc import ABC, abstractmethod
from pathlib import Path

from agentspec.testing.redis_server import RedisServer


class Place(ABC):
    """Run a store that can be made to fail. url: its store URL. spare_bytes: what it takes beside records."""

    url: str
    spare_bytes: int

    @abstractmethod
    def fail(self) -> None:
        """Begin an outage."""

    @abstractmethod
    def recover(self) -> None:
        """End the outage."""

    @abstractmethod
    def size(self) -> int:
        """Return what the store takes on disk or in memory, in bytes."""

    @abstractmethod
    def close(self) -> None:
        """Stop the store and remove its data."""


class RedisPlace(Place):
    """Run a Redis server, which an outage kills and its end restarts."""

    def __init__(self) -> None:
        self._server = RedisServer()
        self._server.start()
        self.url = self._server.url
        self._size = 0
        self.spare_bytes = self.size() + (1 << 20)  # an empty server, connections and scripts

    def fail(self) -> None:
        self._server.kill()

    def recover(self) -> None:
        self._server.start()

    def size(self) -> int:
        import redis

        try:
            with redis.Redis.from_url(self.url) as client:
                self._size = int(client.info("memory")["used_memory"])
        except redis.RedisError:
            pass  # during an outage the last size stands
        return self._size

    def close(self) -> None:
        self._server.close()


class SQLitePlace(Place):
    """Keep an SQLite file, which an outage locks from another connection."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "soak.db"
        self.url = f"sqlite:///{self._path}"
        self.spare_bytes = 4 << 20  # its write-ahead log
        self._lock: sqlite3.Connection | None = None

    def fail(self) -> None:
        self._lock = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=30)
        self._lock.execute("BEGIN EXCLUSIVE")

    def recover(self) -> None:
        if self._lock is not None:
            self._lock.execute("ROLLBACK")
            self._lock.close()
            self._lock = None

    def size(self) -> int:
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        self.recover()
