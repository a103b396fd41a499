"""Test that engines get time to save when the server is stopped, and that other engines get no more than vLLM gives."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.server_ext.vllm_adapter.frontend import shutdown
from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH

OURS = SimpleNamespace(method="custom_class", model=PROPOSER_PATH)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Note the signals that reach this process, in place of its own handlers."""
    numbers: list[int] = []
    before = {number: signal.signal(number, lambda got, _: numbers.append(got)) for number in ENDING}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def made_by_vllm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let this process look as if vLLM had made it under a name."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace())
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(name=name))


class Process:
    """Stand in for an engine's process, which saves a while after it is told to end, or never."""

    def __init__(self, save_seconds: float | None) -> None:
        self.folder = os.environ.get(shutdown._FOLDER)
        self._seconds = save_seconds

    def terminate(self) -> None:
        if self._seconds is not None:
            threading.Timer(self._seconds, self._save).start()

    def is_alive(self) -> bool:
        return True

    def _save(self) -> None:
        assert self.folder is not None
        with contextlib.suppress(FileNotFoundError):  # the manager waits no more
            Path(self.folder, str(id(self))).touch()


def stopped(
    speculative_config: Any, draining: int, given: float | None, *save_seconds: float | None
) -> tuple[float, Any]:
    """Return how long the engines had before vLLM's own shutdown, and their manager. save_seconds: by engine."""
    config = SimpleNamespace(speculative_config=speculative_config, shutdown_timeout=draining)
    manager = SimpleNamespace(manager_stopped=threading.Event())

    def start(made: Any, *_: Any, **__: Any) -> None:
        made.processes = [Process(seconds) for seconds in save_seconds]

    shutdown.init_engine_manager(start, manager, 1, vllm_config=config)
    assert shutdown._FOLDER not in os.environ
    ended: list[tuple[float, float | None]] = []
    begin = time.monotonic()
    shutdown.shut_down_engines(lambda _, timeout: ended.append((time.monotonic(), timeout)), manager, given)
    ((end, timeout),) = ended
    assert timeout == given
    return end - begin, manager


def test_engines_are_killed_when_the_last_one_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "SAVE_SECONDS", 60.0)
    seconds, manager = stopped(OURS, 0, 0, 0.1, 0.3)
    assert 0.3 <= seconds < 30
    assert manager.manager_stopped.is_set()
    assert not Path(manager.processes[0].folder).exists()


def test_a_server_that_ends_without_a_stop_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is killed, or cannot start its engines, could not remove it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    named: list[str | None] = []

    def start(_: Any, __: Any) -> None:
        named.append(os.environ.get(shutdown._FOLDER))
        shutdown.note_saved()
        raise RuntimeError("no process can be started")

    config = SimpleNamespace(speculative_config=OURS, shutdown_timeout=0)
    with pytest.raises(RuntimeError, match="no process"):
        shutdown.init_engine_manager(start, SimpleNamespace(), config)
    assert named[0] is not None and Path(named[0]).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_second_interrupt_while_engines_save_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found: list[Path] = []

    class Interrupted(Process):
        def is_alive(self) -> bool:
            found.extend(tmp_path.iterdir())
            raise KeyboardInterrupt

    manager = SimpleNamespace(manager_stopped=threading.Event(), processes=[])
    config = SimpleNamespace(speculative_config=OURS, shutdown_timeout=0)
    shutdown.init_engine_manager(lambda made, _: made.processes.append(Interrupted(None)), manager, config)
    with pytest.raises(KeyboardInterrupt):
        shutdown.shut_down_engines(lambda *_, **__: None, manager, 0)
    assert len(found) == 1
    assert list(tmp_path.iterdir()) == []


def test_one_that_never_saves_is_killed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "SAVE_SECONDS", 0.4)
    assert stopped(OURS, 0, 0, 0.0, None)[0] >= 0.4


def test_the_thread_that_watches_over_the_engines_leaves_them_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """This thread, too, shuts them down, by a call that kills them within a second, before they could save."""
    monkeypatch.setattr(shutdown, "SAVE_SECONDS", 60.0)
    manager = SimpleNamespace(manager_stopped=threading.Event(), processes=[])
    config = SimpleNamespace(speculative_config=OURS, shutdown_timeout=0)
    shutdown.init_engine_manager(lambda made, _: made.processes.append(Process(0.3)), manager, config)
    ended: list[tuple[float, float | None]] = []

    def original(_: Any, timeout: float | None) -> None:
        ended.append((time.monotonic(), timeout))

    def watch() -> None:
        manager.manager_stopped.wait()
        shutdown.shut_down_engines(original, manager)

    watching = threading.Thread(target=watch)
    watching.start()
    begin = time.monotonic()
    shutdown.shut_down_engines(original, manager, 0)
    watching.join()
    assert [timeout for _, timeout in ended] == [0, None]
    assert ended[0][0] - begin >= 0.3


@pytest.mark.parametrize("given", [None, "3"])
def test_workers_get_the_time_that_their_engine_has(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """Otherwise vLLM's engine core would kill them after five seconds, unless the user says otherwise."""
    if given is None:
        monkeypatch.delenv(shutdown._WORKERS_SECONDS, raising=False)
    else:
        monkeypatch.setenv(shutdown._WORKERS_SECONDS, given)
    seen: list[str | None] = []

    def start(*_: Any) -> None:
        seen.append(os.environ.get(shutdown._WORKERS_SECONDS))

    for speculative_config in (OURS, None):
        config = SimpleNamespace(speculative_config=speculative_config, shutdown_timeout=0)
        shutdown.init_engine_manager(start, SimpleNamespace(), config)
    assert seen == [given or "10", given]
    assert os.environ.get(shutdown._WORKERS_SECONDS) == given


@pytest.mark.parametrize(
    ("speculative_config", "draining", "given"), [(OURS, 0, None), (OURS, 0, 3.0), (OURS, 30, 0), (None, 0, 0)]
)
def test_where_vllm_waits_or_nothing_is_to_be_saved_it_is_vllms_shutdown(
    speculative_config: Any, draining: int, given: float | None
) -> None:
    seconds, manager = stopped(speculative_config, draining, given, None)
    assert seconds < shutdown.SAVE_SECONDS / 2
    assert not manager.manager_stopped.is_set()


def test_a_worker_says_that_it_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(shutdown._FOLDER, raising=False)
    shutdown.note_saved()
    for folder in (tmp_path, tmp_path / "gone"):
        monkeypatch.setenv(shutdown._FOLDER, str(folder))
        shutdown.note_saved()
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]


@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP1", "VllmWorker-1"])
def test_no_second_signal_ends_a_process_of_vllms_that_saves(
    name: str, monkeypatch: pytest.MonkeyPatch, received: list[int]
) -> None:
    """Ctrl-C and systemd signal all processes, and the server then its engines: vLLM dies of the second one."""
    made_by_vllm(monkeypatch, name)
    for _ in range(2):
        with pytest.raises(OSError), shutdown.undisturbed():
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            raise OSError("the disk is full")
    assert received == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize("name", ["MainProcess", "MyTrainer"])
def test_signals_of_other_processes_are_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, received: list[int]
) -> None:
    """An offline engine saves in its program's own process, which decides what Ctrl-C does."""
    made_by_vllm(monkeypatch, name)
    shutdown.outlive_terminal()
    with shutdown.undisturbed():
        for number in ENDING:
            os.kill(os.getpid(), number)
    assert received == [*ENDING]


def test_a_closed_terminal_ends_no_engine_by_itself(monkeypatch: pytest.MonkeyPatch, received: list[int]) -> None:
    made_by_vllm(monkeypatch, "EngineCore")
    with ThreadPoolExecutor(1) as pool:  # signals belong to the main thread
        pool.submit(shutdown.outlive_terminal).result()
    os.kill(os.getpid(), signal.SIGHUP)
    assert received == [signal.SIGHUP]
    shutdown.outlive_terminal()
    os.kill(os.getpid(), signal.SIGHUP)
    assert received == [signal.SIGHUP]


def test_a_closed_terminal_ends_a_server_as_sigterm_does(received: list[int]) -> None:
    for handler, expected in ((signal.SIG_DFL, [signal.SIGTERM]), (signal.SIG_IGN, [])):  # nohup ignores it
        signal.signal(signal.SIGHUP, handler)
        shutdown.end_on_hang_up()
        os.kill(os.getpid(), signal.SIGHUP)
        assert received == expected
        received.clear()


def test_a_signal_ends_the_wait_for_engines_that_start() -> None:
    """vLLM turns a SIGTERM into a KeyboardInterrupt, which its socket drops."""
    network = pytest.importorskip("vllm.utils.network_utils")
    import zmq

    def wait(make: Any) -> None:
        with make("inproc://engines", zmq.ROUTER, bind=True) as socket:
            assert not socket.closed
            raise KeyboardInterrupt("terminated")

    wait(network.zmq_socket_ctx)  # if vLLM raises by itself one day, the patch can go
    with pytest.raises(KeyboardInterrupt, match="terminated"):
        wait(partial(shutdown.startup_socket, network.zmq_socket_ctx))


@pytest.mark.parametrize(("speculative_config", "told"), [(OURS, True), (None, False)])
@pytest.mark.parametrize("in_loop", [True, False])
def test_requests_that_the_engines_never_answer_hear_of_their_end(
    speculative_config: Any, told: bool, in_loop: bool
) -> None:
    """vLLM shuts down in a thread, or in the event loop's own if a program does it. A second shutdown is harmless."""
    pytest.importorskip("vllm")
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    async def run() -> bool:
        queue: Any = RequestOutputCollector(None, "left")
        processor = OutputProcessor(None, log_stats=False)
        processor.request_states["left"] = SimpleNamespace(queue=queue)
        config = SimpleNamespace(speculative_config=speculative_config)
        client = SimpleNamespace(vllm_config=config, output_processor=processor, output_handler=None)
        original = partial(shutdown.shut_down_client, lambda *_, timeout: client.output_handler.cancel())
        client.output_handler = asyncio.create_task(asyncio.sleep(60))
        for _ in range(2):
            await asyncio.sleep(0)
            if in_loop:
                original(client, timeout=0)
            else:
                await asyncio.to_thread(original, client, timeout=0)
        try:
            await asyncio.wait_for(queue.get(), 5 if told else 0.1)
        except EngineDeadError:
            return True
        except TimeoutError:
            return False
        raise AssertionError("an answer without an engine")

    assert asyncio.run(run()) is told


def test_a_client_without_requests_or_loop_is_shut_down_as_ever() -> None:
    ended: list[float] = []
    client = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=OURS), output_handler=None)
    shutdown.shut_down_client(lambda _, timeout: ended.append(timeout), client, timeout=0)
    shutdown.shut_down_client(lambda _, timeout: ended.append(timeout), SimpleNamespace(), timeout=1)  # half made
    assert ended == [0, 1]


@pytest.mark.parametrize(
    ("name", "ours", "ends"), [("EngineCore_DP0", True, True), ("EngineCore", False, False), ("MyTrainer", True, False)]
)
def test_only_a_process_that_vllm_made_for_an_engine_of_ours_ends_with_its_parent(
    name: str, ours: bool, ends: bool, monkeypatch: pytest.MonkeyPatch, received: list[int]
) -> None:
    died, ended = threading.Event(), threading.Event()
    parent = SimpleNamespace(join=died.wait)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(name=name))
    monkeypatch.setattr(shutdown, "SAVE_SECONDS", 0.0)
    calls: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *what: calls.append(what))
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=OURS if ours else None))
    shutdown.init_scheduler(lambda _, kept: calls.append(kept), scheduler, kept="as it is")
    assert calls == ["as it is"] and not ended.wait(0.1)
    assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) is ends
    died.set()
    assert ended.wait(10 if ends else 0.1) is ends
    assert calls == ["as it is", *([(os.getpid(), signal.SIGTERM)] if ends else [])]


def test_an_engine_without_a_parent_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in a program's own process has no parent."""
    monkeypatch.setattr(threading, "Thread", None)
    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=OURS))
    shutdown.init_scheduler(lambda _: None, scheduler)
