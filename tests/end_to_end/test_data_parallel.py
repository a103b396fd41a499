"""Test two data-parallel engines: both answer while the store is away, a paused one loses nothing, and no secret is
shown. On one SQLite file each drafts from the other's turns."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.testing.server import ModelServer
from tests.end_to_end.conftest import ENVIRONMENT, MODEL, OPTIONS, PRICED
from tests.end_to_end.mixed_load import code
from tests.end_to_end.test_restart import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

ENGINES = 2
ALL_NODES = {**ENVIRONMENT, "VLLM_CPU_SIM_MULTI_NUMA": "0"}
"""From 0.33 on, vLLM gives each engine on CPUs its own NUMA node, so on a machine with one node the second doesn't
start. If this variable is set, to any value, every engine may use all nodes."""
PASSWORD = "hunter2-hunter2"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    store = f'{{"agentspec": {{"store": "redis://user:{PASSWORD}@127.0.0.1:1/0", "preload_records": 0}}}}'
    parallel = ("--data-parallel-size", str(ENGINES), "--distributed-executor-backend", "mp")
    with ModelServer(
        MODEL,
        options=(*OPTIONS, *PRICED, *parallel, "--additional-config", store),
        name="demo",
        log=tmp_path_factory.mktemp("parallel") / "server.log",
        environment=ALL_NODES,
    ) as started:
        yield started


def ask(server: ModelServer, rank: int, prompt: str, session: str | None = None) -> dict[str, Any]:
    """Return an answer of the engine with this rank."""
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 48, "ignore_eos": True}
    headers = {"X-data-parallel-rank": str(rank), **({"X-Session-ID": session} if session else {})}
    reply = httpx.post(f"{server.base_url}/completions", json=body, headers=headers, timeout=600)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def delivered(server: ModelServer, rank: int) -> int:
    """Return how many of the other engine's turns this one has read."""
    return int(engines(server)[rank]["store"]["follower"]["delivered"])


def engines(server: ModelServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/v1/agentspec/stats")["engines"]
    return found


def test_every_engine_answers_for_its_requests(server: ModelServer) -> None:
    before = [engine["counters"]["started"] for engine in engines(server)]
    assert len(before) == ENGINES
    for rank in range(ENGINES):
        answer = ask(server, rank, code(990 + rank, 12))
        figures = server.get(f"/v1/agentspec/requests/{answer['id']}")
        assert figures["tokens"] >= 47
    after = [engine["counters"]["started"] for engine in engines(server)]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1] * ENGINES


def test_the_answer_that_comes_too_late_is_nobodys(server: ModelServer) -> None:
    """A worker that is stopped while it is asked answers when it goes on. Later steps are as usual."""
    prompts = [code(993 + rank, 12) for rank in range(ENGINES)]
    texts = [ask(server, rank, prompt)["choices"][0]["text"] for rank, prompt in enumerate(prompts)]
    stopped = workers(server)
    assert len(stopped) == ENGINES
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        answer = httpx.get(f"{server.base_url}/agentspec/stats", timeout=600)
        assert answer.status_code == 503 and time.monotonic() - begin < 15
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    for _ in range(2):
        assert [ask(server, rank, prompt)["choices"][0]["text"] for rank, prompt in enumerate(prompts)] == texts
    assert len(engines(server)) == ENGINES
    wait_for(lambda: all(engine["running"] == 0 for engine in engines(server)))


def test_no_secret_is_in_the_log_and_the_figures(server: ModelServer) -> None:
    log = server.log.read_text()
    for text in (log, server.text("/v1/agentspec/stats"), server.text("/metrics")):
        assert PASSWORD not in text
    assert "the store's secret cannot be read" in log and "give the URL in the environment variable" in log


@pytest.mark.store
def test_ranks_on_one_sqlite_file_share(tmp_path: Path) -> None:
    parallel = ("--data-parallel-size", str(ENGINES), "--distributed-executor-backend", "mp")
    with ModelServer(
        MODEL,
        options=(*OPTIONS, *PRICED, *parallel),
        name="demo",
        log=tmp_path / "server.log",
        environment={**ALL_NODES, "AGENTSPEC_STORE": f"sqlite:///{tmp_path / 'log.db'}"},
    ) as server:
        for rank in range(ENGINES):  # each follows the tenant's log from its first request on
            ask(server, rank, code(997 + rank, 12))
        for rank in range(ENGINES):
            meet(server)
            prompt, session = code(980 + rank, 12), f"from-{rank}"
            before = delivered(server, 1 - rank)
            text = ask(server, rank, prompt, session)["choices"][0]["text"]
            wait_for(lambda other=1 - rank, count=before: delivered(server, other) > count)  # type: ignore[misc]
            # The session is loaded while its request decodes; until then the corpus has the text.
            for other, sources in ((session, ("session", "global")), ("somebody-else", ("global",))):
                answer = ask(server, 1 - rank, prompt, other)
                assert answer["choices"][0]["text"] == text
                accepted = server.get(f"/v1/agentspec/requests/{answer['id']}")["accepted_by_source"]
                assert sum(accepted[source] for source in sources) > 20, accepted


def meet(server: ModelServer) -> None:
    """Wait until the store has every turn, and no engine has read one of the other's for a second.

    The next turn that an engine reads is then the next request's.
    """
    wait_for(lambda: all(one["running"] == one["store"]["writer"]["queued"] == 0 for one in engines(server)))
    counts: list[int] = []
    while counts != (counts := [delivered(server, rank) for rank in range(ENGINES)]):
        time.sleep(1.0)


def workers(server: ModelServer) -> list[int]:
    """Return the process ids of the engines' workers."""
    assert server._process is not None
    group = os.getpgid(server._process.pid)
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if int(fields[2]) == group and "Worker" in command:
                found.append(int(folder.name))
    return found
