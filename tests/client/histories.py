"""Help the tests that look at what a session keeps, here and in its store."""

from __future__ import annotations

import time
from typing import Any

from agentspec import AgentClient, Session
from agentspec.cache.store import Store
from agentspec.client.history.outbox import read_session

from .fake_server import FakeServer


def connect(server: FakeServer, store: Store | str, **options: Any) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", store=store, **options)


def contents(session: Session) -> list[str]:
    return [message["content"] for message in session.messages]


def stored(store: Store, session: str = "s") -> list[tuple[int, str]]:
    return [(position, message["content"]) for position, message in read_session(store, session).history]


def wait_until_stored(store: Store, count: int, session: str = "s") -> None:
    deadline = time.monotonic() + 180
    while len(read_session(store, session).history) < count:
        assert time.monotonic() < deadline, stored(store, session)
        time.sleep(0.01)


def salts_of_erasures(server: FakeServer) -> list[str | None]:
    asked = [request for request in server.received if request.method == "DELETE"]
    return [request.headers.get("x-cache-salt") for request in asked]
