"""Test servers of several models on one store: an erasure on one of them reaches the text of all."""

from pathlib import Path

import pytest

from agentspec.cache.store import LogNames, RecordReader, TurnRecord
from tests.store.helpers import LOGS, wait_until

from .replicas import TENANT, Replica, Start, patience, start, text

__all__ = ["patience", "start"]

OTHER = LogNames("fedcba9876543210", LOGS.secret)


def say(replica: Replica, begin: int, session: str = "s") -> None:
    replica.say([1, 2, 3], text(begin), session)
    assert replica.persistence._writer.flush(60)


def responses(replica: Replica) -> list[int]:
    """Return the first token of each turn in the whole store."""
    logs = replica.store.namespaces()
    records = [record for log in logs for _, record in RecordReader().read(replica.store.read(log))]
    return [int(record.response[0]) for record in records if isinstance(record, TurnRecord)]


@pytest.mark.parametrize("stored", [True, False])
def test_an_erasure_reaches_a_running_server_of_another_model(start: Start, tmp_path: Path, stored: bool) -> None:
    """stored: whether that server has stored anything of the session; its request may still run."""
    a, b = start(), start(logs=OTHER, snapshot=tmp_path / "b.snapshot")
    say(b, 100, "other")
    if stored:
        say(b, 200)
    running = b.begin([1, 2, 3], "s")
    say(a, 300)
    a.erase("s")
    assert responses(a) == [100]
    wait_until(lambda: b.follower("erased"))
    b.end(running, text(400))
    assert b.persistence._writer.flush(60)
    assert responses(a) == [100]
    assert not b.cache.has_session(TENANT, "s")
    assert not any(b.drafts(text(begin, 5), "s") for begin in (200, 400))
    assert b.drafts(text(100, 5)) == text(105, 4)


def test_an_erasure_reaches_a_server_of_another_model_whose_tenant_has_nothing_stored(start: Start) -> None:
    a, b = start(), start(logs=OTHER)
    b.say([1, 2, 3], text(100), "other", tenant="another")
    assert b.persistence._writer.flush(60)
    running = b.begin([1, 2, 3], "s")
    a.erase("s")
    wait_until(lambda: b.follower("erased"))
    b.end(running, text(400))
    assert b.persistence._writer.flush(60)
    assert responses(b) == [100] and not b.drafts(text(400, 5), "s")


def test_an_erasure_reaches_a_server_of_another_model_that_starts_later(start: Start, tmp_path: Path) -> None:
    """The other server's snapshot lies elsewhere, so it is not deleted."""
    b = start(logs=OTHER, snapshot=tmp_path / "b.snapshot")
    say(b, 100)
    say(b, 200, "other")
    wait_until(lambda: b.place(OTHER.of(TENANT)) == b.store.newest(OTHER.of(TENANT)))
    b.engine.close()
    a = start()
    say(a, 300)
    a.erase("s")
    assert responses(a) == [200] and (tmp_path / "b.snapshot").exists()
    b = start(logs=OTHER, snapshot=tmp_path / "b.snapshot")
    assert b.drafts(text(200, 5)) == text(205, 4)
    assert b.drafts(text(100, 5), "s") == [] and not b.cache.has_session(TENANT, "s")
