"""Spread the entries of a Redis log over its shards, and make and read the cursors of entries."""

import zlib
from collections.abc import Sequence

from agentspec.cache.store.base import bad_cursor, check_namespace
from agentspec.cache.store.redis.client import RedisClient
from agentspec.cache.store.redis.shard import START, Id, cursor, id_of, parsed, wire


class Layout:
    """Spread each log's sessions over ``shards`` sets of keys, each with a hash tag of its own.

    A shard's place is its number, from 0. A cursor names an entry by its id. In a log of several shards it also names
    the place, and the id up to which each shard was read.
    """

    def __init__(self, prefix: str, shards: int) -> None:
        self.shards = shards
        self._prefix = prefix

    def channel(self, namespace: str) -> str:
        """Return the channel on which a log's appends and erasures are published."""
        return f"{self._prefix}:{namespace}"

    def places(self, place: int | None = None) -> Sequence[int]:
        """Return the places of all shards, or the given one alone."""
        return range(self.shards) if place is None else [place]

    def tags(self, namespace: str, place: int | None = None) -> list[str]:
        """Return the prefixes of the keys of a log's shards: of all shards, or of the one at a place."""
        name = f"{self._prefix}:{check_namespace(namespace)}"
        names = [name] if self.shards == 1 else [f"{name}:{place}" for place in self.places(place)]
        return [f"{{{name}}}:3:" for name in names]

    def place_of(self, session: str) -> int | None:
        """Return the place of a session's shard; None for "": entries without a session are in all shards."""
        if self.shards == 1:
            return 0
        return zlib.crc32(session.encode("utf-8", "surrogatepass")) % self.shards if session else None

    def part(self, client: RedisClient, namespace: str) -> str:
        """Return the parts of the server that hold a log, as ``Store.part`` does."""
        return ",".join(sorted({client.part(tag) for tag in self.tags(namespace)}))

    def ends(self, client: RedisClient, namespaces: Sequence[str]) -> dict[str, list[Id]]:
        """Return, by log, the id of the newest entry of each shard; START for an empty shard."""
        tags = [tag for namespace in namespaces for tag in self.tags(namespace)]
        rows = client.commands(("XREVRANGE", f"{tag}log", "+", "-", "COUNT", 1) for tag in tags) if tags else []
        ends = iter([parsed(row[0][0]) if row else START for row in rows])
        return {namespace: [next(ends) for _ in range(self.shards)] for namespace in namespaces}

    def name(self, place: int, number: Id) -> str:
        """Return the cursor that names an entry and says nothing about the other shards."""
        return cursor(number) if self.shards == 1 else f"{cursor(number)}.{place:02d}"

    def cursor(self, place: int, number: Id, reached: Sequence[Id]) -> str:
        """Return the cursor of an entry, with the ids up to which the shards were read if there are several."""
        several = "" if self.shards == 1 else "@" + ",".join(wire(one).decode() for one in reached)
        return self.name(place, number) + several

    def read_cursor(self, name: str, at: str | None) -> list[Id]:
        """Return the id up to which a cursor has read each shard. Raises InvalidInputError, naming the argument."""
        own, several, rest = (at or "").partition("@")
        if not several:
            return [id_of(name, own) if own else START] * self.shards
        ids = [id_of(name, one) for one in rest.split(",")]
        if len(ids) != self.shards:
            raise bad_cursor(name, at or "")
        return ids
