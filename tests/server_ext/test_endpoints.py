"""Test the HTTP routes behind vLLM's own key check, with stand-in engines: who is told what, and who sent what."""

import asyncio
import gc
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.api.endpoints import AgentSpecEndpoints
from agentspec.server_ext.figures.metrics import Metrics
from agentspec.server_ext.figures.traces import Trace
from agentspec.server_ext.identity import Identity, RequestTagger
from agentspec.server_ext.identity.callers import Callers, Presented
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.vllm_adapter import patches
from agentspec.server_ext.vllm_adapter.frontend import engine_calls, response_lengths, senders
from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH

ADMIN = "the key of the administrator"


VOCABULARY = 0x2000
"""Size of the served model's vocabulary. In these tests a token is a character."""


class EngineClient:
    """Stand in for vLLM's client of two data-parallel engines, each with metrics of its own."""

    def __init__(self, settings: Settings) -> None:
        model = SimpleNamespace(method="custom_class", model=PROPOSER_PATH)
        served = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.vllm_config = SimpleNamespace(speculative_config=model, model_config=served, additional_config={})
        self.tagger = RequestTagger(Callers(settings, b"secret of the tests"), "tenant")
        self.input_processor = SimpleNamespace(agentspec=self.tagger)
        self.engine_core = self
        self.core_engines = [rank.to_bytes(2, "little") for rank in (0, 1)]
        self.metrics = [Metrics(), Metrics()]
        self.delay = 0.0
        self.limits: list[float | None] = []

    async def _call_utility_async(
        self, name: str, method: str, limit: Any, question: Any, kw: Any, engine: bytes
    ) -> Any:
        assert (name, method) == ("collective_rpc", engine_calls.RPC_METHOD)
        self.limits.append(limit)
        await asyncio.sleep(self.delay)
        if question[0] == "stats":
            return [{"engine": engine[0]}, None]  # the second tensor-parallel rank has no engine
        _, request_id = question
        asked = self.metrics[engine[0]].request(request_id, kw["caller"], call=kw["call"], any_caller=kw["admin"])
        return [asked, None]

    def ran(self, request_id: str, presented: Presented | None, engine: int = 0) -> Identity:
        """Let an engine run a request of this sender."""
        identity = self.tagger.identity_of({"session_id": "s"}, presented)
        metrics = self.metrics[engine]
        metrics.end(metrics.begin(request_id, identity.caller, "" if presented is None else presented.call))
        return identity


Start = Callable[..., tuple[TestClient, EngineClient]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a server with API keys and settings."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    vllm_adapter.register()
    monkeypatch.setenv("AGENTSPEC_ADMIN_KEY", ADMIN)

    def serve(*keys: str, **settings: Any) -> tuple[TestClient, EngineClient]:
        app = FastAPI()
        AgentSpecEndpoints().attach_router(app)
        if keys:
            app.add_middleware(AuthenticationMiddleware, tokens=list(keys))
        engine = EngineClient(Settings(store="memory://", **settings))
        app.state.agentspec_engine = engine

        @app.get("/{path:path}")
        def elsewhere() -> str:
            caller = engine.tagger.callers.caller_of(senders.presented())
            return str(caller.principal)

        return TestClient(app), engine

    return serve


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def shown(key: str, verified: bool | None = True) -> Presented:
    return Presented([(b"authorization", f"Bearer {key}".encode())], verified)


def test_figures_are_told_to_their_principal_and_to_the_administrator(start: Start) -> None:
    server, engine = start("ada", "bob")
    engine.ran("r", shown("ada"), engine=1)
    path = "/v1/agentspec/requests/r"
    for key, status in {"ada": 200, "bob": 404, ADMIN: 200, "eve": 401, ADMIN[:-1]: 401}.items():
        assert server.get(path, headers=bearer(key)).status_code == status, key
    missing = server.get("/v1/agentspec/requests/r2", headers=bearer("bob")).json()["detail"]
    assert server.get(path, headers=bearer("bob")).json()["detail"] == missing.replace("r2", "r")


def test_samples_of_a_request_that_ran_on_several_engines_are_added_up(start: Start) -> None:
    server, engine = start()
    caller = engine.ran("other", shown("x", None)).caller
    for metrics, count in zip(engine.metrics, (2, 3), strict=True):
        figures = metrics.begin("r/1", caller)
        figures.tokens, figures.accepted[0], figures.drafted[0] = 10 * count, count, 2 * count
    figures.trace = Trace(None, shares_corpus=False)
    engine.get_tokenizer = lambda: SimpleNamespace(decode=str)  # type: ignore[attr-defined]
    found = server.get("/v1/agentspec/requests/r%2F1").json()
    assert (found["request_id"], found["tokens"], found["drafted"], found["accepted"]) == ("r/1", 50, 10, 5)
    assert sum(found["accepted_by_source"].values()) == 5 and sum(found["drafted_by_source"].values()) == 10
    assert found["detail"] == []


def test_calls_with_one_id_on_several_engines_are_not_added_up(start: Start) -> None:
    server, engine = start()
    caller = engine.ran("other", shown("x", None)).caller
    for number, call in enumerate(("first", "second", "second")):
        figures = engine.metrics[number % 2].begin("r", caller, call)
        figures.tokens, figures.began = 10**number, number
    for headers in ({}, bearer(ADMIN)):
        found = server.get("/v1/agentspec/requests/r", headers=headers).json()
        assert found["tokens"] == 110
        assert {"caller", "call", "began"}.isdisjoint(found)
    engine.metrics[1].begin("r", "another caller", "third").began = 7  # the administrator sees all
    assert server.get("/v1/agentspec/requests/r").json()["tokens"] == 110
    assert server.get("/v1/agentspec/requests/r", headers=bearer(ADMIN)).json()["tokens"] == 0


def test_a_server_without_a_tokenizer_tells_figures_without_texts(start: Start) -> None:
    server, engine = start()
    figures = engine.metrics[0].begin("r", engine.ran("other", shown("x", None)).caller)
    figures.trace = Trace(None, shares_corpus=False)
    figures.trace.add([5], 0, 0)
    engine.get_tokenizer = without_tokenizer  # type: ignore[attr-defined]
    answer = server.get("/v1/agentspec/requests/r")
    assert answer.status_code == 200 and "detail" not in answer.json()
    engine.get_tokenizer = lambda: SimpleNamespace(decode=str)  # type: ignore[attr-defined]
    assert len(server.get("/v1/agentspec/requests/r").json()["detail"]) == 1


def without_tokenizer() -> Any:
    """Raise the error that vLLM raises under --skip-tokenizer-init."""
    raise ValueError("Tokenizer not available when `skip_tokenizer_init=True`")


def test_a_request_named_like_anothers_neither_reads_nor_changes_its_figures(start: Start) -> None:
    server, engine = start("ada", "bob")
    engine.ran("r", shown("ada"))
    adas = server.get("/v1/agentspec/requests/r", headers=bearer("ada")).json()
    figures = engine.metrics[0].begin("r", engine.ran("other", shown("bob")).caller)
    figures.tokens += 7
    assert server.get("/v1/agentspec/requests/r", headers=bearer("ada")).json() == adas
    assert server.get("/v1/agentspec/requests/r", headers=bearer("bob")).json()["tokens"] == 7


def test_without_keys_figures_are_told_to_all_callers(start: Start) -> None:
    server, engine = start()
    engine.ran("r", None)
    assert server.get("/v1/agentspec/requests/r").status_code == 200
    assert server.get("/v1/agentspec/requests/r", headers=bearer("anything")).status_code == 200


def test_behind_a_gateway_figures_are_told_to_whom_its_header_names(start: Start) -> None:
    server, engine = start(principal_header="X-Principal")
    engine.ran("r", Presented([(b"x-principal", b"ada")]))
    for headers, status in (({"X-Principal": "ada"}, 200), ({"X-Principal": "bob"}, 404), ({}, 404)):
        assert server.get("/v1/agentspec/requests/r", headers=headers).status_code == status
    twice = [("X-Principal", "ada"), ("X-Principal", "bob")]
    assert server.get("/v1/agentspec/requests/r", headers=twice).status_code == 404
    engine.ran("of nobody", None)
    assert server.get("/v1/agentspec/requests/of nobody").status_code == 404
    assert server.get("/v1/agentspec/requests/of nobody", headers=bearer(ADMIN)).status_code == 200


def test_the_administrators_key_opens_agentspecs_routes_only(start: Start) -> None:
    server, _ = start("ada")
    for path, status in {
        "/v1/agentspec/stats": 200,
        "/v1/agentspec": 200,
        "/v1/agentspecs": 401,
        "/v1/completions": 401,
        "/v1/agentspec/../completions": 401,
    }.items():
        assert server.get(path, headers=bearer(ADMIN)).status_code == status, path


def test_all_engines_answer_and_get_no_time_limit(start: Start) -> None:
    server, engine = start()
    assert server.get("/v1/agentspec/stats").json() == {"engines": [{"engine": 0}, {"engine": 1}]}
    assert engine.limits == [None, None]


def test_an_engine_that_does_not_answer_is_a_503(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "_RPC_SECONDS", 0.05)
    server, engine = start()
    engine.delay = 60.0
    begin = time.monotonic()
    answer = server.get("/v1/agentspec/stats")
    assert answer.status_code == 503 and "try again" in answer.json()["detail"]
    assert time.monotonic() - begin < 30


def test_a_path_that_vllm_leaves_unguarded_makes_nobody(start: Start) -> None:
    server, engine = start("ada")
    assert server.get("/invocations").json() == "?"
    ada = engine.tagger.callers.caller_of(shown("ada")).principal
    assert server.get("/invocations", headers=bearer("ada")).json() == server.get("/v1/x", headers=bearer("ada")).json()
    assert server.get("/v1/x", headers=bearer("ada")).json() == ada


@pytest.mark.parametrize("root", ["", "/", "/x", "/x/", "x", "/v"])
@pytest.mark.parametrize("before", ["", "/x"])
def test_a_path_is_the_one_that_is_routed_whatever_the_root_path(root: str, before: str) -> None:
    """Otherwise responses and /metrics would lack agentspec's figures with ``--root-path /``."""
    found = []

    class Middleware:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                found.append(senders.path_of(scope))
            await self.app(scope, receive, send)

    app = FastAPI(root_path=root)
    app.get("/v1/models")(lambda: "routed")
    app.add_middleware(Middleware)
    routed = TestClient(app).get(f"{before}/v1/models").status_code == 200
    assert (found == ["/v1/models"]) == routed
    assert routed == (before in ("", root))


@pytest.mark.parametrize(
    ("path", "numbered"),
    [("/v1/responses", True), ("/v1/chat/completions/batch", True), ("/v1/chat/completions", False)],
)
async def test_routes_on_which_vllm_numbers_the_requests_are_told(path: str, numbered: bool) -> None:
    """Otherwise the figures could not be asked for by the id in the response, which lacks the number."""
    found: list[bool] = []

    async def app(*_: Any) -> None:
        sender = senders.presented()
        found.append(sender is not None and sender.batch)

    await senders.CallerMiddleware(app)({"type": "http", "path": path, "headers": []}, None, None)
    assert found == [numbered]


async def test_a_request_is_not_taken_for_the_one_before_it_on_its_connection() -> None:
    """The server may start a request's task in the context of the request before."""
    found: list[Presented | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(senders.presented())
        if len(found) == 1:
            await asyncio.create_task(request(b"bob"))

    middleware = senders.CallerMiddleware(app)

    async def request(name: bytes) -> None:
        await middleware({"type": "http", "path": "/", "headers": [(b"x-principal", name)]}, None, None)

    await request(b"ada")
    assert [presented and presented.all("x-principal") for presented in found] == [["ada"], ["bob"]]
    assert senders.presented() is None


class ToldEngines(EngineClient):
    """Stand in for two engines that note what they are told."""

    def __init__(self) -> None:
        super().__init__(Settings(store="memory://"))
        self.told: list[tuple[int, str, dict[str, int]]] = []

    async def _call_utility_async(
        self, name: str, method: str, limit: Any, question: Any, kw: Any, engine: bytes
    ) -> Any:
        self.told.append((engine[0], *question))
        return [None]


@pytest.mark.parametrize("ours", [True, False])
def test_every_client_of_an_engine_that_drafts_tells_lengths(ours: bool) -> None:
    """A server that ``AGENTSPEC=1`` alone switched on has no routes of agentspec, and trainers make clients, too."""
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_adapter.register()
    assert hasattr(AsyncLLM.__init__, patches.MARK)
    client: Any = ToldEngines()
    client.output_processor = SimpleNamespace()
    if not ours:
        client.vllm_config.speculative_config = None
    response_lengths.init_client(lambda client: None, client)
    assert (response_lengths.response_lengths_of(client) is not None) == ours == client.tagger.tells_lengths


async def test_engines_hear_of_a_response_whose_caller_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_lengths, "_LOOK_SECONDS", 0.01)
    client: Any = ToldEngines()
    told = client.told
    states = {"left": 1, "stays": 1}
    client.output_processor = SimpleNamespace(request_states=states)
    lengths = response_lengths.ResponseLengths(client)
    lengths.watch({name: SimpleNamespace(num_output_tokens=lambda: 7) for name in states})
    await asyncio.sleep(0.1)
    assert not told
    del states["left"]
    async with asyncio.timeout(60):
        while len(told) < 2:
            await asyncio.sleep(0.01)
    assert told == [(engine, "lengths", {"left": 7}) for engine in (0, 1)]


@pytest.mark.parametrize(("dropped", "wakes"), [(1, 1), (2, 2), (9, 2)])
async def test_engines_are_woken_after_the_last_response_whose_caller_left_before_its_first_token(
    dropped: int, wakes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM drops such requests before their tokens arrive, so it cannot tell whether a stop text would have ended them.

    When the first wake-up is due, engines may still wait for a later response. A second wake-up serves all of those.
    """
    monkeypatch.setattr(response_lengths, "_WAKE_SECONDS", 0.05)
    client: Any = ToldEngines()
    runs = SimpleNamespace(detokenizer=SimpleNamespace(stop=[]))
    processor = SimpleNamespace(request_states={"runs": runs}, agentspec=response_lengths.ResponseLengths(client))
    for names in (["runs"], *(["runs", f"left {number}"] for number in range(dropped))):
        outputs = [SimpleNamespace(request_id=name) for name in names]
        assert response_lengths.process_outputs(lambda _, given: given, processor, outputs) is outputs
    assert not client.told
    async with asyncio.timeout(60):
        while len(client.told) < 2 * wakes:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.15)
    assert client.told == [(engine, "lengths", {}) for engine in (0, 1)] * wakes


def test_nothing_is_logged_of_a_question_that_is_given_up() -> None:
    """A request that ends while the server stops no longer waits for an answer."""
    logged: list[Any] = []

    async def give_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        engine = EngineClient(Settings(store="memory://"))
        engine.delay = 60.0
        asked = asyncio.create_task(engine_calls.ask_engines(engine, "stats"))
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        del asked
        gc.collect()

    asyncio.run(give_up())
    assert not logged


class TestFigures:
    def test_a_caller_never_reads_of_more_accepted_tokens_than_it_got(self) -> None:
        """vLLM finds a stop text after a whole draft was accepted, of which only the beginning is in the response."""
        figures = Metrics().begin("one", None)
        figures.tokens, figures.accepted[1], figures.accepted[3] = 12, 8, 2
        figures.take_back(0)
        assert sum(figures.accepted) == 10
        figures.take_back(8)
        assert (figures.tokens, sum(figures.accepted)) == (4, 3)  # the first token was not drafted
        figures.take_back(4)
        assert figures.tokens == sum(figures.accepted) == 0

    def test_requests_that_have_one_id_have_their_own(self) -> None:
        metrics = Metrics()
        for call, tokens in (("first", 5), ("second", 7)):
            figures = metrics.begin("r", "ada", call)
            figures.tokens += tokens
            metrics.begin("r", "ada", call).tokens += 1  # its other sample
        for call, tokens in (("first", 6), ("second", 8)):
            found = metrics.request("r", "ada", call=call) or {}
            assert (found["tokens"], found["call"]) == (tokens, call)
        assert (metrics.request("r", "ada") or {})["tokens"] == 8
        assert metrics.request("r", "ada", call="third") is None and metrics.request("r", "bob", call="first") is None

    def test_an_id_that_is_used_again_and_again_takes_no_more_memory(self) -> None:
        metrics = Metrics()
        for number in range(20_000):
            metrics.end(metrics.begin(f"r{number % 7}", "ada", str(number)))
        assert metrics.request("r1", "ada") is not None and metrics.request("r1", "ada", call="1") is None
        for number in range(20_000):
            metrics.end(metrics.begin(f"other{number}", "ada", str(number)))
        assert metrics.request("r1", "ada") is None
        assert len(metrics._finished) == 4_096

    def test_those_of_a_running_request_outlast_any_number_of_others(self) -> None:
        metrics = Metrics()
        running = metrics.begin("long", "ada")
        running.tokens = 5
        for number in range(50_000):
            metrics.end(metrics.begin(f"r{number}", "bob"))
        assert metrics.request("long", "ada") == running.as_dict("long")
        metrics.end(running)
        assert metrics.request("long", "ada") is not None
        assert metrics.request("r0", "bob") is None and metrics.request("r49999", "bob") is not None

    def test_the_finished_ones_are_bounded(self) -> None:
        metrics = Metrics()
        for number in range(50_000):
            metrics.end(metrics.begin(f"r{number}", None))
        assert sum(metrics.request(f"r{number}", call="") is not None for number in range(50_000)) == 4_096

    def test_long_ids_take_no_more_memory_than_others(self) -> None:
        metrics = Metrics(1_000_000)
        running = metrics.begin("x" * 400_000, "ada")
        for number in range(50):
            metrics.end(metrics.begin(f"{number}" + "x" * 100_000, "ada"))
        assert len(metrics._finished) == 9
        assert 1_300_000 < metrics.bytes < 1_400_000
        metrics.end(running)
        metrics.end(metrics.begin("x" * 400_000, "ada"))
        assert metrics.bytes == sum(figures.bytes for figures in metrics._finished.values()) < 1_000_000
        metrics.end(metrics.begin("y" * 2_000_000, "ada"))
        assert metrics.bytes == 0 and not metrics._running

    def test_the_samples_of_a_request_share_them_until_the_last_has_ended(self) -> None:
        metrics = Metrics()
        first, second = metrics.begin("r", None), metrics.begin("r", None)
        assert first is second
        metrics.end(first)
        third = metrics.begin("r", None)
        assert third is first
        metrics.end(second)
        metrics.end(third)
        assert metrics.begin("r", None) is first
