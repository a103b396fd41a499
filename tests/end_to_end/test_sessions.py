"""Test session ids in all three places, drafts of turn 2 from turn 1, figures of requests, and bad ids."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import vllm

from agentspec import AgentClient
from agentspec.testing.server import ModelServer
from tests.end_to_end.mixed_load import code
from tests.end_to_end.test_restart import all_stored, wait_for

pytestmark = pytest.mark.engine


def figures(server: ModelServer, request_id: str) -> dict[str, Any]:
    """Return the server's figures of one request."""
    answer: dict[str, Any] = server.get(f"/v1/agentspec/requests/{request_id}")
    return answer


TAGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "header": lambda name: {"extra_headers": {"X-Session-ID": name}},
    "body": lambda name: {"extra_body": {"session_id": name}},
    "xargs": lambda name: {"extra_body": {"vllm_xargs": {"session_id": name}}},
}


@pytest.mark.parametrize("way", TAGS)
def test_a_second_turn_drafts_from_the_first_of_its_session(priced: ModelServer, way: str) -> None:
    tagged, other = TAGS[way](f"three-ways-{way}"), TAGS[way](f"three-ways-{way}-other")
    client = openai.OpenAI(base_url=priced.base_url, api_key="none")
    text = code(len(way) + 200, 12)
    ask: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 48}

    def complete(prompt: str, tag: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        body = {**ask, **tag, "extra_body": {"ignore_eos": True, **tag.get("extra_body", {})}}
        reply = client.completions.create(prompt=prompt, **body)
        return reply.choices[0].text, figures(priced, reply.id)

    first, _ = complete(text, tagged)
    again, mine = complete(text, tagged)
    assert again == first
    assert mine["accepted_by_source"]["session"] > 0
    _, theirs = complete(text, other)
    assert theirs["accepted_by_source"]["session"] == 0
    assert theirs["accepted_by_source"]["global"] > 0  # without keys all callers are one


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_behind_a_stop_text_counts_or_is_kept(priced: ModelServer, stream: bool) -> None:
    """vLLM finds the stop text in the API server, after the engine has accepted a draft that goes far beyond it."""
    if tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 32):
        pytest.skip("this vLLM counts itself what it verified behind a stop text")
    client = openai.OpenAI(base_url=priced.base_url, api_key="none")
    name, tokens = f"stopped-{stream}", 100
    ask: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": tokens, "prompt": code(270, 12)}
    whole = client.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0].text
    stop = whole[len(whole) // 3 :][:6]
    headers = {"X-Session-ID": name, "X-Agentspec-Figures": "summary"}
    ask |= {"stop": [stop], "extra_headers": headers, "extra_body": {"ignore_eos": True}}
    if stream:
        parts = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        text = "".join(part.choices[0].text for part in parts if part.choices)
        (said,) = [part.usage.completion_tokens for part in parts if part.usage]
        (found,) = [
            part.model_extra["agentspec"] for part in parts if part.model_extra and "agentspec" in part.model_extra
        ]
    else:
        reply = client.completions.create(**ask)
        assert reply.usage is not None and reply.model_extra is not None
        text, said, found = reply.choices[0].text, reply.usage.completion_tokens, reply.model_extra["agentspec"]
    assert whole.startswith(text) and text == whole[: whole.index(stop)]
    assert 0 < said < tokens / 2 and found["drafted"] > said
    assert figures(priced, found["request_id"])["tokens"] == found["tokens"] == said >= found["accepted"]
    wait_for(lambda: all_stored(priced))
    (turn,) = priced.get(f"/v1/agentspec/sessions/{name}")["turns"]
    assert len(turn["response"]) == said


def test_a_response_with_a_stop_text_whose_caller_leaves_is_kept_at_once(priced: ModelServer) -> None:
    """The server is idle then, so no later step could end the wait for the response's length."""
    body = {"model": "demo", "prompt": code(270, 12), "max_tokens": 700, "ignore_eos": True}
    body |= {"temperature": 2, "frequency_penalty": 2}  # repeats would be drafted, and over in a moment
    body |= {"stop": ["never said"], "stream": True, "return_token_ids": True}
    # A busy machine may let the engine run for seconds before the caller gets its first token.
    assert any(leave_early(priced, body | {"session_id": f"left-by-its-caller-{number}"}) < 700 for number in range(8))


def leave_early(priced: ModelServer, body: dict[str, Any]) -> int:
    """Leave a response after some tokens. Return how many of its tokens are kept."""
    said = 0
    with httpx.stream("POST", f"{priced.base_url}/completions", json=body, timeout=600) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                said += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
            if said > 20:
                break
    counters = "started", "finished"
    wait_for(lambda: len({priced.stats()["counters"][each] for each in counters}) == 1)
    wait_for(lambda: all_stored(priced))
    (turn,) = priced.get(f"/v1/agentspec/sessions/{body['session_id']}")["turns"]
    assert said <= len(turn["response"])
    return len(turn["response"])


def test_a_batch_of_chats_has_the_figures_of_all_of_them(priced: ModelServer) -> None:
    chats = [[{"role": "user", "content": f"Write a function number {number}."}] for number in (1, 2, 3)]
    body = {"model": "demo", "messages": chats, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    asked = {"X-Agentspec-Figures": "summary", "X-Request-Id": "batch_7"}
    reply = httpx.post(f"{priced.base_url}/chat/completions/batch", json=body, headers=asked, timeout=600).json()
    assert reply["agentspec"]["tokens"] == reply["usage"]["completion_tokens"] == 90
    assert figures(priced, reply["id"]) == reply["agentspec"]
    single = httpx.post(f"{priced.base_url}/chat/completions", json={**body, "messages": chats[0]}, headers=asked)
    assert single.json()["id"] == "chatcmpl-batch_7" and figures(priced, "chatcmpl-batch_7")["tokens"] == 30


def test_a_child_agent_drafts_from_its_parent_and_ends(priced: ModelServer) -> None:
    client = openai.OpenAI(base_url=priced.base_url, api_key="none")
    extra = {"ignore_eos": True, "vllm_xargs": {"agentspec_scope": "session"}}

    def accepted(**headers: str) -> dict[str, int]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = client.completions.create(
            model="demo", prompt=code(260, 12), temperature=0, max_tokens=48, extra_headers=named, extra_body=extra
        )
        found: dict[str, int] = figures(priced, reply.id)["accepted_by_source"]
        return found

    accepted(x_session_id="the-root")
    assert accepted(x_session_id="a-stranger", x_parent_session_id="another")["group"] == 0
    assert accepted(x_session_id="the-child", x_parent_session_id="the-root")["group"] > 0
    held = priced.stats()["cache"]["sessions"]
    assert accepted(x_session_id="the-root", x_session_final="true")["session"] > 0
    accepted(x_session_id="a-stranger")  # now the worker knows that the earlier session has ended
    wait_for(lambda: priced.stats()["cache"]["sessions"] == held - 1)


def test_the_client_sees_where_its_drafts_came_from(priced: ModelServer) -> None:
    with AgentClient(base_url=priced.base_url, model="demo", api_key="none", store="memory://") as client:
        session = client.session("client-figures")
        session.chat("Write a Python function total_count(items).", temperature=0, max_tokens=60)
        reply = session.chat("Write it again.", temperature=0, max_tokens=60)
    assert reply.speculation is not None
    assert reply.speculation.tokens >= 1
    assert reply.speculation.accepted == sum(reply.speculation.accepted_by_source.values())
    assert reply.speculation.mean_acceptance_length >= 1


UNUSABLE: dict[str, dict[str, Any]] = {
    "long": {"session_id": "x" * 300},
    "line break": {"session_id": "line\nbreak"},
    "nul": {"session_id": "nul\x00"},
    "blank": {"session_id": " "},
    "empty": {"vllm_xargs": {"session_id": ""}},
    "number": {"vllm_xargs": {"session_id": 42}},
    "list": {"vllm_xargs": {"session_id": ["a", "b"]}},
    "group": {"vllm_xargs": {"group_id": 1.5}},
    "parent": {"vllm_xargs": {"parent_session_id": 1}},
    "scope": {"vllm_xargs": {"agentspec_scope": "everyone"}},
    "scope of a wrong type": {"vllm_xargs": {"agentspec_scope": ["tenant"]}},
}


@pytest.mark.parametrize("way", UNUSABLE)
def test_what_vllm_answers_is_answered_with_an_unusable_id(priced: ModelServer, plain: ModelServer, way: str) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 2, "temperature": 0, **UNUSABLE[way]}
    before = priced.stats()["counters"].get("ignored_ids", 0)
    with_it, without = (
        httpx.post(f"{server.base_url}/completions", json=body, timeout=600) for server in (priced, plain)
    )
    assert with_it.status_code == without.status_code == 200, with_it.text
    assert with_it.json()["choices"][0]["text"] == without.json()["choices"][0]["text"]
    assert priced.stats()["counters"]["ignored_ids"] == before + 1
    assert priced.log.read_text().count(f"agentspec: {_key(UNUSABLE[way])} of a request cannot be used") == 1


def _key(given: dict[str, Any]) -> str:
    (key,) = given.get("vllm_xargs", given)
    return str(key)


@pytest.mark.parametrize("option", [{"min_p": 0.1}, {"logit_bias": {"5": 1}}])
def test_what_vllm_refuses_with_any_speculation_is_what_the_documents_say(
    priced: ModelServer, plain: ModelServer, option: dict[str, Any]
) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 2, **option}
    replies = [httpx.post(f"{server.base_url}/completions", json=body, timeout=600) for server in (plain, priced)]
    assert [reply.status_code for reply in replies] == [200, 400]
    assert "not yet supported with speculative decoding" in replies[1].text


def test_named_tokens_have_their_log_probabilities_beside_drafts(priced: ModelServer, plain: ModelServer) -> None:
    """vLLM's own speculation returns none, and ends the engine if another request wants log probabilities too."""
    body: dict[str, Any] = {"model": "demo", "prompt": [300 + k % 20 for k in range(100)], "max_tokens": 40}
    body |= {"temperature": 0, "ignore_eos": True, "return_tokens_as_token_ids": True}
    asked = [body | {"logprobs": 2, "logprob_token_ids": [310, 311]}, body | {"logprobs": 1, "prompt": [305] * 90}]

    def answers(server: ModelServer, count: int) -> list[Any]:
        def post(one: dict[str, Any]) -> Any:
            reply = httpx.post(f"{server.base_url}/completions", json=one, timeout=600)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(post, asked * (count // 2)))

    expected = answers(plain, 2)[0]
    accepted = priced.stats()["counters"]["accepted"]
    for found in answers(priced, 2)[:1] + answers(priced, 4)[::2]:
        assert found["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        for ours, theirs in zip(found["logprobs"]["top_logprobs"], expected["logprobs"]["top_logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3) and "token_id:310" in ours
    assert priced.stats()["counters"]["accepted"] > accepted


def test_unknown_requests_are_404(priced: ModelServer) -> None:
    assert httpx.get(f"{priced.base_url}/agentspec/requests/none", timeout=600).status_code == 404


def test_the_extension_introduces_itself(priced: ModelServer, plain: ModelServer) -> None:
    assert priced.get("/v1/agentspec")["drafting"] is True
    assert httpx.get(f"{plain.base_url}/agentspec", timeout=600).status_code == 404
