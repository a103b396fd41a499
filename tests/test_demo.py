"""Test the options of `python -m demo`. The demo itself runs real servers: `make demo`."""

import io
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

import demo.__main__ as demo
from agentspec.testing.server import ModelServer, ServerFailedError


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Run the demo, without any server that starts. Return its exit status."""

    def fail(*_: object) -> None:
        raise ServerFailedError("no server here")

    monkeypatch.setattr(sys, "argv", ["demo", *options])
    monkeypatch.setattr(demo, "_start", fail)
    return demo.main()


def test_it_leaves_what_else_is_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    written = ("plain.log", "summary.json", "server.db", "server.db-wal", "server.db-0.snapshot")
    for name in ("notes.txt", "work/code.py", *written):
        (tmp_path / name).write_text("x")
    assert run(monkeypatch, "--out", str(tmp_path)) == 1
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["code.py", "notes.txt", "work"]


@pytest.mark.parametrize(
    ("kept", "then"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "a.example"}, "a.example,127.0.0.1,localhost"),
        ({"NO_PROXY": "a.example", "no_proxy": "localhost"}, "localhost,127.0.0.1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_its_servers_are_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: dict[str, str], then: str
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, kept.get(name, ""))
    assert run(monkeypatch, "--out", str(tmp_path)) == 1
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == then


def test_a_log_says_that_the_servers_start_before_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()

    def wait(*_: object, **__: object) -> None:
        assert log.getvalue() == "starting vLLM ...\n"

    monkeypatch.setattr(ModelServer, "launch", lambda _: None)
    monkeypatch.setattr(ModelServer, "wait", wait)
    demo._start(Console(file=log, width=150), "starting vLLM", ModelServer("model"))
    assert log.getvalue().splitlines()[-1] == "starting vLLM: 0 s"


DEAF_SERVERS = """
import signal, sys, time
import demo.__main__ as demo
from agentspec.testing.server import ModelServer

signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup, and a shell's & for its jobs, ignore these signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)

DEAF = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"

def start(console, what, *servers):
    for server in servers:
        server.launch()
    while not all("up" in server.tail() for server in servers):
        time.sleep(0.01)
    print(*(server.process_id for server in servers), flush=True)
    time.sleep(600)

ModelServer._command = lambda _: [sys.executable, "-c", DEAF]
demo._start = start
sys.exit(demo.main())
"""
"""A demo whose servers do not end by an interrupt. It prints their process ids."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_leaves_no_server_behind_when_it_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    ended = subprocess.Popen(
        [sys.executable, "-c", DEAF_SERVERS, "--out", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert ended.stdout is not None and ended.stderr is not None
    servers = [int(process) for process in ended.stdout.readline().split()]
    assert len(servers) == 2
    try:
        for _ in range(10):  # one for the demo, and one for each server: it ends them in turn
            ended.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                ended.wait(1)
                break
        else:
            pytest.fail("the demo does not end")
        assert b"stopping the servers" in ended.stdout.read() and ended.returncode not in (None, 0)
        for process in servers:
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)
    finally:
        for process in servers:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        ended.kill()
        ended.communicate()


def test_it_makes_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, "--out", str(tmp_path / "new" / "results")) == 1
    assert (tmp_path / "new" / "results").is_dir()


def test_a_trained_model_takes_the_place_of_a_model_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from demo import train_model

    monkeypatch.setattr(sys, "argv", ["train_model.py", "--steps", "0", "--out", str(tmp_path)])
    monkeypatch.setattr(train_model, "Trainer", lambda _: pytest.fail("it trains"))
    with pytest.raises(SystemExit):
        train_model.main()
    assert f"--out {tmp_path} is there and is no model" in capsys.readouterr().err


def test_the_model_is_evaluated_on_a_task_at_least(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo import evaluate_model

    monkeypatch.setattr(sys, "argv", ["evaluate_model.py", "--tasks", "0"])
    with pytest.raises(SystemExit):
        evaluate_model.main()
    assert "--tasks" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("option", "value"), [("--sessions", "1"), ("--out", __file__)])
def test_it_names_the_option_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, option, value)
    assert option in capsys.readouterr().err.splitlines()[-1] and Path(__file__).exists()


def test_it_replaces_no_file_that_it_did_not_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "server.db").write_text("mine")
    with pytest.raises(SystemExit):
        run(monkeypatch, "--out", str(tmp_path))
    assert "would replace server.db" in capsys.readouterr().err
    assert (tmp_path / "server.db").read_text() == "mine"
