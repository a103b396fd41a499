"""Test a session's history: it grows by whole turns, and only by those that worked."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import openai
import pytest

from agentspec import AgentClient, InvalidInputError, InvalidSessionError, Session, SessionBusyError

from .fake_server import FakeServer


def connect(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(**{"base_url": server.url, "model": "small", "store": None, **options})


def test_each_call_sends_the_whole_history(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session()
        first = session.chat("one")
        session.chat("two")
        assert client.session(session.id).messages == session.messages
        assert session.messages[-1] == {"role": "assistant", "content": "answer 2"}
    assert first.text == "answer 1"
    assert first.message == {"role": "assistant", "content": "answer 1"}
    assert first.finish_reason == "stop"
    assert first.usage is not None and first.usage.total_tokens == 10
    assert first.session == session.id
    assert first.raw.id == "chatcmpl-1"
    assert server.chats[1].body["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "two"},
    ]


def test_a_turn_may_bring_several_messages(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        session.add({"role": "system", "content": "Be brief."})
        session.chat([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
        assert [message["role"] for message in session.messages] == ["system", "user", "user", "assistant"]


def test_a_failed_call_leaves_the_history_as_it_was(server: FakeServer) -> None:
    server.failures = [500, 400]
    with connect(server, max_retries=0) as client:
        session = client.session("s")
        with pytest.raises(openai.InternalServerError):
            session.chat("hello")
        with pytest.raises(openai.BadRequestError):
            session.chat("hello")
        assert session.messages == []
        session.chat("hello")
        assert [message["role"] for message in session.messages] == ["user", "assistant"]


def test_the_openai_client_retries(server: FakeServer) -> None:
    server.failures = [500, 429]
    with connect(server, max_retries=2) as client:
        session = client.session("s")
        assert session.chat("hello").text == "answer 3"
        assert len(session.messages) == 2
    assert len(server.chats) == 3
    assert {chat.headers["x-session-id"] for chat in server.chats} == {"s"}


def test_a_server_that_is_busy_says_when_to_come_back(server: FakeServer) -> None:
    """By itself, the OpenAI client waits for half a second at most before its first retry."""
    server.failures, server.retry_after = [429], ("Retry-After", "1")
    with connect(server, max_retries=1) as client:
        begin = time.monotonic()
        assert client.session("s").chat("hello").text == "answer 2"
        assert time.monotonic() - begin >= 1


def test_timeouts_and_connections_fail_as_in_the_openai_client(server: FakeServer) -> None:
    server.hold = threading.Event()
    with connect(server, max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            client.session("s").chat("hello", timeout=0.1)
        server.hold.set()
        assert client.session("s").chat("again").text
    server.close()
    with connect(server, max_retries=0) as client, pytest.raises(openai.APIConnectionError):
        client.session("s").chat("hello")


def test_one_call_at_a_time(server: FakeServer) -> None:
    server.hold = threading.Event()
    with connect(server) as client:
        session = client.session("s")
        first = threading.Thread(target=session.chat, args=("one",))
        first.start()
        while not server.chats:
            first.join(0.01)
        other = client.session("other")
        other.add({"role": "user", "content": "zero"})
        for forbidden in (
            lambda: session.chat("two"),
            lambda: session.tool_result("id", ""),
            lambda: other.fork("s"),
            session.clear,
        ):
            with pytest.raises(SessionBusyError, match="fork"):
                forbidden()
        server.hold.set()
        first.join()
        session.chat("two")
        assert [message["content"] for message in session.messages] == ["one", "answer 1", "two", "answer 2"]


@pytest.mark.parametrize("store", [None, "memory://"])
def test_the_rule_holds_for_every_taker_of_an_id(server: FakeServer, store: str | None) -> None:
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        stream = client.session("s").stream("one")
        assert next(stream) == "ans"
        with pytest.raises(SessionBusyError):
            client.session("s").chat("two")
        stream.until_done()
        assert [message["content"] for message in client.session("s").messages] == ["one", "answer 1"]


def test_sessions_run_side_by_side(server: FakeServer) -> None:
    with connect(server) as client:
        sessions = [client.session(f"s{number}") for number in range(8)]

        def converse(session: Session) -> None:
            for _ in range(3):
                session.chat(session.id)

        threads = [threading.Thread(target=converse, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for session in sessions:
            assert [message["content"] for message in session.messages[::2]] == [session.id] * 3
    assert len(server.probes) == 1


def test_fork_goes_two_ways(server: FakeServer) -> None:
    with connect(server) as client:
        trunk = client.session("trunk")
        trunk.chat("one")
        branch = trunk.fork("branch")
        branch.chat("two")
        assert len(trunk.messages) == 2
        assert branch.messages[:2] == trunk.messages
        assert len(branch.messages) == 4
        assert server.chats[-1].headers["x-session-id"] == "branch"
        assert trunk.fork().id not in ("trunk", "branch")
        with pytest.raises(InvalidSessionError, match="branch"):
            trunk.fork("branch")


def test_clear_starts_over_and_an_empty_session_needs_a_message(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        session.chat("one")
        session.clear()
        assert session.messages == []
        with pytest.raises(InvalidInputError, match="first message"):
            session.chat()


def test_what_callers_hold_is_theirs(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        message = {"role": "user", "content": [{"type": "text", "text": "one"}]}
        reply = session.chat(message)
        message["content"] = "changed"
        reply.message["content"] = "changed"
        session.messages[0]["content"] = "changed"
        kept = [
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": "answer 1"},
        ]
        assert session.messages == kept


def test_the_key_goes_to_every_endpoint(server: FakeServer) -> None:
    server.api_key = "secret"
    server.counts = {"tokens": 3, "steps": 2, "drafts": 2, "drafted": 2, "accepted": 1}
    with connect(server, api_key="secret") as client:
        assert client.chat("hello").speculation is not None
    with connect(server, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.chat("hello")


def test_an_http_client_of_the_callers_is_used(server: FakeServer) -> None:
    http_client = openai.DefaultHttpxClient(headers={"X-Proxy": "mine"})
    with connect(server, http_client=http_client) as client:
        client.chat("hello")
    assert all(request.headers["x-proxy"] == "mine" for request in server.received)


def test_a_client_that_was_used_is_refused_in_a_forked_process(server: FakeServer) -> None:
    """Both processes would read from one connection, and no thread would store the child's turns."""
    with connect(server) as used, connect(server) as unused:
        used.session("parent").chat("one")
        told = _in_a_fork(lambda: used.session("child").chat("two").text)
        assert "make a client in each process" in told
        session = used.session("parent")
        message = {"role": "user", "content": "two"}
        calls: list[Callable[[], object]] = [
            lambda: used.session("new").messages,
            lambda: session.add(message),
            lambda: session.tool_result("c", "two"),
            lambda: session.reload(),
            lambda: session.clear(),
            lambda: session.fork("other"),
        ]
        for call in calls:
            assert "make a client in each process" in _in_a_fork(call)
        assert _in_a_fork(lambda: unused.session("child").chat("two").text) == "answer 2"
        assert used.session("parent").chat("three").text == "answer 3"


def test_a_fork_that_fails_changes_no_other_session(server: FakeServer) -> None:
    with connect(server) as client:
        one, two = client.session("one", group="g"), client.session("two")
        one.chat("1")
        two.chat("2")
        with pytest.raises(InvalidSessionError, match="another id"):
            one.fork("two")
        with pytest.raises(InvalidInputError, match="at:"):
            one.fork("three", at=9)
        assert (two.parent, two.group, client.session("three").parent) == (None, None, None)
        assert (one.fork("four").parent, one.fork("five").group) == ("one", "g")
        of_another_group = client.session("six", group="h")
        assert two.fork("six").group == of_another_group.group == "h"


def test_a_session_is_never_its_own_parent(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        calls: list[Callable[[], object]] = [
            lambda: session.child("s"),
            lambda: session.fork("s"),
            lambda: client.session("s", parent="s"),
            lambda: client.chat("one", session="s", parent="s"),
        ]
        for wrong in calls:
            with pytest.raises(InvalidSessionError, match="take another id"):
                wrong()
        assert session.parent is None


def _in_a_fork(call: Callable[[], object]) -> str:
    """Run a call in a forked process. Return its result, or the text of its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = str(call())
        except Exception as error:
            told = str(error)
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


def test_ids_of_new_sessions_cannot_be_guessed(server: FakeServer) -> None:
    with connect(server, store="memory://") as client:
        names = [client.session().id for _ in range(100)]
        names += [client.session("s").fork().id for _ in range(10)]
    assert len(set(names)) == 110
    for name in names:
        assert uuid.UUID(hex=name.removeprefix("session-")).version == 4  # 122 random bits


@pytest.mark.parametrize("name", [".", ".."])
def test_dots_as_an_id_are_a_session_as_others_are(server: FakeServer, name: str) -> None:
    with connect(server) as client:
        session = client.session(name)
        assert session.prime(["a text"]) == 1
        session.clear()
    assert server.erased == [name]
    paths = [request.path for request in server.received if request.method in ("PUT", "DELETE")]
    assert [unquote(path) for path in paths] == [f"/v1/agentspec/sessions/{name}"] * 2
