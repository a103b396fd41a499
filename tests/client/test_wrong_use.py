"""Test arguments of a wrong type: the error names the argument and what is needed, before anything is sent."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from agentspec import (
    AgentClient,
    AgentSpecError,
    AsyncAgentClient,
    Budget,
    ConfigurationError,
    InvalidInputError,
    Reply,
    Session,
    Stage,
)

from .fake_server import FakeServer


def content(reply: Reply[Any]) -> None:
    return None


@pytest.fixture
def session(server: FakeServer) -> Session:
    """Return a session with one turn."""
    session = AgentClient(base_url=server.url, model="small", store=None).session("s")
    session.chat("one")
    return session


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", Path("sessions.db")),
        ("store", True),
        ("tokenizer", 5),
        ("record", 5),
        ("record", ""),
        ("base_url", "localhost:8000"),
        ("base_url", "127.0.0.1:8000/v1"),
        ("base_url", "http://"),
        ("base_url", "http://localhost:port/v1"),
        ("base_url", "http://localhost:8000/v1\n"),
        ("base_url", ""),
    ],
)
def test_an_option_that_cannot_work_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field}: .* needed, not"):
        AgentClient(**{"base_url": "http://localhost:8000/v1", "model": "small", field: value})


@pytest.mark.parametrize("name", ["base_url", "OPENAI_BASE_URL"])
@pytest.mark.parametrize(
    "url",
    [
        "ftp://ada:hunter2@host/v1",
        "ada:hunter2@host:8000",
        "http://ada:hunter2@host:x",
        "http://ada:hunter2#@host",
        "ftp://ada:hun?ter2@host",
    ],
)
@pytest.mark.parametrize("client", [AgentClient, AsyncAgentClient])
def test_an_address_that_cannot_work_is_named_without_its_password(
    client: Any, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "base_url":
        monkeypatch.setenv(name, url)
    with pytest.raises(ConfigurationError, match=rf"^{name}: .* needed, not .*\*\*\*@") as caught:
        client(base_url=url if name == "base_url" else None, model="small", store=None)
    assert "hun" not in str(caught.value) and "ter2" not in str(caught.value)


@pytest.mark.parametrize("client", [AgentClient, AsyncAgentClient])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("api_key", "sk-secret\n"),
        ("api_key", "sk-secret…"),
        ("api_key", b"sk-secret"),
        ("organization", "sk-secret\n"),
        ("default_headers", {"Authorization": "Bearer sk-secret\n"}),
        ("default_headers", {"X-Key": None}),
        ("default_headers", ["X-Key"]),
        ("default_query", ["key"]),
        ("base_url", "htp://user:sk-secret@localhost:8000/v1"),
        ("base_url", "http://user:sk-secret/1@localhost:x/v1?key=sk-secret"),
    ],
)
def test_what_no_request_can_carry_is_named_without_the_key(client: Any, option: str, value: Any) -> None:
    options = {"base_url": "http://localhost:8000/v1", "model": "small", "store": None, option: value}
    with pytest.raises((ConfigurationError, InvalidInputError), match=f"^{option}: ") as raised:
        client(**options)
    assert "secret" not in str(raised.getrepr(style="value"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OPENAI_API_KEY", "sk-secret\n"), ("OPENAI_BASE_URL", ""), ("SSL_CERT_FILE", "no-such-file.pem")],
)
def test_a_variable_that_cannot_work_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    address = None if variable == "OPENAI_BASE_URL" else "http://localhost:8000/v1"
    with pytest.raises((ConfigurationError, InvalidInputError), match=f"^{variable}") as raised:
        AgentClient(base_url=address, model="small", store=None)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("client", [AgentClient, AsyncAgentClient])
@pytest.mark.parametrize("scheme", ["socks", "socks5"])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, client: Any, scheme: str) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # as where it is not installed
    monkeypatch.setenv("ALL_PROXY", f"{scheme}://user:sk-secret@127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=rf"^ALL_PROXY={scheme}://\*\*\*@127.0.0.1:1: ") as raised:
        client(base_url="http://localhost:8000/v1", model="small", store=None)
    assert "secret" not in str(raised.getrepr(style="value"))


@pytest.mark.parametrize(
    "value",
    ["5", -1, 0, True, math.inf, math.nan, 1e300, [], {}, b"1", openai.Timeout(math.inf), openai.Timeout(-1.0), (1, 0)],
)
def test_a_timeout_that_cannot_work_is_named(session: Session, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^timeout: a positive number"):
        session.chat("two", timeout=value)
    with pytest.raises(InvalidInputError, match=r"^timeout: a positive number"):
        AgentClient(base_url="http://localhost:8000/v1", model="small", timeout=value)


def test_objects_of_httpx_are_taken_whichever_library_the_openai_client_uses(server: FakeServer) -> None:
    timeout = httpx.Timeout(5.0)
    with AgentClient(
        base_url=server.url, model="small", store=None, timeout=timeout, http_client=httpx.Client()
    ) as client:
        assert client.chat("one", timeout=timeout).text == "answer 1"
    with pytest.raises(InvalidInputError, match=r"^timeout: a positive number"):
        AgentClient(base_url=server.url, model="small", timeout=httpx.Timeout(-1.0))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("make", [AgentClient, AsyncAgentClient])
def test_what_cannot_be_copied_names_the_remedy(make: Any, copied: Callable[[Any], Any]) -> None:
    """Otherwise the error would be about a lock inside."""
    client = make(base_url="http://localhost:8000/v1", model="small", store=None)
    with pytest.raises(AgentSpecError, match=r"^a client cannot be copied or pickled: .* make another one"):
        copied(client)
    with pytest.raises(AgentSpecError, match=r"^session 's' cannot be copied or pickled: fork\(\) it"):
        copied(client.session("s"))


@pytest.mark.parametrize("client", [AgentClient, AsyncAgentClient])
def test_retries_that_cannot_work_are_named(client: Any) -> None:
    for value in (-1, 1.5, "2", True):
        with pytest.raises(InvalidInputError, match=r"^max_retries: a whole number"):
            client(base_url="http://localhost:8000/v1", model="small", store=None, max_retries=value)


@pytest.mark.parametrize("texts", [5, [5], [None], [b"x"], [["x"]], "text", Path("x.py")])
def test_texts_to_prime_with_are_checked(server: FakeServer, session: Session, texts: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^texts: "):
        session.prime(texts)
    assert not [request for request in server.received if request.method == "PUT"]


def test_cache_salts_are_checked(server: FakeServer, session: Session) -> None:
    wrong: Any
    for wrong in (5, []):
        with pytest.raises(InvalidInputError, match=r"^cache_salt: a text"):
            session.prime(["text"], cache_salt=wrong)
    for wrong, match in (("abc", "^cache_salts: a list"), (None, "^cache_salts: a list"), ([5], "^cache_salt: a text")):
        with pytest.raises(InvalidInputError, match=match):
            session.clear(cache_salts=wrong)
    assert server.erased == [] and len(session.messages) == 2


@pytest.mark.parametrize("at", ["1", [1], 1.0, True])
def test_a_fork_begins_at_a_number_of_turns(session: Session, at: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^at: "):
        session.fork(at=at)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("extra_body", 5),
        ("extra_body", [("a", 1)]),
        ("extra_body: vllm_xargs", {"vllm_xargs": 5}),
        ("extra_headers", "X-A: b"),
        ("extra_query", ["a"]),
        ("extra_headers: X-A", {"X-A": "caf\u00e9"}),
        ("extra_headers: X-A", {"X-A": "a\nb"}),
        ("extra_headers: X-A", {"X-A": b"caf\xe9"}),
        ("extra_headers: X-A", {"X-A": "a "}),
        ("extra_headers: X-A", {"X-A": None}),
        ("extra_headers: 'X A'", {"X A": "b"}),
        ("extra_headers: 5", {5: "b"}),
        ("max_retries", -1),
        ("max_retries", "2"),
        ("tools", [print]),
    ],
)
def test_options_of_a_call_are_checked(server: FakeServer, session: Session, field: str, value: Any) -> None:
    option = field.partition(":")[0]
    for call in (session.chat, session.stream):
        with pytest.raises(InvalidInputError, match=f"^{field}: "):
            call("two", **{option: value})
    assert len(server.chats) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"extra_headers": {"X-A": "a b", "X-B": "", "X-C": b"coffee", "X-D": openai.Omit()}},
        {"timeout": openai.Timeout(5.0, connect=None)},
        {"timeout": (5.0, 5.0, 5.0, 5.0)},
        {"timeout": None, "max_retries": openai.NOT_GIVEN},
        {"timeout": openai.NOT_GIVEN, "max_retries": 0},
    ],
)
def test_options_that_the_openai_client_takes_are_taken(session: Session, options: dict[str, Any]) -> None:
    assert session.chat("two", **options).text == "answer 2"
    assert session.refine("three", content, budget=Budget(seconds=60), **options).done


UNFIT: list[Any] = [
    ("seed", np.int64(3)),
    ("temperature", math.nan),
    ("stop", {"a", "b"}),
    ("logit_bias", {"5": math.inf}),
    ("extra_body", {"min_p": 0.1, "top_k": np.int64(3)}),
    ("stop", ["\ud800"]),
    ("extra_body", {"session_id": "a\ud800"}),
    pytest.param("seed", 10**5000, id="a whole number that Python does not write"),
]


@pytest.mark.parametrize(("field", "value"), UNFIT)
async def test_an_option_that_json_cannot_carry_is_named(server: FakeServer, field: str, value: Any) -> None:
    options: dict[str, Any] = {field: value, "user": openai.NOT_GIVEN}
    named = f"^{field}: .* has no form in JSON"
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        session = client.session("s")
        with pytest.raises(InvalidInputError, match=named):
            session.chat("one", **options)
        with pytest.raises(InvalidInputError, match=named):
            session.stream("one", **options).until_done()
        assert session.chat("one").text == "answer 1"
    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as agents:
        with pytest.raises(InvalidInputError, match=named):
            await agents.chat("one", **options)
        with pytest.raises(InvalidInputError, match=named):
            await agents.stream("one", **options).until_done()


def test_an_error_of_another_kind_stays_as_it_is(session: Session) -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        session.chat("two", no_such_option=1)


def test_an_option_of_the_server_s_own_is_told_its_place(session: Session) -> None:
    for send in (session.chat, lambda *sent, **options: session.stream(*sent, **options).until_done()):
        with pytest.raises(TypeError, match="top_k") as raised:
            send("two", temperature=0.5, top_k=20)
        assert raised.value.__notes__ == [
            "agentspec: an option of the server that OpenAI's API lacks goes into extra_body={'top_k': …}"
        ]
    assert session.chat("two", extra_body={"cache_salt": "a"}).text


@pytest.mark.parametrize("salt", ["\ud800", 5, None])
def test_a_salt_that_no_header_can_carry_is_named(session: Session, salt: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^cache_salt: a text in UTF-8 is needed, not "):
        session.clear(cache_salts=[salt])
    with pytest.raises(InvalidInputError, match=r"^cache_salt: a text in UTF-8 is needed, not '\\ud800'"):
        session.prime(["text"], cache_salt="\ud800")


@pytest.mark.parametrize("depth", [201, 2_000, math.inf])
def test_a_message_that_is_nested_too_deep_is_named(server: FakeServer, session: Session, depth: float) -> None:
    part: dict[str, Any] = {}
    if depth == math.inf:
        part["part"] = part
    else:
        for _ in range(int(depth)):
            part = {"part": part}
    with pytest.raises(InvalidInputError, match=r"^message: it is nested deeper than 200 levels"):
        session.chat({"role": "user", "content": "two", "more": part})
    assert len(server.chats) == 1


def test_a_message_may_be_nested(session: Session) -> None:
    part: dict[str, Any] = {}
    for _ in range(190):
        part = {"part": part}
    session.chat({"role": "user", "content": "two", "more": part})
    assert session.messages[2]["more"] == part


async def tell(progress: object) -> None: ...


def test_options_of_loops_are_checked(server: FakeServer, session: Session) -> None:
    wrong: Any = 5
    stage = Stage("plan", "Plan.")
    calls: dict[str, Callable[[], object]] = {
        "budget": lambda: session.refine("two", content, budget=wrong),
        "on_progress": lambda: session.refine("two", content, on_progress=wrong),
        "on_progress: a function that is not": lambda: session.refine("two", content, on_progress=tell),
        "critic": lambda: session.refine("two", wrong),
        "max_retries": lambda: session.refine("two", content, budget=Budget(seconds=60), max_retries="3"),
        "tools: not an option of a loop": lambda: session.refine("two", content, tools=[]),
        "reward": lambda: session.best_of("two", 2, wrong),
        "n: a number": lambda: session.best_of("two", 0, lambda reply: 1.0),
        "at_once": lambda: session.run_tools("two", [print_it], at_once=0),
        "tools": lambda: session.run_tools("two", wrong),
        "tools: max": lambda: session.run_tools("two", [max]),
        "stages": lambda: session.pipeline("two", wrong),
        "stages: a list": lambda: session.pipeline("two", [stage, wrong]),
        "task": lambda: session.pipeline({"role": "user", "content": "two"}, [stage]),  # type: ignore[arg-type]
        "name": lambda: Stage(wrong, "Plan."),
        "system": lambda: Stage("plan", "Plan.", system=wrong),
        "prompt": lambda: Stage("plan", wrong),
        r"system: U\+DCE9 at position 3": lambda: Stage("plan", "Plan.", system="caf\udce9"),
        r"prompt: U\+DCE9 at position 3": lambda: Stage("plan", "caf\udce9"),
        "critic: a function is needed, not 5": lambda: Stage("plan", "Plan.", critic=wrong),
        "attempts": lambda: Stage("plan", "Plan.", attempts=0),
        "attempts: a number": lambda: Stage("plan", "Plan.", attempts=True),
        "options": lambda: Stage("plan", "Plan.", options=wrong),
        "session": lambda: Stage("plan", "Plan.", options={"session": "other"}),
        "budget.seconds": lambda: Budget(seconds=float("inf")),
    }
    for field, call in calls.items():
        with pytest.raises(InvalidInputError, match=f"^{field}"):
            call()
    assert len(server.chats) == 1 and session.chat("two").text == "answer 2"


def test_a_function_whose_text_no_request_can_carry_is_told_why(session: Session) -> None:
    """The error must not say that a message is needed."""
    result = session.refine("two", lambda reply: "caf\udce9")
    with pytest.raises(InvalidInputError, match=r"^critic: U\+DCE9 at position 3 of .* is half of a surrogate pair"):
        raise result.attempts[0].error or AssertionError


def test_a_function_that_returns_no_token_ids_is_named(server: FakeServer) -> None:
    wrong: Any
    for wrong in (lambda text: text, lambda text: 5, lambda text: [2**40]):
        session = AgentClient(base_url=server.url, model="small", store=None, tokenizer=wrong).session()
        session.chat("one")
        with pytest.raises(AgentSpecError, match=r"^tokenizer: its token ids"):
            session.forecast()


def print_it(text: str) -> None:
    """Print a text."""
