"""Test session tags: they name the session to the server, only in ways that this server accepts."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import httpx
import openai
import pytest

from agentspec import AgentClient, ConfigurationError, InvalidInputError, InvalidSessionError
from agentspec.client.connection import connect
from agentspec.client.history.conversation import Conversation
from agentspec.client.history.session_log import SessionLog
from agentspec.client.request import Call, RequestBuilder
from agentspec.client.session_naming import EXTENSION, NAMINGS, SessionTags
from agentspec.identifiers import from_header, to_header

from .fake_server import FakeServer


def test_with_the_extension_header_and_body_carry_the_session(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        client.session("fix-42").chat("hello")
    (chat,) = server.chats
    assert chat.headers["x-session-id"] == "fix-42"
    assert chat.body["session_id"] == "fix-42"
    assert chat.body["vllm_xargs"] == {"session_id": "fix-42"}


def test_any_other_server_gets_the_header_only(plain_server: FakeServer) -> None:
    with AgentClient(base_url=plain_server.url, model="small", store=None) as client:
        reply = client.session("fix-42").chat("hello", temperature=0.5)
    (chat,) = plain_server.chats
    assert reply.text == "answer 1"
    assert chat.headers["x-session-id"] == "fix-42"
    assert chat.body.keys() == {"model", "messages", "temperature"}


def test_stateless_calls_are_tagged_when_they_name_a_session(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        client.chat("one", session="s")
        client.chat([{"role": "user", "content": "two"}])
    tagged, untagged = server.chats
    assert tagged.headers["x-session-id"] == tagged.body["session_id"] == "s"
    assert "x-session-id" not in untagged.headers
    assert untagged.body.keys() == {"model", "messages"}


@pytest.mark.parametrize(
    ("mode", "header", "body"), [("header", True, False), ("body", False, True), ("off", False, False)]
)
def test_tags_can_be_set_whatever_the_server(server: FakeServer, mode: SessionTags, header: bool, body: bool) -> None:
    options = {"session_tags": mode, "speculation": False}
    with AgentClient(base_url=server.url, model="small", store=None, **options) as client:  # type: ignore[arg-type]
        client.session("s").chat("hello")
    (chat,) = server.chats
    assert ("x-session-id" in chat.headers) is header
    assert ("session_id" in chat.body) is body
    assert not server.probes  # nothing depends on it


def test_a_group_travels_in_the_body_of_servers_that_know_it(server: FakeServer, plain_server: FakeServer) -> None:
    for fake in (server, plain_server):
        with AgentClient(base_url=fake.url, model="small", store=None, speculation=False) as client:
            client.session("sample-1", group="problem-7").chat("hello")
            client.chat("hello", session="sample-2", group="problem-7")
            assert client.stream("hello", group="problem-7").until_done().text
    sessions = [{"session_id": "sample-1"}, {"session_id": "sample-2"}, {}]
    assert [chat.body["vllm_xargs"] for chat in server.chats] == [{**tag, "group_id": "problem-7"} for tag in sessions]
    assert [chat.body.get("session_id") for chat in server.chats] == ["sample-1", "sample-2", None]
    assert not any("vllm_xargs" in chat.body for chat in plain_server.chats)
    assert [chat.headers.get("x-session-id") for chat in plain_server.chats] == ["sample-1", "sample-2", None]


@pytest.mark.parametrize(("mode", "tagged"), [("header", False), ("body", True), ("off", False)])
def test_a_group_goes_where_the_bodys_tags_go(plain_server: FakeServer, mode: SessionTags, tagged: bool) -> None:
    plain_server.extension = tagged  # the server refuses fields that it should not get
    with AgentClient(
        base_url=plain_server.url, model="small", store=None, speculation=False, session_tags=mode
    ) as client:
        client.chat("hello", group="problem-7")
    (chat,) = plain_server.chats
    assert chat.body.get("vllm_xargs") == ({"group_id": "problem-7"} if tagged else None)


def test_a_session_keeps_its_group(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        session = client.session("sample-1", group="problem-7")
        assert client.session("sample-1").group == session.group == "problem-7"
        session.chat("one")
        assert session.fork("sample-2").group == "problem-7"
        client.session("sample-1", group="problem-8")
        session.stream("two").until_done()
        assert client.session("other").group is None
    assert [chat.body["vllm_xargs"]["group_id"] for chat in server.chats] == ["problem-7", "problem-8"]


@pytest.mark.parametrize("mode", ["body", "openai"])
def test_an_openai_client_that_cannot_carry_the_session_says_so(server: FakeServer, mode: SessionTags) -> None:
    with (
        AgentClient(base_url=server.url, model="small", store=None, session_tags=mode) as client,
        pytest.raises(InvalidInputError, match=r"client\.openai.*(session_id|prompt_cache_key)"),
    ):
        _ = client.session("s").openai


def test_the_callers_own_extras_stay(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        client.session("s").chat(
            "hello",
            extra_headers={"X-Trace": "7"},
            extra_body={"vllm_xargs": {"depth": 3}},
            model="other",
        )
    (chat,) = server.chats
    assert chat.headers["x-trace"] == "7"
    assert chat.headers["x-session-id"] == "s"
    assert chat.body["vllm_xargs"] == {"depth": 3, "session_id": "s"}
    assert chat.body["model"] == "other"


def test_a_header_is_sent_once_however_the_caller_spells_it() -> None:
    """Older OpenAI clients (2.25) send each spelling, and servers then read one or the other."""
    theirs = {"x-session-id": "mine", "x-agentspec-figures": "detailed", "x-trace": "7"}
    ours = {"X-Session-ID": "mine", "X-Agentspec-Figures": "detailed", "x-trace": "7"}
    builder = RequestBuilder("small", "auto", True)
    builder.learn({"agentspec": "0.1.0"})
    call = Call(Conversation("s", SessionLog(), new=True), "hello", None, {"extra_headers": theirs})
    assert builder.build(call, [])["extra_headers"] == ours
    options: dict[str, Any] = connect(dict, "http://localhost:8000/v1", None, {"default_headers": theirs})
    assert options["default_headers"] == ours


@pytest.mark.parametrize(("status", "again"), [(404, False), (499, False), (500, True), (503, True)])
def test_a_server_whose_probe_fails_is_asked_again_only_where_that_may_help(status: int, again: bool) -> None:
    builder = RequestBuilder("small", "auto", True)
    response: Any = httpx.Response(status, request=httpx.Request("GET", "http://localhost:8000/v1/agentspec"))
    builder.learn(openai.APIStatusError("failed", response=response, body=None))
    assert (builder._ask_at < float("inf")) == again and not builder.extension


def test_an_id_that_no_header_can_carry_arrives_whole_in_the_body(server: FakeServer) -> None:
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        client.session("Größe 50%").chat("hello")
    (chat,) = server.chats
    assert chat.body["session_id"] == "Größe 50%"
    assert unquote(chat.headers["x-session-id"]) == "Größe 50%"


def test_header_values_are_plain_for_plain_ids_and_never_shared() -> None:
    assert to_header("user@host/fix-42:3+a=b") == "user@host/fix-42:3+a=b"
    ids = ["é", "%C3%A9", "%25C3%25A9", "a b", "a%20b", " a", "a"]
    values = [to_header(session) for session in ids]
    assert [from_header(value) for value in values] == ids
    assert all(value.isascii() and value == value.strip() for value in values)


@pytest.mark.parametrize("sent", ["100%", "%zz", "%E9", "é"])
def test_what_no_client_of_ours_encoded_is_read_as_it_is(sent: str) -> None:
    assert from_header(sent) == sent


@pytest.mark.parametrize("session", ["", "x" * 257, "line\nbreak"])
def test_ids_that_cannot_be_are_refused_before_anything_is_sent(server: FakeServer, session: str) -> None:
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        with pytest.raises(InvalidSessionError):
            client.session(session)
        with pytest.raises(InvalidSessionError):
            client.chat("hello", session=session)
        with pytest.raises(InvalidSessionError, match=r"^group: "):
            client.session("s", group=session)
        with pytest.raises(InvalidSessionError, match=r"^group: "):
            client.chat("hello", group=session)
    assert not server.received


def test_bad_settings_name_the_setting(server: FakeServer) -> None:
    with pytest.raises(ConfigurationError, match="session_tags"):
        AgentClient(base_url=server.url, model="small", session_tags="cookie")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="model"):
        AgentClient(base_url=server.url, model="")
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        with pytest.raises(InvalidInputError, match="messages"):
            client.session("s").chat("hello", messages=[])
        with pytest.raises(InvalidInputError, match="non-empty list"):
            client.chat([])
        with pytest.raises(InvalidInputError, match="content parts"):
            client.chat([{"type": "text", "text": "hello"}])
    assert not server.chats


def test_what_the_caller_names_itself_is_kept() -> None:
    request: dict[str, Any] = {
        "extra_headers": {"X-Session-ID": "mine"},
        "extra_body": {"session_id": "mine", "vllm_xargs": {"group_id": "mine", "other": 1}},
    }
    EXTENSION.tag(request, "s", "p", "g")
    assert request["extra_headers"] == {"X-Session-ID": "mine", "X-Parent-Session-ID": "p"}
    xargs = {"session_id": "s", "parent_session_id": "p", "group_id": "mine", "other": 1}
    assert request["extra_body"] == {"session_id": "mine", "vllm_xargs": xargs}


def test_an_id_that_is_too_long_for_its_field_is_replaced_by_its_hash() -> None:
    for length, fits in ((64, True), (65, False)):
        request: dict[str, Any] = {}
        NAMINGS["openai"].tag(request, "x" * length, None, None)
        (named,) = request["extra_body"].values()
        assert len(named) == 64 and (named == "x" * length) == fits


def test_a_parent_is_named_with_a_session_only() -> None:
    request: dict[str, Any] = {}
    NAMINGS["header"].tag(request, None, "p", None)
    assert request == {}
