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
        name = f"{record.writer}:{record.number}"
        return NewEntry(record.session, encode(record), record.shared_by, name, record.log_owner)


@dataclass(frozen=True, slots=True)
class StorePart:
    """Name a part of the store that is away, as ``Store.part`` does."""

    name: str

    def __str__(self) -> str:
        return "a part of the store"


@dataclass(frozen=True, slots=True)
class RefusedLog:
    """Name a log that the store refuses."""

    namespace: str

    def __str__(self) -> str:
        return f"the log {self.namespace}"


Target = StorePart | RefusedLog
"""What records wait for."""

_PAUSE = 1.0
"""Seconds until a target is tried again, at first."""
_REFUSALS = 5
"""After so many refused records of a log in a row, the store counts as refusing the log."""
REFUSED_LOGS = 1024
"""Most refused logs that are remembered while no record waits for them, with about 1.5 kB each."""


@dataclass(slots=True)
class _Waiting:
    """Hold the appends that wait for one target, each with records of one log, and the number of appends of each log.

    The appends are in the order of their first records' numbers.
    """

    target: Target
    breaker: CircuitBreaker
    appends: deque[list[QueuedRecord]] = field(default_factory=deque)
    logs: Counter[str] = field(default_factory=Counter)

    @property
    def takes_nothing(self) -> bool:
        """Return whether this is a log whose latest record was refused, be it the first one."""
        return isinstance(self.target, RefusedLog) and self.breaker.failing

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
    """Hold appends by what they wait for. Not thread-safe.

    That is a part of the store or, when the store has refused a record of a log, this log until the store takes one of
    its records. An append is sent again unchanged, so that a store can recognise it if only its answer was lost. Each
    log keeps its order.
    """

    def __init__(self) -> None:
        self._waiting: dict[Target, _Waiting] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many records wait."""
        return self._count

    def is_part_away(self) -> bool:
        """Return whether a part of the store is away; refused logs do not count."""
        return any(isinstance(target, StorePart) for target in self._waiting)

    def refused_logs(self) -> int:
        """Return how many logs the store refuses."""
        return sum(map(self.is_refused, self._waiting))

    def is_refused(self, target: Target) -> bool:
        """Return whether a target is a log that counts as refused."""
        waiting = self._waiting.get(target)
        return isinstance(target, RefusedLog) and waiting is not None and waiting.breaker.state != "closed"

    def target_of(self, namespace: str, part_of: Callable[[str], str]) -> Target | None:
        """Return what a log's records wait for; None if they need not wait.

        part_of(namespace): returns the part of the store that holds a log now.
        """
        if not self._waiting:
            return None
        if (log := RefusedLog(namespace)) in self._waiting:
            return log
        for target, waiting in self._waiting.items():
            if namespace in waiting.logs:  # even if the log has moved, so that its records keep their order
                return target
        part = StorePart(part_of(namespace))
        return part if part in self._waiting else None

    def add(self, target: Target, items: Sequence[QueuedRecord], *, again: bool = False) -> None:
        """Let an append wait, behind the others, or in its former place if ``again``. Add its target if it is new."""
        waiting = self._latest(target)
        if items:
            (waiting.put_back if again else waiting.add)(list(items))
            self._count += len(items)

    def breaker_of(self, target: Target) -> CircuitBreaker:
        """Return the breaker of a target. Add the target if it is new."""
        return self._latest(target).breaker

    def due(self) -> list[tuple[Target, CircuitBreaker]]:
        """Return the targets that may be tried now."""
        breakers = [(waiting.target, waiting.breaker) for waiting in self._to_try() if waiting.breaker.wait() == 0.0]
        return [(target, breaker) for target, breaker in breakers if breaker.state != "open" or breaker.allow()]

    def targets(self) -> list[tuple[Target, CircuitBreaker]]:
        """Return all parts that are away, and all logs that were refused."""
        return [(target, waiting.breaker) for target, waiting in self._waiting.items()]

    def wait(self) -> float | None:
        """Return how many seconds to wait until a target may be tried; None if there is none to try."""
        return min((waiting.breaker.wait() for waiting in self._to_try()), default=None)

    def take(self, target: Target) -> list[QueuedRecord]:
        """Take the first append that waits for a target. Return [] if there is none: then a part is back.

        A log stays refused until the store has taken a record of it.
        """
        waiting = self._waiting[target]
        if not waiting.appends:
            if not waiting.takes_nothing:
                del self._waiting[target]
            return []
        items = waiting.take()
        self._count -= len(items)
        return items

    def take_other(self, target: Target, session: str | None) -> list[QueuedRecord]:
        """Take the first record that waits for a target and is not of this session. Return [] if there is none."""
        items = self._waiting[target].take_other(session)
        self._count -= len(items)
        return items

    def records(self) -> Iterator[QueuedRecord]:
        """Yield the records that wait."""
        for waiting in self._waiting.values():
            for append in waiting.appends:
                yield from append

    def oldest(self) -> int | None:
        """Return the lowest number of a record that waits."""
        return min((waiting.appends[0][0].number for waiting in self._with_records()), default=None)

    def drop_oldest(self) -> QueuedRecord:
        """Remove the record with the lowest number, and return it. There must be one."""
        self._count -= 1
        return min(self._with_records(), key=lambda waiting: waiting.appends[0][0].number).take_record()

    def forget(self, session: str) -> list[QueuedRecord]:
        """Remove the records of a session, and return them."""
        gone: list[QueuedRecord] = []
        for waiting in self._waiting.values():
            appends, waiting.appends, waiting.logs = waiting.appends, deque(), Counter()
            for append in appends:
                gone += [item for item in append if item.record.session == session]
                if kept := [item for item in append if item.record.session != session]:
                    waiting.add(kept)
        self._count -= len(gone)
        return gone

    def _latest(self, target: Target) -> _Waiting:
        """Return what waits for a target, and make it the latest one.

        To add a target, the call may forget refused logs for which no record waits. If the store still refuses one, its
        next record shows that.
        """
        waiting = self._waiting.pop(target, None)
        if waiting is None:
            self._make_room()
            threshold = _REFUSALS if isinstance(target, RefusedLog) else 1
            waiting = _Waiting(target, CircuitBreaker(threshold=threshold, first_pause=_PAUSE))
        self._waiting[target] = waiting
        return waiting

    def _make_room(self) -> None:
        """Forget refused logs for which no record waits, those refused longest ago first, until one more has room."""
        idle = [name for name, waiting in self._waiting.items() if not waiting.appends and waiting.takes_nothing]
        for name in idle[: max(0, len(idle) + 1 - REFUSED_LOGS)]:
            del self._waiting[name]

    def _with_records(self) -> list[_Waiting]:
        return [waiting for waiting in self._waiting.values() if waiting.appends]

    def _to_try(self) -> list[_Waiting]:
        """Return what waits for targets to try: all but refused logs for which no record waits."""
        return [waiting for waiting in self._waiting.values() if waiting.appends or not waiting.takes_nothing]
