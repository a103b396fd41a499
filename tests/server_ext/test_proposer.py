"""The engine-side logic without vLLM: real trees, a real store, plain steps."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache.store import open_store
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.metrics import api_request_id
from agentspec.server_ext.persistence import Persistence
from agentspec.server_ext.proposer import NewRequest, Proposer, Step
from agentspec.server_ext.settings import Settings

TEXT = list(range(100, 160))


class Engine:
    """The least of an engine: requests whose output is given, verified greedily against the drafts."""

    def __init__(self, url: str = "memory://", tenant: str | None = None, record: Path | None = None) -> None:
        settings = Settings(tenant=tenant, store=url, record=str(record) if record else None)
        self.store = open_store(url)
        self.proposer = Proposer(settings, Persistence(self.store, "ns", tenant, 100), 1000, 16)
        self.proposer.warm_up()
        self.tenant = tenant

    def run(self, request_id: str, prompt: Sequence[int], output: Sequence[int], session: str | None = None) -> int:
        """Decode ``output``; returns the number of steps."""
        tokens = np.zeros((1, len(prompt) + len(output) + 32), dtype=np.int32)
        full = [*prompt, *output]
        length, draft, steps = len(prompt), [0][:0], 0
        while length < len(full):
            accepted = 0
            while accepted < len(draft) and length + accepted < len(full) - 1:
                if draft[accepted] != full[length + accepted]:
                    break
                accepted += 1
            new = length + accepted + 1
            tokens[0, :new] = full[:new]
            started = [] if steps else [NewRequest(request_id, prompt, Identity(self.tenant, session))]
            step = Step(
                started=started,
                request_ids=[request_id],
                tokens=tokens,
                rows=np.array([0], np.int32),
                lengths=np.array([new], np.int32),
                room=np.array([max(0, len(full) - new - 1)], np.int32),
                scheduled=np.array([len(draft)], np.int32),
            )
            (draft,) = self.proposer.propose(step)
            length, steps = new, steps + 1
        self.proposer.finish(request_id, len(output))
        return steps


def test_a_second_turn_drafts_from_the_first() -> None:
    engine = Engine()
    first = engine.run("a", [1, 2, 3], TEXT, session="s")
    second = engine.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s")
    assert first == len(TEXT)
    assert second < first / 3


def test_another_session_without_tenant_draws_nothing() -> None:
    engine = Engine()
    engine.run("a", [1, 2, 3, 100], TEXT[1:], session="s")
    assert engine.run("b", [7, 8, 100], TEXT[1:], session="other") == len(TEXT) - 1


def test_the_tenants_global_tree_serves_another_session() -> None:
    engine = Engine(tenant="t")
    engine.run("a", [1, 2, 3], TEXT, session="s")
    assert engine.run("b", [7, 8, 100, 101, 102], TEXT[3:], session="other") < len(TEXT) / 2


def test_a_restart_restores_the_session_from_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    engine = Engine(url)
    engine.run("a", [1, 2, 3], TEXT, session="s")
    engine.proposer.close()
    again = Engine(url)
    assert again.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s") < len(TEXT) / 3
    again.proposer.close()


def test_a_failing_tree_costs_drafts_and_is_counted_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    engine.proposer.cache.step = broken  # type: ignore[method-assign,assignment]
    assert engine.run("a", [1, 2], TEXT, session="s") == len(TEXT)
    assert engine.run("b", [1, 2], TEXT, session="s") == len(TEXT)
    assert engine.proposer.stats()["counters"]["errors_propose"] == 2
    assert sum("broken on purpose" in (r.exc_text or "") for r in caplog.records) == 1


def test_a_request_that_cannot_start_leaves_the_others_alone() -> None:
    engine = Engine(tenant="t")
    engine.run("warm", [1, 2, 3], TEXT)
    assert engine.run("bad", [5_000_000], TEXT[:5]) == 5
    assert engine.run("good", [1, 2, 3, 100, 101], TEXT[2:]) < len(TEXT) / 2
    assert engine.proposer.stats()["counters"]["errors_start"] == 1


def test_switched_off_never_drafts() -> None:
    settings = Settings(store="memory://", enabled=False)
    store = open_store("memory://")
    proposer = Proposer(settings, Persistence(store, "ns", None, 0), 1000, 16)
    step = Step(
        [],
        ["x"],
        np.ones((1, 8), np.int32),
        np.array([0], np.int32),
        np.array([8], np.int32),
        np.array([4], np.int32),
        np.array([0], np.int32),
    )
    assert proposer.propose(step) == [[]]


def test_the_record_has_a_line_a_step_and_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = Engine(record=path)
    engine.run("a", [1, 2, 3], TEXT, session="s")
    steps = engine.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s")
    engine.proposer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    mine = [line for line in lines if line["request"] == "b"]
    assert len(mine) == steps
    assert sum(line["tokens"] for line in mine) == len(TEXT) - 2
    assert sum(line["accepted"] for line in mine) == len(TEXT) - 2 - steps
    assert {"step", "request", "session", "source", "drafted", "accepted", "ns"} <= set(mine[0])
    assert {line["source"] for line in mine} & {"session", "request"}
    figures = engine.proposer.metrics.request("b")
    assert figures is not None
    assert figures["accepted"] == sum(figures["accepted_by_source"].values()) == len(TEXT) - 2 - steps


def test_sessions_persist_while_the_store_is_slow(tmp_path: Path) -> None:
    engine = Engine(f"sqlite:///{tmp_path / 'log.db'}")
    append = engine.store.append

    def slow(*args: object) -> None:
        time.sleep(0.2)
        append(*args)  # type: ignore[arg-type]

    engine.store.append = slow  # type: ignore[method-assign,assignment]
    start = time.monotonic()
    for i in range(5):
        engine.run(f"r{i}", [1, 2, 3], TEXT[:5], session=f"s{i}")
    assert time.monotonic() - start < 0.2
    engine.proposer.close()


def test_api_ids_lose_the_engines_decoration() -> None:
    assert api_request_id("chatcmpl-abc-12345678") == "chatcmpl-abc"
    assert api_request_id("1_cmpl-abc-0-deadbeef") == "cmpl-abc"
