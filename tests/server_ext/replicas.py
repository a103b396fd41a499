"""Help the tests of several engines on one store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache.store import LogNames, RecordReader, TurnRecord, open_store
from agentspec.server_ext.engine import DraftingEngine, make_cache
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.session_questions import EraseSession
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from tests.store.helpers import LOGS, wait_until

TENANT = "t"
NS = LOGS.of(TENANT)


FOLLOWER = "agentspec.cache.store.background.follower"
LIFE_SECONDS = f"{FOLLOWER}.LIFE_SECONDS"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let followers be held up for 30 s: on a busy machine, a second would leave steps without drafts."""
    monkeypatch.setattr(LIFE_SECONDS, 30.0)


class Replica:
    """Run an engine on a store that others share. It takes steps as in vLLM's worker."""

    def __init__(self, url: str, snapshot: Path | None = None, preload: int = 100, logs: LogNames = LOGS) -> None:
        self.store = open_store(url)
        settings = Settings(verify_cost=0.001)
        self.persistence = Persistence(make_cache(settings, 100_000, 16), self.store, logs, preload)
        self.engine = DraftingEngine(settings, self.persistence, snapshot=snapshot)
        self.cache = self.engine.cache
        self.texts: dict[str, list[int]] = {}
        self.count = 0
        self.engine.warm_up()

    def begin(
        self, prompt: list[int], session: str | None = "s", group: str | None = None, tenant: str = TENANT
    ) -> str:
        self.count += 1
        name = f"r{self.count}"
        identity = Identity(tenant=tenant, session=session, group=group, session_name=session)
        self.texts[name] = list(prompt)
        self.step(NewRequest(name, np.array(prompt, np.int32), identity))
        return name

    def step(self, *started: NewRequest) -> dict[str, list[int]]:
        """Take one step of all requests, none of which gets tokens. Return their drafts."""
        names = list(self.texts)
        width = max([len(text) for text in self.texts.values()], default=0) + 1
        table = np.zeros((max(len(names), 1), width), np.int32)
        for row, name in enumerate(names):
            table[row, : len(self.texts[name])] = self.texts[name]
        lengths = np.array([len(self.texts[name]) for name in names], np.int32)
        room, none = np.full(len(names), 4, np.int32), np.zeros(len(names), np.int32)
        batch = Batch(tuple(names), np.arange(len(names), dtype=np.int32))
        step = Step(batch, list(started), table, lengths, room, none, 0)
        return dict(zip(names, self.engine.propose(step), strict=True))

    def end(self, name: str, response: list[int]) -> None:
        self.texts[name] += response
        self.step()
        del self.texts[name]
        self.engine.finish(name)
        self.engine.finish_if_idle()

    def say(self, prompt: list[int], response: list[int], session: str | None = "s", **names: str) -> None:
        self.end(self.begin(prompt, session, **names), response)

    def drafts(self, context: list[int], session: str | None = None, **names: str) -> list[int]:
        """Return the draft of a request with this prompt, after steps that index what waits."""
        name = self.begin(context, session, **names)
        try:
            self.cache.catch_up()
            return self.step()[name]
        finally:
            del self.texts[name]
            self.engine.finish(name, 0)
            self.engine.finish_if_idle()

    def follower(self, name: str) -> int:
        return int(self.persistence.stats()["follower"][name])

    def place(self, log: str = NS) -> str | None:
        """Return the cursor up to which the tenant's erasures are known."""
        assert self.persistence.snapshot_erasures is not None
        return self.persistence.snapshot_erasures.places().get(log)

    def wait(self, condition: Callable[[], object]) -> None:
        """Take steps until the condition holds."""
        wait_until(lambda: (self.step(), condition())[1])

    def stop(self) -> None:
        """Close the engine after it has read its own turns, so that its snapshot holds them."""
        assert self.persistence._writer.flush(60)
        wait_until(lambda: self.place() == self.store.newest(NS))
        self.engine.close()

    def erase(self, session: str) -> None:
        self.engine.sessions.begin(f"job-{session}", None, EraseSession(session, [TENANT]))
        answer: dict[str, Any] = {}  # it is told once
        wait_until(lambda: answer.update(self.engine.sessions.poll(f"job-{session}")) or answer)
        assert "error" not in answer, answer


Start = Callable[..., Replica]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with replicas_on(f"sqlite:///{tmp_path}/log.db") as start:
        yield start


@contextmanager
def replicas_on(url: str) -> Iterator[Start]:
    """Yield a function that starts a replica on a store. Close all of them at the end."""
    replicas: list[Replica] = []

    def start(**options: object) -> Replica:
        replicas.append(Replica(url, **options))  # type: ignore[arg-type]
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.engine.close()


def text(begin: int, count: int = 40) -> list[int]:
    return list(range(begin, begin + count))


def stored(replica: Replica) -> list[TurnRecord]:
    found = RecordReader().read(replica.store.read(NS))
    return [record for _, record in found if isinstance(record, TurnRecord)]


def meet(*replicas: Replica, session: str | None = "s", **names: str) -> None:
    """Run a request of the tenant on each replica, so that all follow its log and hold the session."""
    for number, replica in enumerate(replicas):
        replica.say([1, 2, 3], text(90_000 + 100 * number), session, **names)
        wait_until(partial(replica.follower, "logs"))
        assert replica.persistence._writer.flush(60)
