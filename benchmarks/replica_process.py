"""Run replicas for store.py: each an engine's drafting and persistence in a process of its own, without vLLM."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from trace_files import accepted_tokens

from agentspec.cache import FinishedTurn
from agentspec.cache.store import LogNames, open_store
from agentspec.server_ext.engine import DraftingEngine, make_cache
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, Int32, NewRequest, Step
from agentspec.testing.replay_types import ReplayError

VOCABULARY = 131_072
NAMES = LogNames("0123456789abcdef", b"benchmark")
COST = 0.03
STEP_SECONDS = 0.010
"""Time of a decode step: an 8B model on one GPU takes 5 to 10 ms for it."""
PROMPT, RESPONSE = 512, 256
"""Tokens of a session's first prompt, and of each response."""
TURNS = 3
"""Turns of a session that `serve` plays; each prompt holds the turns before."""
SESSION = PROMPT + TURNS * RESPONSE
"""Tokens of such a session."""


@dataclass(slots=True)
class Served:
    """Hold what serving cost. calls: CPU seconds of the thread in each step's engine calls. wall: seconds of the same
    calls. restored: turns that the store brought meanwhile."""

    steps: int = 0
    tokens: int = 0
    finished: int = 0
    restored: int = 0
    calls: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


class Engine:
    """Hold a DraftingEngine on a store, and its drafts for the rows of a `Game`."""

    def __init__(self, url: str, batch: int, preload: int = 0) -> None:
        settings = Settings(store=url, verify_cost=COST, preload_records=preload)
        self.persistence = Persistence(make_cache(settings, VOCABULARY, 32), open_store(url), NAMES, preload)
        self.engine = DraftingEngine(settings, self.persistence)
        self.engine.warm_up()  # a thread indexes beside the steps from now on, as in a server
        self.drafts: list[list[int]] = [[] for _ in range(batch)]

    def step(self, step: Step, accepted: list[int], ended: Sequence["Row"], served: Served) -> None:
        """Do one decode step, and finish the requests that it ended. accepted: new tokens of each row."""
        drafted = [min(len(draft), count) for draft, count in zip(self.drafts, accepted, strict=True)]
        step = replace(step, num_verified_draft_tokens=np.array(drafted, np.int32), num_draft_tokens=sum(drafted))
        begin, cpu = time.perf_counter(), time.thread_time()
        self.drafts = self.engine.propose(step)
        for row in ended:
            self.engine.finish(row.name, len(row.text) - row.prompt)
        served.calls.append(time.thread_time() - cpu)
        served.wall.append(time.perf_counter() - begin)
        served.steps += 1
        served.finished += len(ended)
        served.tokens += sum(accepted)


class Game:
    """Play requests of given text step by step, verified greedily. A request that ends makes room for the next.

    The first engine's drafts decide how many tokens a step adds. The other engines are given the same tokens, so that
    they do the same work.
    """

    def __init__(self, requests: Iterator["Request"], batch: int) -> None:
        self._requests = requests
        self._tokens = np.zeros((batch, SESSION), np.int32)
        self._rows: list[Row | None] = [None] * batch
        self._handle: Batch | None = None
        self._count = 0

    def step(self, engines: Sequence[tuple[Engine, Served]], *, reverse: bool = False) -> None:
        """Do one decode step of a full batch on each engine. reverse: begin with the last engine."""
        started = [self._begin(number) for number, row in enumerate(self._rows) if row is None]
        rows = [row for row in self._rows if row is not None]
        if started or self._handle is None:
            self._handle = Batch(tuple(row.name for row in rows), np.arange(len(rows), dtype=np.int32))
        accepted = [row.accept(draft) for row, draft in zip(rows, engines[0][0].drafts, strict=True)]
        for number, row in enumerate(rows):
            self._tokens[number, : row.length] = row.text[: row.length]
        none = np.zeros(len(rows), np.int32)
        step = Step(
            batch=self._handle,
            started=started,
            tokens=self._tokens,
            lengths=np.array([row.length for row in rows], np.int32),
            max_draft_tokens=np.array([max(len(row.text) - row.length - 1, 0) for row in rows], np.int32),
            num_verified_draft_tokens=none,
            num_draft_tokens=0,
        )
        ended = [row for row in rows if row.length == len(row.text)]
        for engine, served in reversed(engines) if reverse else engines:
            engine.step(step, accepted, ended, served)
        for number, row in enumerate(rows):
            if row in ended:
                self._rows[number] = None
                for engine, _ in engines:
                    engine.drafts[number] = []

    def end(self, engines: Sequence[Engine]) -> None:
        """Finish the requests that still run, so that another game can begin on these engines."""
        for engine in engines:
            for row in self._rows:
                if row is not None:
                    engine.engine.finish(row.name, row.length - row.prompt)
            engine.engine.finish_if_idle()
            engine.drafts = [[] for _ in self._rows]

    def _begin(self, number: int) -> NewRequest:
        request = next(self._requests)
        self._count += 1
        row = Row(f"{number}-{self._count}", request.text, request.prompt, request.prompt)
        self._rows[number] = row
        identity = Identity(session=request.session, session_name=request.session)
        return NewRequest(row.name, row.text[: row.prompt], identity)


@dataclass(slots=True)
class Request:
    """Hold a request to play. text: int32 [P + R], prompt and response; prompt: P."""

    session: str
    text: Int32
    prompt: int


@dataclass(slots=True, eq=False)
class Row:
    """Hold a request that is played. length: tokens of its text so far."""

    name: str
    text: Int32
    prompt: int
    length: int

    def accept(self, draft: Sequence[int]) -> int:
        """Add the accepted part of a draft and one more token. Return how many tokens were added."""
        given = accepted_tokens(draft, self.text[self.length : -1]) + 1  # the last token is never drafted
        self.length += given
        return given


class Replica:
    """Serve, write, listen and load in a process of its own, as store.py asks.

    url: the store that replicas share. text: int32 [T], recorded text. Each replica begins at another place of it.
    """

    def __init__(self, url: str, number: int, text: Int32, batch: int) -> None:
        self._number, self._text, self._batch = number, text, batch
        self._shared, self._apart = Engine(url, batch), Engine("memory://", batch)
        self._places = iter(range(number * 977 % len(text), 1 << 62, SESSION))

    def serve(self, begin: float, seconds: float) -> dict[str, Any]:
        """Serve in real time for so long, from `begin` (time.monotonic()) on. Return what it cost.

        Two engines do the same steps in turns, so that they see the same machine. One is on the shared store, and its
        drafts decide how many tokens a step adds. The other has a store of its own in memory. For the first half of
        the time that one knows what it said itself (`first`, `own`). For the second half (`second`, `copy`) it begins
        with a copy of the first one's suffix cache, so it drafts from the same text, without persistence and following.
        """
        first, own = self._take_turns(self._apart, begin, seconds / 2)
        copy = Engine("memory://", self._batch)
        with tempfile.TemporaryDirectory() as folder:
            self._shared.engine.cache.save(f"{folder}/cache")
            copy.engine.cache.load_snapshot(f"{folder}/cache")
        second, copied = self._take_turns(copy, max(begin + seconds / 2, time.monotonic()), seconds / 2)
        copy.engine.close()
        served = {"first": first, "own": own, "second": second, "copy": copied}
        return {name: asdict(found) for name, found in served.items()}

    def _take_turns(self, other: Engine, begin: float, seconds: float) -> tuple[Served, Served]:
        """Serve new requests on the shared engine and on another one in turns. Return what each cost."""
        shared, beside = Served(), Served()
        engines = [(self._shared, shared), (other, beside)]
        game = Game(self._requests(next(self._places)), self._batch)
        before = self._shared.persistence.stats()["restored"]
        for turn in _steps(begin, seconds):
            game.step(engines, reverse=turn % 2 == 0)
        shared.restored = self._shared.persistence.stats()["restored"] - before
        game.end([self._shared, other])
        return shared, beside

    def load_beside(self, session: str, begin: float, seconds: float) -> dict[str, Any]:
        """Serve, and after a third of the time load a session that only the store has. Return what it cost.

        calls: CPU seconds of each step's engine calls. at: the step that asked for the session. loaded: seconds from
        there until the cache had all of it to draft from; None: not in time. cpu: CPU seconds of the process meanwhile,
        beside those calls. Its turns come into the tenant's corpus later, as steps have time.
        """
        engine, served = self._shared, Served()
        others = self._requests(next(self._places))
        asked: list[float] = []
        loaded, at = None, 0

        def requests() -> Iterator[Request]:
            for request in others:
                if not asked and time.monotonic() > begin + seconds / 3:
                    asked.append(time.monotonic())
                    request.session = session
                yield request

        game = Game(requests(), self._batch)
        cpu = time.process_time()
        for _ in _steps(begin, seconds):
            if not asked:
                at, cpu, calls = served.steps, time.process_time(), len(served.calls)
            game.step([(engine, served)])
            if asked and loaded is None and engine.persistence.stats()["adopted_sessions"]:
                loaded = time.monotonic() - asked[0]
                cpu = time.process_time() - cpu - sum(served.calls[calls:])
        return {"calls": served.calls, "at": at, "loaded": loaded, "cpu": cpu}

    def write(self, begin: float, turns: int, session: str | None = None) -> dict[str, float]:
        """Save `turns` turns as fast as the store takes them. Return their tokens, and the wall and CPU seconds.

        session: the session of all turns; None: each turn has its own.
        """
        persistence = self._shared.persistence
        records = [self._turn(session or f"written-{self._number}-{number}") for number in range(turns)]
        time.sleep(max(0.0, begin - time.monotonic()))
        wall, cpu = time.monotonic(), time.process_time()
        done = persistence.stats()["writer"]["persisted"] + turns
        for turn, identity in records:
            persistence.save(turn, identity)
        while persistence.stats()["writer"]["persisted"] < done:
            time.sleep(0.002)
        tokens = sum(len(turn.response) + len(turn.prompt_tail) for turn, _ in records)
        return {"tokens": tokens, "wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}

    def say(self, text: Int32) -> float:
        """Say a text in one step, finish its request, and return the time then (time.monotonic())."""
        engine = self._shared.engine
        engine.propose(_whole("said", text, prompt=8))
        engine.finish("said", len(text) - 8)
        engine.finish_if_idle()
        return time.monotonic()

    def listen(self, text: Int32, known: int, seconds: float) -> float | None:
        """Ask every step for a draft behind the first `known` tokens, until its first token is the text's next one.

        Return the time then (time.monotonic()), or None if that took longer than `seconds`.
        """
        engine, until = self._shared.engine, time.monotonic() + seconds
        found, prompt = None, known - 1
        while found is None and time.monotonic() < until:
            (draft,) = engine.propose(_whole("listening", text[:known], prompt))
            prompt = 0
            if draft and draft[0] == text[known]:
                found = time.monotonic()
            else:
                time.sleep(STEP_SECONDS)
        engine.finish("listening", 0)
        engine.finish_if_idle()
        return found

    def close(self) -> None:
        """Close both engines and their stores."""
        self._shared.engine.close()
        self._apart.engine.close()

    def _requests(self, place: int) -> Iterator[Request]:
        for count in range(1 << 62):
            begin = (place + count * SESSION) % (len(self._text) - SESSION)
            for turn in range(TURNS):
                prompt = PROMPT + turn * RESPONSE
                text = self._text[begin : begin + prompt + RESPONSE]
                yield Request(f"{self._number}-{place}-{count}", text, prompt)

    def _turn(self, session: str) -> tuple[FinishedTurn, Identity]:
        begin = next(self._places) % (len(self._text) - RESPONSE)
        writer, name = self._shared.persistence.next_name()
        text = self._text[begin : begin + RESPONSE]
        turn = FinishedTurn(None, session, 0, text[:8], text[8:], writer=writer, number=name)
        return turn, Identity(session=session, session_name=session)


class Process:
    """Run a Replica in a new process. Its methods are called by `begin`, whose result is the answer to wait for."""

    def __init__(self, url: str, number: int, text: Int32, batch: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, url, number, text, batch), daemon=True)
        self._process.start()

    def begin(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of the replica. Return a function that waits for the result.

        It raises ReplayError if the process has ended, which has printed why.
        """
        with suppress(OSError):
            self._pipe.send((method, arguments))
        return partial(self._answer, method)

    def _answer(self, method: str) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise ReplayError(f"a replica's process has ended in {method}; its own error stands above") from None

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


def _run(pipe: Connection, url: str, number: int, text: Int32, batch: int) -> None:
    replica = Replica(url, number, text, batch)
    while (call := pipe.recv()) is not None:
        method, arguments = call
        pipe.send(getattr(replica, method)(*arguments))
    replica.close()


def _steps(begin: float, seconds: float) -> Iterator[int]:
    """Yield a number at the time of each step, for `seconds`. A step that is late is not made up for."""
    turn = 0
    while (now := time.monotonic()) < begin + seconds:
        if (wait := begin + turn * STEP_SECONDS - now) > 0:
            time.sleep(wait)
        else:
            turn = int((now - begin) / STEP_SECONDS)
        yield turn
        turn += 1


def _whole(name: str, text: Int32, prompt: int) -> Step:
    """Return a step of one request that has all of this text. prompt: tokens of its prompt if it starts, else 0."""
    new = [NewRequest(name, text[:prompt], Identity())] if prompt else []
    one = np.zeros(1, np.int32)
    return Step(
        batch=_ALONE.setdefault(name, Batch((name,), one)),
        started=new,
        tokens=np.ascontiguousarray(text[None]),
        lengths=one + len(text),
        max_draft_tokens=one + 8,
        num_verified_draft_tokens=one,
        num_draft_tokens=0,
    )


_ALONE: dict[str, Batch] = {}
