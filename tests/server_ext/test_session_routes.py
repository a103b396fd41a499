"""Test sessions over HTTP, on real engines and stores behind vLLM's key check: who sees, and may do, what."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentspec.cache.store import RecordReader, Store, StoreJobs
from agentspec.identifiers import to_header
from agentspec.server_ext import session_admin, stored_sessions
from agentspec.server_ext.api import session_routes
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.identity.callers import Presented
from agentspec.server_ext.session_questions import (
    EraseSession,
    FindTenants,
    ImportRecords,
    ListSessions,
    ReadSession,
    SessionQuestion,
)
from tests.timing import assert_fast

from .session_server import ADA, ADMIN, BOB, PROMPT, TEXT, Start, start

__all__ = ["start"]


def test_jobs_take_their_turn_as_the_callers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ADA, BOB)
    owners: list[str | None] = []
    submit = StoreJobs.submit

    def noting(jobs: StoreJobs, job: Callable[[Store], Any], owner: str | None = None) -> Any:
        owners.append(owner)
        return submit(jobs, job, owner)

    monkeypatch.setattr(StoreJobs, "submit", noting)
    monkeypatch.setattr(session_admin, "_SLICE_SECONDS", 0.0)  # each record is a job of its own
    for key in (ADA, BOB):
        identity = server.identity(key, "one")
        server.say(identity)
        export = server.call(key, "GET", "one").content
        server.call(key, "GET")
        server.call(key, "PUT", "one", content=export)
        server.erase(key, "one")
        for salt in ("one", "other"):  # which makes other sessions, but no other caller
            server.call(key, "GET", headers={"X-Cache-Salt": salt})
        assert len(owners) >= 7 and set(owners) == {identity.principal}
        owners.clear()


def test_a_family_is_its_callers_own_and_loses_what_is_erased(start: Start) -> None:
    server = start(ADA, BOB)

    def of(key: str, session: str, parent: str | None = None, **more: Any) -> Identity:
        return server.identity(key, session, parent=parent, scope="session", **more)

    report = [token + 100 for token in TEXT]
    server.say(of(ADA, "root"))
    server.say(of(ADA, "child", "root"), report)

    def shares(engine: int, text: list[int]) -> None:
        server.draws_on(of(ADA, "sibling", "root"), text, engine)

    for engine in (0, 1):  # the second one has it from the store
        shares(engine, TEXT)
        shares(engine, report)
        assert not server.drafts(of(ADA, "sibling"), engine=engine)
        assert not server.drafts(of(BOB, "sibling", "root"), engine=engine)
        assert not server.drafts(of(ADA, "sibling", "root", cache_salt="salt"), engine=engine)
    assert server.erase(ADA, "child").status_code == 200
    for engine in (0, 1):
        assert not server.drafts(of(ADA, "sibling", "root"), report, engine=engine)
        shares(engine, TEXT)


def test_a_session_that_was_erased_stays_when_its_export_is_imported_again(start: Start) -> None:
    """Its turns have the names of these engines, but must not be taken for turns that came late after the erasure."""
    server = start(ADA)
    ada, other = server.identity(ADA, "one"), server.identity(ADA, "other")
    for engine in (0, 1):  # both follow the log
        server.say(ada, [engine, *TEXT], engine=engine)
    export = server.call(ADA, "GET", "one")
    assert server.erase(ADA, "one").status_code == 200
    assert server.call(ADA, "PUT", "one", content=export.content).json()["added"] == len(export.json()["turns"]) == 2

    def delivered(engine: int) -> int:
        return int(server.engines[engine].stats()["store"]["follower"]["delivered"])

    for _ in range(2):  # late turns are erased when a follower looks again
        before = [delivered(engine) for engine in (0, 1)]
        for engine in (0, 1):
            server.say(other, engine=engine)
        server.wait(lambda before=before: delivered(0) > before[0] and delivered(1) > before[1])  # type: ignore[misc]
    assert server.call(ADA, "GET", "one").json() == export.json()


def test_the_administrator_sees_all_by_their_keys_and_imports_nothing(start: Start) -> None:
    server = start(ADA, BOB)
    ada = server.identity(ADA, "one")
    for identity in (ada, server.identity(BOB, "one")):
        server.say(identity)
    found = {session["key"]: session["id"] for session in server.call(ADMIN, "GET").json()["sessions"]}
    assert found == {ada.session: "one", server.identity(BOB, "one").session: "one"}
    export = server.call(ADMIN, "GET", str(ada.session))
    assert export.json()["turns"] == server.call(ADA, "GET", "one").json()["turns"]
    assert server.call(ADMIN, "GET", "one").status_code == 403
    assert server.call(ADMIN, "PUT", str(ada.session), content=export.content).status_code == 403
    assert server.erase(ADMIN, str(ada.session)).status_code == 200
    assert (server.listed(ADA), server.listed(BOB)) == ([], ["one"])
    assert not server.drafts(ada)


def test_a_key_that_somebody_else_shows_is_only_a_name(start: Start) -> None:
    server = start(ADA, BOB)
    ada = server.identity(ADA, "one")
    server.say(ada)
    for key in (BOB, ADA):
        assert server.call(key, "GET", str(ada.session)).status_code == 404
        assert server.erase(key, str(ada.session)).json()["records"] == 0
    assert server.listed(ADA) == ["one"] and server.draws_on(ada)


def test_a_gateways_principals_see_their_own_and_who_is_nobody_sees_nothing(start: Start) -> None:
    server = start(principal_header="X-Principal")
    for name in ("ada", "bob"):
        sender = Presented([(b"x-principal", name.encode())])
        server.say(server.tagger.identity_of({"session_id": f"of {name}"}, sender))
    server.state.agentspec_loopback = False
    assert server.listed(None, headers={"X-Principal": "ada"}) == ["of ada"]
    assert server.call(None, "GET", "of bob", headers={"X-Principal": "ada"}).status_code == 404
    for headers in ({}, {"X-Principal": ""}):
        for method, session in (("GET", ""), ("GET", "of ada"), ("DELETE", "of ada"), ("PUT", "of ada")):
            assert server.call(None, method, session, headers=headers).status_code == 403
    assert server.listed(None, headers={"X-Principal": "ada"}) == ["of ada"]


@pytest.mark.parametrize("value", ["salt", "größer als 9"])
def test_a_salted_session_needs_its_salt(start: Start, value: str) -> None:
    server = start(ADA)
    server.say(server.identity(ADA, "one", cache_salt=value))
    assert server.listed(ADA) == [] and server.call(ADA, "GET", "one").status_code == 404
    salt = {"X-Cache-Salt": to_header(value)}
    assert server.listed(ADA, headers=salt) == ["one"]
    server.call(ADA, "DELETE", "one")
    assert server.call(ADA, "GET", "one", headers=salt).status_code == 200
    assert server.erase(ADA, "one", headers=salt).status_code == 200
    assert server.listed(ADA, headers=salt) == []


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_a_session_under_an_adapter_is_one_session(start: Start, tenant: str | None) -> None:
    server = start(ADA, BOB, tenant=tenant)
    other = list(range(600, 660))
    server.say(server.identity(ADA, "one", adapter="tuned@/adapters/tuned"), other)
    server.say(server.identity(ADA, "one"))
    server.say(server.identity(BOB, "one", adapter="tuned@/adapters/tuned"))
    assert server.listed(ADA) == ["one"]
    (listed,) = server.call(ADA, "GET").json()["sessions"]
    assert (listed["turns"], listed["tokens"]) == (2, 2 * len(PROMPT) + len(TEXT) + len(other))
    export = server.call(ADA, "GET", "one")
    assert sorted(turn["response"][0] for turn in export.json()["turns"]) == [TEXT[0], other[0]]
    assert server.call(ADA, "PUT", "one", content=export.content).json()["added"] == 0
    assert server.erase(ADA, "one").status_code == 200
    assert server.erased == 2
    assert (server.listed(ADA), server.listed(BOB)) == ([], ["one"])


def test_a_question_too_many_is_refused_and_no_other_is_forgotten(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.server_ext.session_admin._ABANDONED_SECONDS", 600.0)  # a busy machine is slow to ask
    server = start(ADA, engines=1)
    server.say(server.identity(ADA, "one"))
    admin = server.engines[0].sessions
    question = FindTenants(str(server.identity(ADA, "one").session))
    for number in range(256):
        caller = f"caller{number // 64}"  # each caller may leave 64
        server.wait(lambda n=number, caller=caller: admin.begin(f"job{n}", caller, question) == {})  # type: ignore[misc]
    assert admin.begin("job256", None, question)["error"] == "unavailable"
    answer = server.call(ADA, "GET", "one")
    assert answer.status_code == 503 and "try again" in answer.text
    server.wait(lambda: all("value" in admin.poll("job0") for _ in range(1)))
    assert admin.poll("job0")["error"] == "unavailable"  # told already
    assert server.call(ADA, "GET", "one").status_code == 200
    monkeypatch.setattr("agentspec.server_ext.session_admin._ABANDONED_SECONDS", 0.0)
    assert admin.begin("job257", None, question) == {} and len(admin._jobs) == 1


def test_a_caller_that_leaves_too_many_answers_keeps_no_other_from_asking(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_admin, "_ABANDONED_SECONDS", 600.0)
    monkeypatch.setattr(session_admin, "_MOST_OF_CALLER", 2)
    server = start(ADA, engines=1)
    admin, question = server.engines[0].sessions, FindTenants(str(server.identity(ADA, "one").session))
    answers = [admin.begin(f"job{number}", "caller", question) for number in range(3)]
    assert answers[:2] == [{}, {}] and answers[2]["error"] == "unavailable"
    assert admin.begin("of another", "other", question) == {}


def test_an_export_that_nobody_waits_for_reads_no_more_turns(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would read 350,000 turns for most of a minute, and all lists and erasures would wait."""
    server = start(ADA, engines=1)
    ada = server.identity(ADA, "one")
    for _ in range(4):
        server.say(ada)
    admin, read = server.engines[0].sessions, list[Any]()

    class Reader(RecordReader):
        def read(self, *args: Any, **options: Any) -> Iterator[Any]:
            for entry in super().read(*args, **options):
                read.append(entry)
                if len(read) == 2:
                    monkeypatch.setattr(session_admin, "_ABANDONED_SECONDS", -1.0)
                yield entry

    monkeypatch.setattr(stored_sessions, "RecordReader", Reader)
    for name in ("first", "second"):  # the second begins after its asker has gone
        assert admin.begin(name, ada.caller, ReadSession(str(ada.session))) == {}
        server.wait(lambda: server.engines[0]._persistence.stats()["jobs"] == 0)
    assert len(read) == 2


@pytest.mark.parametrize("what", ["read", "list", "import"])
def test_a_long_session_lets_the_questions_of_others_between(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One thread asks the store. If 350,000 turns were one job, the questions of others would wait for a minute."""
    server = start(ADA, BOB, engines=1)
    ada, bob = server.identity(ADA, "one"), server.identity(BOB, "two")
    for number in range(4):
        server.say(ada, [number, *TEXT])
    admin, read = server.engines[0].sessions, list[str]()

    class Reader(RecordReader):
        def read(self, *args: Any, **options: Any) -> Iterator[Any]:
            for entry in super().read(*args, **options):
                read.append(entry[0].session)
                yield entry

    monkeypatch.setattr(stored_sessions, "RecordReader", Reader)
    monkeypatch.setattr(session_admin, "_SLICE_SECONDS", 0.0)  # a record in each slice
    session = str(ada.session)
    questions: dict[str, SessionQuestion] = {
        "read": ReadSession(session),
        "list": ListSessions(ada.tenant, ada.principal, anybody=False, count=10),
        "import": ImportRecords(session, ada.tenant, [], only_new=False),
    }
    assert admin.begin("long", ada.caller, questions[what]) == {}
    assert admin.begin("short", bob.caller, FindTenants(str(bob.session))) == {}
    found: dict[str, list[Any]] = {"long": [], "short": []}

    def ended(job: str) -> bool:
        answer = admin.poll(job)
        found[job].extend(answer.get("value", ()))
        return answer.get("more") is False

    server.wait(lambda: ended("short"))
    assert len(read) <= 1
    server.wait(lambda: ended("long"))
    assert len(found["long"]) == (4 if what == "read" else 1) and admin._jobs == {}


def test_an_engine_is_asked_while_another_takes_its_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asker that is silent for seconds counts as gone, and the first engine's answer would be forgotten."""
    monkeypatch.setattr(session_routes, "_WAIT_SECONDS", 2.0)
    server = start(ADA)
    server.say(server.identity(ADA, "one"))
    slow, other = (engine.sessions for engine in server.engines)
    asked: list[str] = []
    poll_slow, poll_other = slow.poll, other.poll

    def polled(job: str) -> dict[str, Any]:
        asked.append(job)
        return poll_other(job)

    monkeypatch.setattr(other, "poll", polled)
    monkeypatch.setattr(slow, "poll", lambda job: poll_slow(job) if job in asked else {})
    assert server.listed(ADA) == ["one"]


def test_the_log_and_no_caller_is_told_where_the_store_is(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_admin, "_TELL_SECONDS", 0.0)
    server = start(ADA, url="redis://operator:hunter2-hunter2@127.0.0.1:1/0", engines=1)
    for method, session in (("GET", ""), ("GET", "one"), ("DELETE", "one")):
        caplog.clear()
        answer = server.call(ADA, method, session)
        assert answer.status_code == 503 and "try again" in answer.json()["detail"]
        assert "127.0.0.1" not in answer.text and "operator" not in answer.text and "redis" not in answer.text
        assert "127.0.0.1:1" in caplog.text and "hunter2" not in caplog.text


@pytest.mark.parametrize("erases", [True, False])
def test_who_erases_is_told_what_a_failing_store_still_holds(start: Start, erases: bool) -> None:
    server = start(ADA, url="redis://127.0.0.1:1/0", engines=1)
    admin, ada, answer = server.engines[0].sessions, server.identity(ADA, "one"), dict[str, Any]()

    def ended() -> bool:
        answer.update(admin.poll("job"))
        return "error" in answer

    session = str(ada.session)
    question = EraseSession(session, [ada.tenant]) if erases else ReadSession(session)
    assert admin.begin("job", ada.caller, question) == {}
    server.wait(ended)
    assert ("what was stored of it is not erased" in answer["message"]) is erases


@pytest.mark.alone
def test_no_engine_waits_for_a_store_that_is_away(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_routes, "_WAIT_SECONDS", 1.0)
    server = start(ADA, url="redis://:hunter2-hunter2@127.0.0.1:1/0", engines=1)

    def measure() -> dict[str, float]:
        server.slowest = 0.0
        for method, session in (("GET", ""), ("GET", "one"), ("DELETE", "one")):
            answer = server.call(ADA, method, session)
            assert answer.status_code == 503 and "hunter2" not in answer.text, answer.text
        return {"seconds": server.slowest}

    assert_fast(measure, seconds=0.2)


@pytest.mark.parametrize("bad", ["%0A", "one%0A", "o%0Ane", "x" * 257, "%00"])
def test_an_id_that_no_session_can_have_is_refused(start: Start, bad: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = start(ADA, engines=1).call(ADA, method, bad, content=b"{}")
        assert answer.status_code == 400 and answer.json()["detail"].startswith("id")
