"""Connect to Redis in each of its forms: a server, Sentinel, Cluster; by TCP, TLS or a unix socket."""

import hashlib
import random
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from agentspec.cache.store.redis.tls import explain_tls, scheme_remedy
from agentspec.errors import StoreError, StoreUnavailableError

SOCKET_TIMEOUT = 0.25
"""Timeout of connecting, and of a command that is not large, in seconds."""

LARGE = 1 << 20
"""Bytes above which a command is large: what it sends, or what the server goes through for its answer."""

_LARGE_TIMEOUT = 15.0  # of a large command, in seconds: 128 MiB on a slow network or server

# errors that pass by themselves, or that the operator can repair without changing the URL; scripts raise the last one
# while the cluster moves their keys
_PASSING = ("MISCONF ", "LOADING ", "BUSY ", "NOREPLICAS ", "non local key")
_PASSING_TYPES = (AskError, ClusterError, TryAgainError)
_FULL = "the server is full: raise its maxmemory, or keep less with the settings retention_days and retention_bytes"
_FOREIGN = "another program has put a value of its own there; rename it or remove it"
_REPLICA = "give the store URL of its master, or of the Sentinels"
_OF_CLUSTER = "SELECT is not allowed in cluster mode"
_NO_CLUSTER = "Cluster mode is not enabled"
_SENTINEL_PASSWORD = "check AGENTSPEC_SENTINEL_USERNAME and AGENTSPEC_SENTINEL_PASSWORD"
# refusals without an error type of their own; the last one is for a long command of a user who gave no password
_REFUSED = ("user executing the script", "ACL failure in script", "unauthenticated ")
_UNKNOWN = ("unknown command", "unknown redis command")
# how errors name a command that the user may not run: by its name or, up to Redis 7.0, by the line of the script
_NAMED = re.compile(r"the '([\w|]+)' command|unknown command ['`]([\w|]+)")
_SCRIPT = re.compile(r" script: [0-9a-f]{40}\b.*")  # what errors of scripts end with
_LINE = re.compile(r"user_script: ?(\d+)")
_CALLED = re.compile(r"redis\.p?call\('([A-Z]+)'")
_TRANSIENT = (redis.ConnectionError, redis.TimeoutError)


RedisForm = Literal["server", "sentinel", "cluster"]


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Hold the address of a Redis, and the passwords for it.

    form: how its servers are found. nodes: host and port of the server, the Sentinels, or some nodes of the Cluster.
    path: of a unix socket, instead of nodes. service: Sentinel's name for the server. sentinel_username,
    sentinel_password: for the Sentinels themselves. tls: TLS options of the connection, None: no TLS. shown: the URL as
    errors show it.
    """

    form: RedisForm
    shown: str
    nodes: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    service: str = ""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: Mapping[str, str] | None = None


class RedisClient:
    """Send commands to a Redis. Thread-safe. The first call connects, so the servers may start later.

    patient: whether to try once more after a lost connection or a timeout. All calls raise StoreUnavailableError if a
    retry may help, else StoreError, and never show the password.
    """

    def __init__(self, address: RedisAddress, *, patient: bool = True) -> None:
        self.shown = address.shown
        self._address = address
        self._patient = patient
        self._clients: dict[bool, Any] = {}  # redis-py's, by whether it is for large commands; made when first needed
        self._lock = threading.Lock()  # held while connecting
        self._closed = False

    def command(self, *command: str | bytes | int) -> Any:
        """Send one command, and return its answer."""
        with self.errors(keys=[str(key) for key in command[1:2]]):
            return self._connected().execute_command(*command)

    def commands(self, commands: Iterable[Sequence[str | bytes | int]]) -> list[Any]:
        """Send independent commands together, and return their answers."""
        with self.errors():
            pipeline = self._connected().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute()
            return answers

    def run(self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int], *, size: int = 0) -> Any:
        """Run a Lua script. All keys must lie on one node. size: bytes that decide whether it is LARGE."""
        with self.errors(script, keys):
            client = self._connected(large=size > LARGE)
            try:
                return client.evalsha(hashlib.sha1(script.encode()).hexdigest(), len(keys), *keys, *arguments)
            except NoScriptError:  # the server is new, or was restarted or failed over
                return client.eval(script, len(keys), *keys, *arguments)

    def keys(self, pattern: str) -> set[str]:
        """Return the keys that match a pattern, on all nodes of a Cluster."""
        with self.errors():
            return {key.decode() for key in self._connected().scan_iter(match=pattern, count=1000)}

    def members(self, key: str, prefix: str) -> set[str]:
        """Return the members of a set that begin with a prefix. The prefix must not hold wildcards (* ? [)."""
        with self.errors():
            return {member.decode() for member in self._connected().sscan_iter(key, match=f"{prefix}*", count=1000)}

    def hash_items(self, key: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the fields and values of a hash, read in pages. It may yield a field twice."""
        with self.errors():
            yield from self._connected().hscan_iter(key, count=1000)

    def part(self, key: str) -> str:
        """Return the name of the Cluster's node that has a key; "" for a single server, or if no node is known."""
        client = next(iter(self._clients.values()), None)
        if self._address.form != "cluster" or client is None:
            return ""
        try:
            name: str = client.nodes_manager.get_node_from_slot(client.keyslot(key)).name
        except RedisClusterException:  # no node has the key's slot at the moment
            return ""
        return name

    def subscription(self) -> Any:
        """Return a subscription without channels. Any node of a Cluster serves: each hears what the others publish."""
        client = self._connected()
        if self._address.form == "cluster":
            client = client.get_redis_connection(random.choice(client.get_primaries()))
        return client.pubsub()

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the connections. Later calls raise StoreError."""
        self._closed = True
        for client in list(self._clients.values()):
            client.close()

    @contextmanager
    def errors(self, script: str = "", keys: Sequence[str] = ()) -> Iterator[None]:
        """Raise redis-py's errors as store errors without the password, because servers quote commands they reject.

        script: the script that runs, so that an error can name the command in it that the user may not run. keys: those
        of the command or the script, so that an error can name them.
        """
        self._refuse_if_closed()
        try:
            yield
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise self._forbidden(error, script) from None
        except ResponseError as error:
            if any(text in str(error) for text in _REFUSED):
                raise self._forbidden(error, script) from None
            if any(text in str(error).lower() for text in _UNKNOWN):
                raise self._unknown(error, script) from None
            if isinstance(error, OutOfMemoryError) or "OOM " in str(error):
                raise StoreUnavailableError(f"{self.shown}: {_FULL}") from None
            if "WRONGTYPE" in str(error) and keys:
                where = f"one of the keys {keys[0].rpartition(':')[0]}:*" if script else keys[0]
                raise StoreError(f"{self.shown}: WRONGTYPE of {where}: {_FOREIGN}") from None
            if isinstance(error, ReadOnlyError) or "READONLY" in str(error):
                raise StoreUnavailableError(f"{self.shown}: READONLY, it is a replica; {_REPLICA}") from None
            if self._address.form == "server" and (isinstance(error, MovedError) or _OF_CLUSTER in str(error)):
                why = "it is a node of a Cluster, which has database 0 only; begin the store URL with redis+cluster://"
                raise StoreUnavailableError(f"{self.shown}: {why}") from None
            passing = isinstance(error, _PASSING_TYPES) or any(text in str(error) for text in _PASSING)
            raise (StoreUnavailableError if passing else StoreError)(self._explain(error)) from None
        except MasterNotFoundError as error:
            raise self._no_master(error) from None
        except (RedisError, RedisClusterException, OSError) as error:
            fault = self._tls_fault(str(error))
            why = f"{self.shown}: {fault}" if fault else self._explain(error)
            remedy = scheme_remedy(str(error), self._address.tls is not None)
            if self._address.form == "cluster" and _NO_CLUSTER in str(error):
                remedy += "; it is a single server: begin the store URL with redis:// or rediss://"
            raise StoreUnavailableError(f"{why}{remedy}") from None

    def _connected(self, *, large: bool = False) -> Any:
        if large not in self._clients:
            with self._lock:
                if large not in self._clients:
                    self._clients[large] = self._connect(_LARGE_TIMEOUT if large else SOCKET_TIMEOUT)
        if self._closed:  # closed while it connected, when `close` saw no connection yet
            self.close()
            self._refuse_if_closed()
        return self._clients[large]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreError(f"{self.shown}: the store is closed")

    def _connect(self, timeout: float) -> Any:
        at = self._address
        options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": SOCKET_TIMEOUT,
            "protocol": 2,
        }
        if at.tls is not None:
            # Without a password, OpenSSL asks the terminal for that of an encrypted key, and waits.
            options |= {"ssl": True, "ssl_password": "", **at.tls}
        user: dict[str, Any] = {"username": at.username, "password": at.password}
        # Retry once: pooled connections die with a restarted server, and a server can be slow once. A retry is safe,
        # because reads and removals can be repeated and appends are numbered.
        # Large commands are not repeated after a timeout, which is long.
        transient = _TRANSIENT if timeout == SOCKET_TIMEOUT else _TRANSIENT[:1]
        retry = Retry(ExponentialBackoff(cap=0.05, base=0.01), 1, transient) if self._patient else Retry(NoBackoff(), 0)
        if at.form == "cluster":
            nodes = [ClusterNode(host, port) for host, port in at.nodes]  # type: ignore[no-untyped-call]
            return RedisCluster(startup_nodes=nodes, retry=retry, **options, **user)
        if at.form == "sentinel":
            asking = {  # `user` is for the server
                "username": at.sentinel_username,
                "password": at.sentinel_password,
                "socket_timeout": SOCKET_TIMEOUT,
            }
            sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
                at.nodes, sentinel_kwargs={**options, **asking, "retry": Retry(NoBackoff(), 0)}
            )
            return sentinel.master_for(at.service, db=at.database, retry=retry, **options, **user)
        if at.path is not None:
            return redis.Redis(unix_socket_path=at.path, db=at.database, retry=retry, **options, **user)
        ((host, port),) = at.nodes
        return redis.Redis(host=host, port=port, db=at.database, retry=retry, **options, **user)

    def _tls_fault(self, error: str) -> str | None:
        """Return what is wrong with the TLS connection, by the text of an error; None if TLS is not at fault."""
        return None if self._address.tls is None else explain_tls(error, self._address.tls)

    def _no_master(self, error: MasterNotFoundError) -> StoreUnavailableError:
        """Return the error for Sentinels that name no server, without redis-py's list of their answers."""
        why = str(error).partition(" : ")[0]
        if "AuthenticationError" in str(error) or "NOAUTH" in str(error):
            why += f": the Sentinels refuse the password; {_SENTINEL_PASSWORD}"
        else:
            errors = self._sentinel_errors()
            if fault := self._tls_fault(errors):
                why += f": {fault}"
            why += scheme_remedy(errors, self._address.tls is not None)
        return StoreUnavailableError(f"{self.shown}: {why}")

    def _sentinel_errors(self) -> str:
        """Ping each Sentinel, and return the errors as text. MasterNotFoundError names only their types."""
        errors = []
        client = next(iter(self._clients.values()))
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            try:
                sentinel.ping()
            except (RedisError, OSError) as error:
                errors.append(str(error))
        return "\n".join(errors)

    def _forbidden(self, error: Exception, script: str) -> StoreUnavailableError:
        user, commands = self._address.username or "default", refused_commands(str(error), script)
        if commands:
            names, rights = " or ".join(commands), " ".join(f"+{command.lower()}" for command in commands)
            why = f"{self.shown}: the user {user} may not run {names}; grant it with ACL SETUSER {user} {rights}"
        elif "keys" in str(error) or " key" in str(error):
            why = f"{self._explain(error)}; grant the user {user} the keys of docs/operations.md"
        else:
            why = (
                f"{self._explain(error)}; check user and password in the store URL or in AGENTSPEC_REDIS_USERNAME and"
                " AGENTSPEC_REDIS_PASSWORD"
            )
        # StoreUnavailableError, so that records wait: nothing is wrong with them.
        return StoreUnavailableError(f"{why} (docs/operations.md says what the user may do)")

    def _unknown(self, error: Exception, script: str) -> StoreUnavailableError:
        """Return the error for a command that the server lacks. It leaves out the arguments that Redis's may quote."""
        names = " or ".join(refused_commands(str(error), script)) or "a command"
        if names == "SENTINEL":
            return StoreUnavailableError(
                f"{self.shown}: no Sentinel answers there; give the Sentinels' hosts, or redis:// with the server's"
            )
        return StoreUnavailableError(
            f"{self.shown}: the server does not know {names}; take rename-command out of its settings"
            " (docs/operations.md says which commands are needed)"
        )

    def _explain(self, error: Exception) -> str:
        text = _SCRIPT.sub("", " ".join(islice(str(error).split(), 60)))
        for secret in filter(None, (self._address.password, self._address.sentinel_password)):
            text = text.replace(secret, "***")
        return f"{self.shown}: {text}"


def refused_commands(error: str, script: str) -> list[str]:
    """Return the command that an error names as refused, or all commands on the script's line that it names."""
    if named := _NAMED.search(error):
        return [(named[1] or named[2]).upper()]
    line = _LINE.search(error)
    return [] if line is None else list(dict.fromkeys(_CALLED.findall(script.splitlines()[int(line[1]) - 1])))
