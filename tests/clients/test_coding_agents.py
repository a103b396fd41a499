"""Test Codex, Claude Code and OpenCode from npm on a real server: their sessions are the server's.

`make test-clients` installs the agents and runs this.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.server_ext.api.quotes import Form, may_quote
from agentspec.testing.server import ModelServer
from tests.clients.agents import AGENTS, BIN, CodingAgent, Place
from tests.clients.one_answer_model import CONTEXT, SENTENCE, write_model

pytestmark = pytest.mark.clients

KEYS = {name: f"key of {name}" for name in (*AGENTS, *(f"family of {name}" for name in AGENTS))}
"""A key for each agent, so that none drafts from another's text."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = tmp_path_factory.mktemp("coding-agents")
    options = ("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "8192", "--max-num-seqs", "8")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    running = ModelServer(
        write_model(folder / "model"),
        options=(*options, *tools, "--api-key", *KEYS.values()),
        name="demo",
        log=folder / "server.log",
        environment={
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "AGENTSPEC_STORE": "memory://",
        },
    )
    with running:
        yield running


def ask(server: ModelServer, path: str, key: str) -> Any:
    answer = httpx.get(f"{server.base_url}/agentspec/{path}", headers={"Authorization": f"Bearer {key}"}, timeout=600)
    answer.raise_for_status()
    return answer.json()


def sessions(server: ModelServer, key: str) -> dict[str, int]:
    """Return the ids of a caller's sessions, and the turns of each."""
    return {session["id"]: session["turns"] for session in ask(server, "sessions", key)["sessions"]}


def accepted(server: ModelServer) -> dict[str, int]:
    (engine,) = ask(server, "stats", next(iter(KEYS.values())))["engines"]
    counts: dict[str, int] = engine["accepted_by_source"]
    return counts


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> CodingAgent:
    found = AGENTS[request.param]
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js on this machine")
    if not (BIN / found.program).exists():
        pytest.skip(f"{found.program} is not installed: make test-clients installs it")
    return found


def place(server: ModelServer, agent: CodingAgent, folder: Path) -> Place:
    return Place(server.base_url.removesuffix("/v1"), KEYS[agent.program], folder)


def test_the_second_turn_drafts_from_the_agents_session(
    agent: CodingAgent, server: ModelServer, tmp_path: Path
) -> None:
    where, way = place(server, agent, tmp_path), next(iter(agent.ways.values()))
    said, session = agent.run(way, where, agent.first, "Say hello.")
    assert SENTENCE in said
    turns = sessions(server, where.key)
    assert turns.keys() == {session}
    before = accepted(server)
    said, again = agent.run(way, where, agent.second, "Say it again.")
    assert SENTENCE in said and again == session
    assert sessions(server, where.key) == {session: turns[session] + 1}
    after = accepted(server)
    assert after["session"] > before["session"], (before, after)


@pytest.mark.parametrize("number", [1, 2])
def test_other_ways_lead_to_the_server(agent: CodingAgent, number: int, server: ModelServer, tmp_path: Path) -> None:
    """The ways are those in docs/coding-agents.md."""
    where, way = place(server, agent, tmp_path), list(agent.ways.values())[number]
    said, session = agent.run(way, where, agent.first, "Say hello.")
    assert SENTENCE in said and session in sessions(server, where.key)


FORMS = {"codex": Form(json=True, patch=True), "claude": Form(json=True), "opencode": Form(json=True)}
"""Forms of the agents' edits: patches, or the JSON of calls that replace strings."""


def test_what_an_agent_sends_tells_the_form_of_its_edits(agent: CodingAgent, tmp_path: Path) -> None:
    bodies: list[bytes] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_error(400)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        where = Place(f"http://127.0.0.1:{refusing.server_port}", "key", tmp_path)
        with suppress(AssertionError):  # the agent's own error about the refusal
            agent.run(next(iter(agent.ways.values())), where, agent.first, "Say hello.")
        refusing.shutdown()
    assert {Form.of(json.loads(body)) for body in bodies if may_quote(body)} == {FORMS[agent.program]}


@dataclass(frozen=True, slots=True)
class Scripted:
    """Hold a route, a body, and the headers of an agent with session "root" and of its child agent "child"."""

    route: str
    body: dict[str, Any]
    root: dict[str, str]
    child: dict[str, str]


FAMILIES = {
    "codex": Scripted(
        "responses",
        {"input": "Say hello."},
        root={"session-id": "root", "thread-id": "root"},
        child={"session-id": "root", "thread-id": "child", "x-codex-parent-thread-id": "root"},
    ),
    "claude": Scripted(
        "messages",
        {"max_tokens": 256, "messages": [{"role": "user", "content": "Say hello."}]},
        root={"x-claude-code-session-id": "root"},
        child={"x-claude-code-session-id": "root", "x-claude-code-agent-id": "child"},
    ),
    "opencode": Scripted(
        "chat/completions",
        {"messages": [{"role": "user", "content": "Say hello."}]},
        root={"x-session-id": "root"},
        child={"x-session-id": "child", "x-parent-session-id": "root"},
    ),
}
"""Requests that the agents above sent."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_child_agent_drafts_from_the_session_that_started_it(name: str, server: ModelServer) -> None:
    family, key = FAMILIES[name], KEYS[f"family of {name}"]

    def say(headers: dict[str, str]) -> None:
        answer = httpx.post(
            f"{server.base_url}/{family.route}",
            json={"model": "demo", **family.body},
            headers={"Authorization": f"Bearer {key}", **headers},
            timeout=600,
        )
        assert answer.status_code == 200 and SENTENCE in answer.text, answer.text

    say(family.root)
    before = accepted(server)
    say(family.child)
    after = accepted(server)
    assert after["group"] > before["group"], (before, after)
    assert sessions(server, key).keys() == {"root", "child"}
