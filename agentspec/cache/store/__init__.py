"""Keep finished turns and messages as records in a store, from which suffix indexes and sessions are restored.

``open_store(url)``          a Store: SQLite, Redis or memory
``LogNames``                 the names of a model's logs, one for each tenant
``encode``, ``decode``       records as checksummed, versioned bytes
``RecordReader``             records from a log
``BackgroundWriter``, ``BackgroundLoader``, ``Follower``, ``StoreJobs``  threads that use a store: no decode path waits
"""

from typing import TYPE_CHECKING

from agentspec.cache.store.background.breaker import CircuitBreaker
from agentspec.cache.store.background.followed import FollowerStats
from agentspec.cache.store.background.follower import Follower
from agentspec.cache.store.background.jobs import StoreJobs
from agentspec.cache.store.background.loader import BackgroundLoader, LoaderStats
from agentspec.cache.store.background.ready import Loaded, ReadyRecords, Wanted
from agentspec.cache.store.background.waiting_records import WriterStats
from agentspec.cache.store.background.writer import BackgroundWriter
from agentspec.cache.store.base import (
    NEW_SESSION,
    QUEUE_BYTES,
    Entry,
    Erasure,
    Losses,
    NewEntry,
    Retention,
    SessionUsage,
    Store,
    Trimmed,
    Usage,
    trim_sessions,
)
from agentspec.cache.store.codec import decode, encode
from agentspec.cache.store.naming import LogNames, frame, mac, model_key
from agentspec.cache.store.record_reader import RecordReader
from agentspec.cache.store.records import CutRecord, EraseRecord, MessageRecord, Record, TurnRecord
from agentspec.cache.store.sqlite.store import MemoryStore, SQLiteStore
from agentspec.cache.store.urls import (
    can_write,
    check_layout,
    default_store_url,
    open_store,
    redact,
    snapshot_path,
    sqlite_path,
)

if TYPE_CHECKING:
    from agentspec.cache.store.redis.store import RedisStore

__all__ = [
    "NEW_SESSION",
    "QUEUE_BYTES",
    "BackgroundLoader",
    "BackgroundWriter",
    "CircuitBreaker",
    "CutRecord",
    "Entry",
    "EraseRecord",
    "Erasure",
    "Follower",
    "FollowerStats",
    "Loaded",
    "LoaderStats",
    "LogNames",
    "Losses",
    "MemoryStore",
    "MessageRecord",
    "NewEntry",
    "ReadyRecords",
    "Record",
    "RecordReader",
    "RedisStore",
    "Retention",
    "SQLiteStore",
    "SessionUsage",
    "Store",
    "StoreJobs",
    "Trimmed",
    "TurnRecord",
    "Usage",
    "Wanted",
    "WriterStats",
    "can_write",
    "check_layout",
    "decode",
    "default_store_url",
    "encode",
    "frame",
    "mac",
    "model_key",
    "open_store",
    "redact",
    "snapshot_path",
    "sqlite_path",
    "trim_sessions",
]


def __getattr__(name: str) -> object:
    if name != "RedisStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentspec.cache.store.redis.store import RedisStore  # imports redis, which takes long, only where it is used

    return RedisStore
