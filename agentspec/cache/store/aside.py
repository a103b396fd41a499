"""Hold records that wait for a part of a store that is away, so that those of other parts go on."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentspec.cache.store.base import NewEntry
from agentspec.cache.store.breaker import CircuitBreaker
from agentspec.cache.store.records import Record, TurnRecord, encode


@dataclass(frozen=True, slots=True)
class QueuedRecord:
    """Hold a record that is to be written: its number in the order of all, its log, and its size in bytes."""

    number: int
    namespace: str
    record: Record
    size: int

    def entry(self) -> NewEntry:
        """Return the record as an entry of its log. Raises InvalidInputError if it cannot be encoded."""
        record = self.record
        if not isinstance(record, TurnRecord):
            return NewEntry(record.session, encode(record))
        return NewEntry(record.session, encode(record), record.shared_by, f"{record.writer}:{record.number}")


@dataclass(slots=True)
class _Part:
    """Hold what waits for one part: appends, each of records of one log, and the logs that they belong to or did."""

    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(threshold=1, first_pause=1.0))
    appends: deque[list[QueuedRecord]] = field(default_factory=deque)
    logs: set[str] = field(default_factory=set)


class SetAside:
    """Hold appends by the part of the store that they wait for. Not thread-safe.

    An append is sent as it is, so that a store can recognise it if only its answer was lost. Each log keeps its order.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        """Return whether a part is away."""
        return bool(self._parts)

    def part_of(self, namespace: str, now: Callable[[str], str]) -> str | None:
        """Return the part that a log's records wait for, None if they don't. now: says which part has a log."""
        if not self._parts:
            return None
        for name, part in self._parts.items():
            if namespace in part.logs:  # even where the log has moved, so that its records keep their order
                return name
        name = now(namespace)
        return name if name in self._parts else None

    def add(self, part: str, items: Sequence[QueuedRecord], *, first: bool = False) -> CircuitBreaker:
        """Let an append wait, behind the others or before them. Return the breaker of its part."""
        held = self._parts.setdefault(part, _Part())
        if items:
            held.logs.add(items[0].namespace)
            (held.appends.appendleft if first else held.appends.append)(list(items))
            self._count += len(items)
        return held.breaker

    def due(self) -> list[tuple[str, CircuitBreaker]]:
        """Return the parts that may be tried now."""
        breakers = [(name, part.breaker) for name, part in self._parts.items() if part.breaker.wait() == 0.0]
        return [(name, breaker) for name, breaker in breakers if breaker.state == "closed" or breaker.allow()]

    def parts(self) -> list[tuple[str, CircuitBreaker]]:
        """Return all parts that are away."""
        return [(name, part.breaker) for name, part in self._parts.items()]

    def wait(self) -> float | None:
        """Return how many seconds to wait until a part may be tried; None if none is away."""
        return min((part.breaker.wait() for part in self._parts.values()), default=None)

    def take(self, part: str) -> list[QueuedRecord]:
        """Take the first append that waits for a part. If there is none, the part is not away any more."""
        held = self._parts[part]
        if not held.appends:
            del self._parts[part]
            return []
        items = held.appends.popleft()
        self._count -= len(items)
        return items

    def oldest(self) -> int | None:
        """Return the lowest number of a record that waits."""
        return min((part.appends[0][0].number for part in self._parts.values() if part.appends), default=None)

    def drop_oldest(self) -> QueuedRecord:
        """Remove the record with the lowest number."""
        waiting = [part.appends for part in self._parts.values() if part.appends]
        appends = min(waiting, key=lambda appends: appends[0][0].number)
        item = appends[0].pop(0)
        self._count -= 1
        if not appends[0]:
            appends.popleft()
        return item

    def forget(self, session: str) -> list[QueuedRecord]:
        """Remove the records of a session, and return them."""
        gone: list[QueuedRecord] = []
        for part in self._parts.values():
            appends, part.appends = part.appends, deque()
            for append in appends:
                gone += [item for item in append if item.record.session == session]
                if kept := [item for item in append if item.record.session != session]:
                    part.appends.append(kept)
        self._count -= len(gone)
        return gone
