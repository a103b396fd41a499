"""Describe the coding agents: how each is pointed at a server, runs a turn, and names its session.

Everything that an agent writes goes to a folder of its own, so that no user's settings are read or changed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(__file__).parents[2] / ".clients" / "node_modules" / ".bin"
"""Where `make test-clients` installs the agents."""


@dataclass(frozen=True, slots=True)
class Place:
    """Name a server and the folder in which an agent works. url: without /v1."""

    url: str
    key: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Way:
    """Point an agent at a server.

    environment, options: what the command gets. write: writes configuration files.
    """

    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    options: Callable[[Place], Sequence[str]] = lambda place: ()
    write: Callable[[Place], object] = lambda place: None


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """Describe one agent. first, second: its arguments for a new session and for going on with it."""

    program: str
    first: Sequence[str]
    second: Sequence[str]
    ways: Mapping[str, Way]
    session_of: Callable[[Sequence[Mapping[str, Any]]], str]
    environment: Callable[[Path], Mapping[str, str]]

    def run(self, way: Way, place: Place, arguments: Sequence[str], prompt: str) -> tuple[str, str]:
        """Run one turn. Return all that the agent printed, and the session's id as the agent names it."""
        way.write(place)
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        environment |= {"PWD": str(place.folder), "HOME": str(place.folder), **self.environment(place.folder)}
        environment |= way.environment(place)
        command = [str(BIN / self.program), *arguments, *way.options(place), prompt]
        ran = subprocess.run(
            command,
            cwd=place.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}\n{ran.stderr}"
        events = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        return ran.stdout, self.session_of(events)


def _codex_provider(place: Place) -> str:
    return f'{{ name = "local", base_url = "{place.url}/v1", env_key = "LOCAL_KEY", wire_api = "responses" }}'


def _codex_config(place: Place) -> str:
    return f'model = "demo"\nmodel_provider = "local"\nmodel_providers.local = {_codex_provider(place)}\n'


CODEX = CodingAgent(
    program="codex",
    first=("exec", "--skip-git-repo-check", "--json"),
    second=("exec", "resume", "--last", "--skip-git-repo-check", "--json"),
    environment=lambda folder: {"CODEX_HOME": str(folder)},
    session_of=lambda events: str(next(event["thread_id"] for event in events if event["type"] == "thread.started")),
    ways={
        "config file": Way(
            write=lambda place: (place.folder / "config.toml").write_text(_codex_config(place)),
            environment=lambda place: {"LOCAL_KEY": place.key},
        ),
        "command line": Way(
            options=lambda place: (
                *("-m", "demo", "-c", "model_provider=local"),
                *("-c", f"model_providers.local={_codex_provider(place)}"),
            ),
            environment=lambda place: {"LOCAL_KEY": place.key},
        ),
        "profile": Way(
            write=lambda place: (place.folder / "local.config.toml").write_text(_codex_config(place)),
            options=lambda place: ("-p", "local"),
            environment=lambda place: {"LOCAL_KEY": place.key},
        ),
    },
)


def _claude_variables(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": place.key,
        "ANTHROPIC_MODEL": "demo",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


CLAUDE = CodingAgent(
    program="claude",
    first=("--output-format", "json", "-p"),
    second=("--output-format", "json", "-c", "-p"),
    environment=lambda folder: {"CLAUDE_CONFIG_DIR": str(folder), "DISABLE_AUTOUPDATER": "1"},
    session_of=lambda events: str(events[-1]["session_id"]),
    ways={
        "environment": Way(environment=_claude_variables),
        "config file": Way(
            write=lambda place: (place.folder / "settings.json").write_text(
                json.dumps({"env": _claude_variables(place)})
            )
        ),
        "command line": Way(options=lambda place: ("--settings", json.dumps({"env": _claude_variables(place)}))),
    },
)


def _opencode_config(place: Place) -> str:
    options = {"baseURL": f"{place.url}/v1", "apiKey": place.key}
    models = {"demo": {"limit": {"context": 60_000, "output": 1_000}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    return json.dumps({"model": "local/demo", "provider": {"local": provider}})


OPENCODE = CodingAgent(
    program="opencode",
    first=("run", "--format", "json"),
    second=("run", "--format", "json", "-c"),
    environment=lambda folder: {
        "OPENCODE_DISABLE_MODELS_FETCH": "1",  # it would wait for a list from the internet
        **{f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("DATA", "CONFIG", "CACHE", "STATE")},
    },
    session_of=lambda events: str(events[0]["sessionID"]),
    ways={
        "config file": Way(write=lambda place: (place.folder / "opencode.json").write_text(_opencode_config(place))),
        "environment": Way(environment=lambda place: {"OPENCODE_CONFIG_CONTENT": _opencode_config(place)}),
        "another config file": Way(
            write=lambda place: (place.folder / "other.json").write_text(_opencode_config(place)),
            environment=lambda place: {"OPENCODE_CONFIG": str(place.folder / "other.json")},
        ),
    },
)

AGENTS = {"codex": CODEX, "claude": CLAUDE, "opencode": OPENCODE}
