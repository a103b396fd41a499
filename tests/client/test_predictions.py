"""Test chat(prediction=…) and chat(predict="auto"): which servers get them, and when a client predicts by itself."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from agentspec import AgentClient, AsyncAgentClient, Budget, InvalidInputError
from agentspec.client.predictions import kept_part, likely_answer
from agentspec.protocol import MAX_PREDICTION

from .fake_server import FakeServer

CODE = "\n".join(f"def function_{i}(argument, other):\n    return argument + other * {i}" for i in range(12))
EDITED = CODE.replace("other * 5", "other * other")
NEWER = EDITED.replace("argument + other * 7", "7")
UNLIKE = " ".join(f"thing{i * 7919} other{i * 104729}" for i in range(60))
WANTED = {"type": "content", "content": CODE}


def connect(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", **{"store": None, **options})


def predictions(server: FakeServer) -> list[Any]:
    return [chat.body.get("prediction") for chat in server.chats]


@pytest.mark.parametrize("given", [CODE, WANTED])
def test_a_server_with_the_extension_gets_it_and_usage_tells(server: FakeServer, given: Any) -> None:
    server.prediction_usage = (40, 2)
    with connect(server, speculation=False, session_tags="header") as client:
        reply = client.session("s").chat("edit it", prediction=given)
        streamed = client.stream("edit it", prediction=given, stream_options={"include_usage": True}).until_done()
        client.chat("hello", prediction=None)
    assert predictions(server) == [WANTED, WANTED, None]
    for usage in (reply.usage, streamed.usage):
        assert usage is not None and usage.completion_tokens_details is not None
        details = usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (40, 2)


@pytest.mark.parametrize("tags", ["auto", "vllm", "sglang", "litellm", "openai", "off"])
def test_other_servers_get_it_if_their_preset_says_so(plain_server: FakeServer, tags: Any) -> None:
    with connect(plain_server, session_tags=tags) as client:
        client.chat("edit it", prediction=CODE)
    assert predictions(plain_server) == [WANTED if tags == "openai" else None]


def test_openais_api_takes_them() -> None:
    for url, takes in ((None, True), ("https://api.openai.com/v1", True), ("http://localhost:1/v1", False)):
        with AgentClient(model="gpt", api_key="k", base_url=url, store=None) as client:
            assert client._requests.takes_predictions is takes


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [{"type": "function"}]},
        {"n": 2},
        {"logprobs": True},
        {"presence_penalty": 0.5},
        {"modalities": ["audio"]},
    ],
)
def test_openais_api_gets_none_beside_what_it_refuses(
    server: FakeServer, plain_server: FakeServer, options: dict[str, Any]
) -> None:
    history = [{"role": "assistant", "content": text} for text in (CODE, EDITED)]
    for sent_to, tags, predicts in ((plain_server, "openai", False), (server, "auto", True)):
        with connect(sent_to, session_tags=tags) as client:
            client.chat(history, predict="auto", **options)
            client.chat(history, predict="auto", n=1, logprobs=False, modalities=["text"])
            client.chat(history, prediction=CODE, **options)
        assert [given is not None for given in predictions(sent_to)] == [predicts, True, predicts]


def test_openais_api_gets_a_limit_that_it_takes_beside_a_prediction(
    server: FakeServer, plain_server: FakeServer
) -> None:
    """A loop's budget of tokens sets such a limit."""
    for sent_to, tags in ((plain_server, "openai"), (server, "auto")):
        with connect(sent_to, session_tags=tags) as client:
            session = client.session()
            session.refine("edit it", lambda reply: None, budget=Budget(tokens=50), prediction=CODE)
            session.chat("edit it", max_completion_tokens=60)
    limits = [
        [(chat.body.get("max_tokens"), chat.body.get("max_completion_tokens")) for chat in sent_to.chats]
        for sent_to in (plain_server, server)
    ]
    assert limits == [[(50, None), (None, 60)], [(None, 50), (None, 60)]]


@pytest.mark.parametrize("given", [None, openai.omit, openai.NOT_GIVEN])
def test_a_prediction_that_is_not_given_is_none(server: FakeServer, given: Any) -> None:
    with connect(server, speculation=False) as client:
        client.chat("edit it", prediction=given)
        assert not server.probes, "only a server that gets a prediction is asked whether it takes one"
        client.chat(
            [{"role": "assistant", "content": text} for text in (CODE, EDITED)], prediction=given, predict="auto"
        )
    assert [given is not None for given in predictions(server)] == [False, True]


def test_a_text_or_the_apis_form_is_needed(server: FakeServer) -> None:
    with connect(server) as client:
        with pytest.raises(InvalidInputError, match="prediction"):
            client.chat("edit it", prediction=5)
        with pytest.raises(InvalidInputError, match="predict"):
            client.chat("edit it", predict="always")


def test_edits_are_predicted_once_there_were_some(server: FakeServer) -> None:
    server.answers = [{"content": text} for text in (CODE, EDITED, NEWER, NEWER, UNLIKE, "ok")]
    with connect(server) as client:
        session = client.session("s")
        for _ in range(2):
            session.chat("improve it", predict="auto")
        session.chat("without", predict="off")
        session.chat("improve it", predict="auto")
        session.chat("mine", predict="auto", prediction=CODE)
        session.chat("improve it", predict="auto")
    assert [given and given["content"] for given in predictions(server)] == [None, None, None, NEWER, CODE, None]


def test_a_loop_of_edits_takes_the_option(server: FakeServer) -> None:
    server.answers = [{"content": text} for text in (CODE, EDITED, NEWER)]
    with connect(server) as client:
        session = client.session("s")
        result = session.refine("write it", lambda reply: None if reply.text == NEWER else "again", predict="auto")
    assert result.done and [given and given["content"] for given in predictions(server)] == [None, None, EDITED]


def test_servers_that_take_none_get_no_automatic_one(plain_server: FakeServer) -> None:
    plain_server.answers = [{"content": CODE}] * 3
    with connect(plain_server) as client:
        for _ in range(3):
            client.session("s").chat("improve it", predict="auto")
    assert predictions(plain_server) == [None] * 3


def test_what_is_kept_of_a_text() -> None:
    assert kept_part(CODE, CODE) > 0.9 and kept_part(CODE, EDITED) > 0.8
    assert kept_part(CODE, UNLIKE) < 0.1 and kept_part("", "") == kept_part("", CODE) == 0.0
    said = [{"role": "assistant", "content": text} for text in (CODE, EDITED)]
    assert likely_answer(said) == EDITED and likely_answer(said[:1]) is None and likely_answer([]) is None
    short = [{"role": "assistant", "content": "yes"}] * 3
    assert likely_answer(short) is None
    assert likely_answer([*said, {"role": "assistant", "content": None, "tool_calls": []}]) == EDITED


def test_no_server_refuses_an_automatic_prediction_for_its_length() -> None:
    """Servers take 16,384 tokens; the end of a longer answer is drafted from the session anyway."""
    long = "\n".join(f"Zeile {i}: für größere Äpfel" for i in range(2_000))
    predicted = likely_answer([{"role": "assistant", "content": long}] * 2)
    assert predicted and long.startswith(predicted) and 16_380 <= len(predicted.encode()) <= MAX_PREDICTION


@pytest.mark.parametrize("stream", [False, True])
async def test_asyncio_waits_for_no_look_at_the_last_answers(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The look takes some 10 ms, in which no other task would run."""
    threads: list[threading.Thread] = []

    def likely(messages: Any) -> str:
        threads.append(threading.current_thread())
        return CODE

    monkeypatch.setattr("agentspec.client.request.likely_answer", likely)
    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
        if stream:
            await client.stream("edit it", predict="auto").until_done()
        else:
            await client.chat("edit it", predict="auto")
    assert predictions(server) == [WANTED]
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_the_asynchronous_twin(server: FakeServer) -> None:
    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
        await client.chat("edit it", prediction=CODE)
    assert predictions(server) == [WANTED]
