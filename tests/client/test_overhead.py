"""What the SDK costs beside the OpenAI client that it is made of: CPU time of calls and of the import, in one run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import openai
import pytest

from agentspec import AgentClient

from .fake_server import FakeServer
from .test_speculation import COUNTS

CALLS, ROUNDS = 20, 3
MOST_OF_A_CALL = 0.001  # seconds of CPU time
MOST_OF_THE_IMPORT = 1.6  # times the import of openai; a share, because a busy machine makes both longer


def cpu_time(call: Callable[[], object]) -> float:
    """Return the CPU time of this thread. Unlike the time on the clock, it hardly depends on what else runs."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


@pytest.mark.parametrize("session_id", [None, "named"])
def test_a_call_costs_less_than_a_millisecond_more(server: FakeServer, tmp_path: Path, session_id: str | None) -> None:
    server.counts = COUNTS
    bare = openai.OpenAI(base_url=server.url, api_key="none")
    history: list[Any] = []

    def ask() -> None:
        history.append({"role": "user", "content": "hello"})
        reply = bare.chat.completions.create(model="small", messages=history)
        history.append({"role": "assistant", "content": reply.choices[0].message.content})

    with AgentClient(base_url=server.url, model="small", store=f"sqlite:///{tmp_path}/sessions.db") as client:
        session = client.session(session_id)
        rounds = [
            median(-cpu_time(ask) + cpu_time(lambda: session.chat("hello")) for _ in range(CALLS))
            for _ in range(ROUNDS)
        ]
    print("CPU time of a call over the bare client's, by rounds:", *(f"{1000 * added:.2f} ms" for added in rounds))
    assert min(rounds) < MOST_OF_A_CALL  # the code's own share is there in every round, a busy machine's is not


def test_the_import_takes_little_longer_and_no_database() -> None:
    def imports(what: str) -> float:
        script = f"import time; {what}; print(time.process_time())"
        result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        return float(result.stdout)

    times = [(imports("from openai import OpenAI"), imports("from agentspec import AgentClient")) for _ in range(5)]
    theirs, ours = (min(column) for column in zip(*times, strict=True))
    print(f"CPU time of the import: {1000 * theirs:.0f} ms, with agentspec {1000 * ours:.0f} ms")
    assert ours < MOST_OF_THE_IMPORT * theirs
    script = (
        "import sys; from agentspec import AgentClient; print({'redis', 'agentspec.cache._native'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "set()"
