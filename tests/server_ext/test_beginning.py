"""Test that requests begin before their prompts are computed, so that indexing and loading run beside the prefill."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.cache import FinishedTurn
from agentspec.cache.store import encode
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.requests.turnover import Turnover
from agentspec.server_ext.session_questions import ImportRecords
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, RequestState, Step
from tests.server_ext.drafts import request
from tests.server_ext.plain_engine import in_memory
from tests.store.helpers import turn, wait_until

LENGTH = 20_000
VOCABULARY = 50_000
SOURCE = 15_000
"""Position in the prompt of the text that the prompt's end and the response repeat."""


class Server:
    """Run an engine with one row and a long prompt, of which only the last eight tokens repeat."""

    def __init__(self) -> None:
        settings = Settings(store="memory://", verify_cost=0.001)
        self.engine = DraftingEngine(settings, in_memory(settings, VOCABULARY))
        self.engine.warm_up()
        self.tokens = np.zeros((1, LENGTH + 100), np.int32)
        self.tokens[0, :LENGTH] = np.random.default_rng(0).permutation(VOCABULARY)[:LENGTH]
        self.tokens[0, LENGTH - 8 : LENGTH + 50] = self.tokens[0, SOURCE : SOURCE + 58]

    def new(self, name: str = "r", length: int = LENGTH, session: str | None = None) -> NewRequest:
        return NewRequest(name, self.tokens[0, :length], Identity(session=session))

    def step(self, length: int = LENGTH + 1, started: tuple[NewRequest, ...] = ()) -> list[int]:
        none = np.zeros(1, np.int32)
        batch = Batch(("r",), none)
        step = Step(batch, started, self.tokens, none + length, none + 16, none, num_draft_tokens=0)
        (draft,) = self.engine.propose(step)
        return draft

    @property
    def counters(self) -> Any:
        return self.engine.stats()["counters"]


def noted(monkeypatch: pytest.MonkeyPatch, *methods: tuple[Any, str]) -> list[str]:
    """Return a list that gets a method's name at each call. methods: (owner, name)."""
    order: list[str] = []

    def noting(name: str, call: Any) -> Any:
        def note(*args: Any, **names: Any) -> Any:
            order.append(name)
            return call(*args, **names)

        return note

    for owner, name in methods:
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    return order


@pytest.fixture
def server(clock_on: None) -> Iterator[Server]:
    made = Server()
    yield made
    made.engine.close()


def test_a_prompt_is_indexed_while_it_is_computed(server: Server) -> None:
    server.engine.begin([server.new()])
    wait_until(lambda: server.engine.cache.stats().pending == 0)
    assert server.step() == server.tokens[0, SOURCE + 9 : SOURCE + 25].tolist()
    assert server.counters["started"] == 1 and server.engine.knows("r", LENGTH)


def test_without_that_its_first_steps_have_no_drafts(server: Server) -> None:
    """This shows that the test above does not pass by itself, as indexing takes time."""
    assert server.step(started=(server.new(),)) == []


def test_streamed_input_begins_a_turn_before_its_prompt_is_computed(server: Server) -> None:
    server.engine.begin([server.new(length=100)])
    server.step(101)
    server.step(102)
    server.engine.begin([server.new(length=200)])  # its response so far is part of the prompt
    assert (server.counters["started"], server.counters["finished"]) == (2, 1) and server.engine.knows("r", 200)
    server.step(201)
    assert server.counters["started"] == 2 and server.engine.stats()["running"] == 1


def test_a_response_is_kept_if_its_caller_leaves_while_the_next_input_is_computed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then reports the end of the next response, which has no token."""
    kept: list[FinishedTurn | None] = []
    finish = server.engine.cache.finish

    def noting(*args: Any, **names: Any) -> Any:
        kept.append(turn := finish(*args, **names))
        return turn

    monkeypatch.setattr(server.engine.cache, "finish", noting)
    server.engine.begin([server.new(length=100)])
    for length in range(101, 111):
        server.step(length)
    server.engine.begin([server.new(length=200)])
    server.engine.finish("r", 0)
    server.engine.finish_if_idle()
    said = server.tokens[0, 100:109]  # the prompt has all tokens of the response but the last
    assert [turn and turn.response.tolist() for turn in kept] == [said.tolist()]
    assert server.engine.stats()["running"] == 0


def test_a_request_that_ends_before_its_first_token_leaves_nothing(server: Server) -> None:
    server.engine.begin([server.new()])
    server.engine.finish("r", 0)
    server.engine.finish_if_idle()
    assert server.engine.stats()["running"] == 0 and server.engine.cache.stats().requests == 0
    assert server.engine.cache.stats().tokens == 0


def test_an_error_costs_its_drafts_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine._turnover, "advance", broken)
        server.engine.begin([server.new()])
    assert server.step() == [] and server.counters["errors_begin"] == 1
    server.engine.finish("r", 1)
    server.engine.begin([server.new()])
    wait_until(lambda: len(server.step()) == 16)  # on a busy machine the start may be left to a step


def test_new_weights_begin_before_the_request_does(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    order = noted(monkeypatch, (server.engine.cache, "begin_weights"), (server.engine.cache, "start"))
    server.engine.note_new_weights()
    server.engine.begin([server.new()])
    server.step()
    assert order == ["begin_weights", "start"]


def test_what_was_loaded_of_a_session_comes_before_its_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the request would index again what its session is about to hold."""
    persistence = server.engine._persistence
    order = noted(monkeypatch, (persistence, "apply_loaded"), (server.engine.cache, "start"))
    server.engine.begin([server.new("other", session="other")])
    wait_until(lambda: persistence.stats()["loader"]["pending"] == 0)
    persistence.load_again(None, "s")
    wait_until(lambda: persistence.has_loaded_of(Identity(session="s")))
    server.engine.begin([server.new(session="t")])
    assert order == ["start", "start"]  # nothing of this session was loaded, only of others
    server.engine.begin([server.new("again", session="s")])
    assert order == ["start", "start", "apply_loaded", "start"]


def test_an_import_is_told_once_the_next_request_drafts_from_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed session is primed just before its first request, which must draft from the import already."""
    persistence = server.engine._persistence
    monkeypatch.setattr(persistence._loader, "_before_read", lambda *_: time.sleep(0.1))
    server.engine.sessions.begin("job", None, ImportRecords("s", None, [encode(turn("s", 1))], only_new=False))
    wait_until(lambda: server.engine.sessions.poll("job").get("value") == [1])
    assert persistence.has_loaded_of(Identity(session="s"))


def test_a_store_that_is_slow_to_read_holds_up_no_import_for_long(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.server_ext.stored_sessions._LOAD_SECONDS", 0.1)
    held = threading.Event()
    monkeypatch.setattr(server.engine._persistence._loader, "_before_read", lambda *_: held.wait(60))
    server.engine.sessions.begin("job", None, ImportRecords("s", None, [encode(turn("s", 1))], only_new=False))
    wait_until(lambda: server.engine.sessions.poll("job").get("value") == [1])
    held.set()


def test_a_step_does_no_more_than_is_likely_to_end_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end takes .3 ms."""
    now, done = [0.0], list[str]()

    def finish(state: RequestState, output_limit: int | None) -> None:
        now[0] += 3e-4
        done.append(state.request_id)

    clock = SimpleNamespace(thread_time=lambda: now[0], monotonic=time.monotonic)
    monkeypatch.setattr("agentspec.server_ext.requests.turnover.time", clock)
    turnover = Turnover(lambda *_: None, finish)
    for name in "abcd":
        turnover.end(request(name), 8, None)
    for seconds, ended in ((5e-4, ["a"]), (7e-4, ["a", "b", "c"])):
        turnover.advance(seconds)
        assert done == ended


def test_nothing_begins_where_drafting_is_switched_off() -> None:
    settings = Settings(store="memory://", enabled=False)
    engine = DraftingEngine(settings, in_memory(settings, VOCABULARY))
    engine.begin([NewRequest("r", [1, 2, 3], Identity())])
    assert not engine.knows("r", 3) and engine.stats()["running"] == 0
    engine.close()
