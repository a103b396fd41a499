"""Test session.prime(), and sessions that are resumed on another server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from agentspec import AgentClient, AsyncAgentClient, InvalidInputError
from agentspec.testing.server import free_port

from .fake_server import FakeServer, Received

TURN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "answer 1"}]


def connect(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", **{"store": None, **options})


def primings(server: FakeServer) -> list[Received]:
    return [request for request in server.received if request.method == "PUT"]


def test_a_session_and_files_are_primed(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"def a(): ...\r\n")
    with connect(server) as client:
        session = client.session("fix/42")
        assert session.prime() == 0 and not primings(server), "it has nothing to say"
        session.chat("hello")
        assert session.prime() == 1
        assert session.prime(["some text", tmp_path / "a.py"], cache_salt="Salz 2é") == 2
    history, files = primings(server)
    assert history.path == files.path == "/v1/agentspec/sessions/fix%2F42"
    assert history.body == {"version": 1, "messages": TURN} and "x-cache-salt" not in history.headers
    assert files.body == {"version": 1, "texts": ["some text", "def a(): ...\r\n"]}, "line ends are as in the file"
    assert files.headers["x-cache-salt"] == "Salz%202%C3%A9"


def test_many_texts_come_in_several_requests(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.priming.IMPORT_PART_BYTES", 100)
    texts = [f"{i}" * 40 for i in range(7)]
    with connect(server) as client:
        assert client.session("s").prime(texts) == 7
    assert [len(request.body["texts"]) for request in primings(server)] == [2, 2, 2, 1]
    monkeypatch.setattr("agentspec.client.priming.MAX_IMPORT_TURNS", 3)
    with connect(server) as client:
        assert client.session("short").prime([str(i) for i in range(7)]) == 7
    assert [len(request.body["texts"]) for request in primings(server)[4:]] == [3, 3, 1]


def test_a_request_is_as_short_as_servers_take_it_also_in_json(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.client.priming.IMPORT_PART_BYTES", 100)
    with connect(server) as client:
        assert client.session("s").prime(["\x1b" * 10] * 3) == 3
    assert [len(request.body["texts"]) for request in primings(server)] == [1, 1, 1], "62 bytes each, as JSON"


def test_errors_say_what_is_wrong(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    with connect(server, max_retries=0) as client:
        session = client.session("s")
        for wrong in ("a text", [tmp_path / "image"], [tmp_path / "missing"], [Path("a\0b")]):
            with pytest.raises(InvalidInputError, match=r"^texts: "):
                session.prime(wrong)
        server.failures = [413]
        with pytest.raises(openai.APIStatusError):
            session.prime(["too long"])


async def test_a_server_that_cannot_be_reached_is_no_server_without_the_extension() -> None:
    address = f"http://127.0.0.1:{free_port()}/v1"
    note = f"agentspec: {address} cannot be reached: wait until its server is up, or give another base_url"
    with AgentClient(base_url=address, model="small", store=None, max_retries=0) as client:
        for call in (lambda: client.session("s").prime(["some text"]), client.session("s").clear):
            with pytest.raises(openai.APIConnectionError) as raised:
                call()
            assert raised.value.__notes__ == [note]
    async with AsyncAgentClient(base_url=address, model="small", store=None, max_retries=0) as agents:
        for wait in (agents.session("s").prime(["some text"]), agents.session("s").clear()):
            with pytest.raises(openai.APIConnectionError) as raised:
                await wait
            assert raised.value.__notes__ == [note]


def test_nothing_is_sent_of_a_list_with_a_file_that_cannot_be_read(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.client.priming.IMPORT_PART_BYTES", 10)  # each text is a request
    with connect(server) as client, pytest.raises(InvalidInputError, match="missing"):
        client.session("s").prime(["some text", "more text", tmp_path / "missing"])
    assert not primings(server)


def test_other_servers_get_nothing(plain_server: FakeServer, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    with connect(plain_server, store=url) as client:
        client.session("s").chat("hello")
    with connect(plain_server, store=url) as client:
        assert client.session("s").prime() == 0
        client.session("s").chat("again")
    assert not primings(plain_server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_resumed_session_is_offered_to_its_server_once(server: FakeServer, tmp_path: Path, stream: bool) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    with connect(server, store=url) as client:
        client.session("s").chat("hello", extra_body={"cache_salt": "salt"})
        assert not primings(server), "the server has just heard it"
    other = FakeServer(extension=True)
    try:
        with connect(other, store=url) as client:
            session = client.session("s")
            for _ in range(2):
                if stream:
                    session.stream("again", extra_body={"cache_salt": "salt"}).until_done()
                else:
                    session.chat("again", extra_body={"cache_salt": "salt"})
        (offered,) = primings(other)
        assert offered.path == "/v1/agentspec/sessions/s?only_new=true"
        assert offered.body == {"version": 1, "messages": TURN} and offered.headers["x-cache-salt"] == "salt"
        assert other.received.index(offered) < other.received.index(other.chats[0])
    finally:
        other.close()


def test_a_session_with_pictures_is_primed_with_its_text(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes no more than a few megabytes, and drafts from none of the data of a picture."""
    monkeypatch.setattr("agentspec.client.priming.IMPORT_PART_BYTES", 1_000)
    text, data = {"type": "text", "text": "What is it?"}, "QUJD" * 1_000
    parts: list[dict[str, Any]] = [
        text,
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "file", "file": {"file_data": data}},
        {"type": "input_image", "image": [data], "width": 3},
    ]
    url = f"sqlite:///{tmp_path}/sessions.db"
    for asked in ({"role": "user", "content": parts}, "And now?"):
        with connect(server, store=url) as client:
            session = client.session("s")
            session.chat(asked)
    (offered,) = primings(server)
    assert offered.body["messages"][0] == {
        "role": "user",
        "content": [
            text,
            {"type": "image_url", "image_url": {"url": ""}},
            {"type": "input_audio", "input_audio": {"data": "", "format": ""}},
            {"type": "file", "file": {"file_data": ""}},
            {"type": "input_image", "image": [""], "width": 3},
        ],
    }
    with connect(server, store=url) as client:
        session = client.session("s")
        assert session.prime() == 1 and session.messages[0]["content"] == parts, "they stay in the session"
    assert primings(server)[-1].body["messages"][:2] == offered.body["messages"]
    assert server.chats[-1].body["messages"][0]["content"] == parts


def test_a_long_session_is_not_offered(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.priming.IMPORT_PART_BYTES", 1_000)
    url = f"sqlite:///{tmp_path}/sessions.db"
    for asked in ("long " * 300, "And now?"):
        with connect(server, store=url) as client:
            client.session("s").chat(asked)
    assert not primings(server)


def test_a_server_that_refuses_the_offer_is_asked_as_usual(server: FakeServer, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    with connect(server, store=url) as client:
        client.session("s").chat("hello")
    with connect(server, store=url) as client:
        server.failures = [503]  # for the call that offers the session
        assert client.session("s").chat("again").text == "answer 2"
    assert len(primings(server)) == 1


async def test_the_asynchronous_twin(server: FakeServer, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    for count in (0, 1):
        async with AsyncAgentClient(base_url=server.url, model="small", store=url) as client:
            session = client.session("s")
            await session.chat("hello")
            assert len(primings(server)) == count
    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
        assert await client.session("t").prime(["one", "two"]) == 2
        assert await client.session("t").prime() == 0
