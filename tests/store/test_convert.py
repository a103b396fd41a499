"""Test that stores of the first schema, as that release wrote them, become stores of the present one."""

import sqlite3
import struct
import subprocess
import sys
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import redis
from redis.cluster import ClusterNode, RedisCluster

from agentspec.cache.store import LogNames, MessageRecord, Record, Store, TurnRecord, decode, mac, open_store
from agentspec.cache.store.contexts import SessionContexts
from agentspec.cache.store.convert import Converted, OldLog, convert, old_log_name
from agentspec.cache.store.sqlite.file import APPLICATION_ID
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError
from agentspec.testing.redis_server import RedisClusterServers, RedisServer
from tests.store.helpers import NS

SECRET = "a secret of the operator"
OWNER = "0123456789abcdef" * 2  # how the old release wrote a caller with an API key


def old_record(kind: str, meta: dict[str, Any], data: bytes) -> bytes:
    """Return a record of version 1."""
    packed = msgpack.packb(meta)
    head = struct.pack("<BIQQ", 1, len(kind), len(packed), len(data)) + kind.encode()
    crc = zlib.crc32(data, zlib.crc32(packed, zlib.crc32(head)))
    made: bytes = msgpack.packb({"v": 1, "kind": kind, "crc": crc, "meta": packed, "data": data})
    return made


def old_turn(session: str, kept: int, tail: list[int], response: list[int], **fields: Any) -> tuple[str, bytes]:
    meta = {"session": session, "created": 5.0, "kept": kept, "prompt": len(tail), "scope": "tenant", **fields}
    return session, old_record(
        "turn", {k: v for k, v in meta.items() if v is not None}, np.array(tail + response, "<i4").tobytes()
    )


LONG = list(range(100, 300))
ENTRIES = [
    old_turn("s", 0, [1, 2, 3], LONG, group="g"),
    old_turn("other", 0, [7], [8, 9]),
    old_turn("s", 203, [4, 5], [6]),
    old_turn("", 0, [1], [2, 3]),
    old_turn("s", 100, [9, 9], [8]),  # an edited history
    old_turn("s", 900, [1], [2, 2], gap=True),  # the previous turn was lost
    old_turn("s", 903, [5], [5]),
    ("s", b"damaged"),
    ("s", msgpack.packb({"v": 1, "kind": None, "crc": 0, "meta": b"", "data": b""})),
    old_turn(f"{OWNER}/s", 0, [1], [5, 6], tenant=OWNER),
    old_turn(f"{OWNER}/s", 0, [1], [6, 7], tenant="acme"),
    old_turn("unscoped", 0, [1], [2], scope=None),
    (
        "chat",
        old_record("message", {"session": "chat", "created": 6.0, "position": 3}, msgpack.packb({"role": "user"})),
    ),
]


def old_file(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 1")
    connection.execute(
        "CREATE TABLE entries (sequence INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL,"
        " session TEXT NOT NULL, payload BLOB NOT NULL)"
    )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executemany(
        "INSERT INTO entries (namespace, session, payload) VALUES (?, ?, ?)",
        [(NS, *entry) for entry in ENTRIES] + [("other", *ENTRIES[1])],
    )
    connection.commit()
    connection.close()


def old_log(server: RedisServer) -> redis.Redis:
    client: redis.Redis = redis.Redis(port=server.port)
    client.flushall()
    write_old_log(client)
    return client


def write_old_log(client: Any) -> None:
    for namespace, entries in ((NS, ENTRIES), ("other", ENTRIES[1:2])):
        tag = f"{{agentspec:{namespace}}}"
        for session, payload in entries:
            number = client.xadd(f"{tag}:log", {"s": session})
            client.xadd(f"{tag}:s:{session}", {"p": payload}, id=number)
            client.sadd(f"{tag}:sessions", session)
        client.set(f"{tag}:w:somebody", 3)


def found(store: Store, session: str | None = None, namespace: str = NS) -> list[Record]:
    key = None if session is None else mac(SECRET.encode(), "session", None, session)
    return [decode(entry.payload) for entry in store.read(namespace, session=key)]


def check(store: Store) -> None:
    """Check that all turns are found by their new names and hashes."""
    turns = [record for record in found(store) if isinstance(record, TurnRecord)]
    assert [turn.response.tolist() for turn in turns] == [
        *(LONG, [8, 9], [6], [2, 3], [8], [2, 2], [5], [6, 7], [2]),
    ]
    assert len({(turn.writer, turn.number) for turn in turns}) == 9
    assert turns[7].session == "" and turns[7].tenant == "acme"
    assert (turns[8].scope, turns[8].tenant) == ("session", None)
    contexts = SessionContexts()
    session = [record for record in found(store, "s") if isinstance(record, TurnRecord)]
    prompts = [contexts.add(record) for record in session]
    first = [1, 2, 3, *LONG]
    assert [None if prompt is None else prompt.tolist() for prompt in prompts] == [
        [1, 2, 3], [*first, 4, 5], [*first[:100], 9, 9], None, None,
    ]  # fmt: skip
    assert session[4].parent != session[3].parent != 0
    assert session[0].session_name == "s"
    (message,) = [record for record in found(store) if isinstance(record, MessageRecord)]
    assert message == MessageRecord("chat", {"role": "user"}, 6.0, 3)
    assert [len(list(store.read(NS, group=mac(SECRET.encode(), "group", None, "g"))))] == [1]
    assert len(found(store, "other", "other")) == 1


ALL = Converted(converted=11, damaged=2, unowned=1)


def test_a_file_is_converted_and_the_old_one_kept_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "server.db"
    old_file(path)
    url = f"sqlite:///{path}"
    with pytest.raises(StoreVersionError, match="agentspec sessions convert"):
        open_store(url)
    (tmp_path / "server.db.converting").write_bytes(b"of a conversion that was cut off")
    assert convert(url, secret=SECRET) == replace(ALL, kept_as=f"{path}.schema-1")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["server.db", "server.db.schema-1"]
    store = open_store(url)
    check(store)
    store.close()
    with pytest.raises(StoreVersionError, match="needs no conversion"):
        convert(url)


KILLED = """
import os, sys
from agentspec.cache.store.convert import convert
left = int(sys.argv[3])
def kill(event, _):
    global left
    if event in ("os.rename", "os.link", "os.remove", "shutil.copyfile"):
        left -= 1
        if left < 0:
            os._exit(9)
sys.addaudithook(kill)
if sys.argv[4] == "no links":
    def link(*_): raise OSError(95, "Operation not supported")
    os.link = link
convert(sys.argv[1], secret=sys.argv[2])
"""


@pytest.mark.parametrize("links", ["links", "no links"])
def test_a_conversion_that_is_killed_can_be_repeated(tmp_path: Path, links: str) -> None:
    """It is killed before each of its file operations in turn. Each time the old store or the new one is in place."""
    for before in range(20):
        folder = tmp_path / str(before)
        folder.mkdir()
        path = folder / "server.db"
        old_file(path)
        old = path.read_bytes()
        program = [sys.executable, "-c", KILLED, f"sqlite:///{path}", SECRET, str(before), links]
        status = subprocess.run(program, check=False).returncode
        try:
            convert(f"sqlite:///{path}", secret=SECRET)
        except StoreVersionError as error:
            assert "needs no conversion" in str(error)
        store = open_store(f"sqlite:///{path}")
        check(store)
        store.close()
        assert sorted(file.name for file in folder.iterdir()) == ["server.db", "server.db.schema-1"]
        assert (folder / "server.db.schema-1").read_bytes() == old
        if status == 0:
            assert before >= 2
            return
        assert status == 9
    raise AssertionError("it was killed each time")


@pytest.mark.parametrize("name", ["what?.db", "no#1.db", "100%25.db"])
def test_a_path_may_have_characters_that_mean_something_in_a_url(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    old_file(path)
    assert convert(f"sqlite:///{path}", secret="secret").converted > 0
    assert {file.name for file in tmp_path.iterdir()} == {name, f"{name}.schema-1"}


@pytest.mark.parametrize("fields", [{"group": 5}, {"kept": float("inf")}])
def test_a_record_with_fields_of_other_types_is_damaged(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain, odd = tmp_path / "plain.db", tmp_path / "odd.db"
    for path in (plain, odd):
        old_file(path)
    with closing(sqlite3.connect(odd)) as connection:
        session, payload = old_turn("odd", 0, [1], [2])
        envelope = msgpack.unpackb(payload)
        payload = old_record("turn", msgpack.unpackb(envelope["meta"]) | fields, envelope["data"])
        connection.execute("INSERT INTO entries (namespace, session, payload) VALUES (?, ?, ?)", (NS, session, payload))
        connection.commit()
    expected, found = (convert(f"sqlite:///{path}", secret="secret") for path in (plain, odd))
    assert (found.converted, found.damaged) == (expected.converted, expected.damaged + 1)


def test_the_kept_file_of_an_earlier_conversion_is_not_overwritten(tmp_path: Path) -> None:
    path, kept = tmp_path / "server.db", tmp_path / "server.db.schema-1"
    old_file(path)
    kept.write_bytes(b"the only copy")
    with pytest.raises(StoreError, match=r"server\.db\.schema-1: .*move it away"):
        convert(f"sqlite:///{path}", secret=SECRET)
    assert kept.read_bytes() == b"the only copy"
    kept.unlink()
    assert convert(f"sqlite:///{path}", secret=SECRET).converted == 11


def test_a_file_that_a_link_names_is_kept_beside_itself(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    old_file(disk / "real.db")
    (tmp_path / "server.db").symlink_to(disk / "real.db")
    assert convert(f"sqlite:///{tmp_path}/server.db").kept_as == str(disk / "real.db.schema-1")
    assert (tmp_path / "server.db").is_symlink()
    assert sorted(file.name for file in disk.iterdir()) == ["real.db", "real.db.schema-1"]


def test_a_file_that_is_read_is_left_as_it_is(tmp_path: Path) -> None:
    """Until a reader ends, a part of the old store is in its write-ahead log, which cannot be kept beside the file."""
    path = tmp_path / "server.db"
    old_file(path)
    reader = sqlite3.connect(path, isolation_level=None)
    writer = sqlite3.connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM entries").fetchone()
    with writer:
        writer.execute("INSERT INTO entries (namespace, session, payload) VALUES (?, ?, ?)", (NS, *ENTRIES[1]))
    with pytest.raises(StoreUnavailableError, match="stop the servers"):
        convert(f"sqlite:///{path}", secret=SECRET)
    reader.close()
    writer.close()
    assert convert(f"sqlite:///{path}", secret=SECRET).converted == 12
    with sqlite3.connect(tmp_path / "server.db.schema-1") as kept:
        assert kept.execute("SELECT count(*) FROM entries").fetchone() == (len(ENTRIES) + 2,)


def test_a_redis_log_is_converted_and_its_keys_removed(server: RedisServer) -> None:
    client = old_log(server)
    with pytest.raises(StoreVersionError, match="agentspec sessions convert"):
        list(open_store(server.url).read(NS))
    client.xadd(f"{{agentspec:{NS}}}:3:log", {"s": "of a conversion", "b": 1})
    assert convert(server.url, secret=SECRET) == ALL
    keys = [key.decode() for key in client.scan_iter()]
    others = {key for key in keys if ":3:" not in key and not key.startswith("{agentspec:}:")}
    assert others == {"agentspec:namespaces", "agentspec:shards"}
    check(open_store(server.url))
    with pytest.raises(StoreVersionError, match="no log of an older release"):
        convert(server.url)


@pytest.mark.store
def test_the_logs_of_a_cluster_are_converted_on_all_its_nodes() -> None:
    with RedisClusterServers() as servers:
        servers.move(servers.slot("{agentspec:other}"), servers.servers[-1])  # the other log is on the first
        nodes = [ClusterNode("127.0.0.1", server.port) for server in servers.servers]  # type: ignore[no-untyped-call]
        with closing(RedisCluster(startup_nodes=nodes)) as client:
            write_old_log(client)
            assert convert(servers.url, secret=SECRET) == ALL
            check(open_store(servers.url))
            left = {key.decode() for key in client.scan_iter() if b":3:" not in key and b"{agentspec:}:" not in key}
            assert left == {"agentspec:namespaces", "agentspec:shards"}
        with pytest.raises(StoreVersionError, match="no log of an older release"):
            convert(servers.url)


def test_without_a_secret_of_the_operator_the_stores_own_makes_the_keys(tmp_path: Path) -> None:
    old_file(tmp_path / "server.db")
    url = f"sqlite:///{tmp_path / 'server.db'}"
    convert(url, tenant="acme")
    store = open_store(url)
    key = mac(store.secret().hex().encode(), "session", None, "unscoped")
    (record,) = [decode(entry.payload) for entry in store.read(NS, session=key)]
    assert isinstance(record, TurnRecord)
    assert (record.tenant, record.scope) == ("acme", "tenant")


def test_a_file_in_use_or_of_another_program_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "server.db"
    old_file(path)
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="stop the servers"):
            convert(f"sqlite:///{path}")
        writer.execute("ROLLBACK")
    writer.close()
    other = tmp_path / "other.db"
    sqlite3.connect(other).execute("CREATE TABLE x (y)")
    with pytest.raises(StoreError, match="not a store"):
        convert(f"sqlite:///{other}")
    with pytest.raises(StoreUnavailableError):
        convert(f"sqlite:///{tmp_path}/missing.db")
    assert not (tmp_path / "missing.db").exists()
    with pytest.raises(StoreVersionError):
        convert("memory://")


LOG, LOGS = OldLog(NS, "0" * 16), LogNames("0" * 16, SECRET.encode())


def turns(store: Store, log: str) -> list[list[int]]:
    records = (decode(entry.payload) for entry in store.read(log))
    return [record.response.tolist() for record in records if isinstance(record, TurnRecord)]


@pytest.fixture(params=["file", "redis"])
def old_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a store of the first schema, with the logs of two servers."""
    if request.param == "redis":
        running: RedisServer = request.getfixturevalue("server")
        old_log(running)
        return running.url
    old_file(tmp_path / "server.db")
    return f"sqlite:///{tmp_path / 'server.db'}"


def test_a_servers_log_is_divided_by_tenant_and_others_are_left(old_store: str) -> None:
    assert convert(old_store, secret=SECRET, log=LOG).divided == 9
    store = open_store(old_store)
    assert sorted(turns(store, LOGS.of(None))) == sorted([LONG, [8, 9], [6], [2, 3], [8], [2, 2], [5], [2]])
    assert turns(store, LOGS.of("acme")) == [[6, 7]]
    session = mac(SECRET.encode(), "session", None, "s")
    assert len(list(store.read(LOGS.of(None), session=session))) == 5
    group = mac(SECRET.encode(), "group", None, "g")
    assert len(list(store.read(LOGS.of(None), group=group))) == 1
    assert turns(store, NS) == [] and len(found(store, "other", "other")) == 1
    store.close()
    with pytest.raises(StoreVersionError, match="name them as the server did"):
        convert(old_store, secret=SECRET, log=LOG)


def test_a_log_is_divided_after_its_store_was_converted(old_store: str) -> None:
    convert(old_store, secret=SECRET)
    assert convert(old_store, secret=SECRET, log=LOG).divided == 9
    assert convert(old_store, secret=SECRET, log=OldLog("other", "0" * 16)).divided == 1
    store = open_store(old_store)
    assert len(turns(store, LOGS.of(None))) == 9 and turns(store, "other") == []
    store.close()


def test_dividing_a_log_that_was_cut_off_goes_on(old_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(old_store, secret=SECRET)
    store = open_store(old_store)
    erased: list[str] = []
    erase = type(store).erase_session

    def failing(self: Any, namespace: str, session: str, *, mark: bool = True) -> Any:
        if len(erased) == 2:
            raise StoreUnavailableError("gone")
        erased.append(session)
        return erase(self, namespace, session, mark=mark)

    monkeypatch.setattr(type(store), "erase_session", failing)
    with pytest.raises(StoreUnavailableError):
        convert(old_store, secret=SECRET, log=LOG)
    monkeypatch.undo()
    convert(old_store, secret=SECRET, log=LOG)
    said = turns(store, LOGS.of(None)) + turns(store, LOGS.of("acme"))
    assert sorted({tuple(each) for each in said}) == sorted({tuple(each) for each in all_said()})
    assert turns(store, NS) == []
    store.close()


def all_said() -> list[list[int]]:
    return [LONG, [8, 9], [6], [2, 3], [8], [2, 2], [5], [6, 7], [2]]


def test_an_old_logs_name_is_what_that_release_made_it(tmp_path: Path) -> None:
    assert old_log_name("model", None, None, "tenant") == "7f350b0d26c363f37fb70d5d52b745d30a140e22"
    names = {old_log_name("model", *rest) for rest in ((None, None, None), ("t", None, None), (None, "r", None))}
    assert len(names) == 3
    folder = tmp_path / "model"
    folder.mkdir()
    before = old_log_name(str(folder), None, None, None)
    (folder / "tokenizer.json").write_text("{}")
    assert old_log_name(str(folder), None, None, None) != before
