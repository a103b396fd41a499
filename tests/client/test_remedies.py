"""Test the notes of errors: which address, key or connection failed, and what to do."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from agentspec import AgentClient, AsyncAgentClient
from agentspec.client.connection import remedies_noted
from agentspec.testing.server import free_port

from .fake_server import FakeServer


def notes(raised: pytest.ExceptionInfo[openai.APIError]) -> list[str]:
    return list(getattr(raised.value, "__notes__", []))


async def notes_of_calls(base_url: str) -> list[list[str]]:
    """Return the notes of the errors of a call and a stream, by either client."""
    found = []
    with AgentClient(base_url=base_url, model="small", store=None, max_retries=0) as client:
        with pytest.raises(openai.APIError) as raised:
            client.chat("one")
        found.append(notes(raised))
        with pytest.raises(openai.APIError) as raised:
            client.stream("one").until_done()
        found.append(notes(raised))
    async with AsyncAgentClient(base_url=base_url, model="small", store=None, max_retries=0) as agents:
        with pytest.raises(openai.APIError) as raised:
            await agents.chat("one")
        found.append(notes(raised))
        with pytest.raises(openai.APIError) as raised:
            await agents.stream("one").until_done()
        found.append(notes(raised))
    return found


async def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    address = f"127.0.0.1:{free_port()}/v1"
    note = f"agentspec: http://***@{address} cannot be reached: wait until its server is up, or give another base_url"
    assert await notes_of_calls(f"http://me:secret@{address}") == 4 * [[note]]


async def test_a_server_that_dies_while_it_answers_is_no_matter_of_the_address(server: FakeServer) -> None:
    server.cut = True
    note = (
        f"agentspec: the connection to {server.url} broke before the answer was complete: try the call again, and see"
        " the server's log if it breaks again"
    )
    assert await notes_of_calls(server.url) == 4 * [[note]]


def test_what_an_older_openai_client_lets_through_of_httpx_is_its_own_error() -> None:
    """The version 2.25 does where a server dies within a stream, or sends nothing for too long."""
    connection = openai.OpenAI(base_url="http://localhost/v1", api_key="EMPTY")
    request = httpx.Request("POST", "http://localhost/v1/chat/completions")
    for error, raised, noted in (
        (httpx.RemoteProtocolError("peer closed connection", request=request), openai.APIConnectionError, "broke"),
        (httpx.ReadTimeout("timed out", request=request), openai.APITimeoutError, "did not answer in time"),
    ):
        with pytest.raises(raised) as found, remedies_noted(connection):
            raise error
        assert found.value.__cause__ is error and noted in found.value.__notes__[0]


async def test_an_address_without_its_path_is_completed(server: FakeServer) -> None:
    server.failures[:] = 4 * [404]
    root = server.url.removesuffix("/v1")
    note = f"agentspec: most servers answer below /v1: give {root}/v1 as base_url"
    assert await notes_of_calls(root) == 4 * [[note]]


@pytest.mark.parametrize("route", ["/chat/completions", "/responses", "/completions"])
async def test_an_address_with_a_route_is_cut(server: FakeServer, route: str) -> None:
    server.failures[:] = 4 * [404]
    note = f"agentspec: the address of a route is no base_url: give {server.url}"
    assert await notes_of_calls(server.url + route) == 4 * [[note]]


async def test_a_refused_key_names_option_and_variable(server: FakeServer) -> None:
    server.failures[:] = 4 * [401]
    note = f"agentspec: give the key of {server.url} as api_key, or in the variable OPENAI_API_KEY"
    assert await notes_of_calls(server.url) == 4 * [[note]]


def test_an_unknown_model_is_no_matter_of_the_address(server: FakeServer) -> None:
    server.failures[:] = [404]
    client = AgentClient(base_url=server.url, model="small", store=None)
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat("two")
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(
    ("status", "text", "noted"),
    [
        (400, "unknown fields: session_id, vllm_xargs", True),
        (422, "body.vllm_xargs: Extra inputs are not permitted", True),
        (400, "Unrecognized request argument supplied: top_q", False),
        (400, "vllm_xargs: agentspec_scope: 'all' is none of tenant, session, none", False),
    ],
)
def test_a_gateway_that_refuses_the_fields_of_a_session_is_told_apart(status: int, text: str, noted: bool) -> None:
    connection = openai.OpenAI(base_url="http://gateway/v1", api_key="EMPTY")
    response: Any = httpx.Response(status, request=httpx.Request("POST", "http://gateway/v1/chat/completions"))
    with pytest.raises(openai.APIStatusError) as raised, remedies_noted(connection):
        raise openai.APIStatusError(text, response=response, body=None)
    remedy = 'agentspec: a gateway may refuse fields that it does not know: give session_tags="header"'
    assert notes(raised) == ([remedy] if noted else [])


@pytest.mark.parametrize(
    "why",
    [
        "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens.",
        "max_completion_tokens=4000 cannot be greater than max_model_len=2048",
        "max_tokens is too large: 100000. This model supports at most 16384 completion tokens",
    ],
)
def test_a_full_context_names_the_ways_on(server: FakeServer, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "refusal", lambda body: why)
    with AgentClient(base_url=server.url, model="small", store=None, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.session("s").chat("one")
        assert "session.child()" in refused.value.__notes__[0]
        attempt = client.session("s").refine("one", lambda reply: None).attempts[0]
    assert attempt.reason is not None and why in attempt.reason and attempt.reason.endswith("that you choose")


FIELDS = 'agentspec: a gateway may refuse fields that it does not know: give session_tags="header"'
LONG = "agentspec: the messages and the answer that was asked for do not fit into the model's context"


@pytest.mark.parametrize(
    ("status", "body", "noted"),
    [
        (  # FastAPI's form
            422,
            {
                "detail": [
                    {"type": "extra_forbidden", "loc": ["body", "session_id"], "msg": "Extra inputs", "input": "s"}
                ]
            },
            ["agentspec: the server says: body.session_id: Extra inputs", FIELDS],
        ),
        (  # Mistral's form
            400,
            {
                "message": {
                    "detail": [{"loc": ["body", "messages", 1, "reasoning"], "msg": "Extra inputs", "input": "x"}]
                }
            },
            [
                "agentspec: the server says: body.messages.1.reasoning: Extra inputs",
                "agentspec: the server refuses a reasoning model's thoughts: give thoughts=False",
            ],
        ),
        (400, {"error": "longer than the context window"}, ["agentspec: the server says: longer than the", LONG]),
        (
            422,
            {"detail": [{"loc": ["body"], "msg": "empty", "input": "extra session_id"}]},
            ["agentspec: the server says"],
        ),
        (400, "<html>\nno</html>", ["agentspec: the server says: <html> no</html>"]),
        (400, {"code": 3, "why": {"a": 1}}, ["agentspec: the server says: code 3: why"]),
        (400, {"detail": "sk-secret " * 99}, ["agentspec: the server says: *** *** ***"]),
        (400, {"error": {"message": "no"}, "detail": "x"}, []),
        (400, {}, []),
        (400, [], []),
    ],
)
def test_what_the_body_of_an_error_says_is_noted(
    server: FakeServer, status: int, body: Any, noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The OpenAI client quotes only a `message` that is a text, and gives "Error code: 422" for any other body."""
    monkeypatch.setattr(server, "refusal", lambda sent: (status, body))
    client = AgentClient(base_url=server.url, api_key="sk-secret", model="small", store=None, max_retries=0)
    with client, pytest.raises(openai.APIStatusError) as raised:
        client.session("s").chat("one")
    found = notes(raised)
    assert len(found) == len(noted) and all(map(str.startswith, found, noted)), found
    assert all(len(note) < 400 and "sk-secret" not in note for note in found)
