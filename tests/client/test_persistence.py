"""Test that sessions outlive their process, and that a failing store costs nothing else."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest

from agentspec import (
    AgentClient,
    AgentSpecError,
    Gap,
    InvalidSessionError,
    StoreError,
    StoreUnavailableError,
    StoreURLError,
)
from agentspec.cache.store import Retention, default_store_url, open_store
from agentspec.client.history.outbox import NAMESPACE, read_session
from tests.store.helpers import damage_payload, wait_until

from .fake_server import FakeServer
from .stores import FailingStore


def converse(url: str, store: str, texts: Sequence[str]) -> None:
    with AgentClient(base_url=url, model="small", store=store) as client:
        session = client.session("fix-42")
        for text in texts:
            session.chat(text)


def test_a_new_client_goes_on_with_a_session(server: FakeServer, plain_server: FakeServer, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'sessions.db'}"
    converse(server.url, store, ["one", "two"])
    # another server and another model: messages belong to neither
    with AgentClient(base_url=plain_server.url, model="other", store=store) as client:
        session = client.session("fix-42")
        assert [message["content"] for message in session.messages] == ["one", "answer 1", "two", "answer 2"]
        session.chat("three")
        assert client.session("fix-43").messages == []
    assert len(plain_server.chats[0].body["messages"]) == 5


def test_a_process_that_never_closes_its_client_loses_nothing(server: FakeServer, tmp_path: Path) -> None:
    script = f"""
        from agentspec import AgentClient
        session = AgentClient(base_url={server.url!r}, model="small").session("fix-42")
        session.add({{"role": "system", "content": "Be brief."}})
        session.chat("one")
    """
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)
    with AgentClient(base_url=server.url, model="small") as client:
        contents = [message["content"] for message in client.session("fix-42").messages]
    assert contents == ["Be brief.", "one", "answer 1", "Be brief.", "one", "answer 2"]
    folder = tmp_path / "data" / "agentspec"
    assert (folder / "sessions.db").exists()
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_that_ends_leaves_waiting_messages_to_its_parent(server: FakeServer, tmp_path: Path) -> None:
    script = f"""
        import os, sys
        from agentspec import AgentClient
        client = AgentClient(base_url={server.url!r}, model="small")
        session = client.session("fix-42")
        session.add({{"role": "system", "content": "Be brief."}})  # it waits until the stored messages are read
        child = os.fork()
        if not child:
            sys.exit()
        os.waitpid(child, 0)
        print(len(session.messages))
    """
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1"]


def test_a_session_dropped_and_taken_up_again_in_one_process(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store="memory://") as client:
        client.session("s").chat("one")
        client.session("s").chat("two")
    assert len(server.chats[1].body["messages"]) == 3


def test_a_closed_client_takes_nothing_that_it_would_lose(server: FakeServer) -> None:
    client = AgentClient(base_url=server.url, model="small")
    session = client.session("s")
    reply = session.chat("one")
    client.close()
    client.close()
    for use in (
        lambda: session.chat("two"),
        lambda: session.stream("two"),
        lambda: session.add({"role": "user", "content": "two"}),
        lambda: session.tool_result("c", "two"),
        session.clear,
        session.reload,
        session.prime,
        lambda: client.speculation(reply),
        lambda: client.chat("two"),
    ):
        with pytest.raises(AgentSpecError, match="the client is closed: make another"):
            use()
    assert [message["content"] for message in session.messages] == ["one", "answer 1"]


@pytest.mark.parametrize("on_unavailable", ["raise", "empty"])
def test_a_closed_client_reads_no_session(server: FakeServer, on_unavailable: Any) -> None:
    """The session must not go on with an empty history: only the client is closed, and the store is there."""
    client = AgentClient(base_url=server.url, model="small", store="memory://")
    known, unread = (client.session(name, on_unavailable=on_unavailable) for name in ("known", "unread"))
    known.chat("one")
    client.close()
    assert len(known.messages) == 2
    for read in (lambda: unread.messages, lambda: unread.gaps, unread.load, unread.fork, unread.forecast, unread.prime):
        with pytest.raises(AgentSpecError, match="the client is closed: make another one"):
            read()


def test_connections_are_closed_though_writing_is_interrupted(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = AgentClient(base_url=server.url, model="small", store=FailingStore("append"))
    client.session("s").chat("one")
    monkeypatch.setattr("agentspec.client.history.outbox.Outbox.close", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        client.close()
    assert client.openai.is_closed()


def test_without_a_store_the_client_remembers(server: FakeServer, tmp_path: Path) -> None:
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        client.session("s").chat("one")
        client.session("s").chat("two")
    assert len(server.chats[1].body["messages"]) == 3
    assert not (tmp_path / "data").exists()


def test_a_failed_call_is_not_kept(server: FakeServer) -> None:
    store = open_store("memory://")
    server.failures = [400]
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        with pytest.raises(openai.BadRequestError):
            client.session("s").chat("one")
        client.session("s").chat("one")
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        assert [message["role"] for message in client.session("s").messages] == ["user", "assistant"]


def test_stateless_calls_are_not_kept(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store="memory://") as client:
        client.chat("one", session="s")
        assert client.session("s").messages == []


def test_forks_and_tool_results_are_kept(server: FakeServer) -> None:
    store = open_store("memory://")
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        trunk = client.session("trunk")
        trunk.chat("one")
        trunk.fork("branch").add({"role": "user", "content": "left"})
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        assert [message["content"] for message in client.session("branch").messages] == ["one", "answer 1", "left"]
        with pytest.raises(InvalidSessionError):
            client.session("trunk").fork("branch")


def test_clear_removes_what_is_stored(server: FakeServer) -> None:
    store = open_store("memory://")
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        session.chat("one")
        session.clear()
        session.chat("two")
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        assert [message["content"] for message in client.session("s").messages] == ["two", "answer 2"]


def test_a_store_that_cannot_write_costs_no_call(
    server: FakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.client.history.store_log.FLUSH_TIMEOUT_S", 0.3)
    with caplog.at_level(logging.WARNING):
        client = AgentClient(base_url=server.url, model="small", store=FailingStore("append"))
        session = client.session("s")
        for text in ("one", "two", "three"):
            session.chat(text)
        assert len(session.messages) == 6
        client.close()
    assert len(server.chats[2].body["messages"]) == 5
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("unwritten" in warning for warning in warnings) == 1
    assert len(warnings) <= 2  # the other warning says that the store was lost, if there was time


def test_clear_that_cannot_remove_changes_nothing(server: FakeServer) -> None:
    store = FailingStore("remove")
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        session.chat("one")
        with pytest.raises(StoreError):
            session.clear()
        assert len(session.messages) == 2
        store.failing = set()
        session.clear()
        assert session.messages == []


def test_what_waits_to_be_written_does_not_come_back_after_clear(server: FakeServer) -> None:
    store = FailingStore("append")
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        session.chat("one")
        session.clear()
        store.failing = set()
        session.chat("two")
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        assert [message["content"] for message in client.session("s").messages] == ["two", "answer 2"]


def test_a_named_store_must_open(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(StoreURLError):
        AgentClient(base_url=server.url, model="small", store="mongodb://localhost")
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError):
        AgentClient(base_url=server.url, model="small", store=f"sqlite:///{damaged}")


def test_a_default_store_that_cannot_open_costs_new_sessions_nothing(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").write_text("a file where the data directory should be")
    with AgentClient(base_url=server.url, model="small") as client:
        for name in (None, "named"):
            session = client.session(name, on_unavailable="empty")
            session.chat("one")
            session.chat("two")
            assert len(session.messages) == 4
        with pytest.raises(StoreUnavailableError, match=r"store=None.*XDG_DATA_HOME.*on_unavailable"):
            client.session("s").chat("three")
    assert len(server.chats) == 4
    assert sum("is away" in record.getMessage() for record in caplog.records) >= 1


def test_damaged_messages_leave_a_gap(server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "sessions.db"
    converse(server.url, f"sqlite:///{path}", ["one", "two"])
    damage_payload(path, 1)
    with AgentClient(base_url=server.url, model="small", store=f"sqlite:///{path}") as client:
        session = client.session("fix-42")
        assert [message["content"] for message in session.messages] == ["answer 1", "two", "answer 2"]
        assert session.gaps == [Gap(before=0, lost=1)]
    assert sum("skipped" in record.getMessage() for record in caplog.records) == 1


def test_the_default_store_erases_whole_sessions_that_were_not_used_for_long(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AgentClient(base_url=server.url, model="small") as client:
        for name in ("old", "new"):
            client.session(name).chat("one")
        client.session("new").chat("two")
    monkeypatch.setattr("agentspec.client.history.store_log.RETENTION", Retention(records=5))
    with AgentClient(base_url=server.url, model="small") as client:
        assert len(client.session("new").messages) == 4  # opens the store
        store = open_store(default_store_url("sessions.db"))
        wait_until(lambda: len(store.sessions(NAMESPACE)) == 1)
        store.close()
        assert client.session("old").messages == []
        assert client.session("old").gaps == []


def test_the_default_store_stays_within_its_limits_while_a_client_runs(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service runs for months, and may be the only client of its store."""
    monkeypatch.setattr("agentspec.client.history.store_log._TRIM_PAUSE_S", 0.0)
    with AgentClient(base_url=server.url, model="small") as client:
        for name in ("old", "old", "old", "new"):
            client.session(name).chat("one")
        store = open_store(default_store_url("sessions.db"))
        wait_until(lambda: store.usage().records == 8)
        monkeypatch.setattr("agentspec.client.history.store_log.RETENTION", Retention(records=7))
        client.session("new").chat("two")
        wait_until(lambda: len(store.sessions(NAMESPACE)) == 1)
        store.close()


def test_a_forked_process_that_ends_waits_for_no_lock_of_its_parents(tmp_path: Path) -> None:
    """The parent's thread is writing at the fork. The child has its locks, and not the thread that releases them."""
    program = f"""
import os, sys, time
from agentspec import AgentClient

client = AgentClient(base_url="http://127.0.0.1:9/v1", model="m", store="sqlite:///{tmp_path / "s.db"}")
session = client.session("a")
session.load()
for number in range(8):
    for _ in range(60):
        session.add({{"role": "user", "content": "x" * 20_000}})
    time.sleep(0.003 * (number % 5))
    child = os.fork()
    if child == 0:
        sys.exit(0)
    for _ in range(1000):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.02)
    else:
        os.kill(child, 9)
        sys.exit("a child hangs")
client.close()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    with closing(open_store(f"sqlite:///{tmp_path / 's.db'}")) as store:
        assert len(read_session(store, "a").history) == 8 * 60


def test_a_client_that_a_forked_process_uses_first_stores_its_messages_there(tmp_path: Path) -> None:
    client = AgentClient(base_url="http://127.0.0.1:9/v1", model="m", store=f"sqlite:///{tmp_path / 's.db'}")
    child = os.fork()
    if child == 0:
        with client:
            client.session("a").add({"role": "user", "content": "kept"})
        os._exit(0)
    os.waitpid(child, 0)
    client.close()
    with closing(open_store(f"sqlite:///{tmp_path / 's.db'}")) as store:
        assert len(read_session(store, "a").history) == 1
