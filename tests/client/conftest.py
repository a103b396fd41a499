from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentspec import AgentClient, AsyncAgentClient, LoopResult

from .fake_server import FakeServer


@pytest.fixture(autouse=True)
def own_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests from writing into the user's data directory and from taking keys from the environment."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Start a fake server that answers as agentspec's extension does."""
    fake = FakeServer(extension=True)
    yield fake
    fake.close()


@pytest.fixture
def plain_server() -> Iterator[FakeServer]:
    """Start a fake server of another kind, which refuses fields that the API does not have."""
    fake = FakeServer(extension=False)
    yield fake
    fake.close()


def _synchronous(server: FakeServer, loop: str, *arguments: Any, **options: Any) -> tuple[LoopResult[Any], list[Any]]:
    with AgentClient(base_url=server.url, model="small", store=None, max_retries=0) as client:
        session = client.session("s")
        result = getattr(session, loop)(*arguments, **options)
        return result, session.messages


def _in_asyncio(server: FakeServer, loop: str, *arguments: Any, **options: Any) -> tuple[LoopResult[Any], list[Any]]:
    async def main() -> tuple[LoopResult[Any], list[Any]]:
        async with AsyncAgentClient(base_url=server.url, model="small", store=None, max_retries=0) as client:
            session = client.session("s")
            result = await getattr(session, loop)(*arguments, **options)
            return result, session.messages

    return asyncio.run(main())


@pytest.fixture(params=[_synchronous, _in_asyncio], ids=["sync", "asyncio"])
def run(request: pytest.FixtureRequest, server: FakeServer) -> Callable[..., tuple[LoopResult[Any], list[Any]]]:
    """Return a function that runs a loop of the session "s" and returns its result and the session's messages."""
    return lambda loop, *arguments, **options: request.param(server, loop, *arguments, **options)
