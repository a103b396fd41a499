"""Start real Redis servers for tests and trials: one alone, one with Sentinels, or a Cluster."""

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from agentspec.errors import ConfigurationError, StoreUnavailableError
from agentspec.testing.server import free_port

_START_SECONDS = 60.0


class RedisServer:
    """Run redis-server with ``appendonly yes``. A context manager.

    The server answers after it has written to its file, so a kill loses nothing that it has acknowledged. With Redis's
    default, ``appendfsync everysec``, the write may come two seconds later while a slow disk syncs the file.
    ``kill()`` sends SIGKILL, and ``start()`` starts the server again on the same port with the same data, unless
    ``empty()`` has removed them in between. ``freeze()`` stops the process (SIGSTOP) until ``thaw()``. ``options``:
    further settings of redis.conf, such as ``{"requirepass": "secret", "maxmemory": "8mb"}``. sentinel: run it as a
    Sentinel. Raises ConfigurationError if redis-server is not installed, StoreUnavailableError if it does not start.
    """

    def __init__(self, options: dict[str, str] | None = None, *, sentinel: bool = False) -> None:
        self._program = find_redis_server()
        self._options = options or {}
        self._sentinel = sentinel
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
        raise StoreUnavailableError(f"redis-server does not start; its log ends with: {self.log()[-500:]}")

    def log(self) -> str:
        """Return the server's log since its data were last removed."""
        log = self._log_file()
        return log.read_text(errors="replace") if log.exists() else ""

    def kill(self) -> None:
        """Kill the server with SIGKILL. Its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def empty(self) -> None:
        """Remove the data of a server that was killed."""
        for file in Path(self._folder.name).iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()

    def freeze(self) -> None:
        """Stop the server's process. Its connections stay open, but get no answer."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        self._signal(signal.SIGCONT)

    def client(self) -> Any:
        """Return a client for tests, which has no timeout."""
        return redis.Redis(port=self.port, password=self._options.get("requirepass"))

    def close(self) -> None:
        """Kill the server and remove its data."""
        self.kill()
        self._folder.cleanup()

    def _log_file(self) -> Path:
        return Path(self._folder.name) / "redis.log"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

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
            "appendfsync": "no",
            **self._options,
        }
        if self._sentinel:  # a Sentinel needs a file, into which it writes its findings
            file = Path(self._folder.name) / "sentinel.conf"
            kept = {
                name: value for name, value in settings.items() if name not in ("save", "appendonly", "appendfsync")
            }
            file.write_text("".join(f"{name} {value}\n" for name, value in kept.items()))
            arguments = [str(file), "--sentinel"]
        else:
            arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        # Messages before the server opens its log go there, too: they may tell which of its settings is wrong.
        with self._log_file().open("ab") as log:
            return subprocess.Popen(
                [self._program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _wait_until_up(self, port: int) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            if _answers(port):
                # If our process has ended, another one has the port and gave the answer.
                return self._process.poll() is None
            time.sleep(0.02)
        return False


class RedisSentinels:
    """Run a server with a replica, and three Sentinels that fail over after half a second. A context manager.

    After a failover, writes that the server acknowledged just before it died can be missing, because the replica has
    only those that reached it. password: the Sentinels' password; None: they ask for none.
    """

    SERVICE = "mymaster"

    def __init__(self, password: str | None = None) -> None:
        self._options = {} if password is None else {"requirepass": password}
        self._stack = ExitStack()
        self.servers: list[RedisServer] = []
        self.sentinels: list[RedisServer] = []

    @property
    def url(self) -> str:
        """Return the store URL."""
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{places}/{self.SERVICE}/0"

    def master(self) -> RedisServer:
        """Return the server that the first Sentinel takes for the master."""
        sentinel = self.sentinels[0].client()
        _, port = sentinel.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            first = stack.enter_context(RedisServer())
            second = stack.enter_context(RedisServer({"replicaof": f"127.0.0.1 {first.port}"}))
            self.servers = [first, second]
            watched = {
                f"sentinel monitor {self.SERVICE}": f"127.0.0.1 {first.port} 2",
                f"sentinel down-after-milliseconds {self.SERVICE}": "500",
                f"sentinel failover-timeout {self.SERVICE}": "3000",
                **self._options,
            }
            self.sentinels = [stack.enter_context(RedisServer(watched, sentinel=True)) for _ in range(3)]
            _wait(lambda: second.client().info("replication")["master_link_status"] == "up")
            for sentinel in self.sentinels:
                _wait(lambda at=sentinel: self._knows_all(at))  # type: ignore[misc]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _knows_all(self, sentinel: RedisServer) -> bool:
        found = sentinel.client().sentinel_master(self.SERVICE)
        return int(found["num-other-sentinels"]) == 2 and int(found["num-slaves"]) == 1


class RedisClusterServers:
    """Run a Cluster of three servers without replicas. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.servers: list[RedisServer] = []

    @property
    def url(self) -> str:
        """Return the store URL."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def owner(self, slot: int) -> RedisServer:
        """Return the server that has a slot."""
        for low, high, (_, port, *_), *_ in self.servers[0].client().execute_command("CLUSTER SLOTS"):
            if low <= slot <= high:
                return next(server for server in self.servers if server.port == int(port))
        raise LookupError(f"nobody has slot {slot}")

    def slot(self, key: str) -> int:
        """Return the slot of a key."""
        return int(self.servers[0].client().execute_command("CLUSTER KEYSLOT", key))

    def move(self, slot: int, target: RedisServer, pause: float = 0.0) -> None:
        """Move a slot to another server, key by key, as redis-cli does. pause: seconds between two keys."""
        source = self.owner(slot)
        from_, to = source.client(), target.client()
        names = {server: client.execute_command("CLUSTER MYID") for server, client in ((source, from_), (target, to))}
        to.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source])
        from_.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target])
        while keys := from_.execute_command("CLUSTER GETKEYSINSLOT", slot, 1):
            from_.execute_command("MIGRATE", "127.0.0.1", target.port, keys[0], 0, 5000)
            time.sleep(pause)
        for client in (to, from_, *(server.client() for server in self.servers)):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", names[target])

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            options = {
                "cluster-enabled": "yes",
                "cluster-node-timeout": "2000",
                "cluster-require-full-coverage": "no",  # otherwise all nodes stop while one is away
            }
            buses = [free_port() for _ in range(3)]  # by default 10,000 above the port, which can be too high
            self.servers = [stack.enter_context(RedisServer({**options, "cluster-port": str(bus)})) for bus in buses]
            clients = [server.client() for server in self.servers]
            for number, client in enumerate(clients):
                low, high = number * 16_384 // 3, (number + 1) * 16_384 // 3 - 1
                client.execute_command("CLUSTER ADDSLOTSRANGE", low, high)
                clients[0].execute_command("CLUSTER MEET", "127.0.0.1", self.servers[number].port, buses[number])
            for client in clients:
                _wait(lambda at=client: _is_formed(at))  # type: ignore[misc]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


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


def _is_formed(client: Any) -> bool:
    state: Any = client.execute_command("CLUSTER INFO")
    return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == 3


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise StoreUnavailableError(f"the Redis servers did not find each other within {_START_SECONDS:.0f} s")
        time.sleep(0.05)
