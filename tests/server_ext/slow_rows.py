"""Step rows on a cache that starts and finishes requests slower than any step has time for."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from agentspec.cache.store import open_store
from agentspec.cache.store.codec import decode
from agentspec.cache.store.records import TurnRecord
from agentspec.server_ext.engine import DraftingEngine, make_cache
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from tests.store.helpers import LOGS

ROWS = 4
PROMPT = 5


def slow(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Make a call take `seconds` of CPU time."""

    def slowly(*args: Any, **names: Any) -> Any:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return call(*args, **names)

    return slowly


class Rows:
    """Hold rows of one token array. Each gets a token in each step. The cache takes longer than any step has."""

    def __init__(self, seconds: float = 3e-3, verify_cost: float | None = None) -> None:
        self.store = open_store("memory://")
        settings = Settings(store="memory://", verify_cost=verify_cost)
        self.persistence = Persistence(make_cache(settings, 1000, 16), self.store, LOGS, 0)
        self.engine = DraftingEngine(settings, self.persistence)
        self.engine.cache.start = slow(self.engine.cache.start, seconds)  # type: ignore[method-assign]
        self.engine.cache.finish = slow(self.engine.cache.finish, seconds)  # type: ignore[method-assign]
        self.tokens = np.arange(ROWS * 200, dtype=np.int32).reshape(ROWS, 200)
        self.lengths = dict[str, int]()
        self.rows = dict[str, int]()

    def begin(self, *ids: str, session: str | None = None) -> list[list[int]]:
        """Take a step in which requests begin; their names end in their rows."""
        for name in ids:
            self.rows[name], self.lengths[name] = int(name[-1]), PROMPT
        return self.step(*ids, session=session)

    def begin_first(self, *ids: str) -> None:
        """Begin requests in front of the forward pass of the next step; their names end in their rows."""
        for name in ids:
            self.rows[name], self.lengths[name] = int(name[-1]), PROMPT
        self.engine.begin([NewRequest(name, self.tokens[self.rows[name], :PROMPT], Identity()) for name in ids])

    def step(self, *started: str, session: str | None = None) -> list[list[int]]:
        for name in self.rows:
            self.lengths[name] += 1
        rows = np.array(list(self.rows.values()), np.int32)
        new = [NewRequest(name, self.tokens[self.rows[name], :PROMPT], Identity(None, session)) for name in started]
        none = np.zeros(len(rows), np.int32)
        lengths = np.array(list(self.lengths.values()), np.int32)
        batch = Batch(tuple(self.rows), rows)
        return self.engine.propose(Step(batch, new, self.tokens, lengths, none + 8, none, num_draft_tokens=0))

    def end(self, name: str, *, told: bool = True, may_be_shorter: bool = False, last: bool = True) -> None:
        """End a request. last: vLLM has no further step, if none runs."""
        text = self.tokens[self.rows.pop(name), : self.lengths.pop(name)].tolist()
        self.engine.finish(name, len(text) - PROMPT, (lambda: text) if told else None, may_be_shorter=may_be_shorter)
        if last:
            self.engine.finish_if_idle()

    @property
    def started(self) -> int:
        return self.engine.metrics.counters["started"]

    @property
    def finished(self) -> int:
        return self.engine.metrics.counters["finished"]

    def stored(self) -> list[TurnRecord]:
        """Return the turns in the store, in the order in which they came."""
        self.persistence._writer.flush(10.0)
        records = [decode(entry.payload) for entry in self.store.read(LOGS.of(None))]
        return [record for record in records if isinstance(record, TurnRecord)]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    """Return rows that never load from the store: a step that applies loaded turns would end fewer requests."""
    made = Rows()
    monkeypatch.setattr(made.persistence, "has_loaded", lambda: False)
    yield made
    made.engine.close()
