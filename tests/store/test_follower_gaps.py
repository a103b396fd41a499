"""Test what the follower does where retention may have removed entries that it had not read."""

import threading
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from typing import Any, cast
from unittest.mock import Mock

import pytest

from agentspec.cache.store import NewEntry, Retention, open_store
from agentspec.cache.store.background.followed import FollowedLog
from agentspec.cache.store.background.gaps import LogGaps
from agentspec.errors import StoreUnavailableError
from agentspec.testing.redis_server import RedisServer
from tests.store.followed_process import LIFE_SECONDS, OTHER, Process, hide
from tests.store.helpers import NS, FlakyStore, entry_of, turn, wait_until


def own_turn(session: str, number: int) -> NewEntry:
    return entry_of(turn(session, number, writer=OTHER))


@pytest.mark.parametrize("shards", (1, 4))
def test_an_erasure_of_all_that_a_quiet_redis_log_held_is_applied(
    server: RedisServer, shards: int, monkeypatch: pytest.MonkeyPatch, patience: None
) -> None:
    """Retention removed nothing: the follower must not skip the tombstone, nor forget the tenant."""
    url = f"{server.url}?shards={shards}&prefix=quiet-{shards}"
    with closing(open_store(url)) as mine, closing(open_store(url)) as theirs:
        wait, erased = mine.wait, threading.Event()
        erased.set()

        def wait_for_the_whole_erasure(cursors: Mapping[str, str], timeout: float) -> list[str]:
            found = wait(cursors, timeout)
            assert erased.wait(60)
            return found

        monkeypatch.setattr(mine, "wait", wait_for_the_whole_erasure)
        process = Process(cast(FlakyStore, mine), number=8)
        try:
            process.begin(NS, "t")
            mine.append(NS, [own_turn("s", 7)])
            process.wait(skipped=1)
            time.sleep(1.1)  # longer than LIFE_SECONDS
            erased.clear()
            theirs.erase_session(NS, "s")
            erased.set()
            wait_until(lambda: process.erased or process.forgotten)
            assert (process.erased, process.forgotten) == ([("t", "s")], [])
            mine.append(NS, [own_turn("s", 7)])  # it was on its way
            wait_until(lambda: process.erased_again == [("t", "s")])
        finally:
            process.follower.close()


def test_tombstones_behind_a_gap_are_applied_before_the_log_is_left(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of this process that came behind them are erased again."""
    monkeypatch.setattr(LIFE_SECONDS, 0.5)
    hidden = hide(process, monkeypatch, NS)
    process.begin(NS, "t")
    process.begin("other", "u")
    process.number, process.busy = 8, {"t"}
    process.store.append(NS, [entry_of(turn("goes", 1))])
    process.store.erase_session(NS, "s")
    process.store.append(NS, [own_turn("s", 7)])
    assert process.store.trim(Retention(records=1)).records == 1
    place = process.follower.places()[NS]
    time.sleep(0.6)
    hidden.clear()
    wait_until(lambda: process.erased)
    wait_until(lambda: process.follower.outdated == {"t"})
    time.sleep(0.2)
    assert (process.erased, process.forgotten) == ([("t", "s")], [])
    assert process.follower.places()[NS] == place, "a snapshot of now may hold text from before a lost tombstone"
    process.busy = set()
    wait_until(lambda: process.erased_again)
    assert (process.erased, process.forgotten, process.erased_again) == ([("t", "s")], ["t"], [("t", "s")])
    assert not process.follower.outdated and process.follower.places()[NS] > place


class Looks:
    """Look for gaps in two logs, of which the second lies on a node of its own."""

    def __init__(self) -> None:
        self.logs = {name: FollowedLog(f"tenant of {name}", "1", "1") for name in ("here", "there")}
        self.histories: dict[str, str | Exception] = {"here": "whole", "there": "whole"}
        self.asked: list[str] = []
        store = Mock(newest=lambda name: "9", part=lambda name: name, history=self.history)
        self.busy = True
        self.ahead: list[str] = []
        self.gaps = LogGaps(store, lambda name, log: nullcontext(), lambda name, log: not self.busy, self.look_ahead)

    def look_ahead(self, name: str, log: FollowedLog) -> str:
        self.ahead.append(name)
        return "9"

    def history(self, name: str, after: str) -> Any:
        self.asked.append(name)
        answer = self.histories[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_gap_is_known_while_its_node_is_away() -> None:
    looks = Looks()
    looks.histories["there"] = "trimmed"
    assert not looks.gaps.leave(looks.logs, {"there"})
    looks.histories["there"] = StoreUnavailableError("away")
    assert looks.gaps.leave(looks.logs, set()), "the other logs can be read"
    assert looks.gaps.outdated == {"tenant of there"}
    del looks.logs["there"]
    assert looks.gaps.leave(looks.logs, set()) and not looks.gaps.outdated


def test_tombstones_in_front_of_a_gap_are_read_once_while_its_tenant_is_busy() -> None:
    """The tenant may be busy with one long response, and have many tombstones."""
    looks = Looks()
    looks.histories["there"] = "trimmed"
    for _ in range(5):
        assert not looks.gaps.leave(looks.logs, {"there"})
    assert looks.ahead == ["there"]
    looks.busy = False
    assert looks.gaps.leave(looks.logs, set()) and looks.ahead == ["there", "there"]
    assert looks.logs["there"].tombstones_applied_to == "9"


def test_a_log_that_was_evicted_tells_its_tombstones_all_the_same() -> None:
    looks = Looks()
    looks.histories["there"] = "lost"
    assert looks.gaps.leave(looks.logs, {"there"}) and looks.ahead == ["there"]


def test_a_node_that_is_away_is_not_asked_each_time_for_the_sake_of_a_refused_log() -> None:
    looks = Looks()
    looks.histories["there"] = StoreUnavailableError("away")
    for _ in range(5):
        assert looks.gaps.leave(looks.logs, {"there"})
    assert looks.asked == ["there"]
    assert looks.gaps.leave(looks.logs, set(), {"there"}) and looks.asked == ["there", "there"]


def test_a_quiet_log_is_looked_at_again_when_its_node_may_be_back(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks()
    looks.histories["there"] = StoreUnavailableError("away")
    for names in ({"here", "there"}, set[str](), set[str]()):
        assert looks.gaps.leave(looks.logs, names)
    assert sorted(looks.asked) == ["here", "there"], "a node that is away holds up the others"
    looks.histories["there"] = "trimmed"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6.0)
    assert not looks.gaps.leave(looks.logs, set())
    looks.busy = False
    assert looks.gaps.leave(looks.logs, set()) and not looks.gaps.unsure
