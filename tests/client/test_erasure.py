"""Test that clear() erases all that a session has left on the server, even after its object is gone."""

from __future__ import annotations

import gc
import sqlite3
from pathlib import Path

import openai
import pytest

from agentspec import AgentClient, AsyncAgentClient, Stage, StoreUnavailableError
from agentspec.cache.store import open_store
from agentspec.client.history.erasure_list import ErasureList
from agentspec.identifiers import MAX_ID_LENGTH, helpers_of, is_helper

from .fake_server import FakeServer
from .histories import connect, contents, salts_of_erasures, stored


def test_clear_erases_the_servers_copy_too(server: FakeServer) -> None:
    store = open_store("memory://")
    with connect(server, store) as client:
        session = client.session("a/b ü")
        session.chat("one")
        session.clear()
        assert session.messages == []
        server.erasing = [404, 405]  # the server has forgotten it already, or cannot erase
        session.clear()
        session.clear()
    assert server.erased == ["a/b ü"] * 3
    assert stored(store, "a/b ü") == []


def test_clear_erases_the_sessions_of_all_cache_salts(server: FakeServer) -> None:
    """On the server, each salt makes another session of the same id."""
    with connect(server, "memory://") as client:
        session = client.session("s")
        session.chat("one", extra_body={"cache_salt": "mine"})
        session.chat("two", extra_body={"cache_salt": "mine"})
        session.chat("three")
        server.erasing = [404]  # nothing was said without a salt
        session.clear(cache_salts=["größer als 9"])
    assert salts_of_erasures(server) == [None, "gr%C3%B6%C3%9Fer%20als%209", "mine"]
    assert server.erased == ["s"] * 3


async def test_clear_erases_the_sessions_of_all_cache_salts_with_asyncio(server: FakeServer) -> None:
    async with AsyncAgentClient(base_url=server.url, model="small", store="memory://") as client:
        session = client.session("s")
        await session.chat("one", extra_body={"cache_salt": "mine"})
        await session.clear()
    assert salts_of_erasures(server) == [None, "mine"]


def test_clear_erases_what_its_loops_said_in_other_sessions(server: FakeServer) -> None:
    with connect(server, "memory://") as client:
        session = client.session("s")
        session.best_of("count", 2, lambda reply: 1.0)
        session.pipeline("count", [Stage("plan", "Plan it:"), Stage("write", "Write it:")])
        used = {chat.headers["x-session-id"] for chat in server.chats}
        session.clear()
    assert set(server.erased) == used | {"s"} and len(used) == 4
    assert {name.rpartition(".")[2] for name in used if name.startswith("s.")} >= {"1", "2"}


def test_clear_leaves_a_session_alone_whose_name_a_loop_might_choose(server: FakeServer) -> None:
    with connect(server, "memory://") as client:
        client.session("s.1").chat("my own")
        session = client.session("s")
        session.best_of("count", 2, lambda reply: 1.0)
        session.clear()
        assert "s.1" not in server.erased and "s" in server.erased
        assert contents(client.session("s.1")) == ["my own", "answer 1"]


def test_sessions_of_loops_are_remembered_up_to_a_limit(server: FakeServer) -> None:
    with connect(server, "memory://") as client:
        conversation = client.session("s")._conversation
        made = [conversation.new_helper() for _ in range(10_000)]
    assert len(set(made)) == 10_000 and all(is_helper(name, "s") for name in made)
    assert conversation.helpers == made[-1_000:]


def test_clear_asks_no_server_that_cannot_know_the_session(server: FakeServer, plain_server: FakeServer) -> None:
    for fake, tags in ((plain_server, "auto"), (server, "off")):
        with connect(fake, "memory://", session_tags=tags) as client:
            session = client.session("s")
            session.chat("one")
            session.clear()
            assert session.messages == []
        assert fake.erased == []


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_clear_warns_where_a_gateway_hides_whether_the_server_keeps_sessions(
    server: FakeServer, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Nearly every server without the extension answers 404."""
    server.probe = lambda: (status, {})
    with connect(server, "memory://") as client:
        client.session("one").chat("one")
        client.session("one").clear()
    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as agents:
        await agents.session("two").clear()
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("agentspec.client")]
    names = ["one", "two"] if status != 404 else []
    assert len(warned) == len(names) and server.erased == []
    for name, warning in zip(names, warned, strict=True):
        assert f"{name!r}: nothing was erased on the server: GET /agentspec was refused with status {status}" in warning


def test_clear_that_the_server_refuses_changes_nothing(server: FakeServer) -> None:
    with connect(server, "memory://", max_retries=0) as client:
        session = client.session("s")
        session.chat("one")
        server.erasing = [403, 500]
        with pytest.raises(openai.PermissionDeniedError):
            session.clear()
        with pytest.raises(openai.InternalServerError):
            session.clear()
        assert contents(session) == ["one", "answer 1"]
        session.clear()
        assert session.messages == []


async def test_clear_with_asyncio(server: FakeServer) -> None:
    store = open_store("memory://")
    async with AsyncAgentClient(base_url=server.url, model="small", store=store, max_retries=0) as client:
        session = client.session("s")
        await session.chat("one")
        server.erasing = [500]
        with pytest.raises(openai.InternalServerError):
            await session.clear()
        assert len(session.messages) == 2
        await session.clear()
        assert session.messages == []
    assert server.erased == ["s", "s"]
    assert stored(store) == []


def test_clear_of_an_unreachable_server_says_so(server: FakeServer) -> None:
    with connect(server, "memory://", max_retries=0) as client:
        session = client.session("s")
        session.add({"role": "user", "content": "one"})
        server.close()
        with pytest.raises(openai.APIConnectionError):
            session.clear()
        assert contents(session) == ["one"]


def test_salts_and_helpers_outlive_the_session_object(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store="memory://") as client:
        client.session("s").best_of("count", 2, lambda reply: 1.0)
        client.session("s").chat("one", extra_body={"cache_salt": "mine"})
        client.chat("two", session="s", extra_body={"cache_salt": "unkept"})
        gc.collect()
        client.session("s").clear()
    used = {chat.headers["x-session-id"] for chat in server.chats}
    assert len(used) == 3 and set(server.erased) == used
    assert set(salts_of_erasures(server)) == {None, "mine", "unkept"}


def test_clear_erases_what_helpers_said_and_what_was_primed_under_salts(server: FakeServer) -> None:
    with connect(server, "memory://") as client:
        session = client.session("s")
        session.best_of("count", 2, lambda reply: 1.0, extra_body={"cache_salt": "mine"})
        session.prime(["a text"], cache_salt="primed")
        session.clear()
    used = {chat.headers["x-session-id"] for chat in server.chats}
    erasures = zip(server.erased, salts_of_erasures(server), strict=True)
    assert {(helper, "mine") for helper in used} | {("s", "primed")} <= set(erasures)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.history.erasure_list._MAX_SESSIONS", 3)
    monkeypatch.setattr("agentspec.client.history.erasure_list._MAX_NAMES", 2)
    erasures = ErasureList()
    for session in ("a", "b", "c", "a", "d"):
        for salt in ("1", "2", "3"):
            erasures.add_salt(session, salt)
    assert {session: erasures.salts(session) for session in "abcd"} == {
        "a": ["2", "3"],
        "b": [],
        "c": ["2", "3"],
        "d": ["2", "3"],
    }


def test_clear_repeats_an_erasure_that_is_not_complete(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.base.ERASURE_PAUSE_S", 0.01)
    with AgentClient(base_url=server.url, model="small", store="memory://") as client:
        session = client.session("s")
        session.chat("one")
        server.erasing = [202, 202]
        session.clear()
        assert server.erased == ["s"] * 3 and session.messages == []


async def test_clear_says_that_something_is_left(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.base.ERASURE_S", 0.05)
    monkeypatch.setattr("agentspec.client.base.ERASURE_PAUSE_S", 0.01)
    with AgentClient(base_url=server.url, model="small", store="memory://") as client:
        session = client.session("s")
        session.chat("one")
        server.erasing = [202] * 1_000
        with pytest.raises(StoreUnavailableError, match=r"^session 's': .*clear\(\) again"):
            session.clear()
        assert len(session.messages) == 2
    async with AsyncAgentClient(base_url=server.url, model="small", store="memory://") as agents:
        twin = agents.session("s")
        await twin.chat("one")
        with pytest.raises(StoreUnavailableError, match=r"^session 's': .*clear\(\) again"):
            await twin.clear()
        server.erasing = []
        await twin.clear()
        assert twin.messages == []


def test_clear_says_that_something_is_left_in_the_clients_own_store(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.client.history.store_log.FLUSH_TIMEOUT_S", 0.3)
    path = tmp_path / "sessions.db"
    with AgentClient(base_url=server.url, model="small", store=f"sqlite:///{path}") as client:
        session = client.session("s")
        session.chat("one")
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchone()
        with pytest.raises(StoreUnavailableError, match=r"clear\(\) again"):
            session.clear()
        reader.close()
        session.clear()
        assert session.messages == []


def test_clear_names_session_and_remedy_where_the_clients_own_store_is_away(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store="redis://127.0.0.1:1/0") as client:
        session = client.session("s")
        with pytest.raises(StoreUnavailableError, match=r"^session 's': not erased .*refused; call clear\(\) again"):
            session.clear()


def test_a_cleared_session_leaves_nothing_in_the_clients_own_store(server: FakeServer, tmp_path: Path) -> None:
    with AgentClient(base_url=server.url, model="small", store=f"sqlite:///{tmp_path}/sessions.db") as client:
        session = client.session("unmistakable-name")
        session.chat("unmistakable text")
        client.session("other").chat("one")
        session.clear()
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert b"other" in left and b"unmistakable" not in left


def test_a_salt_that_is_sent_again_counts_as_the_latest() -> None:
    erasures = ErasureList()
    for salt in ("one", "two", "one"):
        erasures.add_salt("s", salt)
    assert erasures.salts("s") == ["two", "one"] and erasures.salts("t") == []


def test_what_was_erased_once_is_not_erased_again() -> None:
    server = FakeServer(extension=True)
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        session = client.session("s")
        for _ in range(3):
            session.best_of("task", 2, lambda reply: 1.0)
            session.chat("more", extra_body={"cache_salt": "pepper"})
            server.received.clear()
            session.clear()
            assert len(server.erased) == 6  # the session and two helpers, each with and without the salt


def test_long_ids_that_begin_alike_have_other_helpers() -> None:
    long = "x" * 210
    helper = f"{helpers_of(long + 'a')}.3"
    assert is_helper(helper, long + "a") and not is_helper(helper, long + "b")
    assert len(helper) <= MAX_ID_LENGTH
