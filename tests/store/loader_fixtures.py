"""Provide a loader on a store that fails on demand."""

from collections.abc import Iterator

import pytest

from agentspec.cache.store import BackgroundLoader, CircuitBreaker, Entry, Wanted
from agentspec.errors import StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, entry_of, turn

CORPUS = Wanted(NS, "tenant")


@pytest.fixture
def store() -> Iterator[FlakyStore]:
    opened = FlakyStore()
    yield opened
    opened.gate.set()


@pytest.fixture
def loader(store: FlakyStore) -> Iterator[BackgroundLoader]:
    breaker = CircuitBreaker(first_pause=0.02, max_pause=0.05, retry_delay=0.001)
    started = BackgroundLoader(store, breaker=breaker)
    yield started
    started.close()


def session(name: str) -> Wanted:
    return Wanted(NS, "tenant", session=name)


def fill(store: FlakyStore, count: int, sessions: int = 3) -> None:
    """Append turns 0 to count - 1, to the sessions in rotation."""
    for number in range(count):
        store.append(NS, [entry_of(turn(f"s{number % sessions}", number, group=f"g{number % 2}"))])
    store.appended.clear()


class SlowSession(FlakyStore):
    """Time out on reads of the session `broken`."""

    broken = "slow"

    def read(self, namespace: str, *, session: str | None = None, **names: object) -> Iterator[Entry]:
        if session == self.broken:
            raise StoreUnavailableError("timed out")
        return super().read(namespace, session=session, **names)  # type: ignore[arg-type]
