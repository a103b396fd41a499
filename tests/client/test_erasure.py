"""clear() erases what a session has left on the server, also when its object is gone, and until nothing is left."""

from __future__ import annotations

import gc
import sqlite3
from pathlib import Path

import pytest

from agentspec import AgentClient, AsyncAgentClient, StoreUnavailableError
from agentspec.client.erasure_list import ErasureList

from .fake_server import FakeServer


def salts_of_erasures(server: FakeServer) -> list[str | None]:
    asked = [request for request in server.received if request.method == "DELETE"]
    return [request.headers.get("x-cache-salt") for request in asked]


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


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.erasure_list._MAX_SESSIONS", 3)
    monkeypatch.setattr("agentspec.client.erasure_list._MAX_NAMES", 2)
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
    monkeypatch.setattr("agentspec.client.client.ERASURE_PAUSE_S", 0.01)
    with AgentClient(base_url=server.url, model="small", store="memory://") as client:
        session = client.session("s")
        session.chat("one")
        server.erasing = [202, 202]
        session.clear()
        assert server.erased == ["s"] * 3 and session.messages == []


async def test_clear_says_that_something_is_left(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("client", "async_client"):
        monkeypatch.setattr(f"agentspec.client.{module}.ERASURE_S", 0.05)
        monkeypatch.setattr(f"agentspec.client.{module}.ERASURE_PAUSE_S", 0.01)
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
    monkeypatch.setattr("agentspec.client.store_log.FLUSH_TIMEOUT_S", 0.3)
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


def test_a_cleared_session_leaves_nothing_in_the_clients_own_store(server: FakeServer, tmp_path: Path) -> None:
    with AgentClient(base_url=server.url, model="small", store=f"sqlite:///{tmp_path}/sessions.db") as client:
        session = client.session("unmistakable-name")
        session.chat("unmistakable text")
        client.session("other").chat("one")
        session.clear()
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert b"other" in left and b"unmistakable" not in left
