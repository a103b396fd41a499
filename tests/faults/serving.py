"""Run an engine that decodes while its store fails, and a network that can be slow."""

import itertools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self

import numpy as np

from agentspec.cache.store import CircuitBreaker, RecordReader, RedisStore, Retention, TurnRecord, open_store
from agentspec.server_ext.engine import DraftingEngine, make_cache
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from tests.store.helpers import LOGS, wait_until

TENANT = "t"
LOG = LOGS.of(TENANT)
_OUTPUT = 24  # tokens of a turn

wait_for_server = partial(wait_until, timeout=180.0)
"""Wait until a condition holds that a server, or many turns, have to bring about."""


class Serving:
    """Decode turns of four sessions in a thread, one after another, on the real cache and a store. A context manager.

    Every call of the engine's decode path is timed.
    """

    def __init__(
        self,
        url: str,
        *,
        retention: Retention | None = None,
        breaker: Callable[[], CircuitBreaker] = lambda: CircuitBreaker(first_pause=0.05, max_pause=0.2),
    ) -> None:
        store = open_store(url)
        assert isinstance(store, RedisStore)
        self.store = store
        settings = Settings(tenant=TENANT, store=url)
        self.persistence = Persistence(make_cache(settings, 1000, 16), store, LOGS, 100, retention)
        self.persistence._writer._breaker, self.persistence._loader._breaker = breaker(), breaker()
        self.engine = DraftingEngine(settings, self.persistence)
        self.engine.warm_up()
        self.turns = 0
        self.waited: list[float] = []  # seconds of each call
        self.worked: list[float] = []  # CPU seconds of each call
        self.slept: list[float] = []  # seconds of each forward pass
        self._random = np.random.default_rng(1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._decode)

    def __enter__(self) -> Self:
        self._thread.start()
        self.go_on(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.persistence.close()

    def stop(self) -> None:
        """End the decoding."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def go_on(self, turns: int) -> None:
        """Wait until `turns` more turns have ended."""
        until = self.turns + turns
        wait_for_server(lambda: self.turns >= until or not self._thread.is_alive())
        assert self._thread.is_alive(), "decoding has stopped"

    def settle(self) -> None:
        """End the decoding, and wait until everything is in the store."""
        self.stop()
        assert self.persistence._writer.flush(60)

    def acknowledged(self) -> int:
        """Return the number of turns that the store has acknowledged."""
        return self.persistence._writer.stats().persisted

    def stored(self) -> list[int]:
        """Return the numbers of the turns in the store, in the log's order."""
        reader = RecordReader()
        found = [record.number for _, record in reader.read(self.store.read(LOG)) if isinstance(record, TurnRecord)]
        assert reader.damaged == reader.unknown == 0
        return found

    def never_waited(self) -> None:
        """Check that no call of the decode path waited for the store.

        A call that did would take a socket's timeout, 250 ms. A busy machine may hold up two calls for as long, and
        more if it held up forward passes too.
        """
        assert len(self.waited) > 300
        held_up = sum(seconds > 0.1 for seconds in self.slept)
        assert sorted(self.waited)[-3 - 2 * held_up] < 0.2, (held_up, sorted(self.waited)[-20:])
        assert sorted(self.worked)[-3] < 0.05

    def _decode(self) -> None:
        texts: dict[str, list[int]] = {}
        while not self._ended.is_set():
            session = f"{self.turns % 4:032x}"
            prompt = [*texts.get(session, [1, 2, 3])[-200:], 4]
            output = self._random.integers(5, 1000, _OUTPUT).tolist()
            self._run(f"r{self.turns}", prompt, output, session)
            texts[session] = [*prompt, *output]
            self.turns += 1

    def _run(self, name: str, prompt: list[int], output: list[int], session: str) -> None:
        tokens = np.zeros((1, len(prompt) + len(output)), np.int32)
        tokens[0] = [*prompt, *output]
        batch, identity = Batch((name,), np.zeros(1, np.int32)), Identity(TENANT, session, principal="p")
        for count in range(1, len(output) + 1):
            step = Step(
                started=[NewRequest(name, prompt, identity)] if count == 1 else [],
                batch=batch,
                tokens=tokens,
                lengths=np.array([len(prompt) + count], np.int32),
                max_draft_tokens=np.array([4], np.int32),
                num_verified_draft_tokens=np.zeros(1, np.int32),
                num_draft_tokens=0,
            )
            self._timed(lambda step=step: self.engine.propose(step))  # type: ignore[misc]
            begin = time.perf_counter()
            time.sleep(0.0005)  # the forward pass
            self.slept.append(time.perf_counter() - begin)
        self._timed(lambda: self.engine.finish(name, len(output)))
        self._timed(self.engine.finish_if_idle)

    def _timed(self, call: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        call()
        self.waited.append(time.perf_counter() - wall)
        self.worked.append(time.thread_time() - cpu)


class SlowNetwork:
    """Stand between a client and a server. A context manager.

    delay: seconds that each message to the server takes. swallowed: messages with these bytes in them never arrive.
    """

    def __init__(self, port: int, *, delay: float = 0.0, swallowed: bytes | None = None) -> None:
        self._server = port
        self.delay, self.swallowed = delay, swallowed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            for _ in itertools.count():
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._sockets += [client, server]
                threading.Thread(target=self._carry, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, False), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                if asks:
                    time.sleep(self.delay)
                    if self.swallowed is not None and self.swallowed in data:
                        continue
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
