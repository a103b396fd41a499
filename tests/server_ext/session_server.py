"""Help the tests of the sessions' routes: a server of several engines on one store."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from agentspec.cache.store import LogNames, open_store
from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.api.endpoints import AgentSpecEndpoints
from agentspec.server_ext.engine import DraftingEngine, make_cache
from agentspec.server_ext.identity import Identity, RequestTagger
from agentspec.server_ext.identity.callers import Callers, Presented
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from agentspec.server_ext.vllm_adapter import served_model_key
from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH
from tests.store.helpers import wait_until

ADA, BOB = "key of ada", "key of bob"
ADMIN = "the key of the administrator"
TEXT = list(range(500, 560))
PROMPT = [1, 2, 3, 4, 5]
VOCABULARY = 1000
MODEL = Path(__file__).parents[2] / "demo" / "model"


class Server:
    """Run a server of several engines that share a store; ``http`` is its client."""

    def __init__(self, url: str, engines: int, keys: Sequence[str], record: Path | None, **settings: Any) -> None:
        given = Settings(store=url, record=None if record is None else str(record), **settings)
        model = SimpleNamespace(
            model=str(MODEL),
            tokenizer=str(MODEL),
            revision=None,
            tokenizer_revision=None,
            hf_overrides={},
            get_vocab_size=lambda: VOCABULARY,
        )
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(method="custom_class", model=PROPOSER_PATH),
            additional_config={},
            model_config=model,
        )
        self.tagger = RequestTagger(Callers(given, b"secret of the tests"), "tenant")
        self.input_processor = SimpleNamespace(agentspec=self.tagger)
        self.engine_core = self
        self.core_engines = [rank.to_bytes(2, "little") for rank in range(engines)]
        logs = LogNames(served_model_key(self.vllm_config), b"secret of the tests")
        self.engines = [
            DraftingEngine(given, Persistence(make_cache(given, VOCABULARY, 16), open_store(url), logs, 100))
            for _ in self.core_engines
        ]
        self.get_tokenizer: Callable[[], Any] = lambda: None
        self.asked = 0
        self.erased = 0
        self.slowest = 0.0
        app = FastAPI()
        AgentSpecEndpoints().attach_router(app)
        if keys:
            from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

            app.add_middleware(AuthenticationMiddleware, tokens=list(keys))
        app.state.agentspec_engine = self
        app.state.agentspec_socket, app.state.agentspec_loopback = False, True
        self.state = app.state
        self.http = TestClient(app, "http://127.0.0.1:8000")

    async def _call_utility_async(self, name: str, method: str, limit: Any, args: Any, kw: Any, engine: bytes) -> Any:
        self.asked += 1
        runner = SimpleNamespace(agentspec=SimpleNamespace(engine=self.engines[engine[0]]))
        args, kw = msgspec.msgpack.decode(msgspec.msgpack.encode((args, kw)))  # as vLLM carries them
        begin = time.perf_counter()
        answer = vllm_adapter.worker_rpc(SimpleNamespace(model_runner=runner), *args, **kw)
        self.slowest = max(self.slowest, time.perf_counter() - begin)
        return [answer, None]

    def identity(self, key: str | None, session: str, **more: Any) -> Identity:
        shown = None if key is None else Presented([(b"authorization", f"Bearer {key}".encode())], verified=True)
        given = {"session_id": session, "agentspec_scope": more.pop("scope", "tenant")}
        if parent := more.pop("parent", None):
            given["parent_session_id"] = parent
        return self.tagger.identity_of(given, shown, **more)

    def start(self, name: str, identity: Identity, prompt: Sequence[int], text: Sequence[int], engine: int = 0) -> int:
        """Begin a request and verify its text at once. Return the length of the draft behind it."""
        tokens = np.zeros((1, 512), np.int32)
        full = [*prompt, *text]
        tokens[0, : len(full)] = full
        count = np.array([len(full)], np.int32)
        step = Step(
            started=[NewRequest(name, prompt, identity)],
            batch=Batch((name,), np.zeros(1, np.int32)),
            tokens=tokens,
            lengths=count,
            max_draft_tokens=np.array([16], np.int32),
            num_verified_draft_tokens=np.zeros(1, np.int32),
            num_draft_tokens=0,
        )
        (draft,) = self.engines[engine].propose(step)
        return len(draft)

    def end(self, name: str, output_limit: int, engine: int = 0) -> None:
        """End a request. Where it was the last, vLLM has no further step."""
        self.engines[engine].finish(name, output_limit)
        self.engines[engine].finish_if_idle()

    def say(
        self, identity: Identity, text: Sequence[int] = TEXT, prompt: Sequence[int] = PROMPT, engine: int = 0
    ) -> None:
        """Run a request to its end, and wait until it is stored."""
        name = f"r{time.perf_counter_ns()}"
        self.start(name, identity, prompt, text, engine)
        self.end(name, len(text), engine)
        self.wait(lambda: self.engines[engine].stats()["store"]["writer"]["queued"] == 0)

    def follow(self) -> None:
        """Wait until each engine has read what the others stored and erased."""
        for engine in self.engines:
            assert engine._persistence._follower is not None
            engine._persistence._follower.settle(60.0)

    def draws_on(self, identity: Identity, text: Sequence[int] = TEXT, engine: int = 0) -> bool:
        """Wait until a request drafts from earlier text, which arrives from the store a little later. Return True."""
        self.wait(lambda: self.drafts(identity, text, engine))
        return True

    def drafts(self, identity: Identity, text: Sequence[int] = TEXT, engine: int = 0) -> bool:
        """Return whether a request soon drafts from earlier text. The request is aborted, so it leaves nothing."""
        name = f"d{time.perf_counter_ns()}"
        drafted = 0
        for _ in range(20):
            drafted = self.start(name, identity, [9, *text[:8]], text[8:10], engine)
            self.end(name, 0, engine)
            if drafted:
                break
            time.sleep(0.01)
        return drafted > 0

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, 20.0)

    def call(self, key: str | None, method: str, session: str = "", **more: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        path = "/v1/agentspec/sessions" + (f"/{session}" if session else "")
        return self.http.request(method, path, headers=headers | more.pop("headers", {}), **more)

    def erase(self, key: str, session: str, **more: Any) -> Any:
        """Erase a session, again while another engine's thread reads the store. Set ``erased`` to the record count."""
        answers: list[Any] = []

        def done() -> bool:
            answers.append(self.call(key, "DELETE", session, **more))
            return bool(answers[-1].status_code != 202)

        self.wait(done)
        self.erased = sum(answer.json()["records"] for answer in answers)  # each answer counts its own
        return answers[-1]

    def listed(self, key: str | None, **more: Any) -> list[str]:
        return [session["id"] for session in self.call(key, "GET", **more).json()["sessions"]]


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts servers, on one SQLite file unless told otherwise."""
    vllm_adapter.register()
    monkeypatch.setenv("AGENTSPEC_ADMIN_KEY", ADMIN)
    started = []

    def serve(
        *keys: str,
        url: str = f"sqlite:///{tmp_path / 'log.db'}",
        engines: int = 2,
        record: Path | None = None,
        **settings: Any,
    ) -> Server:
        started.append(Server(url, engines, keys, record, **settings))
        return started[-1]

    yield serve
    for server in started:
        for engine in server.engines:
            engine.close()
