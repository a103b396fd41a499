"""Set records aside whose part of the store is away, or whose log it refuses, so that the others are still written."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agentspec.cache.store.background.breaker import CircuitBreaker
from agentspec.cache.store.base import NewEntry
from agentspec.cache.store.codec import encode
from agentspec.cache.store.records import Record, TurnRecord


@dataclass(frozen=True, slots=True)
class QueuedRecord:
    """Hold a record to write: its number in the order of all records, its log, and its size in bytes."""

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


_LOG = "log "
"""Prefix of the name of a part that is one refused log. No part of a store has a space in its name."""
_PAUSE = 1.0
"""Seconds until a part or a log is tried again, at first."""
_REFUSALS = 5
"""After so many refused records of a log in a row, the store counts as refusing the log."""
REFUSED_LOGS = 1024
"""Most refused logs that are remembered while no record waits for them, with about 1.5 kB each."""


@dataclass(slots=True)
class _Part:
    """Hold the appends that wait for one part, each with records of one log, and the number of appends of each log.

    The appends are in the order of their first records' numbers.
    """

    breaker: CircuitBreaker
    appends: deque[list[QueuedRecord]] = field(default_factory=deque)
    logs: Counter[str] = field(default_factory=Counter)

    def add(self, items: list[QueuedRecord]) -> None:
        """Let an append wait."""
        number, place = items[0].number, len(self.appends)
        while place and self.appends[place - 1][0].number > number:
            place -= 1
        self.appends.insert(place, items)
        self.logs[items[0].namespace] += 1

    def put_back(self, items: list[QueuedRecord]) -> None:
        """Let an append wait again. Divide an append of its log that has records from before it and from behind it."""
        log, number = items[0].namespace, items[0].number
        for append in self.appends:
            if append[0].namespace == log and append[0].number < number < append[-1].number:
                behind = [item for item in append if item.number > number]
                del append[-len(behind) :]
                self.add(behind)
                break
        self.add(items)

    def take(self) -> list[QueuedRecord]:
        """Remove the first append, and return it. Forgets a log of which no other waits, because there may be many."""
        items = self.appends.popleft()
        self._note_gone(items[0].namespace)
        return items

    def take_record(self) -> QueuedRecord:
        """Remove the first record of the first append, and return it."""
        item, *rest = self.take()
        if rest:
            self.add(rest)
        return item

    def take_other(self, session: str | None) -> list[QueuedRecord]:
        """Remove the first record that is not of a session. Return it as an append of its own; [] if there is none."""
        for place, append in enumerate(self.appends):
            for index, item in enumerate(append):
                if item.record.session != session:
                    del append[index]
                    if not append:
                        del self.appends[place]
                        self._note_gone(item.namespace)
                    return [item]
        return []

    def _note_gone(self, namespace: str) -> None:
        self.logs[namespace] -= 1
        if not self.logs[namespace]:
            del self.logs[namespace]


class SetAside:
    """Hold appends by the part of the store that they wait for. Not thread-safe.

    When the store refuses a record of a log, the log becomes a part of its own (``log_part``) until the store takes one
    of its records. An append is sent again unchanged, so that a store can recognise it if only its answer was lost.
    Each log keeps its order.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many records wait."""
        return self._count

    def is_part_away(self) -> bool:
        """Return whether a part of the store is away; refused logs do not count."""
        return any(not is_log(name) for name in self._parts)

    def refused_logs(self) -> int:
        """Return how many logs the store refuses."""
        return sum(map(self.is_refused, self._parts))

    def is_refused(self, part: str) -> bool:
        """Return whether a part is a log that counts as refused."""
        return is_log(part) and part in self._parts and self._parts[part].breaker.state != "closed"

    def part_of(self, namespace: str, current_part: Callable[[str], str]) -> str | None:
        """Return the part that a log's records wait for; None if they need not wait.

        current_part(namespace): returns the part of the store that holds a log now.
        """
        if not self._parts:
            return None
        if (alone := log_part(namespace)) in self._parts:
            return alone
        for name, part in self._parts.items():
            if namespace in part.logs:  # even if the log has moved, so that its records keep their order
                return name
        name = current_part(namespace)
        return name if name in self._parts else None

    def add(self, part: str, items: Sequence[QueuedRecord], *, again: bool = False) -> CircuitBreaker:
        """Let an append wait, behind the others, or in its former place if ``again``. Return the breaker of its part.

        Without ``items``, only make the part. To make room, the call may forget refused logs for which no record waits.
        If the store still refuses one, its next record shows that.
        """
        held = self._parts.pop(part, None)
        if held is None:
            self._make_room()
            breaker = CircuitBreaker(threshold=_REFUSALS if is_log(part) else 1, first_pause=_PAUSE)
            held = _Part(breaker)
        self._parts[part] = held  # the latest is the last
        if items:
            (held.put_back if again else held.add)(list(items))
            self._count += len(items)
        return held.breaker

    def due(self) -> list[tuple[str, CircuitBreaker]]:
        """Return the parts that may be tried now."""
        breakers = [(name, part.breaker) for name, part in self._waited_for() if part.breaker.wait() == 0.0]
        return [(name, breaker) for name, breaker in breakers if breaker.state != "open" or breaker.allow()]

    def parts(self) -> list[tuple[str, CircuitBreaker]]:
        """Return all parts that are away."""
        return [(name, part.breaker) for name, part in self._parts.items()]

    def wait(self) -> float | None:
        """Return how many seconds to wait until a part may be tried; None if there is none to try."""
        return min((part.breaker.wait() for _, part in self._waited_for()), default=None)

    def take(self, part: str) -> list[QueuedRecord]:
        """Take the first append that waits for a part. Return [] if there is none: then the part is not away any more.

        A log stays refused until the store has taken a record of it.
        """
        held = self._parts[part]
        if not held.appends:
            if not _takes_nothing(part, held):
                del self._parts[part]
            return []
        items = held.take()
        self._count -= len(items)
        return items

    def take_other(self, part: str, session: str | None) -> list[QueuedRecord]:
        """Take the first record that waits for a part and is not of this session. Return [] if there is none."""
        items = self._parts[part].take_other(session)
        self._count -= len(items)
        return items

    def records(self) -> Iterator[QueuedRecord]:
        """Yield the records that wait."""
        for part in self._parts.values():
            for append in part.appends:
                yield from append

    def oldest(self) -> int | None:
        """Return the lowest number of a record that waits."""
        return min((part.appends[0][0].number for part in self._parts.values() if part.appends), default=None)

    def drop_oldest(self) -> QueuedRecord:
        """Remove the record with the lowest number, and return it. There must be one."""
        waiting = [part for part in self._parts.values() if part.appends]
        self._count -= 1
        return min(waiting, key=lambda part: part.appends[0][0].number).take_record()

    def forget(self, session: str) -> list[QueuedRecord]:
        """Remove the records of a session, and return them."""
        gone: list[QueuedRecord] = []
        for part in self._parts.values():
            appends, part.appends, part.logs = part.appends, deque(), Counter()
            for append in appends:
                gone += [item for item in append if item.record.session == session]
                if kept := [item for item in append if item.record.session != session]:
                    part.add(kept)
        self._count -= len(gone)
        return gone

    def _make_room(self) -> None:
        """Forget refused logs for which no record waits, those refused longest ago first, until one more has room."""
        idle = [name for name, part in self._parts.items() if not part.appends and _takes_nothing(name, part)]
        for name in idle[: max(0, len(idle) + 1 - REFUSED_LOGS)]:
            del self._parts[name]

    def _waited_for(self) -> list[tuple[str, _Part]]:
        """Return the parts to try: all but refused logs for which no record waits."""
        return [(name, part) for name, part in self._parts.items() if part.appends or not _takes_nothing(name, part)]


def _takes_nothing(name: str, part: _Part) -> bool:
    """Return whether a part is a log whose latest record was refused, be it the first one."""
    return is_log(name) and part.breaker.failing


def log_part(namespace: str) -> str:
    """Return the name of the part that consists of one refused log."""
    return _LOG + namespace


def is_log(part: str) -> bool:
    """Return whether a part is one refused log, by its name."""
    return part.startswith(_LOG)
