"""Test the figures on a real server's /metrics, with one and with two API servers."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from agentspec.testing.server import ModelServer
from tests.end_to_end.conftest import ENVIRONMENT, MODEL, OPTIONS, PRICED
from tests.end_to_end.test_restart import wait_for
from tests.server_ext.test_dashboard import selectors
from tests.server_ext.test_metrics import Samples, of, read

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def two_api_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    server = ModelServer(
        MODEL,
        options=(*OPTIONS, *PRICED, "--api-server-count", "2"),
        name="demo",
        log=tmp_path_factory.mktemp("logs") / "two.log",
        environment={**ENVIRONMENT, "AGENTSPEC_STORE": "memory://"},
    )
    with server:
        yield server


def metrics(server: ModelServer) -> str:
    """Return a scrape. If an engine takes over two seconds, the scrape lacks agentspec's figures: try again."""
    found: list[str] = []

    def is_whole() -> bool:
        found.append(server.text("/metrics"))
        return not server.agentspec or "agentspec_" in found[-1]

    wait_for(is_whole)
    return found[-1]


def scrape(server: ModelServer) -> Samples:
    samples = read(metrics(server).encode())
    assert any(name.startswith("vllm:") for name, _ in samples)
    return samples


def say(server: ModelServer, count: int) -> None:
    """Make requests on separate connections, so that every API server gets some. Wait until all are counted."""

    def finished() -> int:
        return int(server.stats()["counters"].get("finished", 0))

    wait_for(lambda: server.stats()["running"] == 0)
    before = finished()
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        for _ in range(count):
            answer = client.completions.create(
                model="demo",
                prompt="def slugify(text):",
                max_tokens=40,
                temperature=0,
                extra_headers={"Connection": "close", "X-Session-ID": "metrics-session"},
                extra_body={"ignore_eos": True},
            )
            assert answer.choices[0].text
    wait_for(lambda: finished() == before + count)
    wait_for(lambda: server.stats()["store"]["writer"]["queued"] == 0)
    time.sleep(1.1)  # the figures of a scrape are up to a second old


def test_figures_of_a_real_server(fast: ModelServer, plain: ModelServer) -> None:
    time.sleep(1.1)  # the figures of a scrape are up to a second old
    before = scrape(fast)
    say(fast, 3)
    text, stats = metrics(fast), fast.stats()
    samples = read(text.encode())
    assert of(samples, "agentspec_drafted_tokens_total") == stats["counters"]["drafted"]
    assert of(samples, "agentspec_accepted_tokens_total") == stats["counters"]["accepted"] > 0
    finished = "agentspec_requests_finished_total"
    assert of(samples, finished) - of(before, finished) == 3
    assert of(samples, "agentspec_draft_seconds_count") == of(samples, "agentspec_steps_total") > 0
    assert of(samples, "agentspec_memory_bytes") > 0
    assert of(samples, "agentspec_store_available") == 1
    assert "metrics-session" not in text
    # vLLM counts the same tokens.
    accepted = of(samples, "vllm:spec_decode_num_accepted_tokens_total")
    assert of(samples, "agentspec_accepted_tokens_total") == pytest.approx(accepted, rel=0.05)
    assert not any(name.startswith("agentspec_") for name, _ in scrape(plain))


def test_the_dashboard_asks_for_what_a_real_server_has(fast: ModelServer) -> None:
    say(fast, 1)
    asked = {selector.name for selector in selectors()}
    missing = asked - {name for name, _ in scrape(fast)}
    assert len(asked) > 20 and missing <= {"agentspec_errors_total"}  # shown only if there are errors


def test_top_shows_a_real_server(fast: ModelServer) -> None:
    say(fast, 1)
    command = [sys.executable, "-m", "agentspec", "top", "--once", "--interval", "0.1", "--url", fast.base_url]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    assert "metrics-session" in printed and "tokens a second" in printed


def test_the_commands_tell_errors_in_the_servers_words(fast: ModelServer, tmp_path: Path) -> None:
    arguments = ("sessions", "export", "never-named", str(tmp_path / "session.json"), "--url", fast.base_url)
    ran = subprocess.run([sys.executable, "-m", "agentspec", *arguments], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 2 and "no session 'never-named'" in ran.stderr, ran.stdout + ran.stderr


@pytest.mark.store
def test_every_api_server_tells_the_same(two_api_servers: ModelServer) -> None:
    say(two_api_servers, 8)
    with ThreadPoolExecutor(8) as pool:  # connections at once, so that both processes get some
        scrapes = list(pool.map(lambda _: scrape(two_api_servers), range(16)))
    for samples in scrapes:
        assert of(samples, "agentspec_requests_finished_total") == 8
        assert of(samples, "agentspec_accepted_tokens_total") > 0
    assert len({of(samples, "agentspec_steps_total") for samples in scrapes}) == 1


@pytest.mark.store
def test_the_log_of_the_servers_is_quiet(two_api_servers: ModelServer, fast: ModelServer) -> None:
    for server in (two_api_servers, fast):
        log = Path(server.log).read_text(errors="replace")
        assert "/metrics lacks" not in log
        assert log.count("Traceback") == 0
