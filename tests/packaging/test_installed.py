"""Test an installed wheel with nothing but the package and pytest: the core, the client, and what is not needed.

`make dist` and the release workflow copy this file alone, so it imports nothing from tests.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

import agentspec
from agentspec import AgentClient
from agentspec.cache import SuffixCache

TEXT = list(range(100, 140))


def remember(cache: SuffixCache) -> None:
    """Let a session say TEXT."""
    cache.start("first", [1, 2, 3], session="s")
    cache.extend("first", TEXT)
    cache.finish("first")


def draft_after_ten(cache: SuffixCache) -> list[int]:
    """Draft for a request of the same session that has said ten tokens of TEXT again."""
    cache.start("second", [1, 2, 3], session="s")
    cache.extend("second", TEXT[:10])
    drafted: list[int] = cache.propose(["second"], 8)[0].token_ids.tolist()
    cache.abort("second")
    return drafted


def test_the_core_drafts_what_the_session_said() -> None:
    cache = SuffixCache()
    remember(cache)
    drafted = draft_after_ten(cache)
    assert drafted
    assert drafted == TEXT[10 : 10 + len(drafted)]


def test_a_saved_cache_drafts_the_same_when_loaded(tmp_path: Path) -> None:
    cache = SuffixCache()
    remember(cache)
    cache.save(tmp_path / "cache")
    assert draft_after_ten(SuffixCache.load(tmp_path / "cache")) == draft_after_ten(cache)


def test_the_version_is_the_distributions() -> None:
    assert agentspec.__version__ == version("agentspec")


class Server(BaseHTTPRequestHandler):
    """Answer every chat completion with one message, and nothing else."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "hello"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.send(200, {**answer, "choices": [choice]})

    def do_GET(self) -> None:
        self.send(404, {"error": {"message": "not here", "type": "not_found"}})

    def send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_client_talks_to_a_server(url: str, tmp_path: Path) -> None:
    client = AgentClient(base_url=url, model="m", api_key="none", store=f"sqlite:///{tmp_path / 'sessions.db'}")
    reply = client.session("s").chat("hi")
    assert reply.text == "hello"
    assert reply.usage is not None and reply.usage.total_tokens == 4


def test_the_core_and_the_client_import_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, agentspec.cache; from agentspec import AgentClient; agentspec.cache.SuffixCache();"
        "print(*{'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


@pytest.mark.parametrize(
    "command",
    [
        *("serve MODEL", "serve MODEL --config FILE.yaml", "rollout FILE.jsonl --model MODEL", "train FILE.yaml"),
        *("speculator show FOLDER", "speculator prune FOLDER OUT --model MODEL"),
    ],
)
def test_a_command_whose_packages_are_missing_says_what_to_install(command: str, tmp_path: Path) -> None:
    (tmp_path / "FILE.jsonl").write_text('{"id": "a", "prompt": "hello"}\n')
    (tmp_path / "FILE.yaml").write_text("{}")
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('vllm', 'torch', 'yaml')));"
        "from agentspec.cli import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "AGENTSPEC_STORE": "memory://"},
    )
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
    assert "pip install 'agentspec[" in ran.stderr


def test_the_command_prints_its_help() -> None:
    ran = subprocess.run([sys.executable, "-m", "agentspec", "--help"], capture_output=True, text=True, check=True)
    assert "serve" in ran.stdout
