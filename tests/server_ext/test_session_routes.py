"""Sessions over HTTP, on real engines and stores behind vLLM's key check: who sees, and may do, what."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentspec.addresses import is_loopback
from agentspec.cache.store import RecordReader, Store, StoreJobs
from agentspec.identifiers import to_header
from agentspec.server_ext import session_admin
from agentspec.server_ext.api import session_routes
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.identity.callers import Presented
from tests.timing import assert_fast

from .session_server import ADA, ADMIN, BOB, PROMPT, TEXT, Start, start

__all__ = ["start"]


def test_a_caller_sees_its_own_sessions_used_last_first(start: Start) -> None:
    server = start(ADA, BOB)
    for key, session, engine in ((ADA, "one", 0), (ADA, "two", 1), (BOB, "one", 0), (ADA, "one", 0)):
        server.say(server.identity(key, session), engine=engine)
    server.say(server.identity(ADA, "kept to itself", scope="session"))
    assert server.listed(ADA) == ["kept to itself", "one", "two"]
    assert server.listed(BOB) == ["one"]
    assert server.listed(ADA, params={"limit": 1}) == ["kept to itself"]
    (bobs,) = server.call(BOB, "GET").json()["sessions"]
    assert bobs["tokens"] == len(PROMPT) + len(TEXT) and bobs["turns"] == 1 and abs(time.time() - bobs["used"]) < 60
    assert "key" not in bobs
    assert server.call(None, "GET").status_code == server.call("eve", "GET").status_code == 401


def test_jobs_take_their_turn_as_the_callers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ADA, BOB)
    owners: list[str | None] = []
    submit = StoreJobs.submit

    def noting(jobs: StoreJobs, job: Callable[[Store], Any], owner: str | None = None) -> Any:
        owners.append(owner)
        return submit(jobs, job, owner)

    monkeypatch.setattr(StoreJobs, "submit", noting)
    for key in (ADA, BOB):
        identity = server.identity(key, "one")
        server.say(identity)
        export = server.call(key, "GET", "one").content
        server.call(key, "GET")
        server.call(key, "PUT", "one", content=export)
        server.erase(key, "one")
        assert len(owners) >= 5 and set(owners) == {identity.principal}
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
    """Its turns bear the names of engines here, but they did not arrive late behind the erasure."""
    server = start(ADA)
    ada, other = server.identity(ADA, "one"), server.identity(ADA, "other")
    for engine in (0, 1):  # both follow the log
        server.say(ada, [engine, *TEXT], engine=engine)
    export = server.call(ADA, "GET", "one")
    assert server.erase(ADA, "one").status_code == 200
    assert server.call(ADA, "PUT", "one", content=export.content).json()["added"] == len(export.json()["turns"]) == 2

    def delivered(engine: int) -> int:
        return int(server.engines[engine].stats()["store"]["follower"]["delivered"])

    for _ in range(2):  # what came late is erased when a follower looks again
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


def test_the_list_is_of_one_tenant_and_of_as_many_as_are_asked_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(ADA, engines=1, tenant="acme")
    for name in ("one", "two", "three"):
        server.say(server.identity(ADA, name))
    for limit, count in ((0, 0), (2, 2), (1000, 3)):
        assert len(server.listed(ADA, params={"limit": limit})) == count
    monkeypatch.setattr(session_routes, "_LONGEST_LIST", 1)
    assert server.listed(ADA) == ["three"]
    admin, principal = server.engines[0]._sessions, server.identity(ADA, "one").principal
    for tenant, count in (("acme", 3), ("rival", 0), (None, 0)):
        assert admin.begin("job", None, "list", tenant, principal, False, 10) == {}
        answer: dict[str, Any] = {}
        server.wait(lambda answer=answer: answer.update(admin.poll("job")) or "value" in answer)  # type: ignore[misc]
        assert len(answer["value"]) == count


def test_without_keys_the_list_answers_on_a_loopback_server_only(start: Start) -> None:
    server = start()
    server.say(server.identity(None, "an unguessable name"))
    assert server.listed(None) == ["an unguessable name"]
    server.state.agentspec_loopback = False
    refused = server.call(None, "GET")
    assert refused.status_code == 403 and "--api-key" in refused.json()["detail"]
    assert server.call(None, "GET", headers={"X-Cache-Salt": "x"}).status_code == 403
    assert server.call(None, "GET", "an unguessable name").status_code == 200  # the name is a capability
    assert server.call(None, "GET", "another name").status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("rebound.example.org:8000", 403),
        ("127.0.0.1.example.org", 403),
        ("10.0.0.1", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_without_keys_a_web_page_cannot_list_by_a_name_that_leads_here(start: Start, host: str, status: int) -> None:
    """By DNS rebinding: the page's own name then stands in ``Host``, and the browser lets it read the answer."""
    server = start(engines=1)
    assert server.call(None, "GET", headers={"Host": host}).status_code == status
    server.state.agentspec_socket, server.state.agentspec_loopback = True, False
    assert server.call(None, "GET", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        (None, False),
        ("", False),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
    ],
)
def test_which_hosts_are_loopback(host: str | None, local: bool) -> None:
    assert is_loopback(host) == local


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
    server = start(ADA, engines=1)
    server.say(server.identity(ADA, "one"))
    admin = server.engines[0]._sessions
    session = server.identity(ADA, "one").session
    for number in range(256):
        owner = f"owner{number // 64}"  # one may leave 64
        server.wait(lambda n=number, owner=owner: admin.begin(f"job{n}", owner, "tenants", session) == {})  # type: ignore[misc]
    assert admin.begin("job256", None, "tenants", session)["error"] == "unavailable"
    answer = server.call(ADA, "GET", "one")
    assert answer.status_code == 503 and "try again" in answer.text
    server.wait(lambda: all("value" in admin.poll("job0") for _ in range(1)))
    assert admin.poll("job0")["error"] == "unavailable"  # told already
    assert server.call(ADA, "GET", "one").status_code == 200
    monkeypatch.setattr("agentspec.server_ext.session_admin._ABANDONED_SECONDS", 0.0)
    assert admin.begin("job257", None, "tenants", session) == {} and len(admin._jobs) == 1


def test_a_list_that_nobody_waits_for_reads_no_more_sessions(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among a million sessions of others it went on for minutes, and erasures waited behind it."""
    server = start(ADA, engines=1, tenant="acme")
    for name in ("one", "two", "three"):
        server.say(server.identity(ADA, name))
    admin, bob = server.engines[0]._sessions, server.identity(BOB, "x")
    read: list[str] = []
    original = session_admin._turns

    def turns(store: Store, log: str, session: str, newest: int | None = None) -> Any:
        read.append(session)
        if len(read) == 2:
            monkeypatch.setattr(session_admin, "_ABANDONED_SECONDS", -1.0)
        return original(store, log, session, newest)

    monkeypatch.setattr(session_admin, "_turns", turns)
    for name in ("first", "second"):  # the second one begins when its asker is gone
        assert admin.begin(name, bob.principal, "list", bob.tenant, bob.principal, False, 10) == {}
        server.wait(lambda: server.engines[0]._persistence.stats()["jobs"] == 0)
    assert len(read) == 2


def test_an_export_that_nobody_waits_for_reads_no_more_turns(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a session of 350,000 turns it went on for most of a minute, and everybody's lists and erasures waited."""
    server = start(ADA, engines=1)
    ada = server.identity(ADA, "one")
    for _ in range(4):
        server.say(ada)
    admin, read = server.engines[0]._sessions, list[Any]()

    class Reader(RecordReader):
        def read(self, *args: Any, **options: Any) -> Iterator[Any]:
            for entry in super().read(*args, **options):
                read.append(entry)
                if len(read) == 2:
                    monkeypatch.setattr(session_admin, "_ABANDONED_SECONDS", -1.0)
                yield entry

    monkeypatch.setattr(session_admin, "RecordReader", Reader)
    for name in ("first", "second"):  # the second one begins when its asker is gone
        assert admin.begin(name, ada.principal, "read", ada.session, ada.tenant, False) == {}
        server.wait(lambda: server.engines[0]._persistence.stats()["jobs"] == 0)
    assert len(read) == 2


@pytest.mark.parametrize("what", ["read", "list"])
def test_a_long_list_or_export_lets_the_questions_of_others_between(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It was one job of the only thread that asks the store: of 350,000 turns, the others waited for a minute."""
    server = start(ADA, BOB, engines=1)
    ada, bob = server.identity(ADA, "one"), server.identity(BOB, "two")
    for number in range(4):
        server.say(ada, [number, *TEXT])
    admin, read = server.engines[0]._sessions, list[str]()

    class Reader(RecordReader):
        def read(self, *args: Any, **options: Any) -> Iterator[Any]:
            for entry in super().read(*args, **options):
                read.append(entry[0].session)
                yield entry

    monkeypatch.setattr(session_admin, "RecordReader", Reader)
    monkeypatch.setattr(session_admin, "_SLICE_SECONDS", 0.0)  # a record in each slice
    long = (ada.session, ada.tenant, False) if what == "read" else (ada.tenant, ada.principal, False, 10)
    assert admin.begin("long", ada.principal, what, *long) == {}
    assert admin.begin("short", bob.principal, "tenants", bob.session) == {}
    found: list[Any] = []

    def ended() -> bool:
        answer = admin.poll("long")
        found.extend(answer.get("value", ()))
        return answer.get("more") is False

    answers: list[Any] = []
    server.wait(lambda: answers.append(admin.poll("short")) or "value" in answers[-1])  # type: ignore[func-returns-value]
    assert len(read) <= 1
    server.wait(ended)
    assert len(found) == (4 if what == "read" else 1) and admin._jobs == {}


def test_a_list_goes_on_while_it_finds_sessions_of_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for a store that does not answer. Each part that was read is progress, whatever is in it."""
    server = start(ADA, BOB, engines=1, tenant="team")
    server.say(server.identity(ADA, "one"))
    for number in range(8):
        server.say(server.identity(BOB, str(number)))

    class Slow(RecordReader):
        def read(self, *args: Any, **options: Any) -> Iterator[Any]:
            time.sleep(0.1)
            yield from super().read(*args, **options)

    monkeypatch.setattr(session_admin, "RecordReader", Slow)
    monkeypatch.setattr(session_admin, "_SLICE_SECONDS", 0.0)
    monkeypatch.setattr(session_routes, "_WAIT_SECONDS", 0.4)
    assert server.listed(ADA) == ["one"]


def test_an_engine_is_asked_while_another_takes_its_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer was forgotten: an asker that says nothing for seconds counts as gone."""
    monkeypatch.setattr(session_routes, "_WAIT_SECONDS", 2.0)
    server = start(ADA)
    server.say(server.identity(ADA, "one"))
    slow, other = (engine._sessions for engine in server.engines)
    asked: list[str] = []
    poll_slow, poll_other = slow.poll, other.poll

    def polled(job: str) -> dict[str, Any]:
        asked.append(job)
        return poll_other(job)

    monkeypatch.setattr(other, "poll", polled)
    monkeypatch.setattr(slow, "poll", lambda job: poll_slow(job) if job in asked else {})
    assert server.listed(ADA) == ["one"]


def test_a_limit_below_zero_is_refused_and_no_empty_list(start: Start) -> None:
    server = start(ADA, engines=1)
    server.say(server.identity(ADA, "one"))
    for limit, status in (("-1", 422), ("x", 422), ("0", 200), ("100000", 200)):  # vLLM makes 400 of 422
        answer = server.call(ADA, "GET", params={"limit": limit})
        assert answer.status_code == status and (status == 200 or "limit" in answer.text)
    assert server.listed(ADA, params={"limit": 100_000}) == ["one"]


def test_the_log_and_no_caller_is_told_where_the_store_is(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(ADA, url="redis://operator:hunter2-hunter2@127.0.0.1:1/0", engines=1)
    for method, session in (("GET", ""), ("GET", "one"), ("DELETE", "one")):
        caplog.clear()
        answer = server.call(ADA, method, session)
        assert answer.status_code == 503 and "try again" in answer.json()["detail"]
        assert "127.0.0.1" not in answer.text and "operator" not in answer.text and "redis" not in answer.text
        assert "127.0.0.1:1" in caplog.text and "hunter2" not in caplog.text


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
