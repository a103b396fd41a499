"""Test ``agentspec sessions`` on a server's real routes and store: what is printed, and errors that name the remedy."""

import io
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from agentspec.cache.store import LogNames, NewEntry, Store, TurnRecord, encode, open_store
from agentspec.cache.store.convert import old_log_name
from agentspec.cli.server import shown_time
from agentspec.identifiers import helpers_of
from agentspec.server_ext.api import session_routes
from agentspec.server_ext.persistence.model_key import find_model_key
from agentspec.server_ext.session_questions import ListSessions
from agentspec.server_ext.stored_sessions import StoredSessions
from tests.cli.test_cli import Program, agentspec
from tests.server_ext.session_server import ADA, ADMIN, BOB, PROMPT, TEXT, Server, Start, start
from tests.store.test_convert import old_file

__all__ = ["agentspec", "start"]

Sessions = Callable[..., tuple[int, str]]


@pytest.fixture
def server(start: Start) -> Server:
    """Return a server that checks two keys and holds a session of each."""
    server = start(ADA, BOB, engines=1)
    server.say(server.identity(ADA, "fix-42"))
    server.say(server.identity(BOB, "bobs"), list(range(700, 760)))
    return server


@pytest.fixture
def sessions(agentspec: Program, server: Server, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    """Return a function that calls ``agentspec sessions`` as the caller with a key."""
    monkeypatch.setenv("COLUMNS", "200")

    def client(base_url: str, headers: dict[str, str], timeout: float, **_: Any) -> Any:
        assert base_url.endswith("/v1/agentspec") and timeout > 10
        return TestClient(server.http.app, base_url=base_url, headers=headers)

    monkeypatch.setattr(httpx, "Client", client)

    def call(*arguments: str, key: str | None = ADA) -> tuple[int, str]:
        monkeypatch.setenv("AGENTSPEC_API_KEY", key or "")
        return agentspec("sessions", *arguments)

    return call


def test_a_list_shows_the_callers_sessions(sessions: Sessions, server: Server) -> None:
    status, printed = sessions("list")
    assert "bytes in the store" in printed
    assert status == 0 and "fix-42" in printed and "bobs" not in printed
    assert str(len(PROMPT) + len(TEXT)) in printed
    (session,) = json.loads(sessions("list", "--json")[1])["sessions"]
    assert session["id"] == "fix-42"
    assert {"fix-42", "bobs"} <= set(sessions("list", key=ADMIN)[1].split())
    assert sessions("list", "--url", "http://127.0.0.1:8000/v1/")[0] == 0


def test_a_list_is_as_long_as_it_is_asked_for(
    sessions: Sessions, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server lists at most 1,000 sessions in one answer."""
    monkeypatch.setattr(session_routes, "_LONGEST_LIST", 2)
    names = [f"session-{number}" for number in range(5)]
    for name in names:
        server.say(server.identity(ADA, name))
    for limit, expected in (("3", names[:1:-1]), ("6", [*names[::-1], "fix-42"]), ("50", [*names[::-1], "fix-42"])):
        listed = json.loads(sessions("list", "--json", "--limit", limit)[1])["sessions"]
        assert [session["id"] for session in listed] == expected


@pytest.mark.parametrize(("limit", "more"), [("2", True), ("3", False), ("100", False)])
def test_a_list_says_that_there_are_more(sessions: Sessions, server: Server, limit: str, more: bool) -> None:
    for name in ("one", "two"):
        server.say(server.identity(ADA, name))
    status, printed = sessions("list", "--limit", limit)
    assert (status, "fix-42" in printed) == (0, not more)
    assert ("the 2 sessions used last; list more with --limit" in printed) == more
    assert ("--limit" in printed) == more
    assert "--limit" not in sessions("list", "--json", "--limit", limit)[1], "another program reads it"


def test_a_list_shows_groups_and_the_keys_of_sessions_without_a_name(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    numbers = {"tokens": 1, "turns": 1, "bytes": 1, "used": 0.0}
    listed = [
        {"id": None, "key": "0123abcd", "group": "issue-7", **numbers},
        {"id": "named", "key": "4567abcd", "group": None, **numbers},
        {"id": None, "group": None, **numbers},  # a server that shows no keys
    ]
    made, transport = httpx.Client, httpx.MockTransport(lambda _: httpx.Response(200, json={"sessions": listed}))
    monkeypatch.setattr(httpx, "Client", lambda **options: made(**options, transport=transport))
    status, printed = agentspec("sessions", "list")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert status == 0 and [(row[0], row[-1]) for row in rows] == [("0123abcd", "issue-7"), ("named", ""), ("", "")]
    assert "group" in printed


@pytest.mark.parametrize("terminal", [False, True])
def test_a_list_shows_whole_ids(
    sessions: Sessions, server: Server, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    name = f"session-{'0123456789abcdef' * 4}"
    server.say(server.identity(ADA, name))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    printed = sessions("list")[1]
    cells = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert name in ("".join(cells) if terminal else cells)


@pytest.mark.parametrize("name", [".", "..", "a/b", "é"])
def test_a_session_is_reached_whatever_its_id(sessions: Sessions, server: Server, name: str) -> None:
    server.say(server.identity(ADA, name))
    assert sessions("show", name)[0] == 0
    assert sessions("delete", name) == (0, f"erased: {name} (1 record of it in the store)\n")
    held = "nothing of it was in the store; 'agentspec sessions list' shows your sessions"
    assert sessions("delete", name) == (0, f"erased: {name} ({held})\n")
    assert [session["id"] for session in json.loads(sessions("list", "--json")[1])["sessions"]] == ["fix-42"]


def test_a_shown_session_has_a_row_for_each_turn(sessions: Sessions, server: Server) -> None:
    server.say(server.identity(ADA, "fix-42"), [7, 8], [*PROMPT, *TEXT, 6])
    created = [turn["created"] for turn in server.call(ADA, "GET", "fix-42").json()["turns"]]
    printed = sessions("show", "fix-42")[1]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert rows == [
        ["1", shown_time(created[0]), "0", str(len(PROMPT)), str(len(TEXT))],
        ["2", shown_time(created[1]), str(len(PROMPT) + len(TEXT)), "1", "2"],
    ]


def test_a_session_goes_through_a_file(sessions: Sessions, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "fix-42.json"
    assert f"{len(TEXT)}" in sessions("show", "fix-42")[1]
    assert sessions("export", "fix-42", str(file)) == (0, f"written: {file}\n")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    assert f"warning: {file}: others may read it (mode 0640)" in sessions("export", "fix-42", str(file))[1]
    assert sessions("import", "copy of it", str(file), key=BOB)[1] == "1 of 1 turns added\n"
    assert sessions("import", "copy of it", str(file), key=BOB)[1] == "0 of 1 turns added; the others were there\n"
    assert server.draws_on(server.identity(BOB, "copy of it"))
    status, printed = sessions("delete", "copy of it", key=BOB)
    assert status == 0 and "erased: copy of it" in printed
    assert not server.drafts(server.identity(BOB, "copy of it"))


def test_a_session_goes_through_a_pipe(sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed = sessions("export", "fix-42", "-")
    assert status == 0 and len(json.loads(printed)["turns"]) == 1
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(printed.encode())))
    assert sessions("import", "copy of it", "-", key=BOB)[1] == "1 of 1 turns added\n"
    assert not (tmp_path / "-").exists()


def test_a_closed_standard_input_is_named(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None in its place where the shell closed it (``<&-``)."""
    monkeypatch.setattr("sys.stdin", None)
    status, printed = sessions("import", "fix-42", "-")
    assert (status, printed) == (2, "agentspec: -: the standard input is closed; name a file\n")


def test_an_export_may_take_minutes(sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first byte of a session of 350,000 turns comes after two minutes."""
    client, waits = httpx.Client, list[float]()

    def noted(base_url: str, headers: Any, timeout: float, **_: Any) -> Any:
        waits.append(timeout)
        return client(base_url=base_url, headers=headers, timeout=timeout)

    monkeypatch.setattr(httpx, "Client", noted)
    assert sessions("export", "fix-42", str(tmp_path / "file"))[0] == 0
    assert waits == [1800.0]


@pytest.fixture
def long_file(sessions: Sessions, server: Server, tmp_path: Path) -> Path:
    """Return the export of ADA's session "long", of seven turns."""
    for number in range(7):
        server.say(server.identity(ADA, "long"), [*TEXT, number])
    file = tmp_path / "long.json"
    assert sessions("export", "long", str(file))[0] == 0
    return file


@pytest.mark.parametrize(
    ("content", "field"), [({"turns": [{}, {}]}, "version: Field required"), ({"turns": [], "x": 1}, "version: Field")]
)
def test_a_long_file_that_lacks_fields_is_refused_by_them(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], field: str
) -> None:
    """It must not be called no JSON, nor accepted without turns."""
    monkeypatch.setattr("agentspec.cli.sessions.IMPORT_PART_BYTES", 4)
    file = tmp_path / "some.json"
    file.write_text(json.dumps(content))
    status, printed = sessions("import", "copy", str(file))
    assert status == 2 and field in printed


def test_a_session_that_is_too_long_for_one_call_goes_in_parts(
    sessions: Sessions, server: Server, long_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = long_file.stat().st_size // 3
    monkeypatch.setattr("agentspec.cli.sessions.IMPORT_PART_BYTES", part)
    monkeypatch.setattr("agentspec.server_ext.api.imports.MAX_IMPORT_BYTES", 2 * part)
    refused = server.call(BOB, "PUT", "copy", content=long_file.read_bytes())
    assert refused.status_code == 413 and "agentspec sessions import" in refused.text
    assert "7 of 7 turns added" in sessions("import", "copy", str(long_file), key=BOB)[1]
    assert "0 of 7 turns added" in sessions("import", "copy", str(long_file), key=BOB)[1]
    monkeypatch.setattr("agentspec.server_ext.api.imports.MAX_IMPORT_BYTES", part // 4)
    assert "each turn or text has to fit" in sessions("import", "copy", str(long_file), key=BOB)[1]
    exported = [server.call(key, "GET", name).json()["turns"] for key, name in ((ADA, "long"), (BOB, "copy"))]
    assert exported[0] == exported[1]


def test_an_import_in_parts_that_fails_names_the_turn_and_what_was_added(
    sessions: Sessions, server: Server, long_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cli.sessions.IMPORT_PART_BYTES", long_file.stat().st_size // 3)
    whole = json.loads(long_file.read_text())

    def spoilt(turn: int, **changes: Any) -> str:
        turns = [one | changes if number == turn else one for number, one in enumerate(whole["turns"])]
        long_file.write_text(json.dumps(whole | {"turns": turns}))
        return sessions("import", "copy", str(long_file), key=BOB)[1]

    printed = " ".join(spoilt(0, kept=-1).split())
    assert "turns.0.kept" in printed and "are imported" not in printed
    assert server.call(BOB, "GET", "copy").status_code == 404
    printed = " ".join(spoilt(5, response=[10**9]).split())
    assert "turns.5.response" in printed or "turns.5: a token id" in printed
    imported = len(server.call(BOB, "GET", "copy").json()["turns"])
    assert 0 < imported < 6 and f"the turns before turns.{imported} are imported" in printed
    assert f"{7 - imported} of 7 turns added" in spoilt(7)


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (("list",), None, "AGENTSPEC_API_KEY"),
        (("list",), "wrong", "AGENTSPEC_API_KEY"),
        (("show", "bobs"), ADA, "no session 'bobs'"),
        (("show", "caf\udce9"), ADA, "U+DCE9 at position 3"),
        (("delete", "a\nb"), ADA, "U+000A at position 1"),
        (("export", "none", "file"), ADA, "no session 'none'"),
        (("import", "x", __file__), ADA, "body: "),
        (("export", "fix-42", "no-such-folder/file"), ADA, "no-such-folder/file: No such file"),
        (("list", "--header", "X-Principal"), ADA, "Name: value"),
        (("convert", "sqlite:///no-such-folder/old.db"), ADA, "no such file"),
        (("convert", "memory://"), ADA, "nothing of an older release"),
        (("convert", "redis://me:hunter2@127.0.0.1:1/0"), ADA, "redis://***@127.0.0.1:1/0"),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    sessions: Sessions, arguments: tuple[str, ...], key: str | None, message: str
) -> None:
    status, printed = sessions(*arguments, key=key)
    assert status == 2 and message in printed and "Traceback" not in printed and "hunter2" not in printed


def test_a_time_beyond_the_calendar_is_shown_in_seconds() -> None:
    assert shown_time(1e15) == "1000000000000000 s"
    assert shown_time(0.0).startswith("19")


def test_an_erasure_that_waits_for_another_process_says_so(
    sessions: Sessions, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cli.sessions._ERASURE_SECONDS", 0.0)
    reader = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM entries").fetchone()
    status, printed = sessions("delete", "fix-42")
    assert status == 2 and "another process still reads" in printed
    reader.execute("COMMIT")
    reader.close()
    monkeypatch.undo()


def test_an_erasure_waits_for_another_process_and_counts_what_it_erased_before(
    sessions: Sessions, server: Server, tmp_path: Path
) -> None:
    server.say(server.identity(ADA, "fix-42"))
    reader = sqlite3.connect(tmp_path / "log.db", isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM entries").fetchone()
    later = threading.Timer(0.5, reader.execute, ["COMMIT"])
    later.start()
    assert sessions("delete", "fix-42") == (0, "erased: fix-42 (2 records of it in the store)\n")
    later.join()
    reader.close()


def test_an_old_store_is_converted(agentspec: Program, tmp_path: Path) -> None:
    file = tmp_path / "old.db"
    old_file(file)
    status, printed = agentspec("sessions", "convert", f"sqlite:///{file}")
    assert status == 0 and "converted: " in printed and "2 damaged" in printed and "old.db" in printed
    assert "run it again with --model" in printed
    assert f"the old data are still in {file}.schema-1; delete it" in " ".join(printed.split())
    assert "left out: 1 of callers with API keys" in printed
    again, printed = agentspec("sessions", "convert", f"sqlite:///{file}")
    assert again == 2 and "Traceback" not in printed
    status, printed = agentspec("sessions", "convert", f"sqlite:///{file}", "--model", "demo/model")
    assert status == 2 and "name them as the server did" in printed  # the log is another model's


@pytest.mark.parametrize("secret", [None, "the servers' secret"])
def test_a_servers_turns_are_moved_to_their_tenants_logs(
    agentspec: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    """A server with a secret looks for its logs under names made with that one alone."""
    url = f"sqlite:///{tmp_path / 'old.db'}"
    with closing(open_store(url)) as store:
        record = TurnRecord(
            writer="0" * 16,
            number=1,
            session="s",
            prompt_tail=np.array([1], np.int32),
            response=np.array([2, 3], np.int32),
            created=1.0,
            tenant="acme",
        )
        store.append(old_log_name("demo/model", None, None, "acme"), [NewEntry("s", encode(record))])
        logs = LogNames(find_model_key("demo/model"), (secret or store.secret().hex()).encode())
    monkeypatch.setenv("AGENTSPEC_SECRET", secret or "")
    monkeypatch.setenv("AGENTSPEC_STORE", url)
    status, printed = agentspec("sessions", "convert", "--model", "demo/model", "--tenant", "acme")
    assert status == 0 and "moved: 1 turns" in printed
    with closing(open_store(url)) as store:
        assert store.namespaces() == [logs.of("acme")]


def test_an_erasure_lists_no_sessions_but_those_of_its_loops(
    sessions: Sessions, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among 60,000 sessions it took 17 s, because each 1,000 of them were listed anew."""
    helper = f"{helpers_of('fix-42')}.1"
    for session in (helper, "one", "two", "three"):
        server.say(server.identity(ADA, session))
    asked: list[ListSessions] = []
    used_last = StoredSessions.used_last

    def noted(stored: StoredSessions, wanted: ListSessions, store: Store) -> Iterator[list[dict[str, Any]]]:
        asked.append(wanted)
        for found in used_last(stored, wanted, store):
            assert [session["id"] for session in found] in ([], [helper])
            yield found

    monkeypatch.setattr(StoredSessions, "used_last", noted)
    assert "and 1 session of its loops" in sessions("delete", "fix-42")[1]
    assert len(asked) == 1


def test_an_erasure_takes_the_sessions_of_its_loops_along(sessions: Sessions, server: Server) -> None:
    """Their ids were made in another process. A session of the user's own with a like name stays."""
    others = ["fix-421.0a1b2c3d.1", "fix-42.0a1b2c3d.x", "fix-42.tests"]
    for session in ("fix-42.0a1b2c3d.1", "fix-42.0a1b2c3d.12", *others):
        server.say(server.identity(ADA, session))
    said = "erased: fix-42 (1 record of it in the store); and 2 sessions of its loops\n"
    assert sessions("delete", "fix-42") == (0, said)
    assert set(server.listed(ADA)) == set(others)
