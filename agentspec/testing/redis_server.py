"""Start a real redis-server for tests and trials, on a free port and in a folder of its own."""

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from agentspec.errors import ConfigurationError, StoreUnavailableError
from agentspec.testing.server import free_port

_START_SECONDS = 10.0


class RedisServer:
    """Run redis-server with ``appendonly yes``, so that it persists what it has acknowledged. A context manager.

    ``kill()`` sends SIGKILL; ``start()`` starts it again on the same port with the same data. ``options``: further
    settings of redis.conf, such as ``{"requirepass": "secret", "maxmemory": "8mb"}``.
    Raises ConfigurationError if redis-server is not installed, StoreUnavailableError if it does not start.
    """

    def __init__(self, options: dict[str, str] | None = None) -> None:
        self._program = find_redis_server()
        self._options = options or {}
        self._folder = tempfile.TemporaryDirectory(prefix="agentspec-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Return the server's store URL, with its password."""
        password = self._options.get("requirepass")
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"

    @property
    def process_id(self) -> int | None:
        """Return the process id of the running server; None while it is stopped."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server, or start it again, and wait until it answers."""
        for _ in range(3):  # another process may take the free port first
            port = self.port or free_port()
            self._process = self._launch(port)
            if self._wait_until_up(port):
                self.port = port
                return
            self.kill()
        log = (Path(self._folder.name) / "redis.log").read_text(errors="replace")
        raise StoreUnavailableError(f"redis-server did not start within {_START_SECONDS:.0f} s: {log[-500:]}")

    def kill(self) -> None:
        """Kill the server with SIGKILL. Its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Kill the server and remove its data."""
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self, port: int) -> subprocess.Popen[bytes]:
        settings = {
            "port": str(port),
            "bind": "127.0.0.1",
            "dir": self._folder.name,
            "logfile": "redis.log",
            "save": "",
            "appendonly": "yes",
            **self._options,
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return subprocess.Popen(
            [self._program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _wait_until_up(self, port: int) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            if _answers(port):
                # If our process has ended, another one has the port and gave the answer.
                return self._process.poll() is None
            time.sleep(0.02)
        return False


def find_redis_server() -> str:
    """Return the path of redis-server. Raises ConfigurationError naming the command that installs it."""
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigurationError("redis-server is not installed; install it with: apt-get install redis-server")
    return program


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            connection.sendall(b"PING\r\n")
            reply = connection.recv(64)
    except OSError:
        return False
    return reply.startswith((b"+PONG", b"-NOAUTH"))  # -LOADING: not ready yet
