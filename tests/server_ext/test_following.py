"""Test several engines on one store: the others draft from what one says."""

import threading
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest

from agentspec.cache import FinishedTurn
from agentspec.cache.store import NewEntry
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.step import NewRequest
from tests.store.helpers import wait_until

from .replicas import NS, TENANT, Start, meet, patience, start, stored, text

__all__ = ["patience", "start"]


def test_what_one_says_the_other_drafts_from(start: Start) -> None:
    a, b = start(), start()
    meet(a, b)
    a.say([1, 2, 3], text(100))
    a.say([1, 2, 3], text(200), "elsewhere", group="g")
    b.wait(lambda: b.follower("applied") >= 2)
    assert b.drafts(text(100, 5), "s") == text(105, 4)
    assert b.cache.has_session(TENANT, "s") and not b.cache.has_session(TENANT, "elsewhere")
    assert b.drafts(text(200, 5)) == text(205, 4)  # from the tenant's corpus
    assert b.drafts(text(200, 5), tenant="u") == []
    assert a.follower("applied") <= 1 and a.follower("skipped") >= 2  # only what `meet` said
    wait_until(lambda: b.follower("learned") == b.follower("delivered") >= 2)


def test_what_others_wrote_and_cannot_be_used_is_counted(start: Start) -> None:
    a, b = start(), start()
    meet(a, b)
    a.store.append(NS, [NewEntry("s", b"damaged"), NewEntry("s", msgpack.packb({"v": 99}))])
    b.wait(lambda: b.persistence.stats()["refused"] == 2)
    assert b.persistence.stats()["refused_by_kind"] == {"damaged": 1, "unknown_version": 1}


def test_a_turn_that_comes_while_its_session_waits_to_be_applied_is_in_it(start: Start) -> None:
    """An applied session counts as loaded, so no engine would read the turn again."""
    a, b = start(), start()
    meet(a, b, session="other")

    def say(response: list[int]) -> None:
        before = b.follower("delivered")
        a.say([1, 2, 3], response)
        wait_until(lambda: b.follower("delivered") > before)

    say(text(100))
    b.persistence.load_again(TENANT, "s")
    wait_until(b.persistence.has_loaded)
    say(text(200))  # b is idle
    b.wait(lambda: not b.persistence.has_loaded())
    assert not b.cache.needs_load(TENANT, "s")
    b.texts["alone"] = text(200, 5)
    b.step(NewRequest("alone", np.array(text(200, 5), np.int32), Identity(tenant=TENANT, session="s", scope="session")))
    b.cache.catch_up()
    assert b.step()["alone"] == text(205, 4)


def test_a_step_does_not_wait_while_a_turn_of_another_process_is_put_into_the_cache(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(), start()
    meet(a, b)
    begun, go_on = threading.Event(), threading.Event()
    restore = b.cache.restore

    def slow(turn: FinishedTurn, *, held_only: bool = False) -> None:
        if held_only:
            begun.set()
            assert go_on.wait(60)
        restore(turn, held_only=held_only)

    monkeypatch.setattr(b.cache, "restore", slow)
    a.say([1, 2, 3], text(500), "large")
    assert a.persistence._writer.flush(60) and begun.wait(60)
    held = b.begin([1, 2, 3], "large")
    wait_until(lambda: b.persistence.has_loaded(), 60)
    begin = time.monotonic()
    b.step()
    assert time.monotonic() - begin < 30  # a step that waits goes on when the thread does, after a minute
    assert b.cache.needs_load(TENANT, "large")
    go_on.set()
    b.wait(lambda: not b.cache.needs_load(TENANT, "large"))
    b.end(held, text(600))
    assert b.drafts(text(500, 5), "large") == text(505, 4)


def test_a_group_that_is_held_is_followed(start: Start) -> None:
    a, b = start(), start()
    meet(a, b, session="x", group="g")
    b.wait(lambda: not b.cache.needs_load(TENANT, group="g"))
    a.say([1, 2, 3], text(100), "fresh", group="g")
    before = b.follower("applied")
    b.wait(lambda: b.follower("applied") > before)
    b.cache.catch_up()
    name = b.begin(text(100, 5), "another", group="g")
    b.cache.catch_up()
    draft = b.cache.propose([name], 4, cost=0.0)[0]
    assert (draft.token_ids.tolist(), draft.source) == (text(105, 4), "group")


def test_an_unknown_session_is_loaded_whole_when_a_request_names_it(start: Start) -> None:
    a, b = start(), start()
    meet(a, b, session="other")
    a.say([1, 2, 3], text(100))
    a.say([1, 2, 3, *text(100)], text(200))
    b.wait(lambda: b.follower("applied") >= 2)
    assert b.cache.needs_load(TENANT, "s")
    b.begin([5], "s")
    b.wait(lambda: not b.cache.needs_load(TENANT, "s"))
    a.say([1, 2, 3, *text(100), *text(200)], text(300))
    b.wait(lambda: b.follower("applied") >= 3)
    assert b.drafts(text(300, 5), "s") == text(305, 4)
    assert len(b.store.sessions(NS)) == 2


def test_a_tenants_corpus_is_loaded_at_its_first_request(start: Start) -> None:
    a = start()
    a.say([1, 2, 3], text(100))
    assert a.persistence._writer.flush(60)
    b = start()
    time.sleep(0.1)
    assert b.cache.needs_load(TENANT)  # no request has asked for it
    b.begin([4, 5, 6])
    b.wait(lambda: not b.cache.needs_load(TENANT))
    assert b.drafts(text(100, 5)) == text(105, 4)
    assert b.cache.needs_load("u")


def test_a_large_session_is_there_whole_with_the_step_that_takes_it(start: Start, tmp_path: Path) -> None:
    a = start()
    said = np.random.default_rng(1).integers(0, 90_000, (6, 20_000)).tolist()
    for part in said:
        a.say(part[:19_000], part[19_000:])
    assert a.persistence._writer.flush(60)
    b = start(preload=0)
    name = b.begin([1, 2, 3])
    wait_until(b.persistence.has_loaded)
    b.step()
    assert b.persistence.stats()["adopted_sessions"] == 1
    b.texts[name] += said[2][5_000:5_010]  # long before all of it could have been indexed
    b.step()
    assert b.cache.stats().pending < 10_000  # the tenant's corpus, and the request's own text
    draft = b.cache.propose([name], 4)[0]
    assert (draft.token_ids.tolist(), draft.source) == (said[2][5_010:5_014], "session")
    b.wait(lambda: not b.cache.needs_load(TENANT, "s"))
    again = b.begin([1])
    b.texts[again] += said[5][19_500:19_510]
    b.cache.catch_up()
    assert b.step()[again] == said[5][19_510:19_514]


def test_what_is_said_after_an_erasure_is_kept_though_the_log_was_not_followed_before(start: Start) -> None:
    before, again = start(), start()
    before.say([1, 2, 3], text(100))
    assert before.persistence._writer.flush(60)
    again.erase("s")
    name = again.begin([1, 2, 3], "s")
    wait_until(lambda: again.follower("logs") == 2)  # that of callers without keys, and the tenant's
    again.end(name, text(200))
    assert again.persistence._writer.flush(60)
    assert [record.response.tolist() for record in stored(again)] == [text(200)]
