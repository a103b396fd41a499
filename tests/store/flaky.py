"""Help the tests of the background writer: a store that fails as told, and what it holds."""

from collections.abc import Callable, Iterator

import pytest

from agentspec.cache.store import CircuitBreaker, NewEntry, decode
from tests.store.helpers import NS, FlakyStore, number_of


@pytest.fixture
def store() -> Iterator[FlakyStore]:
    opened = FlakyStore()
    yield opened
    opened.gate.set()


def quick() -> CircuitBreaker:
    return CircuitBreaker(first_pause=0.02, max_pause=0.05, retry_delay=0.001)


def stored(store: FlakyStore) -> list[int]:
    return [number_of(decode(entry.payload)) for entry in store.read(NS)]


def refuse(store: FlakyStore, error: Exception, never: Callable[[int], bool]) -> None:
    """Let a store raise `error` for appends with a record for whose number `never` returns True."""
    original = store.append

    def picky(namespace: str, entries: list[NewEntry]) -> None:
        if any(never(number_of(decode(payload))) for _, payload, *_ in entries):
            raise error
        original(namespace, entries)

    store.append = picky  # type: ignore[method-assign,assignment]
