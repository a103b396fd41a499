"""Help the tests of loops: answers of the model, a critic and a tool."""

from __future__ import annotations

import threading
import time
from typing import Any

from agentspec import Reply

from .fake_server import FakeServer


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def release(server: FakeServer, count: int) -> None:
    """Let the server answer once `count` calls wait for it."""
    assert server.hold is not None
    while len(server.chats) < count:
        time.sleep(0.01)
    server.hold.set()


def join_threads() -> None:
    """Wait for the threads that loops have started, some of which outlive their loop."""
    for thread in threading.enumerate():
        if thread.name == "agentspec-loop":
            thread.join(60)


def calls(*named: tuple[str, str]) -> dict[str, Any]:
    """Return an answer with these tool calls."""
    return {
        "tool_calls": [
            {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(named)
        ]
    }


def short(answer: Reply[Any]) -> str | None:
    """Return what is wrong with an answer, as a critic does; None if it ends with 3."""
    return None if answer.text.endswith("3") else f"not 3 but {answer.text}"


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b
