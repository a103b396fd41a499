"""Test engines that write to a log which they do not follow yet: no turn comes behind its erasure for good."""

from collections.abc import Callable

import pytest

from agentspec.errors import StoreUnavailableError
from tests.store.helpers import wait_until

from .replicas import NS, Replica, Start, meet, patience, start, stored, text

__all__ = ["patience", "start"]

Restore = Callable[[], None]


def say_unfollowed(replica: Replica, monkeypatch: pytest.MonkeyPatch, response: list[int], session: str) -> Restore:
    """Say a turn on a replica while the store is away for it alone. Return a function that brings the store back."""
    patch = pytest.MonkeyPatch()

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailableError("away")

    for call in ("append", "read", "newest", "tombstones", "wait", "ping"):
        patch.setattr(replica.store, call, away)
    monkeypatch.setattr(replica.persistence, "request_load", lambda *_, **__: None)  # the writer comes first
    replica.say([1, 2, 3], response, session)
    wait_until(lambda: replica.persistence.stats()["writer"]["failed"])
    return patch.undo


def sessions(replica: Replica) -> list[str]:
    return [record.session for record in stored(replica)]


def test_a_turn_from_before_an_erasure_elsewhere_is_not_stored_though_its_log_is_not_followed_yet(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(), start()
    back = say_unfollowed(b, monkeypatch, text(100), "gone")
    a.erase("gone")
    b.say([1, 2, 3], text(300), "stays")
    back()
    assert b.persistence._writer.flush(60)
    assert sessions(a) == ["stays"]
    assert b.persistence.stats()["writer"]["erased"] == 1
    assert b.drafts(text(100, 5)) == [] and b.drafts(text(100, 5), "gone") == []
    assert b.drafts(text(300, 5)) == text(305, 4)


def test_a_turn_from_before_an_erasure_elsewhere_is_not_stored_though_the_session_was_used_since(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(), start()
    back = say_unfollowed(b, monkeypatch, text(100), "gone")
    a.erase("gone")
    a.say([1, 2, 3], text(300), "gone")
    assert a.persistence._writer.flush(60)
    back()
    assert b.persistence._writer.flush(60)
    assert [record.response[0] for record in stored(a)] == [300]
    assert b.drafts(text(100, 5)) == [] and b.drafts(text(100, 5), "gone") == []


def test_a_turn_of_a_log_that_was_left_is_not_stored_behind_its_erasure(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(), start()
    meet(a, b, session="other")
    back = say_unfollowed(b, monkeypatch, text(100), "gone")
    assert b.persistence._follower is not None
    b.persistence._follower._logs.remove(NS)  # as where too many are followed
    a.erase("gone")
    back()
    assert b.persistence._writer.flush(60)
    assert sessions(a) == ["other", "other"]


def test_a_session_that_was_used_again_before_this_process_began_keeps_its_turns(start: Start) -> None:
    a = start()
    a.erase("s")
    a.say([1, 2, 3], text(100))
    assert a.persistence._writer.flush(60)
    b = start()
    running = b.begin([1, 2, 3])
    wait_until(lambda: b.follower("logs") == 2)
    b.end(running, text(300))
    assert b.persistence._writer.flush(60)
    assert [record.response[0] for record in stored(a)] == [100, 300]
    b.wait(lambda: b.drafts(text(100, 5), "s") == text(105, 4))


def test_a_session_that_was_erased_before_this_process_began_keeps_its_first_turn(start: Start) -> None:
    a = start()
    a.say([1, 2, 3], text(100))
    assert a.persistence._writer.flush(60)
    a.erase("s")
    b = start()
    running = b.begin([1, 2, 3])
    wait_until(lambda: b.follower("logs") == 2)
    b.end(running, text(300))
    assert b.persistence._writer.flush(60)
    assert [record.response[0] for record in stored(a)] == [300]
    assert b.drafts(text(300, 5), "s") == text(305, 4)
    assert b.engine.stats()["requests_erased"] == 0


def test_a_request_that_may_be_older_than_its_sessions_erasure_elsewhere_is_counted(start: Start) -> None:
    """The server does not follow its tenant's log yet, so nobody knows which came first."""
    a, b = start(), start()
    a.erase("s")
    running = b.begin([1, 2, 3])
    wait_until(lambda: b.follower("logs") == 2)
    b.end(running, text(300))
    assert b.persistence._writer.flush(60)
    assert stored(a) == [] and b.drafts(text(300, 5)) == []
    assert b.engine.stats()["requests_erased"] == 1
