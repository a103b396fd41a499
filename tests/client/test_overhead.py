"""Test what the SDK costs beside its OpenAI client: CPU time of calls and of the import, in one run."""

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

pytestmark = pytest.mark.alone

CALLS, ROUNDS = 20, 3
MOST_OF_A_CALL = 0.001  # seconds of CPU time
MOST_OF_THE_IMPORT = 1.3  # times the import of openai; a share, because a busy machine makes both longer


def cpu_time(call: Callable[[], object]) -> float:
    """Return this thread's CPU time for a call. Unlike wall time, it hardly depends on what else runs.

    A pause comes first: without it, on some machines one of two equal calls in turn always takes .5 to 1 ms more.
    """
    time.sleep(0.02)
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


@pytest.mark.parametrize("session_id", [None, "named"])
def test_a_call_costs_less_than_a_millisecond_more(server: FakeServer, tmp_path: Path, session_id: str | None) -> None:
    """Each round has its own conversation. With 60 turns, a call of OpenAI's client takes 12 ms, and varies by 1 ms."""
    server.counts = COUNTS
    bare = openai.OpenAI(base_url=server.url, api_key="none")

    def added_in_a_round(client: AgentClient, number: int) -> float:
        session = client.session(session_id and f"{session_id}-{number}")
        history: list[Any] = []

        def ask() -> None:
            history.append({"role": "user", "content": "hello"})
            reply = bare.chat.completions.create(model="small", messages=history)
            history.append({"role": "assistant", "content": reply.choices[0].message.content})

        return median(-cpu_time(ask) + cpu_time(lambda: session.chat("hello")) for _ in range(CALLS))

    with AgentClient(base_url=server.url, model="small", store=f"sqlite:///{tmp_path}/sessions.db") as client:
        rounds = [added_in_a_round(client, number) for number in range(ROUNDS)]
    print("CPU time of a call over the bare client's, by rounds:", *(f"{1000 * added:.2f} ms" for added in rounds))
    assert min(rounds) < MOST_OF_A_CALL  # every round has the code's own cost, but not a busy machine's


def run_python(script: str) -> str:
    """Run a script in an interpreter of its own, and return what it prints."""
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


def test_the_import_takes_little_longer() -> None:
    """Both times are of one process, so a slow moment of the machine makes both longer."""
    script = "from time import process_time as cpu; import {}; theirs = cpu(); import {}; print(theirs, cpu())"
    rounds = [run_python(script.format("openai", "agentspec; agentspec.AgentClient")).split() for _ in range(5)]
    times = sorted((float(ours) / float(theirs), float(theirs), float(ours)) for theirs, ours in rounds)
    share, theirs, ours = times[len(times) // 2]
    print(f"CPU time of the import: {1000 * theirs:.0f} ms, with agentspec {1000 * ours:.0f} ms")
    assert 1.0 < share < MOST_OF_THE_IMPORT


def test_the_import_loads_nothing_that_takes_long() -> None:
    """The client loads numpy, databases and the drafting core when a session or a forecast needs them."""
    script = "import sys; {}; print(*sys.modules)"
    theirs = set(run_python(script.format("from openai import OpenAI")).split())
    ours = set(run_python(script.format("from agentspec import AgentClient")).split())
    added = {name.partition(".")[0] for name in ours - theirs}
    assert added <= {"agentspec", *sys.stdlib_module_names}
    assert not {"numpy", "msgpack", "redis", "sqlite3", "agentspec.cache"} & ours
