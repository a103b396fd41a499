"""Stand in for a process that follows the logs of others."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentspec.cache.store import CircuitBreaker, Follower, TurnRecord
from agentspec.errors import StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, number_of, wait_until

OTHER = "fedcba9876543210"
FOLLOWER = "agentspec.cache.store.background.follower"
LIFE_SECONDS = f"{FOLLOWER}.LIFE_SECONDS"


@dataclass
class Process:
    """Hold what a follower needs of its process, and record what it tells the process."""

    store: FlakyStore
    number: int = 0
    unwritten: set[str] = field(default_factory=set)  # sessions with turns that wait for the store
    erased: list[tuple[str | None, str]] = field(default_factory=list)
    erased_again: list[tuple[str | None, str]] = field(default_factory=list)
    refusals: int = 0  # how often erasing again fails
    faults: int = 0  # how often erasing here fails
    forgotten: list[str | None] = field(default_factory=list)
    busy: set[str | None] = field(default_factory=set)
    learned: list[int] = field(default_factory=list)
    learning_takes: float = 0.0
    may_learn: threading.Event = field(default_factory=threading.Event)  # learning waits for it
    taken: list[tuple[str, int]] = field(default_factory=list)
    taking_takes: float = 0.0

    def __post_init__(self) -> None:
        self.may_learn.set()
        self.follower = Follower(
            self.store,
            OTHER,
            take=self.take,
            forget_sessions=self.erase,
            unwritten=lambda: self.unwritten,
            erase_again=self.erase_again,
            learn=self.learn,
            forget_tenant=self.forget,
            max_logs=3,
            breaker=CircuitBreaker(threshold=2, first_pause=0.2, max_pause=0.2),
        )
        self.begin = self.follower.begin

    def erase(self, tenant: str | None, sessions: Sequence[str]) -> int:
        if self.faults > 0:
            self.faults -= 1
            raise MemoryError("no memory for it")
        self.taken = [(of, number) for of, number in self.taken if of not in sessions]
        self.erased += [(tenant, session) for session in sessions]
        return self.number

    def erase_again(self, tenant: str | None, session: str) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise StoreUnavailableError("busy")
        self.erased_again.append((tenant, session))

    def learn(self, record: TurnRecord) -> None:
        assert number_of(record) not in self.numbers()  # a process cannot learn from a turn that it has restored
        self.learned.append(number_of(record))
        assert self.may_learn.wait(60)
        time.sleep(self.learning_takes)

    def forget(self, tenant: str | None) -> bool:
        if tenant in self.busy:
            return False
        self.forgotten.append(tenant)
        return True

    def take(self, log: str, record: TurnRecord) -> None:
        if not self.follower.own.may_be_older(log, record.session):
            self.taken.append((record.session, number_of(record)))
        time.sleep(self.taking_takes)

    def numbers(self) -> list[int]:
        return [number for _, number in self.taken]

    def hear_of_an_erasure(self) -> None:
        """Follow the log, and apply another process's erasure of the session "s" after seven turns of this one."""
        self.begin(NS, "t")
        self.number = 7
        self.store.erase_session(NS, "s")
        self.wait(erased=1)

    def wait(self, **figures: Any) -> None:
        wait_until(lambda: all(getattr(self.follower.stats(), name) == value for name, value in figures.items()))


def hide(process: Process, monkeypatch: pytest.MonkeyPatch, *logs: str) -> set[str]:
    """Let a process hear of nothing in these logs. Returns their set, to be changed."""
    hidden, wait = set(logs), process.store.wait
    monkeypatch.setattr(
        process.store, "wait", lambda cursors, timeout: [name for name in wait(cursors, 0.05) if name not in hidden]
    )
    return hidden
