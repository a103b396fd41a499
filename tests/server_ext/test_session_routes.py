"""Sessions over HTTP, on real engines and stores behind vLLM's key check: who sees, exports, imports, erases what."""

import json
import logging
import sqlite3
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from agentspec.cache.store import LogNames, open_store
from agentspec.identifiers import to_header
from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.api import session_routes
from agentspec.server_ext.api.endpoints import AgentSpecEndpoints, is_loopback
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.identity import Identity, RequestTagger
from agentspec.server_ext.identity.callers import Callers, Presented
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from agentspec.server_ext.vllm_adapter import served_model_key
from agentspec.server_ext.vllm_adapter.launch import PROPOSER_PATH
from tests.server_ext.fuzz import fuzz
from tests.timing import assert_fast

from .test_endpoints import without_tokenizer

ADA, BOB = "key of ada", "key of bob"
ADMIN = "the key of the administrator"
TEXT = list(range(500, 560))
PROMPT = [1, 2, 3, 4, 5]
VOCABULARY = 1000
MODEL = Path(__file__).parents[2] / "demo" / "model"


class Server:
    """A server of several engines that share a store; ``http`` is its client."""

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
        self.core_engines = list(range(engines))
        logs = LogNames(served_model_key(self.vllm_config), b"secret of the tests")
        self.engines = [
            DraftingEngine(given, Persistence(open_store(url), logs, 100), VOCABULARY, 16) for _ in self.core_engines
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
        app.state.agentspec_loopback = True
        self.state = app.state
        self.http = TestClient(app)

    async def _call_utility_async(self, name: str, method: str, limit: Any, args: Any, kw: Any, engine: int) -> Any:
        self.asked += 1
        runner = SimpleNamespace(agentspec=SimpleNamespace(engine=self.engines[engine]))
        begin = time.perf_counter()
        answer = vllm_adapter.worker_rpc(SimpleNamespace(model_runner=runner), *args)
        self.slowest = max(self.slowest, time.perf_counter() - begin)
        return [answer, None]

    def identity(self, key: str | None, session: str, **more: Any) -> Identity:
        shown = None if key is None else Presented([(b"authorization", f"Bearer {key}".encode())], verified=True)
        given = {"session_id": session, "agentspec_scope": more.pop("scope", "tenant")}
        if parent := more.pop("parent", None):
            given["parent_session_id"] = parent
        return self.tagger.identity_of(given, shown, **more)

    def start(self, name: str, identity: Identity, prompt: Sequence[int], text: Sequence[int], engine: int = 0) -> int:
        """Begin a request and verify its text at once. Returns the length of the draft behind it."""
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

    def say(
        self, identity: Identity, text: Sequence[int] = TEXT, prompt: Sequence[int] = PROMPT, engine: int = 0
    ) -> None:
        """Run a request to its end, and wait until it is stored."""
        name = f"r{time.perf_counter_ns()}"
        self.start(name, identity, prompt, text, engine)
        self.engines[engine].finish(name, len(text))
        self.wait(lambda: self.engines[engine].stats()["store"]["writer"]["queued"] == 0)

    def draws_on(self, identity: Identity, text: Sequence[int] = TEXT, engine: int = 0) -> bool:
        """Wait until a request draws on what was said before. What is in the store arrives a little later."""
        self.wait(lambda: self.drafts(identity, text, engine))
        return True

    def drafts(self, identity: Identity, text: Sequence[int] = TEXT, engine: int = 0) -> bool:
        """Whether a request draws soon on what was said before. It is aborted, so it leaves nothing."""
        name = f"d{time.perf_counter_ns()}"
        asked = self.engines[engine]
        drafted = 0
        for _ in range(20):
            drafted = self.start(name, identity, [9, *text[:8]], text[8:10], engine)
            asked.finish(name, 0)
            if drafted:
                break
            time.sleep(0.01)
        return drafted > 0

    def wait(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "did not happen in time"
            time.sleep(0.005)

    def call(self, key: str | None, method: str, session: str = "", **more: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        path = "/v1/agentspec/sessions" + (f"/{session}" if session else "")
        return self.http.request(method, path, headers=headers | more.pop("headers", {}), **more)

    def erase(self, key: str, session: str, **more: Any) -> Any:
        """Erase a session; while another engine's thread reads the store, again. Sets ``erased`` to its records."""
        answers: list[Any] = []

        def done() -> bool:
            answers.append(self.call(key, "DELETE", session, **more))
            return bool(answers[-1].status_code != 202)

        self.wait(done)
        self.erased = sum(answer.json()["records"] for answer in answers)  # each says what it erased itself
        return answers[-1]

    def listed(self, key: str | None, **more: Any) -> list[str]:
        return [session["id"] for session in self.call(key, "GET", **more).json()["sessions"]]


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers, on one SQLite file unless told otherwise."""
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


def test_a_caller_sees_its_own_sessions_used_last_first(start: Start) -> None:
    server = start(ADA, BOB)
    for key, session, engine in ((ADA, "one", 0), (ADA, "two", 1), (BOB, "one", 0), (ADA, "one", 0)):
        server.say(server.identity(key, session), engine=engine)
    server.say(server.identity(ADA, "kept to itself", scope="session"))
    assert server.listed(ADA) == ["kept to itself", "one", "two"]
    assert server.listed(BOB) == ["one"]
    assert server.listed(ADA, params={"limit": 1}) == ["kept to itself"]
    (bobs,) = server.call(BOB, "GET").json()["sessions"]
    assert bobs["tokens"] == len(PROMPT) + len(TEXT) and bobs["turns"] == 1 and abs(time.time() - bobs["used"]) < 60
    assert "key" not in bobs
    assert server.call(None, "GET").status_code == server.call("eve", "GET").status_code == 401


def test_a_family_is_its_callers_own_and_loses_what_is_erased(start: Start) -> None:
    server = start(ADA, BOB)

    def of(key: str, session: str, parent: str | None = None, **more: Any) -> Identity:
        return server.identity(key, session, parent=parent, scope="session", **more)

    report = [token + 100 for token in TEXT]
    server.say(of(ADA, "root"))
    server.say(of(ADA, "child", "root"), report)

    def shares(engine: int, text: list[int]) -> None:
        server.draws_on(of(ADA, "sibling", "root"), text, engine)

    for engine in (0, 1):  # the second one has it from the store
        shares(engine, TEXT)
        shares(engine, report)
        assert not server.drafts(of(ADA, "sibling"), engine=engine)
        assert not server.drafts(of(BOB, "sibling", "root"), engine=engine)
        assert not server.drafts(of(ADA, "sibling", "root", cache_salt="salt"), engine=engine)
    assert server.erase(ADA, "child").status_code == 200
    for engine in (0, 1):
        assert not server.drafts(of(ADA, "sibling", "root"), report, engine=engine)
        shares(engine, TEXT)


def test_a_session_that_was_erased_stays_when_its_export_is_imported_again(start: Start) -> None:
    """Its turns bear the names of engines here, but they did not arrive late behind the erasure."""
    server = start(ADA)
    ada, other = server.identity(ADA, "one"), server.identity(ADA, "other")
    for engine in (0, 1):  # both follow the log
        server.say(ada, [engine, *TEXT], engine=engine)
    export = server.call(ADA, "GET", "one")
    assert server.erase(ADA, "one").status_code == 200
    assert server.call(ADA, "PUT", "one", content=export.content).json()["added"] == len(export.json()["turns"]) == 2

    def delivered(engine: int) -> int:
        return int(server.engines[engine].stats()["store"]["follower"]["delivered"])

    for _ in range(2):  # what came late is erased when a follower looks again
        before = [delivered(engine) for engine in (0, 1)]
        for engine in (0, 1):
            server.say(other, engine=engine)
        server.wait(lambda before=before: delivered(0) > before[0] and delivered(1) > before[1])  # type: ignore[misc]
    assert server.call(ADA, "GET", "one").json() == export.json()


def test_the_administrator_sees_all_by_their_keys_and_imports_nothing(start: Start) -> None:
    server = start(ADA, BOB)
    ada = server.identity(ADA, "one")
    for identity in (ada, server.identity(BOB, "one")):
        server.say(identity)
    found = {session["key"]: session["id"] for session in server.call(ADMIN, "GET").json()["sessions"]}
    assert found == {ada.session: "one", server.identity(BOB, "one").session: "one"}
    export = server.call(ADMIN, "GET", str(ada.session))
    assert export.json()["turns"] == server.call(ADA, "GET", "one").json()["turns"]
    assert server.call(ADMIN, "GET", "one").status_code == 403
    assert server.call(ADMIN, "PUT", str(ada.session), content=export.content).status_code == 403
    assert server.erase(ADMIN, str(ada.session)).status_code == 200
    assert (server.listed(ADA), server.listed(BOB)) == ([], ["one"])
    assert not server.drafts(ada)


def test_without_keys_the_list_answers_on_a_loopback_server_only(start: Start) -> None:
    server = start()
    server.say(server.identity(None, "an unguessable name"))
    assert server.listed(None) == ["an unguessable name"]
    server.state.agentspec_loopback = False
    refused = server.call(None, "GET")
    assert refused.status_code == 403 and "--api-key" in refused.json()["detail"]
    assert server.call(None, "GET", headers={"X-Cache-Salt": "x"}).status_code == 403
    assert server.call(None, "GET", "an unguessable name").status_code == 200  # the name is a capability
    assert server.call(None, "GET", "another name").status_code == 404


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        (None, False),
        ("", False),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
    ],
)
def test_which_hosts_are_loopback(host: str | None, local: bool) -> None:
    assert is_loopback(host) == local


def test_a_gateways_principals_see_their_own_and_who_is_nobody_sees_nothing(start: Start) -> None:
    server = start(principal_header="X-Principal")
    for name in ("ada", "bob"):
        sender = Presented([(b"x-principal", name.encode())])
        server.say(server.tagger.identity_of({"session_id": f"of {name}"}, sender))
    server.state.agentspec_loopback = False
    assert server.listed(None, headers={"X-Principal": "ada"}) == ["of ada"]
    assert server.call(None, "GET", "of bob", headers={"X-Principal": "ada"}).status_code == 404
    for headers in ({}, {"X-Principal": ""}):
        for method, session in (("GET", ""), ("GET", "of ada"), ("DELETE", "of ada"), ("PUT", "of ada")):
            assert server.call(None, method, session, headers=headers).status_code == 403
    assert server.listed(None, headers={"X-Principal": "ada"}) == ["of ada"]


@pytest.mark.parametrize("value", ["salt", "größer als 9"])
def test_a_salted_session_needs_its_salt(start: Start, value: str) -> None:
    server = start(ADA)
    server.say(server.identity(ADA, "one", cache_salt=value))
    assert server.listed(ADA) == [] and server.call(ADA, "GET", "one").status_code == 404
    salt = {"X-Cache-Salt": to_header(value)}
    assert server.listed(ADA, headers=salt) == ["one"]
    server.call(ADA, "DELETE", "one")
    assert server.call(ADA, "GET", "one", headers=salt).status_code == 200
    assert server.erase(ADA, "one", headers=salt).status_code == 200
    assert server.listed(ADA, headers=salt) == []


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_a_session_under_an_adapter_is_one_session(start: Start, tenant: str | None) -> None:
    server = start(ADA, BOB, tenant=tenant)
    other = list(range(600, 660))
    server.say(server.identity(ADA, "one", adapter="tuned@/adapters/tuned"), other)
    server.say(server.identity(ADA, "one"))
    server.say(server.identity(BOB, "one", adapter="tuned@/adapters/tuned"))
    assert server.listed(ADA) == ["one"]
    (listed,) = server.call(ADA, "GET").json()["sessions"]
    assert (listed["turns"], listed["tokens"]) == (2, 2 * len(PROMPT) + len(TEXT) + len(other))
    export = server.call(ADA, "GET", "one")
    assert sorted(turn["response"][0] for turn in export.json()["turns"]) == [TEXT[0], other[0]]
    assert server.call(ADA, "PUT", "one", content=export.content).json()["added"] == 0
    assert server.erase(ADA, "one").status_code == 200
    assert server.erased == 2
    assert (server.listed(ADA), server.listed(BOB)) == ([], ["one"])


class TestExportAndImport:
    def test_a_session_moves_to_another_caller_and_serves_itself_alone(self, start: Start) -> None:
        server = start(ADA, BOB)
        server.say(server.identity(ADA, "one"))
        server.say(server.identity(ADA, "one"), [*TEXT[10:], 7, 8], [*PROMPT, *TEXT, 6])
        export = server.call(ADA, "GET", "one")
        turns = export.json()["turns"]
        assert [turn["response"] for turn in turns] == [TEXT, [*TEXT[10:], 7, 8]]
        assert server.call(BOB, "GET", "one").status_code == 404
        bob, alone = server.identity(BOB, "copy/of one"), server.identity(BOB, "other")
        assert not server.drafts(bob)
        answer = server.call(BOB, "PUT", "copy/of one", content=export.content)
        assert answer.json() == {"id": "copy/of one", "turns": 2, "added": 2}
        for engine in (0, 1):
            assert server.draws_on(bob, engine=engine) and not server.drafts(alone, engine=engine)
        assert server.call(BOB, "GET", "copy/of one").json()["turns"] == turns
        assert server.listed(BOB) == ["copy/of one"]

    def test_importing_again_adds_what_is_missing(self, start: Start) -> None:
        server = start(ADA)
        server.say(server.identity(ADA, "one"))
        first = server.call(ADA, "GET", "one").content
        server.say(server.identity(ADA, "one"), [7, 8, 9], [*PROMPT, *TEXT, 6])
        both = server.call(ADA, "GET", "one").content
        for content, added in ((first, 1), (first, 0), (both, 1), (both, 0), (first, 0)):
            assert server.call(ADA, "PUT", "copy", content=content).json()["added"] == added
        assert server.call(ADA, "GET", "copy").json()["turns"] == json.loads(both)["turns"]

    def test_engines_with_stores_of_their_own_get_a_copy_each(self, start: Start) -> None:
        server = start(ADA, url="memory://")
        server.say(server.identity(ADA, "one"), engine=1)
        export = server.call(ADA, "GET", "one").content
        assert server.call(ADA, "PUT", "copy", content=export).json()["added"] == 1
        assert all(server.draws_on(server.identity(ADA, "copy"), engine=engine) for engine in (0, 1))

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (lambda body: "[]", "body"),
            (lambda body: "{", "body"),
            (lambda body: "", "body"),
            (lambda body: body | {"version": 2}, "version"),
            (lambda body: body | {"version": True}, "version"),
            (lambda body: body | {"log": "0" * 16}, "log"),
            (lambda body: body | {"turns": 5}, "turns"),
            (lambda body: body | {"more": 1}, "more"),
            (lambda body: {name: body[name] for name in body if name != "turns"}, "turns"),
            (lambda body: with_turn(body, kept=-1), "turns.0.kept"),
            (lambda body: with_turn(body, kept=2**32), "turns.0.kept"),
            (lambda body: with_turn(body, number=0), "turns.0.number"),
            (lambda body: with_turn(body, number="1"), "turns.0.number"),
            (lambda body: with_turn(body, writer="x"), "turns.0.writer"),
            (lambda body: with_turn(body, parent="g" * 16), "turns.0.parent"),
            (lambda body: with_turn(body, prompt=[-1]), "turns.0.prompt.0"),
            (lambda body: with_turn(body, prompt=[1.5]), "turns.0.prompt.0"),
            (lambda body: with_turn(body, response=[VOCABULARY]), "turns.0"),
            (lambda body: with_turn(body, response=[2**40]), "turns.0.response.0"),
            (lambda body: with_turn(body, created=float("nan")), "turns.0.created"),
            (lambda body: with_turn(body, weights="a\nb"), "turns.0"),
        ],
    )
    def test_a_wrong_import_is_refused_by_field_and_changes_nothing(
        self, start: Start, change: Callable[[Any], Any], field: str
    ) -> None:
        server = start(ADA, engines=1)
        server.say(server.identity(ADA, "one"))
        body = change(server.call(ADA, "GET", "one").json())
        answer = server.call(ADA, "PUT", "copy", content=body if isinstance(body, str) else json.dumps(body))
        assert answer.status_code == 400, answer.text
        assert answer.json()["detail"].startswith(field)
        assert server.listed(ADA) == ["one"]

    def test_a_body_without_end_is_refused(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session_routes, "_MAX_BODY", 1000)
        assert start(ADA).call(ADA, "PUT", "copy", content=b" " * 1001).status_code == 413

    def test_a_long_session_comes_in_parts(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentspec.server_ext.session_admin._PART_BYTES", 1000)
        server = start(ADA)
        for number in range(30):
            server.say(server.identity(ADA, "one"), [number, *TEXT])
        turns = server.call(ADA, "GET", "one").json()["turns"]
        assert [turn["response"][0] for turn in turns] == list(range(30))

    def test_an_engine_forgets_what_it_exported(self, start: Start) -> None:
        """A session may take megabytes, which no budget counts."""
        server = start(ADA)
        server.say(server.identity(ADA, "one"))
        for _ in range(3):
            assert server.call(ADA, "GET", "one").status_code == 200
        assert not any(engine._sessions._jobs for engine in server.engines)


class TestTexts:
    """Sessions primed with texts and messages, in the tokens of the model that is served."""

    TEXT = "abcdefghijklmnopqrstuvwxyz"

    @pytest.fixture
    def server(self, start: Start) -> Server:
        server = start(ADA, BOB)
        tokenizer = SimpleNamespace(
            encode=lambda text, add_special_tokens: [ord(c) for c in text],
            apply_chat_template=lambda messages, **_: "".join(f"{m['role']}: {m['content']}" for m in messages),
        )
        server.get_tokenizer = lambda: tokenizer
        return server

    def put(self, server: Server, session: str, body: Any, key: str = ADA, **more: Any) -> Any:
        return server.call(key, "PUT", session, content=json.dumps({"version": 1, **body}), **more)

    @pytest.mark.parametrize("body", [{"texts": [TEXT]}, {"messages": [{"role": "user", "content": TEXT}]}])
    def test_are_drafted_from_by_their_session_alone(self, server: Server, body: Any) -> None:
        answer = self.put(server, "one", body)
        assert answer.json() == {"id": "one", "turns": 1, "added": 1}, answer.text
        tokens = [ord(c) for c in self.TEXT]
        for engine in (0, 1):
            assert server.draws_on(server.identity(ADA, "one"), tokens, engine)
            assert not server.drafts(server.identity(ADA, "two"), tokens, engine)
            assert not server.drafts(server.identity(BOB, "one"), tokens, engine)
        assert self.put(server, "one", body).json()["added"] == 0
        assert self.put(server, "twice", {"texts": [self.TEXT, self.TEXT]}).json()["added"] == 1
        assert server.erase(ADA, "one").status_code == 200
        assert not server.drafts(server.identity(ADA, "one"), tokens)

    def test_only_a_new_session_is_primed_where_that_is_asked_for(self, server: Server) -> None:
        only: dict[str, Any] = {"params": {"only_new": "true"}}
        assert self.put(server, "one", {"texts": ["0123456789"]}, **only).json()["added"] == 1
        assert self.put(server, "one", {"texts": [self.TEXT]}, **only).json()["added"] == 0
        server.say(server.identity(ADA, "two"))
        assert self.put(server, "two", {"texts": [self.TEXT]}, **only).json()["added"] == 0
        assert self.put(server, "two", {"texts": [self.TEXT]}).json()["added"] == 1

    def test_a_server_without_a_tokenizer_says_so(self, server: Server) -> None:
        server.get_tokenizer = without_tokenizer
        answer = self.put(server, "one", {"texts": [self.TEXT]})
        assert (answer.status_code, "--skip-tokenizer-init" in answer.json()["detail"]) == (400, True)

    def test_messages_without_a_usable_template_count_as_their_texts(self, server: Server) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"content": self.TEXT}]
        assert self.put(server, "one", {"messages": messages}).json()["added"] == 1
        assert server.draws_on(server.identity(ADA, "one"), [ord(c) for c in self.TEXT])

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"texts": "abc"}, "texts"),
            ({"texts": [1]}, "texts.0"),
            ({"messages": ["hello"]}, "messages.0"),
            ({"texts": [], "more": 1}, "more"),
            ({"texts": ["\u2603"]}, "turns.0"),
            ({"texts": ["whole", "half a pair: \ud83d"]}, "texts.1"),
            ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages"),
        ],
    )
    def test_wrong_ones_are_refused_by_field(self, server: Server, body: Any, field: str) -> None:
        answer = self.put(server, "one", body)
        assert answer.status_code == 400 and answer.json()["detail"].startswith(field), answer.text


def with_turn(body: Any, **changes: Any) -> Any:
    return body | {"turns": [body["turns"][0] | changes]}


class TestErasure:
    def test_nothing_is_left_of_it_and_all_is_left_of_others(self, start: Start, tmp_path: Path) -> None:
        record = tmp_path / "steps.jsonl"
        server = start(ADA, BOB, record=record)
        ada, bob = server.identity(ADA, "fix-42"), server.identity(BOB, "fix-42")
        secret, other = list(range(600, 660)), list(range(700, 760))
        for engine in (0, 1):
            server.say(ada, secret, engine=engine)
        server.say(bob, other)
        server.say(server.identity(ADA, "two"), TEXT)
        assert all(server.draws_on(ada, secret, engine) for engine in (0, 1))
        server.wait(lambda: str(ada.session) in record.read_text())
        database = tmp_path / "log.db"
        coded = coded_text(database, ada)
        assert stored(database, coded) and stored(database, str(ada.session))
        server.start("running", ada, [9], [8, 7])
        answer = server.erase(ADA, "fix-42")
        assert (answer.status_code, answer.json()["complete"]) == (200, True), answer.text
        assert not stored(database, coded)
        steps = [json.loads(line) for line in record.read_text().splitlines()]
        assert {step["session_key"] for step in steps} >= {None, bob.session}
        assert str(ada.session) not in record.read_text()
        assert not any(server.drafts(ada, secret, engine) for engine in (0, 1))
        assert server.draws_on(bob, other) and server.draws_on(server.identity(ADA, "two"))
        assert server.call(ADA, "GET", "fix-42").status_code == 404
        assert (server.listed(ADA), server.listed(BOB)) == (["two"], ["fix-42"])
        server.engines[0].finish("running", 2)  # keeps nothing
        server.say(server.identity(ADA, "two"), TEXT)
        assert server.listed(ADA) == ["two"]
        assert server.erase(ADA, "fix-42").status_code == 200  # erased already
        server.say(ada, secret)
        assert server.draws_on(ada, secret)  # the name can be used again

    def test_the_snapshot_goes_and_the_next_one_is_without_it(self, start: Start, tmp_path: Path) -> None:
        server = start(ADA, engines=1)
        engine = server.engines[0]
        snapshot = tmp_path / "snapshot"
        server.engines = [
            DraftingEngine(engine.settings, engine._persistence, VOCABULARY, 16, snapshot=snapshot),
        ]
        server.engines[0].warm_up()
        secret = list(range(600, 660))
        server.say(server.identity(ADA, "one"), secret)
        server.say(server.identity(ADA, "two"))
        keeper = server.engines[0]._keeper
        assert keeper is not None and keeper.save() and stored(snapshot, secret) and stored(snapshot, TEXT)
        assert server.erase(ADA, "one").json()["complete"]
        assert not snapshot.exists()
        assert keeper.save() and stored(snapshot, TEXT) and not stored(snapshot, secret[8:])

    def test_a_guessed_name_of_anothers_session_erases_nothing(self, start: Start) -> None:
        server = start(ADA, BOB)
        server.say(server.identity(ADA, "one"))
        unknown, guessed = (server.erase(BOB, name) for name in ("unknown", "one"))
        assert unknown.status_code == guessed.status_code == 200
        assert guessed.json() == {**unknown.json(), "id": "one"}
        assert server.listed(ADA) == ["one"] and server.draws_on(server.identity(ADA, "one"))

    def test_sessions_under_an_adapter_and_of_a_tenant_go_too(self, start: Start) -> None:
        server = start(ADA, tenant="acme")
        with_adapter = server.identity(ADA, "one", adapter="tuned@/adapters/tuned")
        server.say(server.identity(ADA, "one"))
        server.say(with_adapter, list(range(600, 660)))
        assert server.draws_on(with_adapter, list(range(600, 660)))
        server.call(ADA, "DELETE", "one")
        assert not server.drafts(with_adapter, list(range(600, 660)))
        assert not server.drafts(server.identity(ADA, "one"))

    def test_a_session_whose_turns_never_reached_the_store_goes_too(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = start(ADA, engines=1)
        monkeypatch.setattr(server.engines[0]._persistence, "save", lambda turn, identity: None)
        with_adapter = server.identity(ADA, "one", adapter="tuned@/adapters/tuned")
        server.say(with_adapter)
        assert server.draws_on(with_adapter)
        assert server.erase(ADA, "one").status_code == 200
        assert not server.drafts(with_adapter)

    def test_while_another_process_reads_old_pages_it_is_not_complete(self, start: Start, tmp_path: Path) -> None:
        server = start(ADA, engines=1)
        server.say(server.identity(ADA, "one"))
        coded = coded_text(tmp_path / "log.db", server.identity(ADA, "one"))
        assert stored(tmp_path / "log.db", coded)
        reader = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchone()
        waiting = server.call(ADA, "DELETE", "one")
        assert (waiting.status_code, waiting.json()["complete"]) == (202, False)
        assert server.listed(ADA) == []
        reader.execute("COMMIT")
        reader.close()
        assert waiting.json()["records"] == 1
        assert server.erase(ADA, "one").status_code == 200
        assert server.erased == 0  # the answer before has counted them
        assert not stored(tmp_path / "log.db", coded)


def coded_text(database: Path, identity: Identity) -> bytes:
    """The end of a session's newest record, which is text in the store's coding."""
    with closing(open_store(f"sqlite:///{database}")) as store:
        records = [entry.payload for log in store.namespaces() for entry in store.read(log, session=identity.session)]
    return records[-1][-24:]


def stored(file: Path, what: Sequence[int] | str | bytes) -> bool:
    """Whether a file, or a database's files, hold these token ids, this text or these bytes."""
    if isinstance(what, str):
        what = what.encode()
    wanted = what if isinstance(what, bytes) else np.array(what, np.int32).tobytes()
    return any(wanted in each.read_bytes() for each in file.parent.glob(f"{file.name}*"))


def test_a_question_too_many_is_refused_and_no_other_is_forgotten(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(ADA, engines=1)
    server.say(server.identity(ADA, "one"))
    admin = server.engines[0]._sessions
    session = server.identity(ADA, "one").session
    for number in range(256):
        server.wait(lambda number=number: admin.begin(f"job{number}", "tenants", session) == {})  # type: ignore[misc]
    assert admin.begin("job256", "tenants", session)["error"] == "unavailable"
    answer = server.call(ADA, "GET", "one")
    assert answer.status_code == 503 and "try again" in answer.text
    server.wait(lambda: all("value" in admin.poll("job0") for _ in range(1)))
    assert admin.poll("job0")["error"] == "unavailable"  # told already
    assert server.call(ADA, "GET", "one").status_code == 200
    monkeypatch.setattr("agentspec.server_ext.session_admin._ABANDONED_SECONDS", 0.0)
    assert admin.begin("job257", "tenants", session) == {} and len(admin._jobs) == 1


def test_no_engine_waits_for_a_store_that_is_away(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_routes, "_WAIT_SECONDS", 1.0)
    server = start(ADA, url="redis://:hunter2-hunter2@127.0.0.1:1/0", engines=1)

    def measure() -> dict[str, float]:
        server.slowest = 0.0
        for method, session in (("GET", ""), ("GET", "one"), ("DELETE", "one")):
            answer = server.call(ADA, method, session)
            assert answer.status_code == 503 and "hunter2" not in answer.text, answer.text
        return {"seconds": server.slowest}

    assert_fast(measure, seconds=0.2)


def test_fuzzed_exports_requests_settings_and_key_files_are_used_or_refused() -> None:
    outcomes = fuzz(6_000, seed=1)
    for outcome in ("export: 2 records", "export: refused", "request: nobody", "request: scope session", "keys: read"):
        assert outcomes[outcome] > 10
    assert outcomes["settings: read"] > 10 and outcomes["settings: refused"] > 10


@pytest.mark.parametrize("item", ["-1,", "1,", '"x",', "[],", "{},"])
def test_the_largest_import_takes_memory_in_proportion(item: str) -> None:
    count = session_routes._MAX_BODY // 8 // len(item)
    body = '{"version": 1, "id": "s", "log": "x", "turns": [{"prompt": [' + item * count + "0]}]}"
    tracemalloc.start()
    with pytest.raises(HTTPException, match="turns"):
        session_routes._parse(body.encode())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 30 * len(body)


@pytest.mark.parametrize("bad", ["%0A", "x" * 257, "%00"])
def test_an_id_that_no_session_can_have_is_refused(start: Start, bad: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = start(ADA, engines=1).call(ADA, method, bad, content=b"{}")
        assert answer.status_code == 400 and answer.json()["detail"].startswith("id")


@pytest.mark.parametrize("before", ["", "/behind/a/proxy"])
@pytest.mark.parametrize("rest", ["a-session-of-ada", "a%20b?only_new=true", "a/b", ""])
def test_the_access_log_names_no_session(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: str, rest: str
) -> None:
    log = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(log, "filters", [])  # another test's server may have changed it
    start(engines=1)
    with caplog.at_level(logging.INFO, log.name):
        for path in (f"{before}/v1/agentspec/sessions/{rest}", "/v1/agentspec/sessions?limit=5", "/v1/models"):
            log.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:9", "DELETE", path, "1.1", 200)  # as uvicorn does
        log.info("a line of another form: %s", rest)
    lines = caplog.messages
    assert lines[0] == f'127.0.0.1:9 - "DELETE {before}/v1/agentspec/sessions/… HTTP/1.1" 200'
    assert "sessions?limit=5 " in lines[1] and "/v1/models" in lines[2] and lines[3].endswith(rest)
