"""Test lists of sessions over HTTP, on real engines and stores behind vLLM's key check: whose, how many, in order."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from agentspec.addresses import is_loopback
from agentspec.cache.store import NewEntry, RecordReader, Store
from agentspec.server_ext import session_admin, stored_sessions
from agentspec.server_ext.api import session_routes
from agentspec.server_ext.session_questions import ListSessions

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
    admin, principal = server.engines[0].sessions, server.identity(ADA, "one").principal
    for tenant, count in (("acme", 3), ("rival", 0), (None, 0)):
        assert admin.begin("job", None, ListSessions(tenant, principal, anybody=False, count=10)) == {}
        answer: dict[str, Any] = {}
        server.wait(lambda answer=answer: answer.update(admin.poll("job")) or "value" in answer)  # type: ignore[misc]
        assert len(answer["value"]) == count


def test_turns_without_a_session_and_sessions_without_a_turn_are_not_listed(start: Start) -> None:
    """The store keeps all turns without a session under one empty key, whoever said them."""
    server = start(ADA, engines=1, tenant="acme")
    ada = server.identity(ADA, "one")
    server.say(ada)
    server.say(replace(ada, session=None, session_name=None))
    persistence = server.engines[0]._persistence
    log = persistence.logs.of(ada.tenant)
    persistence._store.append(log, [NewEntry("unreadable", b"of a later release")])
    assert {usage.session for usage in persistence._store.sessions(log)} == {ada.session, "", "unreadable"}
    assert server.listed(ADA) == server.listed(ADMIN) == ["one"]


def test_pages_hold_each_session_once(start: Start) -> None:
    """Without pages, sessions beyond the longest list could not be found, nor erased by callers without the names."""
    server = start(ADA, BOB)
    names = [f"session {number}" for number in range(7)]
    for number, name in enumerate(names):
        server.say(server.identity(ADA, name), engine=number % 2)
        server.say(server.identity(BOB, name), engine=number % 2)
    pages, before = list[int](), dict[str, float]()
    listed: list[str] = []
    while True:
        answer = server.call(ADA, "GET", params={"limit": 3, **before}).json()
        listed += [session["id"] for session in answer["sessions"]]
        pages.append(len(answer["sessions"]))
        if answer["next"] is None:
            break
        before = {"before": answer["next"]}
    assert listed == names[::-1] and pages == [3, 3, 1]
    assert len(server.call(ADMIN, "GET", params={"limit": 3, **before}).json()["sessions"]) == 2


def test_the_list_is_of_the_ids_that_begin_as_asked(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only these are read as a whole. Without a prefix, an erasure read all sessions to find those of its loops."""
    server = start(ADA, BOB, engines=1, tenant="acme")
    names = ["one", "one.a", "two", "one.b", "on", "ONE.c", "o%.d", "one.e"]
    for name in names:
        server.say(server.identity(ADA, name))
    server.say(server.identity(BOB, "one.bobs"))
    read: list[str] = []
    original = stored_sessions._turns

    def turns(store: Store, log: str, session: str, newest: int | None = None) -> Any:
        if newest is None:
            read.append(session)
        return original(store, log, session, newest)

    monkeypatch.setattr(stored_sessions, "_turns", turns)
    assert server.listed(ADA, params={"prefix": "one."}) == ["one.e", "one.b", "one.a"]
    assert len(read) == 3
    assert server.listed(ADA, params={"prefix": "one.", "limit": 2}) == ["one.e", "one.b"]
    assert server.listed(ADA, params={"prefix": "o%"}) == ["o%.d"] and server.listed(ADA, params={"prefix": "x"}) == []
    assert server.listed(ADA, params={"prefix": ""}) == names[::-1]
    assert server.listed(ADMIN, params={"prefix": "one.b"}) == ["one.bobs", "one.b"]


def test_a_page_of_one_session_says_how_to_go_on(start: Start) -> None:
    server = start(ADA, engines=1)
    for name in ("one", "two"):
        server.say(server.identity(ADA, name))
    first = server.call(ADA, "GET", params={"limit": 1}).json()
    assert [session["id"] for session in first["sessions"]] == ["two"] and first["next"] is not None
    behind = server.call(ADA, "GET", params={"limit": 1, "before": first["next"]}).json()
    assert [session["id"] for session in behind["sessions"]] == ["one"]
    assert server.call(ADA, "GET", params={"limit": 0}).json() == {"sessions": [], "next": None}


def test_a_page_does_not_end_between_sessions_of_one_moment(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ADA, engines=1)
    for name in ("first", "one", "two", "three", "latest"):
        server.say(server.identity(ADA, name))
    moments = {"first": 1.0, "latest": 3.0}
    keys = {str(server.identity(ADA, name).session): moment for name, moment in moments.items()}
    store = type(server.engines[0]._persistence._store)
    original = store.sessions
    monkeypatch.setattr(
        store,
        "sessions",
        lambda self, log: [replace(usage, used=keys.get(usage.session, 2.0)) for usage in original(self, log)],
    )
    first = server.call(ADA, "GET", params={"limit": 2}).json()
    assert {session["id"] for session in first["sessions"]} == {"latest", "one", "two", "three"} and first["next"] == 2
    behind = server.call(ADA, "GET", params={"limit": 2, "before": 2.0}).json()
    assert [session["id"] for session in behind["sessions"]] == ["first"] and behind["next"] is None


@pytest.mark.parametrize("adapter_last", [False, True])
def test_a_session_in_several_logs_counts_as_used_when_its_newest_turn_was_said(
    start: Start, adapter_last: bool
) -> None:
    """Turns under an adapter are in a log of their own. Otherwise such a session would be on a wrong page."""
    server = start(ADA, engines=1)
    plain, adapted = server.identity(ADA, "one"), server.identity(ADA, "one", adapter="tuned@/adapters/tuned")
    first, last = (plain, adapted) if adapter_last else (adapted, plain)
    server.say(first)
    server.say(server.identity(ADA, "between"))
    server.say(last)
    store = server.engines[0]._persistence._store
    usages = [usage for log in store.namespaces() for usage in store.sessions(log) if usage.session == plain.session]
    assert len(usages) == 2
    one, between = server.call(ADA, "GET").json()["sessions"]
    assert (one["id"], between["id"]) == ("one", "between")
    assert one["used"] == max(usage.used for usage in usages) > between["used"]
    assert one["bytes"] == sum(usage.bytes for usage in usages) and one["turns"] == 2
    behind = server.call(ADA, "GET", params={"before": one["used"]}).json()["sessions"]
    assert [session["id"] for session in behind] == ["between"]


@pytest.mark.parametrize("last", [0, 1])
def test_a_session_in_the_memory_of_several_engines_counts_as_used_when_its_newest_turn_was_said(
    start: Start, last: int
) -> None:
    """Otherwise a page could end before a session that the next one does not show either."""
    server = start(ADA, url="memory://")
    server.say(server.identity(ADA, "one"), engine=1 - last)
    server.say(server.identity(ADA, "between"), engine=last)
    server.say(server.identity(ADA, "one"), engine=last)
    assert server.listed(ADA) == ["one", "between"]
    first = server.call(ADA, "GET", params={"limit": 1}).json()
    assert [session["id"] for session in first["sessions"]] == ["one"]
    assert "between" in server.listed(ADA, params={"limit": 1, "before": first["next"]})


@pytest.mark.parametrize("before", ["x", "nan", "inf", ""])
def test_a_time_that_is_none_is_refused(start: Start, before: str) -> None:
    answer = start(ADA, engines=1).call(ADA, "GET", params={"before": before})
    assert answer.status_code == 422 and "before" in answer.text  # vLLM makes 400 of it


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
    """This is DNS rebinding: ``Host`` has the page's own name, and the browser lets the page read the answer."""
    server = start(engines=1)
    assert server.call(None, "GET", headers={"Host": host}).status_code == status
    server.state.agentspec_socket, server.state.agentspec_loopback = True, False
    assert server.call(None, "GET", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}, 200),
        ({"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
def test_without_keys_a_web_page_of_another_site_gets_no_sessions(
    start: Start, headers: dict[str, str], status: int
) -> None:
    """A browser sends the calls of any page to localhost, and shows it the answers where all origins are allowed."""
    server = start(engines=1)
    server.say(server.identity(None, "one"))
    for method, session in (("GET", ""), ("GET", "one"), ("DELETE", "one")):
        assert server.call(None, method, session, headers=headers).status_code == status, (method, session)
    keyed = start(ADA, engines=1)
    assert keyed.call(ADA, "GET", headers=headers).status_code == 200  # a page does not know the key
    server.state.agentspec_loopback = False
    assert server.call(None, "DELETE", "one", headers=headers).status_code == 200  # an id is a capability there


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


def test_a_list_that_nobody_waits_for_reads_no_more_sessions(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would go on for minutes among a million sessions of others, and erasures would wait behind it."""
    server = start(ADA, engines=1, tenant="acme")
    for name in ("one", "two", "three"):
        server.say(server.identity(ADA, name))
    admin, bob = server.engines[0].sessions, server.identity(BOB, "x")
    read: list[str] = []
    original = stored_sessions._turns

    def turns(store: Store, log: str, session: str, newest: int | None = None) -> Any:
        read.append(session)
        if len(read) == 2:
            monkeypatch.setattr(session_admin, "_ABANDONED_SECONDS", -1.0)
        return original(store, log, session, newest)

    monkeypatch.setattr(stored_sessions, "_turns", turns)
    for name in ("first", "second"):  # the second begins after its asker has gone
        assert admin.begin(name, bob.caller, ListSessions(bob.tenant, bob.principal, anybody=False, count=10)) == {}
        server.wait(lambda: server.engines[0]._persistence.stats()["jobs"] == 0)
    assert len(read) == 2


def test_a_list_goes_on_while_it_finds_sessions_of_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is for a store that does not answer. Each part read is progress, whatever it contains."""
    server = start(ADA, BOB, engines=1, tenant="team")
    server.say(server.identity(ADA, "one"))
    for number in range(8):
        server.say(server.identity(BOB, str(number)))

    class Slow(RecordReader):
        def read(self, *args: Any, **options: Any) -> Iterator[Any]:
            time.sleep(0.1)
            yield from super().read(*args, **options)

    monkeypatch.setattr(stored_sessions, "RecordReader", Slow)
    monkeypatch.setattr(session_admin, "_SLICE_SECONDS", 0.0)
    monkeypatch.setattr(session_routes, "_WAIT_SECONDS", 0.4)
    assert server.listed(ADA) == ["one"]


def test_a_limit_below_zero_is_refused_and_no_empty_list(start: Start) -> None:
    server = start(ADA, engines=1)
    server.say(server.identity(ADA, "one"))
    for limit, status in (("-1", 422), ("x", 422), ("0", 200), ("100000", 200)):  # vLLM makes 400 of 422
        answer = server.call(ADA, "GET", params={"limit": limit})
        assert answer.status_code == status and (status == 200 or "limit" in answer.text)
    assert server.listed(ADA, params={"limit": 100_000}) == ["one"]
