"""Token logs: what was said is kept as records in a store, and trees are rebuilt from them.

``open_store(url)``    a Store: SQLite, Redis or memory
``namespace(...)``     which log: model, tokenizer and tenant
``encode``/``decode``  records as checksummed, versioned bytes
``BackgroundWriter``, ``BackgroundLoader``  all that a decode path may touch: they never wait for a store
"""

from agentspec.cache.store.base import Entry, Store
from agentspec.cache.store.breaker import CircuitBreaker
from agentspec.cache.store.codec import decode, encode, encode_message, encode_turn
from agentspec.cache.store.loader import BackgroundLoader, LoaderStats
from agentspec.cache.store.memory import MemoryStore
from agentspec.cache.store.naming import namespace
from agentspec.cache.store.reader import RecordReader
from agentspec.cache.store.records import MessageRecord, Record, TurnRecord
from agentspec.cache.store.redis_store import RedisStore
from agentspec.cache.store.sqlite import SQLiteStore
from agentspec.cache.store.urls import open_store, redact
from agentspec.cache.store.writer import BackgroundWriter, WriterStats

__all__ = [
    "BackgroundLoader",
    "BackgroundWriter",
    "CircuitBreaker",
    "Entry",
    "LoaderStats",
    "MemoryStore",
    "MessageRecord",
    "Record",
    "RecordReader",
    "RedisStore",
    "SQLiteStore",
    "Store",
    "TurnRecord",
    "WriterStats",
    "decode",
    "encode",
    "encode_message",
    "encode_turn",
    "namespace",
    "open_store",
    "redact",
]
