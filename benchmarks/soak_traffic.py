"""Make the traffic of the soak run: six threads that send requests of every kind, and remember what they sent."""

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai

from agentspec import AgentClient
from agentspec.testing.server import ModelServer
from demo.tasks import FIRST_HELD_OUT_SEED, make_task

MAX_MODEL_LEN = 4096
VOCABULARY = 1_500
WORKERS = 6


@dataclass(slots=True)
class Said:
    """Hold what the clients know of the traffic. Several threads add to it."""

    tokens: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    finished: list[tuple[float, str]] = field(default_factory=list)
    """(epoch seconds, session) of complete answers"""
    touched: set[str] = field(default_factory=set)
    """sessions that were aborted or erased; the store need not have them"""
    erased: list[str] = field(default_factory=list)
    drafts: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the start, tokens a step) of an agent's correction"""
    errors: list[str] = field(default_factory=list)


class Traffic:
    """Make requests from several threads until it is stopped."""

    def __init__(self, server: ModelServer, seed: int, start: float) -> None:
        self.said = Said()
        self._server = server
        self._start = start
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._constant: list[int] = []
        self._openai = openai.OpenAI(base_url=server.base_url, api_key="none", timeout=120)
        self._agents = AgentClient(base_url=server.base_url, model=server.name, api_key="none", store=None)
        self._kinds: tuple[Callable[[random.Random], None], ...] = (
            *(self._agent, self._new_id, self._new_id, self._constant_id),
            *(self._long, self._long, self._long, self._long, self._abort, self._erase),
        )
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + i),), daemon=True) for i in range(WORKERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the requests under way, and close."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        self._agents.close()
        self._openai.close()

    def _run(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            kind = chance.choice(self._kinds)
            try:
                kind(chance)
            except Exception as error:
                with self._lock:
                    self.said.errors.append(f"{kind.__name__}: {error!r}"[:200])
                self._stop.wait(0.5)

    def _agent(self, chance: random.Random) -> None:
        """Write a function and correct it, in a new session: the correction repeats most of the first answer."""
        task = make_task(FIRST_HELD_OUT_SEED + chance.randrange(20))
        session = self._agents.session()
        first = session.chat(task.request, temperature=0, max_tokens=200)
        test = task.tests[-1]
        failed = (
            f"1 of 3 tests fail. Fix {test.name}: {test.rule}\n{test.call} raised TypeError, expected {test.expected}."
        )
        second = session.chat(failed, temperature=0, max_tokens=200)
        for reply in (first, second):
            self._note("agent", session.id, reply.usage.total_tokens if reply.usage else 0)
        if second.speculation is not None and second.speculation.steps:
            with self._lock:
                rate = second.speculation.tokens / second.speculation.steps
                self.said.drafts.append((time.monotonic() - self._start, rate))

    def _new_id(self, chance: random.Random) -> None:
        self._complete("new id", _name(), _prompt(chance, chance.randrange(200, 2000)))

    def _constant_id(self, chance: random.Random) -> None:
        with self._lock:
            self._constant = [*self._constant[-1_000:], *_prompt(chance, 200)]
            prompt = list(self._constant)
        self._complete("constant id", "soak-constant", prompt)

    def _long(self, chance: random.Random) -> None:
        self._complete("long prompt", _name(), _prompt(chance, MAX_MODEL_LEN - 64))

    def _abort(self, chance: random.Random) -> None:
        name = _name()
        with self._lock:
            self.said.touched.add(name)
        with self._openai.completions.create(**self._request(name, _prompt(chance, 300)), stream=True) as stream:
            for _, _event in zip(range(3), stream, strict=False):
                pass
        self._note("abort", None, 300)

    def _erase(self, chance: random.Random) -> None:
        name = _name()
        with self._lock:
            self.said.touched.add(name)
        self._complete("erase", name, _prompt(chance, 300))
        try:
            self._openai.delete(f"/agentspec/sessions/{name}", cast_to=object, options={"max_retries": 0})
        except openai.InternalServerError as error:
            if error.status_code != 503:  # 503: the store is away, as in an outage
                raise
            return
        with self._lock:
            self.said.erased.append(name)

    def _complete(self, kind: str, session: str, prompt: list[int]) -> None:
        answer = self._openai.completions.create(**self._request(session, prompt))
        self._note(kind, session, answer.usage.total_tokens if answer.usage else 0)

    def _request(self, session: str, prompt: list[int]) -> dict[str, Any]:
        tag = {"session_id": session, "vllm_xargs": {"session_id": session}, "ignore_eos": True}
        return {
            "model": self._server.name, "prompt": prompt, "max_tokens": 8, "temperature": 1.0, "extra_body": tag
        }  # fmt: skip

    def _note(self, kind: str, session: str | None, tokens: int) -> None:
        with self._lock:
            self.said.requests[kind] += 1
            self.said.tokens += tokens
            if session is not None:
                self.said.finished.append((time.time(), session))


def _name() -> str:
    return f"soak-{uuid.uuid4().hex}"


def _prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(10, VOCABULARY) for _ in range(length)]
