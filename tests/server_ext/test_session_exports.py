"""Test exports and imports of sessions: what is kept, and which fields are refused."""

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException

from agentspec.cache.store import NewEntry, TurnRecord, encode, open_store
from agentspec.errors import StoreUnavailableError
from agentspec.protocol import MAX_IMPORT_BYTES, MAX_IMPORT_TURNS
from agentspec.server_ext import session_admin
from agentspec.server_ext.api import imports, session_exports, session_routes
from tests.server_ext.fuzz import fuzz
from tests.store.helpers import wait_until
from tests.timing import assert_fast, beside

from .session_server import ADA, BOB, PROMPT, TEXT, VOCABULARY, Server, Start, start

OF_ANOTHER_MODEL = (
    "log: the session was exported from another model or tokenizer, whose tokens mean something else; import it at a "
    "server of that one, or give its messages or texts here"
)

__all__ = ["start"]


def hold_slow_texts(server: Server) -> threading.Event:
    """Make the encoding of texts that begin with "slow" wait for an event. Return the event."""
    release = threading.Event()

    def encode(text: str, **_: Any) -> list[int]:
        assert not text.startswith("slow") or release.wait(60)
        return [1, 2, 3]

    server.get_tokenizer = lambda: SimpleNamespace(encode=encode)
    return release


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

    def test_a_session_that_was_stored_under_another_tenant_is_found_by_its_name(self, start: Start) -> None:
        """As when the operator names a tenant, or another one. It is no longer listed."""
        before = start(ADA, BOB, engines=1)
        before.say(before.identity(ADA, "one"))
        after = start(ADA, BOB, engines=1, tenant="team")
        assert after.call(ADA, "GET", "one").json()["turns"] == before.call(ADA, "GET", "one").json()["turns"]
        assert after.call(BOB, "GET", "one").status_code == 404
        assert after.listed(ADA) == []
        assert after.erase(ADA, "one").status_code == 200
        assert after.call(ADA, "GET", "one").status_code == 404

    def test_an_export_has_the_turns_that_cannot_be_written_now(self, start: Start) -> None:
        server = start(ADA, BOB, engines=1)
        ada = server.identity(ADA, "one")
        server.say(ada)
        file = server.engines[0]._persistence._store._connections.writer  # type: ignore[attr-defined]
        file.execute("PRAGMA query_only = 1")  # as on a file system that became read-only
        for number, identity in enumerate((ada, server.identity(BOB, "two"))):
            server.start(f"r{number}", identity, [*PROMPT, *TEXT, 6], [*TEXT * 4, 7])
            server.end(f"r{number}", 99)
        exports = [server.call(key, "GET", name).json()["turns"] for key, name in ((ADA, "one"), (BOB, "two"))]
        assert [len(turns) for turns in exports] == [2, 1]
        file.execute("PRAGMA query_only = 0")
        server.wait(lambda: server.engines[0].stats()["store"]["writer"]["queued"] == 0)
        assert [server.call(key, "GET", name).json()["turns"] for key, name in ((ADA, "one"), (BOB, "two"))] == exports

    @pytest.mark.parametrize("body", ["[]", "null", "1", '"x"'])
    def test_a_body_that_is_no_object_is_refused_with_the_remedy(self, start: Start, body: str) -> None:
        answer = start(ADA, engines=1).call(ADA, "PUT", "one", content=body)
        assert answer.status_code == 400
        assert "body: a JSON object expected; give what `agentspec sessions export` wrote" in answer.text

    def test_what_was_said_just_now_is_in_the_store_when_somebody_asks(self, start: Start) -> None:
        server = start(ADA, engines=1)
        for number in range(20):
            name = f"session {number}"
            server.start(name, server.identity(ADA, name), PROMPT, TEXT)
            server.end(name, len(TEXT))
            assert len(server.call(ADA, "GET", name).json()["turns"]) == 1
            assert name in server.listed(ADA)

    def test_another_sessions_text_stays_out_of_an_export(self, start: Start, tmp_path: Path) -> None:
        """Another file may have been copied over the SQLite file in use, so that entries and payloads don't match."""
        server = start(ADA, BOB)
        mine, others = server.identity(ADA, "mine"), server.identity(BOB, "others")
        server.say(mine)
        server.say(others, list(range(300, 340)))
        with closing(open_store(f"sqlite:///{tmp_path / 'log.db'}")) as store:
            (log,), (other,) = (store.namespaces(session=each.session) for each in (mine, others))
            (turn,) = store.read(other, session=others.session)
            assert mine.session is not None
            store.append(log, [NewEntry(mine.session, turn.payload)])
        (exported,) = server.call(ADA, "GET", "mine").json()["turns"]
        assert exported["response"] == [*TEXT]
        assert server.listed(BOB) == ["others"]

    def test_a_prompt_with_placeholders_of_images_moves_too(self, start: Start) -> None:
        """Some models mark images in a prompt by ids beyond their vocabulary."""
        server = start(ADA)
        prompt = [1, 2, *[VOCABULARY + 5] * 70, 3]
        server.say(server.identity(ADA, "one"), TEXT, prompt)
        export = server.call(ADA, "GET", "one")
        answer = server.call(ADA, "PUT", "copy", content=export.content)
        assert answer.status_code == 200 and answer.json()["added"] == 1
        (turn,) = server.call(ADA, "GET", "copy").json()["turns"]
        assert (turn["prompt"], turn["response"]) == (prompt, TEXT)
        assert all(server.draws_on(server.identity(ADA, "copy"), engine=engine) for engine in (0, 1))

    def test_a_session_that_is_held_takes_an_import_though_no_log_is_followed(self, start: Start) -> None:
        """A store in memory has no other writers, so the engine has to read again what was imported."""
        server = start(ADA, url="memory://", engines=1)
        held, other, cache = server.identity(ADA, "held", scope="session"), [*range(300, 340)], server.engines[0].cache
        server.say(server.identity(ADA, "one"))
        server.say(held, other)
        server.wait(lambda: server.drafts(held, other) and not cache.needs_load(held.tenant, held.session))
        assert server.call(ADA, "PUT", "held", content=server.call(ADA, "GET", "one").content).json()["added"] == 1
        assert server.draws_on(held)

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
            (lambda body: "[" * 100_000, "body: nested too deeply"),
            (lambda body: f"[1{'0' * 4_300}]", "body: a whole number has more than 4,300 digits; write it as a text"),
            (lambda body: body | {"texts": ["abc"]}, "texts: not beside turns"),
            (lambda body: {"version": 1, "turns": [], "messages": []}, "messages: not beside turns"),
            (
                lambda body: {name: body[name] for name in body if name != "version"},
                "version: Field required; give what `agentspec sessions export` wrote",
            ),
            (lambda body: body | {"version": 2}, "version: 1 expected"),
            (lambda body: body | {"version": True}, "version"),
            (lambda body: body | {"log": "0" * 16}, OF_ANOTHER_MODEL),
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
            (lambda body: with_turn(body, prompt=[2**31 - 1]), "turns.0.prompt.0"),
            (lambda body: with_turn(body, response=[1, VOCABULARY]), "turns.0"),
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

    def test_long_imports_of_one_caller_hold_up_nothing_else(self, start: Start) -> None:
        """Otherwise they would take all threads of the API server, and chats with tools would wait for minutes."""
        server = start(ADA, BOB, engines=1)
        server.say(server.identity(ADA, "one"))
        release = hold_slow_texts(server)
        slow, quick = ({"version": 1, "texts": [text]} for text in ("slow", "quick"))
        with server.http, ThreadPoolExecutor(50) as callers:  # one event loop for all, as in a server
            try:
                waiting = [callers.submit(server.call, ADA, "PUT", f"slow{i}", json=slow) for i in range(40)]
                time.sleep(0.5)
                assert callers.submit(server.call, ADA, "GET", "one").result(20).status_code == 200
                assert callers.submit(server.call, BOB, "PUT", "quick", json=quick).result(20).status_code == 200
                assert not any(call.done() for call in waiting)
            finally:
                release.set()
            assert {call.result(60).status_code for call in waiting} == {200}

    @pytest.mark.parametrize("salts", [False, True])
    @pytest.mark.parametrize(("bodies_of_all", "of_another"), [(16, 200), (4, 429)])
    def test_bodies_that_wait_are_bounded(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, bodies_of_all: int, of_another: int, salts: bool
    ) -> None:
        """One caller sends ten times as many as fit. Another still imports, unless all together are too many.

        salts: whether each body comes with a salt of its own, which makes another principal of the same caller.
        """
        monkeypatch.setattr(imports, "MAX_IMPORT_BYTES", 1000)
        monkeypatch.setattr(imports, "_BODIES_OF_ALL", bodies_of_all)
        server = start(ADA, BOB, engines=1)
        release = hold_slow_texts(server)
        slow, quick = ({"version": 1, "texts": [text + 900 * "x"]} for text in ("slow", "quick"))
        with server.http, ThreadPoolExecutor(50) as callers:
            try:
                salted = [{"X-Cache-Salt": str(i)} if salts else {} for i in range(40)]
                waiting = [
                    callers.submit(server.call, ADA, "PUT", f"slow{i}", json=slow, headers=headers)
                    for i, headers in enumerate(salted)
                ]
                wait_until(lambda: sum(call.done() for call in waiting) >= 36, 20)
                refused = [call.result() for call in waiting if call.done()]
                assert [answer.status_code for answer in refused] == 36 * [429]
                answer = refused[0]
                assert answer.json()["detail"].startswith("body: imports of yours wait")
                assert answer.headers["retry-after"] == "5"
                other = callers.submit(server.call, BOB, "PUT", "quick", json=quick).result(20)
                assert other.status_code == of_another
                assert of_another == 200 or other.json()["detail"].startswith("body: imports of all callers wait")
            finally:
                release.set()
            assert sorted(call.result(60).status_code for call in waiting) == 4 * [200] + 36 * [429]
            assert server.call(BOB, "PUT", "later", json=quick).status_code == 200
        assert not session_routes._imports._held

    def test_a_long_import_is_appended_in_slices(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        """Redis answers nobody while it appends. An import that fails in between is completed by the next one."""
        server = start(ADA, engines=1)
        server.say(server.identity(ADA, "one"))
        body = server.call(ADA, "GET", "one").json()
        body["turns"] = [{**body["turns"][0], "number": number} for number in range(1, 1001)]
        store = server.engines[0]._persistence._store
        append, sizes = store.append, list[int]()

        def counted(namespace: str, entries: Sequence[Any], **more: Any) -> list[str]:
            sizes.append(len(entries))
            if len(sizes) == 3:
                raise StoreUnavailableError("away")
            return append(namespace, entries, **more)

        monkeypatch.setattr(store, "append", counted)
        assert server.call(ADA, "PUT", "copy", json=body).status_code == 503
        assert server.call(ADA, "PUT", "copy", json=body).json()["added"] == 1000 - 2 * 256
        assert sizes == [256, 256, 256, 256, 1000 - 3 * 256]
        assert server.call(ADA, "PUT", "copy", json=body).json()["added"] == 0
        assert len(server.call(ADA, "GET", "copy").json()["turns"]) == 1000

    def test_a_body_without_end_is_refused(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(imports, "MAX_IMPORT_BYTES", 1000)
        assert start(ADA).call(ADA, "PUT", "copy", content=b" " * 1001).status_code == 413

    @pytest.mark.parametrize("within", [True, False])
    def test_a_caller_that_leaves_imports_nothing_and_is_no_error_of_the_server(
        self, start: Start, within: bool
    ) -> None:
        """within: whether it leaves within its body; it may also leave while the body's texts are tokenized."""
        server = start(ADA)
        hold_slow_texts(server)
        body = json.dumps({"version": 1, "texts": ["a text"]}).encode()
        path = "/v1/agentspec/sessions/copy"
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "PUT",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {ADA}".encode())],
        }
        arriving = iter([{"type": "http.request", "body": body, "more_body": within}, {"type": "http.disconnect"}])
        sent: list[Any] = []

        async def receive() -> Any:
            return next(arriving)

        async def send(message: Any) -> None:
            sent.append(message)

        async def leave() -> None:
            await server.http.app(scope, receive, send)

        asyncio.run(leave())
        assert sent[0]["status"] == 400
        assert server.listed(ADA) == []

    def test_a_long_session_comes_in_parts(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentspec.server_ext.session_admin._PART_BYTES", 1000)
        poll, parts = session_admin.SessionAdmin.poll, list[list[bytes]]()

        def polled(admin: session_admin.SessionAdmin, job: str) -> dict[str, Any]:
            answer = poll(admin, job)
            parts.append(answer.get("value", []))
            return answer

        server = start(ADA)
        for number in range(30):
            server.say(server.identity(ADA, "one"), [number, *TEXT])
        monkeypatch.setattr(session_admin.SessionAdmin, "poll", polled)
        turns = server.call(ADA, "GET", "one").json()["turns"]
        assert [turn["response"][0] for turn in turns] == list(range(30))
        payloads = [payload for part in parts for payload in part]
        assert max(sum(map(len, part)) for part in parts) < 1000 + max(map(len, payloads))

    def test_goes_on_after_its_next_part_was_refused(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        server = start(ADA, engines=1)
        for number in range(4):
            server.say(server.identity(ADA, "one"), [number, *TEXT])
        monkeypatch.setattr(session_admin, "_SLICE_SECONDS", 0.0)
        persistence, asked = server.engines[0]._persistence, list[None]()
        submit = persistence.submit

        def refuse_every_second(*args: Any) -> Any:
            asked.append(None)
            if len(asked) % 2 == 0:
                raise StoreUnavailableError("64 jobs wait for the store already; try again later")
            return submit(*args)

        monkeypatch.setattr(persistence, "submit", refuse_every_second)
        turns = server.call(ADA, "GET", "one").json()["turns"]
        assert [turn["response"][0] for turn in turns] == list(range(4)) and len(asked) > 4

    @pytest.mark.alone
    def test_a_long_session_becomes_json_beside_the_event_loop(self) -> None:
        """In one piece, 20,000 turns would hold the interpreter's lock for seconds, and stop all streams."""
        tokens = np.arange(150, dtype=np.int32)
        turn = TurnRecord(writer="ab" * 8, number=1, session="s", prompt_tail=tokens, response=tokens, created=1.5)
        payloads = [encode(replace(turn, number=number)) for number in range(1, 12_001)]
        exported: list[bytes | None] = []

        def export() -> None:
            exported.append(session_exports.write_export("one", "log", [payloads]))

        def measure() -> dict[str, float]:
            calls, _ = beside(export, lambda: time.sleep(0.001), pause=0.0)  # after a sleep it waits for the lock
            return {"longest": max(calls)}

        assert_fast(measure, longest=60.0)  # up to 25 ms; in one piece 200 and more
        assert exported[-1] is not None
        turns = json.loads(exported[-1])["turns"]
        assert [turn["number"] for turn in turns] == list(range(1, 12_001))
        assert turns[0]["response"] == list(range(150)) and "weights" not in turns[0]

    def test_an_engine_forgets_what_it_exported(self, start: Start) -> None:
        """An exported session may take megabytes, which no budget counts."""
        server = start(ADA)
        server.say(server.identity(ADA, "one"))
        for _ in range(3):
            assert server.call(ADA, "GET", "one").status_code == 200
        assert not any(engine.sessions._jobs for engine in server.engines)


@pytest.mark.parametrize("field", ["turns", "texts", "messages"])
def test_of_many_short_turns_texts_or_messages_no_more_are_read_than_fit_into_memory(field: str) -> None:
    """Each takes 1.5 KB while it is read, and a body has room for two million one-letter texts."""

    def parse(count: int) -> None:
        session_exports._parse(json.dumps({"version": 1, field: ["a"] * count}).encode())

    with pytest.raises(HTTPException) as refused:
        parse(MAX_IMPORT_TURNS + 1)
    assert refused.value.status_code == 400
    assert refused.value.detail.startswith(f"{field}: at most 32768 are taken at once")
    if field == "texts":
        parse(MAX_IMPORT_TURNS)


def with_turn(body: Any, **changes: Any) -> Any:
    return body | {"turns": [body["turns"][0] | changes]}


def test_fuzzed_exports_requests_settings_and_key_files_are_used_or_refused() -> None:
    outcomes = fuzz(6_000, seed=1)
    for outcome in ("export: 2 records", "export: refused", "request: nobody", "request: scope session", "keys: read"):
        assert outcomes[outcome] > 10
    assert outcomes["settings: read"] > 10 and outcomes["settings: refused"] > 10


@pytest.mark.parametrize("item", ["-1,", "1,", '"x",', "[],", "{},"])
def test_the_largest_import_takes_memory_in_proportion(item: str) -> None:
    count = MAX_IMPORT_BYTES // 8 // len(item)
    body = '{"version": 1, "id": "s", "log": "x", "turns": [{"prompt": [' + item * count + "0]}]}"
    tracemalloc.start()
    with pytest.raises(HTTPException, match="turns"):
        session_exports._parse(body.encode())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 30 * len(body)


def test_a_turn_that_continues_nothing_and_names_a_context_is_refused(start: Start) -> None:
    server = start(ADA)
    server.say(server.identity(ADA, "one"))
    export = server.call(ADA, "GET", "one").json()
    export["turns"][0] |= {"kept": 0, "parent": "f" * 16}
    answer = server.call(ADA, "PUT", "copy", json=export)
    assert (answer.status_code, "turns.0.parent: 0 expected" in answer.text) == (400, True)
