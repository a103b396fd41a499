"""Test erasures and other jobs on the store, in a thread: what they end, and what they report."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.store import Erasure, NewEntry, encode
from agentspec.errors import StoreUnavailableError
from agentspec.server_ext import session_admin, stored_sessions
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.persistence.turn_records import turn_of
from agentspec.server_ext.session_admin import SessionAdmin
from agentspec.server_ext.session_questions import (
    EraseSession,
    FindEnd,
    FindTenants,
    ImportRecords,
    ListSessions,
    SessionQuestion,
)
from tests.store.helpers import LOGS, FlakyStore, turn, wait_until

from .stored_engine import NS, TENANT, Engine, records, store, text

__all__ = ["store"]


def test_an_erased_session_is_gone_from_queue_loader_and_store(store: FlakyStore) -> None:
    engine = Engine(store)
    engine.say([1, 2, 3], text(100))
    engine.flush()
    other = Engine(store)
    name = other.start([7, 8, 100, 101, 102])
    wait_until(lambda: other.persistence._loader.ready._waiting)  # read, and not yet applied
    other.say([7, 8], text(200), session="kept")
    other.cache.abort(name)
    other.cache.remove_session(TENANT, "s")
    assert other.persistence.erase("s", [TENANT]).result(60) == Erasure(1, complete=True)
    assert other.load() == 0
    name = other.start([7, 8, 100, 101, 102])
    assert other.load() == 0
    assert other.draft(name) == []
    other.flush()
    assert [record.session for record in records(store)] == ["kept"]


def test_what_was_stored_under_another_tenant_meanwhile_is_erased_too(store: FlakyStore) -> None:
    """The caller first asks which tenants know the session. A turn with an adapter may finish after that."""
    engine = Engine(store)
    engine.say([1, 2, 3], text(100))
    engine.cache.start("r", [1, 2, 3], session="s", tenant="adapter")
    engine.cache.extend("r", text(200))
    turn = engine.cache.finish("r", name=engine.persistence.next_name())
    assert turn is not None
    engine.persistence.save(turn, Identity(tenant="adapter", session="s"))
    engine.flush()
    assert len(list(store.read(LOGS.of("adapter"), session="s"))) == 1
    assert engine.persistence.erase("s", [TENANT]).result(60) == Erasure(2, complete=True)
    assert [list(store.read(LOGS.of(tenant), session="s")) for tenant in (TENANT, "adapter")] == [[], []]


def test_other_processes_hear_of_an_erasure_whose_records_were_trimmed(store: FlakyStore) -> None:
    engine = Engine(store)
    engine.cache.restore(replace(turn_of(turn("s", 1)), tenant="adapter"))
    assert engine.persistence.erase("s", [TENANT]).result(60).complete
    assert store.tombstones(LOGS.of("adapter"))


def test_a_session_asked_for_while_it_is_erased_does_not_come_back(store: FlakyStore) -> None:
    engine = Engine(store)
    engine.say([1, 2, 3], text(100))
    engine.flush()
    again = Engine(store)
    release = gate(again.persistence)
    again.cache.remove_session(TENANT, "s")
    erasure = again.persistence.erase("s", [TENANT])
    again.cache.abort(again.start([1, 2, 3]))
    assert again.persistence.stats()["loader"]["pending"] == 0
    release()
    assert erasure.result(60) == Erasure(1, complete=True)
    assert again.load() == 0
    again.cache.abort(again.start([1, 2, 3]))
    assert again.load() == 0
    assert not again.cache.has_session(TENANT, "s")


def test_an_erasure_that_the_store_cannot_do_says_so(store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.server_ext.persistence.persistence._ERASE_SECONDS", 0.05)
    engine = Engine(store)
    store.gate.clear()
    engine.say([1, 2, 3], text(100))
    wait_until(lambda: engine.persistence._writer._records.in_flight)
    with pytest.raises(StoreUnavailableError, match="try again"):
        engine.persistence.erase("s", [TENANT]).result(60)
    store.gate.set()


def test_questions_that_a_store_cannot_answer_are_logged_once_a_minute(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`agentspec top` asks every two seconds, however long the store is away."""
    engine = Engine(store)
    admin = SessionAdmin(engine.persistence, lambda: ())

    def ask() -> dict[str, Any]:
        admin.begin("job", None, ListSessions(TENANT, None, anybody=True, count=10))
        answer: dict[str, Any] = {}
        wait_until(lambda: answer.update(admin.poll("job")) or answer)
        return answer

    for call in ("namespaces", "sessions", "newest"):
        monkeypatch.setattr(store, call, Mock(side_effect=StoreUnavailableError("the store at 10.0.0.7 is gone")))
    assert all("10.0.0.7" not in ask()["message"] for _ in range(4))
    assert [line for line in caplog.messages if "10.0.0.7" in line and "question" in line] == [
        "agentspec: a question about sessions cannot be answered: the store at 10.0.0.7 is gone"
    ]


def gate(persistence: Persistence) -> Callable[[], None]:
    """Hold the job thread up until the returned function is called."""
    held = [True]
    persistence.submit(lambda store: wait_until(lambda: not held))
    return held.clear


def test_jobs_run_one_by_one_and_tell_their_results(store: FlakyStore) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    store.append(NS, [NewEntry("s", b"x")])
    release = gate(persistence)
    listed = persistence.submit(lambda store: [usage.session for usage in store.sessions(NS)])
    failing = persistence.submit(lambda store: 1 // 0)
    assert not (listed.done() or failing.done())
    assert persistence.stats()["jobs"] == 3
    release()
    assert listed.result(60) == ["s"]
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    wait_until(lambda: persistence.stats()["jobs"] == 0)
    persistence.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        persistence.submit(lambda store: None)
    assert persistence.stats()["jobs"] == 0


def test_jobs_that_wait_are_bounded(store: FlakyStore) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    release = gate(persistence)
    jobs = [persistence.submit(lambda store: None) for _ in range(63)]
    with pytest.raises(StoreUnavailableError, match="try again later"):
        persistence.submit(lambda store: None)
    release()
    assert jobs[-1].result(60) is None
    wait_until(lambda: persistence.stats()["jobs"] == 0)
    persistence.submit(lambda store: None).result(60)
    persistence.close()


def test_those_of_many_owners_are_bounded_together(store: FlakyStore) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    release = gate(persistence)
    taken = 0
    for owner in range(10 * 1024):
        with suppress(StoreUnavailableError):
            persistence.submit(lambda store: None, str(owner))
            taken += 1
    assert taken == 1023 and persistence.stats()["jobs"] == 1024  # the gate is one job
    assert len(persistence._jobs._counts) == 1024  # no count is kept for owners whose jobs are refused
    release()
    wait_until(lambda: persistence.stats()["jobs"] == 0)
    persistence.submit(lambda store: None, "late").result(60)
    persistence.close()


def test_owners_take_turns(store: FlakyStore) -> None:
    """One owner's jobs delay another owner's job by one job only."""
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    ran: list[str] = []
    release = gate(persistence)
    for owner, count in (("a", 64), ("b", 2), ("c", 1)):
        jobs = [
            persistence.submit(lambda store, name=f"{owner}{number}": ran.append(name), owner)  # type: ignore[misc]
            for number in range(count)
        ]
    with pytest.raises(StoreUnavailableError, match="try again later"):
        persistence.submit(lambda store: None, "a")
    release()
    wait_until(lambda: persistence.stats()["jobs"] == 0)
    assert jobs[0].done()
    assert ran[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert [name for name in ran if name.startswith("a")] == [f"a{number}" for number in range(64)]
    persistence.close()


def test_a_session_is_new_if_neither_the_cache_nor_the_store_holds_it(store: FlakyStore) -> None:
    """A turn in the cache may not have reached the store yet, or retention has removed it."""
    cache = SuffixCache()
    cache.restore(turn_of(turn("in the cache", 1)))
    store.append(LOGS.of(None), [NewEntry("in the store", encode(turn("in the store", 1)))])
    persistence = Persistence(cache, store, LOGS, preload=0)
    admin = SessionAdmin(persistence, lambda: ())
    for session, added in (("in the cache", 0), ("in the store", 0), ("new", 1)):
        records = [encode(turn(session, 2))] * 2  # a text may be given twice
        assert admin.begin(session, None, ImportRecords(session, None, records, only_new=True, owner="ada")) == {}
        answer: dict[str, Any] = {}  # it is told once
        wait_until(lambda answer=answer, session=session: answer.update(admin.poll(session)) or answer)  # type: ignore[misc]
        assert answer == {"value": [added], "more": False}
        assert len(list(store.read(LOGS.of(None), session=session))) == (session != "in the cache")
    assert [entry.owner for entry in store.appended[-1]] == ["ada"]
    persistence.close()


def test_an_import_ends_where_its_session_is_erased_meanwhile(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_sessions, "_WRITE_RECORDS", 1)
    monkeypatch.setattr(session_admin, "_SLICE_SECONDS", 0.0)
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    admin = SessionAdmin(persistence, lambda: ())
    records = [encode(turn("s", number)) for number in range(1, 5)]
    question = ImportRecords("s", None, records, only_new=False)

    def stored() -> int:
        return len(list(store.read(LOGS.of(None), session="s")))

    def poll(job: str, answer: dict[str, Any]) -> bool:
        answer |= admin.poll(job)
        return answer.get("more") is False or "error" in answer

    assert admin.begin("import", "a", question) == {}
    wait_until(lambda: poll("import", {}) or stored() == 2)
    assert admin.begin("erasure", "a", EraseSession("s", [None])) == {}
    answer: dict[str, Any] = {}
    wait_until(lambda: poll("erasure", answer))
    assert answer["value"]["complete"] and stored() == 0
    wait_until(lambda: poll("import", answer))
    assert answer["error"] == "invalid" and "erased while it was imported" in answer["message"]
    assert stored() == 0
    assert admin.begin("again", "a", question) == {}  # it was asked for after the erasure
    answer = {}
    wait_until(lambda: poll("again", answer))
    assert "error" not in answer and stored() == 4
    persistence.close()


def test_an_import_by_several_engines_ends_where_its_session_is_erased_between_them(store: FlakyStore) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    admin = SessionAdmin(persistence, lambda: ())
    answer: dict[str, Any] = {}

    def ask(question: SessionQuestion) -> dict[str, Any]:
        answer.clear()
        assert admin.begin("job", None, question) == {}
        wait_until(lambda: answer.update(admin.poll("job")) or answer)
        return answer

    (begun,) = ask(FindEnd(None))["value"]
    assert begun == store.newest(LOGS.of(None))
    wanted = ImportRecords("s", None, [encode(turn("s", 1))], only_new=False, begun=begun)
    assert ask(wanted)["value"] == [1]
    assert ask(EraseSession("s", [None]))["value"]["records"] == 1
    assert ask(wanted)["error"] == "invalid"  # on the next engine
    assert list(store.read(LOGS.of(None), session="s")) == []
    persistence.close()


@pytest.mark.parametrize("at", [1, 2, 4])
def test_what_an_import_stores_behind_the_erasure_of_another_process_is_erased_again(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """at: the append before which the other process erases the session."""
    monkeypatch.setattr(stored_sessions, "_WRITE_RECORDS", 1)
    append = store.append

    def late(*args: Any) -> list[str]:
        if len(store.appended) + 1 == at:
            store.erase_session(LOGS.of(None), "s")
        return append(*args)

    monkeypatch.setattr(store, "append", late)
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    admin = SessionAdmin(persistence, lambda: ())
    records = [encode(turn("s", number)) for number in range(1, 5)]
    assert admin.begin("import", None, ImportRecords("s", None, records, only_new=False)) == {}
    answer: dict[str, Any] = {}
    wait_until(lambda: answer.update(admin.poll("import")) or answer)
    assert answer.get("error") == "invalid" and len(store.appended) == at
    assert list(store.read(LOGS.of(None), session="s")) == []
    persistence.close()


def test_who_polls_is_not_gone_however_long_a_job_takes(store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(session_admin, "time", SimpleNamespace(monotonic=lambda: now[0]))
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    admin, release = SessionAdmin(persistence, lambda: ()), gate(persistence)
    for name in ("polled", "left"):
        assert admin.begin(name, None, FindTenants("s")) == {}
    for now[0] in (4.0, 8.0, 12.0):
        assert admin.poll("polled") == {}
    assert admin.begin("next", None, FindTenants("s")) == {}  # jobs whose askers are gone make room
    release()
    wait_until(lambda: admin.poll("next"))
    assert admin.poll("polled") == {"value": [], "more": False}
    assert admin.poll("left")["error"] == "unavailable"
    persistence.close()


def test_answers_that_one_caller_does_not_fetch_leave_room_for_others(store: FlakyStore) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    admin = SessionAdmin(persistence, lambda: ())
    for number in range(64):
        assert admin.begin(f"left-{number}", "a", FindTenants("s")) == {}
        wait_until(lambda: persistence.stats()["jobs"] == 0)
    refused = admin.begin("one more", "a", FindTenants("s"))
    assert refused["error"] == "unavailable" and "try again" in refused["message"]
    assert admin.begin("other", "b", FindTenants("s")) == {}
    assert admin.poll("left-0") == {"value": [], "more": False}
    assert admin.begin("now", "a", FindTenants("s")) == {}
    persistence.close()


def test_answers_that_nobody_fetches_are_bounded_for_all_callers_together(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_admin, "_MOST_JOBS", 3)
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    admin = SessionAdmin(persistence, lambda: ())
    for caller in ("a", "b", "c"):
        assert admin.begin(caller, caller, FindTenants("s")) == {}
        wait_until(lambda: persistence.stats()["jobs"] == 0)
    refused = admin.begin("d", "d", FindTenants("s"))
    assert refused["error"] == "unavailable" and refused["message"].startswith("3 questions")
    assert admin.poll("a") == {"value": [], "more": False}
    assert admin.begin("d", "d", FindTenants("s")) == {}
    assert "error" in admin.begin("e", "e", FindTenants("s"))
    monkeypatch.setattr(session_admin, "_ABANDONED_SECONDS", -1.0)  # all who asked are gone
    assert admin.begin("e", "e", FindTenants("s")) == {}
    persistence.close()


def test_an_unexpected_error_is_logged_and_its_text_is_not_told(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The text may quote anything, for example what somebody said."""
    monkeypatch.setattr(store, "namespaces", Mock(side_effect=ValueError("a secret")))
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    admin = SessionAdmin(persistence, lambda: ())
    assert admin.begin("job", None, FindTenants("s")) == {}
    wait_until(lambda: persistence.stats()["jobs"] == 0)
    assert admin.poll("job") == {"error": "failed", "message": "ValueError"}
    assert "a job on a session failed" in caplog.text and "a secret" in caplog.text
    persistence.close()


def test_a_question_that_the_end_cancels_is_answered(store: FlakyStore) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    admin, release = SessionAdmin(persistence, lambda: ()), gate(persistence)
    assert admin.begin("job", None, FindTenants("s")) == {}
    persistence._jobs.close()
    release()
    answer = admin.poll("job")
    assert answer["error"] == "unavailable" and "closed" in answer["message"]
    persistence.close()


def test_the_end_cancels_what_has_not_begun(store: FlakyStore) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    release = gate(persistence)
    waiting = persistence.submit(lambda store: None, "a")
    persistence._jobs.close()
    release()
    assert waiting.cancelled()
    wait_until(lambda: persistence.stats()["jobs"] == 0)
    persistence.close()
