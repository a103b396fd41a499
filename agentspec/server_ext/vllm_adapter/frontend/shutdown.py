"""Let engines save when a server is stopped, answer its callers, and let it be stopped while its engines start.

By default (``--shutdown-timeout 0``) vLLM tells its engines to abort their requests, and kills them at the same moment.
Then nothing is saved: no snapshot, and no turn of the last milliseconds. So their manager makes a folder when it stops
the engines, and lets them live until each has left a file there.

Ctrl-C, systemd and a terminal that is closed send their signal to all processes of a server. The server then tells its
engines a second time, which must not kill one that is saving.
"""

import contextlib
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec

SAVE_SECONDS = 10.0
"""Longest time that engines have to save once their requests are aborted."""

_FOLDER = "AGENTSPEC_SAVED"
"""Environment variable that names the folder to engines and their workers. It exists only while they are stopped."""
_ATTRIBUTE = "agentspec_saved"
"""Attribute of vLLM's manager of engine processes: the folder's path, or None where engines have nothing to save."""
_LOCK = "agentspec_shutdown"
"""Attribute of the manager: a lock, held while its engines are shut down."""
_WORKERS_SECONDS = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
"""vLLM's variable: how long an engine core lets its workers end before it kills them. 5 by default."""
_POLL_SECONDS = 0.02
_CORE_NAME, _WORKER_NAME = "EngineCore", "VllmWorker"
"""Beginnings of the names of the processes that vLLM makes for an engine core, and for a rank of several."""


def init_engine_manager(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    """Choose the path of the folder, if these engines draft with agentspec. vLLM's manager keeps no configuration.

    The folder is made later: a server that is killed, or whose start fails, could not remove it.
    """
    config = next((value for value in (*args, *kwargs.values()) if hasattr(value, "speculative_config")), None)
    folder, given = None, os.environ.get(_WORKERS_SECONDS)
    # Where a --shutdown-timeout gives requests time to finish, engines are to be killed when it is over.
    if config is not None and uses_agentspec(config) and not config.shutdown_timeout:
        folder = os.environ[_FOLDER] = str(Path(tempfile.gettempdir(), f"agentspec-saved-{secrets.token_hex(16)}"))
        os.environ.setdefault(_WORKERS_SECONDS, f"{SAVE_SECONDS:.0f}")
    setattr(manager, _ATTRIBUTE, folder)
    setattr(manager, _LOCK, threading.RLock())
    try:
        original(manager, *args, **kwargs)
    finally:
        os.environ.pop(_FOLDER, None)
        if given is None:
            os.environ.pop(_WORKERS_SECONDS, None)


@contextlib.contextmanager
def startup_socket(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Make the socket at which vLLM waits for its engines to start, and let a KeyboardInterrupt end the wait.

    vLLM's own socket drops the interrupt. So a SIGTERM, which vLLM turns into one, would be lost: the server would
    start all the same, or wait for ever for engines that it no longer answers.
    """
    interrupt = None
    with original(*args, **kwargs) as socket:
        try:
            yield socket
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def shut_down_client(original: Callable[..., None], client: Any, *args: Any, **kwargs: Any) -> None:
    """End the engines, then tell every request that is left. ``client`` is an ``AsyncLLM``.

    vLLM stops reading the engines' answers when they have ended. A request that reached them too late to be aborted
    would hear nothing: its caller would wait for its own timeout, and the server for its caller.
    """
    original(client, *args, **kwargs)
    reader = getattr(client, "output_handler", None)
    if reader is None or not uses_agentspec(client.vllm_config):
        return
    from vllm.v1.engine.exceptions import EngineDeadError

    with contextlib.suppress(RuntimeError):  # the loop is closed, so no request waits
        reader.get_loop().call_soon_threadsafe(client.output_processor.propagate_error, EngineDeadError())


def init_scheduler(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Let an engine core's process end with the one that started it, if it drafts with agentspec.

    By itself the process outlives a program that was killed (kill -9, out of memory). Then the GPU's memory stays
    taken, and the program cannot be started again.
    """
    original(scheduler, *args, **kwargs)
    if _is_made_by_vllm(_CORE_NAME) and uses_agentspec(scheduler.vllm_config):
        outlive_terminal()
        parent = multiprocessing.parent_process()
        threading.Thread(target=_end_after, args=(parent,), name="agentspec-parent", daemon=True).start()


def _is_made_by_vllm(*names: str) -> bool:
    """Return whether vLLM has made this process, under a name that begins with one of these.

    A trainer may run an engine in a process that it has made. When that process ends is up to the trainer.
    """
    made = multiprocessing.parent_process() is not None
    return made and multiprocessing.current_process().name.startswith(names)


def _end_after(parent: Any) -> None:
    """Wait for the parent's death. Then shut this process down, so that it saves; after SAVE_SECONDS end it."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_SECONDS)
    os._exit(1)


def end_on_hang_up() -> None:
    """End this server as by SIGTERM when its terminal is closed (SIGHUP), unless that is ignored, as under nohup.

    By itself SIGHUP kills it, and each of its engines, at once.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def outlive_terminal() -> None:
    """Ignore SIGHUP in a process that vLLM has made: its server, or the server's end, tells it to save and end."""
    if _is_made_by_vllm(_CORE_NAME, _WORKER_NAME) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore further signals to end during the block, in which a process that vLLM has made saves.

    vLLM lets a second signal kill an engine core that shuts down. The server ends one that takes too long.
    """
    if not _is_made_by_vllm(_CORE_NAME, _WORKER_NAME) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it is not Python's
                signal.signal(number, handler)


def note_saved() -> None:
    """Tell the manager that this process has saved what it holds."""
    if folder := os.environ.get(_FOLDER):
        with contextlib.suppress(OSError):
            Path(folder, str(os.getpid())).touch()


def shut_down_engines(original: Callable[..., None], manager: Any, timeout: float | None = None) -> None:
    """End the engines. Where vLLM would kill them at once, give them up to SAVE_SECONDS to save first.

    A second call waits for the first. vLLM's thread that watches over the engines makes one within a second, which
    would kill them while they save.
    """
    folder = getattr(manager, _ATTRIBUTE, None)
    with getattr(manager, _LOCK, None) or contextlib.nullcontext():
        if folder is not None and timeout == 0:
            _wait_until_saved(manager, Path(folder))
        original(manager, timeout=timeout)


def _wait_until_saved(manager: Any, folder: Path) -> None:
    """Tell the engines to end, and wait until they have saved, for SAVE_SECONDS at most.

    An engine that was told earlier, as by Ctrl-C in a terminal, may have saved before the folder was there. Then the
    wait lasts until its process has ended.
    """
    with contextlib.suppress(OSError):  # on a full disk the wait lasts until the engines have ended
        folder.mkdir(mode=0o700)
    try:
        manager.manager_stopped.set()  # tells vLLM's watching thread that their end is no failure
        for process in manager.processes:
            process.terminate()
        deadline = time.monotonic() + SAVE_SECONDS
        while time.monotonic() < deadline and any(process.is_alive() for process in manager.processes):
            if len(list(folder.glob("*"))) >= len(manager.processes):
                break
            time.sleep(_POLL_SECONDS)
    finally:  # also if a second Ctrl-C ends the wait
        shutil.rmtree(folder, ignore_errors=True)
