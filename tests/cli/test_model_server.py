"""Test the servers that tests and the demo start: their command on this machine, and the wait for their answer."""

import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from agentspec.testing.server import CPU_OPTIONS, GPU_OPTIONS, ModelServer

ODD_AT_FIRST = """
import socket, sys, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
for answer in (b"no HTTP\\r\\n\\r\\n", b"HTTP/1.0 200 OK\\r\\n\\r\\n"):
    call = listening.accept()[0]
    call.recv(65536)
    call.sendall(answer)
    call.close()
time.sleep(600)
"""
"""A program that answers one call with something that is no HTTP, and the next one as a ready server."""

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("gpu", [False, True])
def test_servers_that_share_a_gpu_take_a_small_part_of_its_memory(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for agentspec in (False, True):
        command = ModelServer("model", agentspec=agentspec, options=["--max-num-seqs", "2"])._command()
        given, other = (GPU_OPTIONS, CPU_OPTIONS) if gpu else (CPU_OPTIONS, GPU_OPTIONS)
        assert set(given) <= set(command) and not set(other) - set(given) & set(command)
        assert command[-2:] == ["--max-num-seqs", "2"]


def test_it_waits_where_something_else_answers_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ModelServer("model")
    monkeypatch.setattr(server, "_command", lambda: [sys.executable, "-c", ODD_AT_FIRST, str(server.port)])
    server.launch()
    try:
        server.wait(60)
    finally:
        server.kill()


def test_a_proxy_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY")
    server = ModelServer("model")
    with socket.create_server(("127.0.0.1", server.port)) as listening:
        answer = threading.Thread(target=_answer_one_call, args=(listening,))
        answer.start()
        assert server.text("/health", timeout=30) == "ready"
        answer.join()


def _answer_one_call(listening: socket.socket) -> None:
    with listening.accept()[0] as call:
        call.recv(65536)
        call.sendall(b"HTTP/1.0 200 OK\r\n\r\nready")


def test_the_end_of_a_log_has_its_first_error(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(100)]
    server = ModelServer("model", log=tmp_path / "server.log")
    cause = "(EngineCore pid=7) RuntimeError: the cause"
    for at, head in ((10, [cause, "..."]), (70, [])):  # before the last lines, and among them
        server.log.write_text("\n".join([*lines[:at], cause, *lines[at:], "RuntimeError: See root cause above."]))
        assert server.tail().splitlines() == [*head, *server.log.read_text().splitlines()[-40:]]
    server.log.write_text("no error\n")
    assert server.tail() == "no error"


def test_a_server_that_is_never_launched_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server makes its log's folder at the launch, for this user only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    servers = [ModelServer("model") for _ in range(2)]
    assert list(tmp_path.iterdir()) == [] and servers[0].log != servers[1].log
    monkeypatch.setattr(ModelServer, "_command", lambda _: ["true"])
    servers[0].launch()
    servers[0].kill()
    assert list(tmp_path.iterdir()) == [servers[0].log.parent]
    assert servers[0].log.parent.stat().st_mode & 0o777 == 0o700
