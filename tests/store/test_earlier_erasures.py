"""Test which erasures count as older than all requests of a process."""

import pytest

from agentspec.cache.store import Retention, Store
from agentspec.cache.store.background.earlier_erasures import EarlierErasures
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.helpers import NS, entry_of, turn

OTHER = "0123abce"


def fill(store: Store) -> EarlierErasures:
    """Erase two sessions of each log before a process serves."""
    for log in (NS, OTHER):
        for session in ("early", "again"):
            store.append(log, [entry_of(turn(session, 1))])
            store.erase_session(log, session)
    return EarlierErasures(store)


def test_what_was_erased_before_a_process_serves_concerns_none_of_its_requests(store: Store) -> None:
    earlier = fill(store)
    assert earlier.without(NS, ["early"]) == ["early"]
    earlier.read(NS)
    earlier.stop()
    store.erase_session(NS, "again")
    store.erase_session(NS, "late")
    store.erase_session("0123abcf", "early")  # a new log
    assert earlier.without(NS, ["early", "again", "late"]) == ["again", "late"]
    assert earlier.without("0123abcf", ["early"]) == earlier.without(OTHER, ["early"]) == ["early"]
    while store.trim(Retention(records=0)).more:
        pass
    assert earlier.without(NS, ["early"]) == []


def test_where_a_log_ends_is_not_asked_of_a_process_that_serves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an erasure that came just after a request would count as older than it."""
    earlier = fill(store)
    newest = store.newest

    def serve(namespace: str) -> str:
        earlier.stop()
        return newest(namespace)

    monkeypatch.setattr(store, "newest", serve)
    earlier.read("0123abc")
    assert earlier.without(NS, ["early"]) == earlier.without(OTHER, ["early"]) == ["early"]


def test_a_log_that_cannot_be_read_costs_the_others_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = fill(store)
    newest, error = store.newest, StoreError("damaged")

    def fail(namespace: str) -> str:
        if namespace == NS:
            raise error
        return newest(namespace)

    monkeypatch.setattr(store, "newest", fail)
    earlier.read("0123abc")
    assert earlier.without(NS, ["early"]) == ["early"] and earlier.without(OTHER, ["early"]) == []
    error = StoreUnavailableError("away")
    with pytest.raises(StoreUnavailableError):
        earlier.read("0123abc")


def test_in_a_store_that_was_replaced_all_erasures_count(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = fill(store)
    earlier.read(NS)
    monkeypatch.setattr(store, "history", lambda *_: "lost")
    assert earlier.without(NS, ["early"]) == ["early"]


def test_no_more_ends_are_held_than_a_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.cache.store.background.earlier_erasures._MOST_LOGS", 1)
    earlier = fill(store)
    earlier.read("0123abc")
    assert [earlier.without(log, ["early"]) for log in sorted((NS, OTHER))] == [[], ["early"]]
