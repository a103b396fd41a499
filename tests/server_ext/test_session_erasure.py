"""Test erasing a session over HTTP: what is left of it, of others, and where."""

import json
import logging
import sqlite3
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from fastapi.responses import JSONResponse

from agentspec.cache.store import Erasure, open_store
from agentspec.errors import StoreUnavailableError
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.figures.traces import Traces
from agentspec.server_ext.identity import Identity

from .session_server import ADA, ADMIN, BOB, TEXT, Start, start
from .test_endpoints import bearer
from .test_quotes import BODY, SPELLED, Tokenizer

__all__ = ["start"]


class TestErasure:
    def test_nothing_is_left_of_it_and_all_is_left_of_others(self, start: Start, tmp_path: Path) -> None:
        record = tmp_path / "steps.jsonl"
        server = start(ADA, BOB, record=record)
        ada, bob = server.identity(ADA, "fix-42"), server.identity(BOB, "fix-42")
        secret, other = list(range(600, 660)), list(range(700, 760))
        for engine in (0, 1):
            server.say(ada, secret, engine=engine)
        server.say(bob, other)
        two = server.identity(ADA, "two")
        server.say(two, TEXT)
        assert all(server.draws_on(ada, secret, engine) for engine in (0, 1))
        server.wait(lambda: str(ada.session) in record.read_text())
        database = tmp_path / "log.db"
        coded = coded_text(database, ada)
        assert stored(database, coded) and stored(database, str(ada.session))
        server.start("running", ada, [9], [8, 7])
        server.start("of another", two, [9], [8, 7])
        answer = server.erase(ADA, "fix-42")
        assert (answer.status_code, answer.json()["complete"]) == (200, True), answer.text
        assert not stored(database, coded)
        steps = [json.loads(line) for line in record.read_text().splitlines()]
        assert {step["session_key"] for step in steps} >= {None, bob.session}
        assert str(ada.session) not in record.read_text()
        assert not any(server.drafts(ada, secret, engine) for engine in (0, 1))
        assert server.draws_on(bob, other) and server.draws_on(two)
        assert server.call(ADA, "GET", "fix-42").status_code == 404
        assert (server.listed(ADA), server.listed(BOB)) == (["two"], ["fix-42"])
        states = {state.request_id: state.identity for state in server.engines[0].sessions._states()}
        assert (states["running"].session, states["running"].session_name) == (None, None)
        assert (states["of another"].session, states["of another"].session_name) == (two.session, "two")
        server.end("running", 2)  # keeps nothing
        server.end("of another", 0)
        server.say(two, TEXT)
        assert server.listed(ADA) == ["two"]
        assert server.erase(ADA, "fix-42").status_code == 200  # erased already
        server.follow()  # what an engine says before it has read the other one's tombstone is erased, too
        server.say(ada, secret)
        assert server.draws_on(ada, secret)  # the name can be used again

    def test_the_snapshot_goes_and_the_next_one_is_without_it(self, start: Start, tmp_path: Path) -> None:
        server = start(ADA, engines=1)
        engine = server.engines[0]
        snapshot = tmp_path / "snapshot"
        server.engines = [DraftingEngine(engine.settings, engine._persistence, snapshot=snapshot)]
        server.engines[0].warm_up()
        secret = list(range(600, 660))
        server.say(server.identity(ADA, "one"), secret)
        server.say(server.identity(ADA, "two"))
        keeper = server.engines[0]._keeper
        assert keeper is not None and keeper.save() and stored(snapshot, secret) and stored(snapshot, TEXT)
        assert server.erase(ADA, "one").json()["complete"]
        assert not snapshot.exists()
        assert keeper.save() and stored(snapshot, TEXT) and not stored(snapshot, secret[8:])

    def test_an_erasure_that_is_refused_changes_nothing(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise a running request would forget its session, and its turn would never reach the store."""
        server = start(ADA, engines=1)
        ada = server.identity(ADA, "one")
        server.start("running", ada, [9], TEXT)

        def refuse(*_: object) -> None:
            raise StoreUnavailableError("64 jobs wait for the store already; try again later")

        with monkeypatch.context() as patch:
            patch.setattr(server.engines[0]._persistence, "erase", refuse)
            assert server.call(ADA, "DELETE", "one").status_code == 503
        server.end("running", len(TEXT))
        server.wait(lambda: server.listed(ADA) == ["one"])
        assert server.draws_on(ada)

    def test_a_request_that_starts_while_its_session_is_erased_leaves_nothing_of_it(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread takes the session from the cache just after the request has read that it has one."""
        server = start(ADA, engines=1)
        ada, engine = server.identity(ADA, "one"), server.engines[0]
        assert ada.session is not None
        begin = engine.cache.start

        def begun(request_id: str, *prompt: Any, **names: Any) -> None:
            engine._persistence._forget_sessions(ada.tenant, [str(ada.session)])
            begin(request_id, *prompt, **names)

        with monkeypatch.context() as patch:
            patch.setattr(engine.cache, "start", begun)
            server.start("running", ada, [9], TEXT)
        server.end("running", len(TEXT))
        assert not engine.cache.has_session(ada.tenant, ada.session)
        assert not server.drafts(ada) and server.listed(ADA) == []
        server.say(ada)
        assert server.draws_on(ada)

    def test_an_erasure_by_another_process_reaches_the_step_record_and_running_requests(
        self, start: Start, tmp_path: Path
    ) -> None:
        record = tmp_path / "steps.jsonl"
        server = start(ADA, engines=1, record=record)
        ada, engine = server.identity(ADA, "one"), server.engines[0]
        server.say(ada)
        server.start("running", ada, [9], TEXT)
        server.wait(lambda: str(ada.session) in record.read_text())
        engine._persistence._forget_sessions(ada.tenant, [str(ada.session)])
        server.wait(lambda: str(ada.session) not in record.read_text())
        (running,) = [state for state in engine.sessions._states() if state.request_id == "running"]
        assert (running.identity.session, running.identity.session_name) == (None, None)

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
        hidden, erase = set[str | None](), Traces.erase

        def noting(traces: Traces, session: str, tenants: Collection[str | None]) -> None:
            hidden.update(tenants)
            erase(traces, session, tenants)

        monkeypatch.setattr(Traces, "erase", noting)
        server.say(with_adapter)
        assert server.draws_on(with_adapter)
        assert server.erase(ADA, "one").status_code == 200
        assert not server.drafts(with_adapter)
        persistence = server.engines[0]._persistence
        assert with_adapter.session in persistence._store.tombstones(persistence.logs.of(with_adapter.tenant))
        assert with_adapter.tenant in hidden  # rejected tokens in its detailed figures may quote the session

    def test_the_logs_of_other_tenants_are_told_nothing_of_it(self, start: Start) -> None:
        """Otherwise each erasure would write into the log of every tenant that the server knows."""
        server = start(ADA, BOB, engines=1)
        ada, bob = server.identity(ADA, "one"), server.identity(BOB, "one")
        server.say(ada)
        server.say(bob)
        persistence = server.engines[0]._persistence
        assert {ada.tenant, bob.tenant} <= set(persistence.cache.tenants()) and ada.tenant != bob.tenant
        assert server.erase(ADA, "one").status_code == 200
        assert set(persistence._store.tombstones(persistence.logs.of(ada.tenant))) == {ada.session}
        assert not persistence._store.tombstones(persistence.logs.of(bob.tenant))

    def test_other_processes_hear_of_it_under_an_adapter_with_which_a_request_runs(self, start: Start) -> None:
        """Neither cache nor store holds the request's text yet. Another server may have begun such requests, too."""
        server = start(ADA, engines=1)
        with_adapter = server.identity(ADA, "one", adapter="tuned@/adapters/tuned")
        server.start("running", with_adapter, [9], TEXT)
        persistence = server.engines[0]._persistence
        assert server.erase(ADA, "one").status_code == 200
        assert with_adapter.session in persistence._store.tombstones(persistence.logs.of(with_adapter.tenant))

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
        assert server.erased == 0  # the earlier answer has counted the records
        assert not stored(tmp_path / "log.db", coded)


def coded_text(database: Path, identity: Identity) -> bytes:
    """Return the end of a session's newest record, which is text in the store's coding."""
    with closing(open_store(f"sqlite:///{database}")) as store:
        records = [entry.payload for log in store.namespaces() for entry in store.read(log, session=identity.session)]
    return records[-1][-24:]


def stored(file: Path, what: Sequence[int] | str | bytes) -> bool:
    """Return whether a file, or a database's files, hold these token ids, this text or these bytes."""
    if isinstance(what, str):
        what = what.encode()
    wanted = what if isinstance(what, bytes) else np.array(what, np.int32).tobytes()
    return any(wanted in each.read_bytes() for each in file.parent.glob(f"{file.name}*"))


@pytest.mark.parametrize("before", ["", "/behind/a/proxy"])
@pytest.mark.parametrize("rest", ["a-session-of-ada", "a%20b?only_new=true", "a/b", ""])
def test_the_access_log_names_no_session(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: str, rest: str
) -> None:
    log = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(log, "filters", [])  # another test's server may have changed it
    start(engines=1)
    with caplog.at_level(logging.INFO, log.name):
        paths = (f"{before}/v1/agentspec/sessions/{rest}", "/v1/agentspec/sessions", "/v1/models")
        for path in (*paths, f"{before}/v1/agentspec/sessions?limit=5&pre%66ix={rest}"):
            log.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:9", "DELETE", path, "1.1", 200)  # as uvicorn does
        log.info("a line of another form: %s", rest)
    lines = caplog.messages
    assert lines[0] == f'127.0.0.1:9 - "DELETE {before}/v1/agentspec/sessions/… HTTP/1.1" 200'
    assert "/v1/models" in lines[2] and lines[4].endswith(rest)
    assert lines[3] == f'127.0.0.1:9 - "DELETE {before}/v1/agentspec/sessions?… HTTP/1.1" 200'


def test_the_traceback_of_an_unknown_session_does_not_name_it(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """With --log-error-stack, vLLM logs a traceback for each error that it answers."""
    server = start(ADA, engines=1)
    log = logging.getLogger("vllm.entrypoints")

    def answer(request: Any, error: Any) -> JSONResponse:
        log.error("HTTPException caught", exc_info=error)
        return JSONResponse({"error": error.detail}, status_code=error.status_code)

    server.http.app.add_exception_handler(HTTPException, answer)  # type: ignore[attr-defined]
    told = server.call(ADA, "GET", "a-session-of-ada")
    assert told.status_code == 404 and "a-session-of-ada" in told.text
    assert "404" in caplog.text and "a-session-of-ada" not in caplog.text


def test_an_erasure_forgets_what_its_caller_might_have_quoted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts may be the session's. Those of other callers stay, unless the administrator erases."""
    server = start(ADA, BOB)
    tokenizer = Tokenizer()
    server.get_tokenizer = lambda: tokenizer

    def encoded(key: str, **more: Any) -> int:
        before = tokenizer.encoded
        server.http.post("/v1/chat/completions", json={**BODY, **more}, headers=bearer(key))
        return tokenizer.encoded - before

    def all_encoded() -> list[int]:
        return [encoded(ADA), encoded(ADA, cache_salt="a"), encoded(BOB)]

    whole = len(SPELLED)
    assert all_encoded() == [whole] * 3
    assert server.call("unknown", "DELETE", "s").status_code == 401
    assert all_encoded() == [0] * 3
    assert server.erase(ADA, "s").status_code == 200
    assert all_encoded() == [whole, whole, 0]
    assert server.erase(ADMIN, "0" * 32).status_code == 200
    assert server.state.agentspec_quotes.held_bytes == 0
    assert all_encoded() == [whole] * 3
    monkeypatch.setattr("agentspec.server_ext.api.request_bodies._owner", lambda engine: "")  # as with api_keys_file
    assert server.erase(ADMIN, "0" * 32).status_code == 200
    assert server.state.agentspec_quotes.held_bytes == 0


def test_a_session_may_be_used_again_as_soon_as_its_erasure_is_answered(start: Start) -> None:
    """Each engine erases it, and must not take another's erasure for a later one."""
    server = start(ADA)
    ada = server.identity(ADA, "one")
    for _ in range(15):
        server.say(ada)
        assert server.erase(ADA, "one").status_code == 200
        server.say(ada, TEXT[:30])
        time.sleep(0.02)
        assert [len(turn["response"]) for turn in server.call(ADA, "GET", "one").json()["turns"]] == [30]
        server.erase(ADA, "one")


def test_a_session_may_be_used_again_at_once_on_an_engine_that_had_nothing_of_its_tenant(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That engine does not follow the tenant's log before, so it would take the other's erasure for a later one."""
    server = start(ADA)
    ada, store = server.identity(ADA, "one"), server.engines[0]._persistence._store
    erase = store.erase_session

    def erase_last(*of: str) -> Erasure:
        time.sleep(0.2)
        return erase(*of)

    monkeypatch.setattr(store, "erase_session", erase_last)
    server.say(ada)
    assert server.erase(ADA, "one").status_code == 200
    server.start("again", ada, [9], TEXT[:30], engine=1)
    time.sleep(0.3)  # the tenant's log is followed by now
    server.end("again", 30, engine=1)
    server.wait(lambda: server.listed(ADA) == ["one"])
    assert [engine.stats()["requests_erased"] for engine in server.engines] == [0, 0]


@pytest.mark.parametrize("origin", ["http://[", "http://a]b"])
def test_an_origin_that_cannot_be_read_counts_as_another_site(start: Start, origin: str) -> None:
    assert start().call(None, "GET", headers={"Origin": origin}).status_code == 403
