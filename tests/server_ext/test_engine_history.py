"""Test what the engine keeps of finished turns, over restarts and in its store, and for how long."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import FinishedTurn, HistoryWindow, Scope, SuffixCache
from agentspec.cache.store import NewEntry, open_store
from agentspec.server_ext.engine import DraftingEngine, make_cache
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.pricing.step_cost import StepCost
from agentspec.server_ext.settings import MemoryShares, Settings
from agentspec.server_ext.step import NewRequest
from tests.store.helpers import LOGS

from .plain_engine import NONE, TEXT, Engine


@pytest.mark.parametrize(
    ("kept", "drafts"),
    [
        (None, True),
        ("2 weights", True),
        ("1 weight", False),
        ("2 epochs", True),
        ("1 epoch", False),
        ("1 token", False),
    ],
)
def test_an_old_policys_samples_fade(kept: str | None, drafts: bool) -> None:
    engine = Engine(history_window=HistoryWindow.parse(kept) if kept else None)
    engine.run("a", [1, 2, 3, 100], TEXT[1:], group="g")
    for _ in range(3):  # one update, tensor by tensor
        engine.proposer.note_new_weights()
    engine.proposer.note_new_epoch()
    engine.run("first", [900], [901, 902], group="g")
    engine.proposer.cache.catch_up()
    steps = engine.run("b", [1, 2, 3, 100], TEXT[1:], group="g")
    assert steps < len(TEXT) / 3 if drafts else steps == len(TEXT) - 1
    counters = engine.proposer.stats()["counters"]
    assert counters["weight_updates"] == counters["epochs"] == 1


def test_a_restart_restores_the_session_from_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    engine = Engine(url)
    engine.run("a", [1, 2, 3], TEXT, session="s")
    engine.proposer.close()
    again = Engine(url)
    assert again.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s") < len(TEXT) / 3
    again.proposer.close()


def test_a_restart_goes_on_with_the_saved_indexes_and_prices(tmp_path: Path) -> None:
    """The second store is empty, so all text and prices come from the snapshot."""
    engine = Engine(snapshot=tmp_path / "saved")
    engine.run("a", [1, 2, 3], TEXT, session="s")
    for step in range(200):
        engine.proposer.pricing.cost.observe(1, step % 5, 0.010 + 0.001 * (step % 5))
    price = engine.proposer.pricing.cost.at(1).cost
    engine.proposer.close()
    again = Engine(snapshot=tmp_path / "saved")
    assert again.proposer.pricing.cost.at(1).cost == pytest.approx(price)
    assert again.proposer.pricing.cost.at(1).cost != Engine().proposer.pricing.cost.at(1).cost
    assert again.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s") < len(TEXT) / 3
    assert again.proposer.stats()["snapshot"]["loaded_tokens"] > 0
    again.proposer.close()


def test_what_a_snapshot_and_the_store_both_hold_counts_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    engine = Engine(url, snapshot=tmp_path / "saved")
    engine.run("a", [1, 2, 3], TEXT, session="s")
    held = engine.proposer.cache.stats().tokens
    engine.proposer.close()
    again = Engine(url, snapshot=tmp_path / "saved")
    assert again.proposer.cache.stats().tokens == held
    again.proposer.close()


def test_prices_that_cannot_be_read_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    costs = StepCost()
    fresh = costs.at(1).cost
    for damaged in (b"no json", b"[]", b'{"batches": {"1": {}}}', b'{"batches": {"1": {"levels": {"0": {"x": 1}}}}}'):
        costs.restore(damaged)
    costs.restore(b"")  # there is no snapshot
    assert costs.at(1).cost == fresh
    assert len(caplog.records) == 4


@pytest.mark.parametrize("session", [None, "s"])
def test_single_tokens_of_beam_search_are_not_kept(session: str | None) -> None:
    engine = Engine()
    for number in range(5):
        engine.run(f"beam{number}", [1, 2, 3, *TEXT[:number]], TEXT[number : number + 1], session=session)
    stats = engine.proposer.stats()
    assert stats["counters"]["started"] == stats["counters"]["finished"] == 5
    assert stats["cache"]["tokens"] == 0
    assert stats["store"]["writer"]["persisted"] + stats["store"]["writer"]["queued"] == 0
    engine.run("answer", [1, 2, 3], TEXT[:2], session=session)
    assert engine.proposer.cache.stats().tokens > 0


@pytest.mark.parametrize("scope", ["tenant", "session"])
def test_a_restart_restores_what_was_shared_and_nothing_else(tmp_path: Path, scope: Scope) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    engine = Engine(url, "owner", scope=scope)
    engine.run("a", [1, 2, 3], TEXT, session="s")
    engine.proposer.close()
    for tenant, drawn in (("owner", scope == "tenant"), ("another", False), (None, False)):
        again = Engine(url, tenant)
        steps = again.run("b", [7, 8, 100, 101, 102], TEXT[3:], session="other")
        assert (steps < len(TEXT) / 2) == drawn, tenant
        again.proposer.close()


def test_a_group_reaches_the_suffix_indexes_and_comes_back_from_the_store() -> None:
    engine = Engine(tenant="t")
    groups: list[str | None] = []
    start = engine.proposer.cache.start
    restored: list[FinishedTurn] = []

    def noted(*args: Any, group: str | None = None, **names: Any) -> None:
        groups.append(group)
        start(*args, group=group, **names)

    engine.proposer.cache.start = noted  # type: ignore[method-assign]
    engine.run("a", [1, 2, 3], TEXT, session="s", group="p")
    engine.run("b", [1, 2, 3], TEXT, session="s2")
    assert groups == ["p", None]

    turns = [FinishedTurn("t", "s", 0, NONE, NONE, "p"), FinishedTurn("t", None, 0, NONE, NONE, None)]
    store = open_store("memory://")
    for turn in turns:
        persistence = Persistence(SuffixCache(), store, LOGS, 100)
        writer, number = persistence.next_name()
        persistence.save(replace(turn, writer=writer, number=number), Identity(tenant="t"))
        persistence._writer.close()
    cache = SuffixCache()
    cache.restore = lambda turn, *, held_only=False: restored.append(turn)  # type: ignore[method-assign]
    Persistence(cache, store, LOGS, 100).warm_up(5.0, "t")
    assert [(turn.session, turn.group) for turn in restored] == [("s", "p"), (None, None)]


def test_sessions_persist_while_the_store_is_slow(tmp_path: Path) -> None:
    engine = Engine(f"sqlite:///{tmp_path / 'log.db'}")
    append, decoded, held = engine.store.append, threading.Event(), []

    def slow(*args: object) -> list[str]:
        held.append(decoded.wait(180))
        return append(*args)  # type: ignore[arg-type]

    engine.store.append = slow  # type: ignore[method-assign,assignment]
    for i in range(5):
        engine.run(f"r{i}", [1, 2, 3], TEXT[:5], session=f"s{i}")
    decoded.set()
    assert len(engine.turns()) == 5
    assert held and all(held)  # decoding did not wait until the store gave up
    engine.proposer.close()


def test_a_store_in_memory_stays_within_the_budget() -> None:
    """Ten times the store's share is written. Without a limit, the store took up to 256 MB beside the budget."""
    settings = Settings(store="memory://", max_bytes=4_000_000)
    shares = MemoryShares.of(settings.max_bytes, settings.store)
    assert shares.store == 1_000_000
    assert shares.cache + 2 * shares.queue + shares.figures + shares.store == settings.max_bytes
    store = open_store("memory://", memory_bytes=shares.store)
    cache = make_cache(settings, 1000, 16)
    proposer = DraftingEngine(settings, Persistence(cache, store, LOGS, 0, queue_bytes=shares.queue))
    log, payload = LOGS.of(None), bytes(50_000)
    for number in range(200):
        store.append(log, [NewEntry(f"s{number}", payload)])
        memory = proposer.stats()["memory"]
        assert memory["store"] <= 1.1 * shares.store and memory["bytes"] <= memory["limit"] == settings.max_bytes
    assert memory["store"] > 0.5 * shares.store
    assert 0 < len(list(store.read(log))) < 20
    proposer.close()


def test_what_a_request_holds_counts_for_its_caller_and_its_tenants_text_for_the_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is taken from the owner who holds most, so a caller gains nothing from many cache salts."""
    proposer, started = Engine().proposer, list[dict[str, Any]]()
    start = proposer.cache.start

    def begun(*request: Any, **names: Any) -> None:
        started.append(names)
        start(*request, **names)

    monkeypatch.setattr(proposer.cache, "start", begun)
    own = Identity("mac", session="s", principal="salted", caller="ada")
    named = replace(own, tenant="acme", named_tenant="acme")
    requests = [NewRequest(f"r{number}", [1, 2, 3], identity) for number, identity in enumerate((own, named))]
    proposer.begin(requests)
    proposer._turnover.advance(60.0, requests)
    assert [(names["owner"], names["tenant_owner"]) for names in started] == [("ada", "ada"), ("ada", "acme")]
