"""Test that acknowledged turns survive kill -9, in SQLite and in a real Redis server, and that Redis may fail."""

import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from agentspec.server_ext.vllm_adapter.frontend.shutdown import SAVE_SECONDS
from agentspec.testing.redis_server import RedisServer
from agentspec.testing.server import ModelServer
from tests.end_to_end.conftest import ENVIRONMENT, MODEL, OPTIONS, PRICED
from tests.end_to_end.mixed_load import code

pytestmark = [pytest.mark.engine, pytest.mark.store]

OPEN = 40
"""Requests that run while a server is stopped."""


def complete(
    server: ModelServer, prompt: str, session: str, tokens: int = 60, scope: str = "tenant", salt: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return a greedy completion and its figures. Requests with another ``salt`` share nothing with it."""
    with openai.OpenAI(base_url=server.base_url, api_key="none", timeout=600) as client:
        reply = client.completions.create(
            model="demo",
            prompt=prompt,
            temperature=0,
            max_tokens=tokens,
            extra_body={"ignore_eos": True, "vllm_xargs": {"agentspec_scope": scope}, "cache_salt": salt},
            extra_headers={"X-Session-ID": session},
        )
    return reply.choices[0].text, server.get(f"/v1/agentspec/requests/{reply.id}")


def wait_for(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def all_stored(server: ModelServer) -> bool:
    """Return whether the store has every turn. A request is running until its turn is on its way to the store."""
    stats = server.stats()
    return bool(stats["running"] == stats["store"]["writer"]["queued"] == 0)


def server_in(folder: Path, *options: str) -> ModelServer:
    """Return a server with its own store and log, in a folder."""
    environment = {**ENVIRONMENT, "AGENTSPEC_STORE": f"sqlite:///{folder}/server.db"}
    log = folder / "server.log"
    return ModelServer(MODEL, options=(*OPTIONS, *options), name="demo", log=log, environment=environment)


def test_a_killed_server_finds_its_sessions_in_sqlite(fast: ModelServer, database: Path, tmp_path: Path) -> None:
    """Restarted, it also has a public corpus, of a text that no request has said."""
    prompt, published = code(901, 12), code(905, 12)
    text, _ = complete(fast, prompt, "killed")
    wait_for(lambda: all_stored(fast))
    expected, _ = complete(fast, published, "public", scope="none")
    (tmp_path / "public.jsonl").write_text(json.dumps({"text": published + expected}))
    fast.kill()
    assert database.exists()
    own = fast.options
    fast.options = [*own, "--public", str(tmp_path / "public.jsonl")]
    fast.start()
    fast.options = own
    assert fast.stats()["store"]["restored"] >= 1
    again, figures = complete(fast, prompt, "killed")
    assert again == text
    assert figures["accepted_by_source"]["session"] > 0
    _, other = complete(fast, prompt, "killed-other")
    assert other["accepted_by_source"]["session"] == 0
    wait_for(lambda: fast.stats()["public"]["state"] == "ready")
    again, narrow = complete(fast, published, "public", scope="session")
    assert again == expected and narrow["accepted_by_source"]["public"] == 0
    again, figures = complete(fast, published, "public-2")
    assert again == expected and figures["accepted_by_source"]["public"] > 0
    assert fast.stats()["accepted_by_source"]["public"] == figures["accepted_by_source"]["public"]
    said = [
        line for line in fast.log.read_text(errors="replace").splitlines() if "agentspec: public corpus of 1" in line
    ]
    assert len(said) == 1 and "INFO" in said[0]


def test_a_server_that_is_stopped_saves_turns_and_indexes(tmp_path: Path) -> None:
    """It is stopped in the middle of a request, whose caller is told. By itself, vLLM kills its engines at once."""
    server = server_in(tmp_path, *PRICED)
    with server, ThreadPoolExecutor(OPEN) as pool:
        complete(server, code(907, 12), "stopped")
        body = {"model": "demo", "prompt": "def ", "max_tokens": 900, "ignore_eos": True, "temperature": 1}
        requests = [
            pool.submit(httpx.post, f"{server.base_url}/completions", json=body, timeout=600) for _ in range(OPEN)
        ]
        wait(requests, return_when=FIRST_COMPLETED)
        assert server.process_id is not None
        os.kill(server.process_id, signal.SIGTERM)
        assert not wait(requests, timeout=SAVE_SECONDS + 15).not_done
    assert list(tmp_path.glob("server.db-*.snapshot"))
    with sqlite3.connect(tmp_path / "server.db") as database:
        assert database.execute("SELECT count(*) FROM entries").fetchone()[0] >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_server_lets_its_engine_save(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C and a closed terminal do that. The server then tells its engine again, and people press twice.

    The store is locked, so that the engine takes two seconds to end.
    """
    server = server_in(tmp_path, *PRICED)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the server would inherit that it is ignored
    with server, sqlite3.connect(tmp_path / "server.db", isolation_level=None) as other:
        signal.signal(signal.SIGHUP, ignored)
        complete(server, code(907, 12), "stopped")
        wait_for(lambda: all_stored(server))
        assert server.process_id is not None
        other.execute("BEGIN IMMEDIATE")
        complete(server, code(908, 12), "waits")
        processes = [psutil.Process(server.process_id), *psutil.Process(server.process_id).children(recursive=True)]
        for _ in range(2):
            os.killpg(server.process_id, number)
            psutil.wait_procs(processes, timeout=0.7)
        _, alive = psutil.wait_procs(processes, timeout=SAVE_SECONDS + 30)
        assert not alive
        other.execute("ROLLBACK")
    assert list(tmp_path.glob("server.db-*.snapshot"))
    assert "1 records unwritten" in server.log.read_text(errors="replace")


def test_callers_of_an_engine_that_hangs_hear_of_its_end(tmp_path: Path) -> None:
    """By itself, vLLM leaves the callers waiting for their own timeouts, and the server for the callers."""
    server = server_in(tmp_path)
    body = {"model": "demo", "prompt": "def ", "max_tokens": 900, "ignore_eos": True}
    body |= {"temperature": 2, "frequency_penalty": 2}  # repeats would be drafted, and over in a moment
    with server, ThreadPoolExecutor(2) as pool:
        processes = psutil.Process(server.process_id).children(recursive=True)
        engines = [process for process in processes if "EngineCore" in "".join(process.cmdline())]
        assert engines

        def ask(stream: bool) -> Future[httpx.Response]:
            return pool.submit(
                httpx.post, f"{server.base_url}/completions", json=body | {"stream": stream}, timeout=300
            )

        requests = [ask(False), ask(True)]

        def both_run() -> bool:
            """Return whether both run. A busy server may report neither before its end, so start new ones."""
            for stream in (False, True):
                if requests[stream].done():
                    requests[stream] = ask(stream)
            return bool(server.stats()["running"] == len(requests))

        wait_for(both_run)
        for process in engines:
            process.suspend()
        assert server.process_id is not None
        os.kill(server.process_id, signal.SIGTERM)
        assert not wait(requests, timeout=SAVE_SECONDS + 30).not_done
    whole, streamed = (request.result() for request in requests)
    assert whole.status_code == 500
    assert '"error"' in whole.text and '"error"' in streamed.text


def test_an_engine_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """The engine saves before it ends. By itself, vLLM's engine stays alive, and keeps a GPU's memory."""
    server = server_in(tmp_path)
    with server:
        complete(server, code(907, 12), "killed")
        wait_for(lambda: all_stored(server))
        assert server.process_id is not None
        started = psutil.Process(server.process_id).children(recursive=True)
        assert any("EngineCore" in "".join(process.cmdline()) for process in started)
        os.kill(server.process_id, signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=SAVE_SECONDS + 30)
        assert not alive
    assert list(tmp_path.glob("server.db-*.snapshot"))


def test_where_vllm_serve_is_the_command_two_variables_switch_drafting_on(tmp_path: Path) -> None:
    """A container's image may run ``vllm serve``, with a home folder that can't be written."""
    prompt, volume = code(909, 12), tmp_path / "volume"
    switched = {"AGENTSPEC": "1", "VLLM_PLUGINS": "agentspec", "HOME": "/proc", "XDG_DATA_HOME": str(volume)}
    server = ModelServer(
        MODEL,
        agentspec=False,
        options=OPTIONS,
        name="demo",
        log=tmp_path / "server.log",
        environment={**ENVIRONMENT, **switched, "AGENTSPEC_SETTINGS": '{"verify_cost": 0.03}'},
    )
    with server:
        text, _ = complete(server, prompt, "container")
        again, figures = complete(server, prompt, "container")
        wait_for(lambda: all_stored(server))
        assert server.process_id is not None
        os.kill(server.process_id, signal.SIGTERM)
        psutil.Process(server.process_id).wait(SAVE_SECONDS + 30)
    assert again == text
    assert figures["accepted_by_source"]["session"] > 0
    assert {file.suffix for file in (volume / "agentspec").iterdir()} == {".db", ".snapshot"}


def test_redis_dies_and_returns_and_serves_the_next_process() -> None:
    prompt = code(902, 12)
    with RedisServer() as redis:
        server = ModelServer(
            MODEL,
            options=(*OPTIONS, *PRICED, "--tenant", "team"),
            name="demo",
            environment={**ENVIRONMENT, "AGENTSPEC_STORE": redis.url},
        )
        with server:
            text, _ = complete(server, prompt, "redis-1")
            wait_for(lambda: server.stats()["store"]["writer"]["persisted"] == 1)
            redis_dies_while_decoding(server, redis)
            lost, _ = complete(server, code(904, 12), "redis-2")
            wait_for(lambda: server.stats()["store"]["writer"]["state"] == "open")
            counts = server.stats()["store"]["writer"]
            assert counts["failed"] >= 5
            assert counts["queued"] >= 1
            redis.start()
            wait_for(lambda: server.stats()["store"]["writer"]["queued"] == 0)
            wait_for(lambda: "the store is back" in server.log.read_text(errors="replace"))
            log = server.log.read_text(errors="replace")
            assert log.count("the store is lost") == 1, "the writer says so once, however many appends fail"
            assert log.count("the store is back") == 1
            server.kill()
            server.start()
            again, figures = complete(server, prompt, "redis-1")
            assert again == text
            assert figures["accepted_by_source"]["session"] > 0
            again, figures = complete(server, code(904, 12), "redis-2")
            assert again == lost
            assert figures["accepted_by_source"]["session"] > 0
            # The tenant's corpus was restored too: another session drafts from it.
            _, figures = complete(server, prompt, "redis-3")
            assert figures["accepted_by_source"]["global"] > 0


def redis_dies_while_decoding(server: ModelServer, redis: RedisServer) -> None:
    """Kill Redis with -9 in the middle of a long answer, which must end as if nothing had happened."""
    expected, _ = complete(server, code(903, 12), "redis-0", tokens=300)
    result: list[str] = []
    run = threading.Thread(target=lambda: result.append(complete(server, code(903, 12), "redis-other", tokens=300)[0]))
    run.start()
    time.sleep(0.2)
    redis.kill()
    run.join(600)
    assert result == [expected]
