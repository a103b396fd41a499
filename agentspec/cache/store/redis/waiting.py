"""Wait for new entries of logs on Redis."""

import operator
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from agentspec.cache.store.redis.client import RedisClient
from agentspec.cache.store.redis.layout import Layout
from agentspec.cache.store.redis.shard import Id
from agentspec.errors import StoreError, StoreUnavailableError

_LOOK_SECONDS = 1.0  # between two looks at all logs that are waited for, in case a notice was lost
_MESSAGES = 4096  # most messages that one call reads


class Notices:
    """Hear of new entries by publish/subscribe, over one connection for any number of logs. Use it from one thread.

    Messages that are published while the connection is lost are missed, so the caller must also look at the logs now
    and then.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._subscription: Any = None
        self._channels: set[str] = set()

    def listen(self, channels: set[str]) -> set[str]:
        """Listen on these channels and no others. Returns those that were not listened on before."""
        with self._client.errors(), self._dropped_on_error():
            if self._subscription is None:
                self._subscription, self._channels = self._client.subscription(), set()
            new, old = channels - self._channels, self._channels - channels
            if new:
                self._subscription.subscribe(*sorted(new))
            if old:
                self._subscription.unsubscribe(*sorted(old))
            self._channels = set(channels)
            return new

    def heard(self, timeout: float) -> set[str]:
        """Return the channels on which something was published; waits up to ``timeout`` seconds for the first."""
        found: set[str] = set()
        until = time.monotonic() + timeout
        with self._client.errors(), self._dropped_on_error():
            for _ in range(_MESSAGES):
                wait = 0.0 if found else max(0.0, until - time.monotonic())
                message = None if self._subscription is None else self._subscription.get_message(timeout=wait)
                if message is None:
                    break
                if message["type"] == "message":
                    found.add(message["channel"].decode())
        return found

    def drop(self) -> None:
        """Close the connection. The next ``listen`` opens another one, which may lead to another server."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with suppress(Exception):
                subscription.close()

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise


class Waiting:
    """Implement ``Store.wait``: listen for notices of new entries, and look at all logs now and then.

    client: a client that is used for nothing else; `close` closes it.
    """

    def __init__(self, client: RedisClient, layout: Layout) -> None:
        self._client, self._layout = client, layout
        self._notices = Notices(client)
        # Cursors of logs that had nothing behind them at the last look, and of which nothing was heard since.
        self._quiet: dict[str, str] = {}
        self._look_at = 0.0  # when to look at all logs
        self._lock = threading.Lock()

    def wait(self, cursors: Mapping[str, str], timeout: float) -> list[str]:
        """Return the logs that have entries behind their cursors; waits up to ``timeout`` seconds for the first.

        Also returns the logs that the server refuses to read, so that their reader gets the error.
        """
        deadline = time.monotonic() + timeout
        lows = {name: self._layout.read_cursor("cursors", at) for name, at in cursors.items()}
        channels = {self._layout.channel(name): name for name in cursors}
        with self._lock:
            try:
                heard, pause = self._notices.listen(set(channels)), 0.0
                if self._look_at <= deadline:
                    self._look_at = 0.0  # look now, so that a server that is away is noticed before the wait is over
                while True:
                    for channel in heard | self._notices.heard(pause):
                        self._quiet.pop(channels.get(channel, ""), None)
                    now, heard = time.monotonic(), set()
                    if now >= self._look_at:
                        self._quiet, self._look_at = {}, now + _LOOK_SECONDS
                    changed = sorted(name for name, at in cursors.items() if self._quiet.get(name) != at)
                    ends, refused = self._reachable_ends(changed)
                    found = [name for name in ends if any(map(operator.lt, lows[name], ends[name]))] + refused
                    self._quiet |= {name: cursors[name] for name in set(changed).difference(found)}
                    left = deadline - time.monotonic()
                    if found or left <= 0:
                        return found
                    pause = min(left, max(0.0, self._look_at - now))
            except BaseException:
                self._notices.drop()  # the next connection may have to lead to another server
                self._look_at = 0.0
                raise

    def close(self) -> None:
        """Close the connections."""
        self._notices.drop()
        self._client.close()

    def _reachable_ends(self, namespaces: Sequence[str]) -> tuple[dict[str, list[Id]], list[str]]:
        """Return the newest ids of those logs whose node answers, and the logs that the server refuses to read.

        Raises StoreUnavailableError if no node answers. A node that refuses a log counts as answering.
        """
        parts: dict[str, list[str]] = {}
        for namespace in namespaces:
            parts.setdefault(self._layout.part(self._client, namespace), []).append(namespace)
        ends: dict[str, list[Id]] = {}
        refused: list[str] = []
        away = None
        to_ask = list(parts.values())
        while to_ask:
            names = to_ask.pop()
            try:
                ends |= self._layout.ends(self._client, names)
            except StoreUnavailableError as error:
                away = error
            except StoreError:  # of one of these logs, so each is asked for by itself
                if len(names) == 1:
                    refused += names
                else:
                    to_ask += [[name] for name in names]
        if away is not None and not (ends or refused):
            raise away
        return ends, refused
