"""What every store promises, on each of them; Redis is a real server."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentspec.cache.store import Store, open_store
from agentspec.errors import InvalidInputError, StoreError
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS

KINDS = ("memory", "sqlite", "redis")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not about timeouts, and a busy test machine can hold a server up for long."""
    monkeypatch.setattr("agentspec.cache.store.redis_store.SOCKET_TIMEOUT", 10.0)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        opened = open_store(f"{server.url}?prefix={tmp_path.name.replace('[', '-').replace(']', '-')[:64]}")
    else:
        opened = open_store("memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/a/b/store.db")
    yield opened
    opened.close()


def payloads(store: Store, session: str | None = None, *, newest: int | None = None) -> list[bytes]:
    return [entry.payload for entry in store.read(NS, session=session, newest=newest)]


def fill(store: Store, count: int, sessions: int = 3) -> list[tuple[str, bytes]]:
    entries = [(f"s{number % sessions}", b"payload %d" % number) for number in range(count)]
    for start in range(0, count, 100):
        store.append(NS, entries[start : start + 100])
    return entries


def test_entries_come_back_in_order_and_exact(store: Store) -> None:
    raw = bytes(range(256)) * 3
    store.append(NS, [("a", raw), ("b", b""), ("a", b"2")])
    store.append(NS, [("a", b"3")])
    assert [(entry.session, entry.payload) for entry in store.read(NS)] == [
        ("a", raw),
        ("b", b""),
        ("a", b"2"),
        ("a", b"3"),
    ]
    assert payloads(store, "a") == [raw, b"2", b"3"]
    assert payloads(store, "b") == [b""]
    assert payloads(store, "nobody") == []


def test_cursors_sort_as_the_log_and_are_the_same_in_a_session(store: Store) -> None:
    fill(store, 300)
    sequences = [entry.sequence for entry in store.read(NS)]
    assert sequences == sorted(set(sequences))
    assert [entry.sequence for entry in store.read(NS, session="s1")] == sequences[1::3]


@pytest.mark.parametrize("session", [None, "s1"])
def test_after_goes_on_where_another_read_ended(store: Store, session: str | None) -> None:
    fill(store, 400)
    entries = list(store.read(NS, session=session))
    for index in (0, 63, 127, 128, len(entries) - 1):
        rest = list(store.read(NS, session=session, after=entries[index].sequence))
        assert rest == entries[index + 1 :]


@pytest.mark.parametrize("session", [None, "s1"])
@pytest.mark.parametrize("newest", [0, 1, 2, 64, 128, 129, 10_000])
def test_newest_gives_the_last_ones_oldest_first(store: Store, session: str | None, newest: int) -> None:
    fill(store, 400)
    entries = list(store.read(NS, session=session))
    assert list(store.read(NS, session=session, newest=newest)) == (entries[-newest:] if newest else [])
    behind = entries[-5:]
    assert list(store.read(NS, session=session, after=entries[-6].sequence, newest=newest)) == (
        behind[-newest:] if newest else []
    )


def test_a_read_ends_with_what_was_there_when_it_began(store: Store) -> None:
    entries = fill(store, 300)
    reading = store.read(NS)
    first = next(reading)
    store.append(NS, [("s0", b"later")])
    assert [first.payload, *(entry.payload for entry in reading)] == [payload for _, payload in entries]


def test_namespaces_are_apart(store: Store) -> None:
    store.append(NS, [("s", b"ours")])
    store.append("other", [("s", b"theirs")])
    assert payloads(store) == [b"ours"]
    assert [entry.payload for entry in store.read("other", session="s")] == [b"theirs"]
    assert store.remove_session("other", "s") == 1
    assert payloads(store, "s") == [b"ours"]
    assert store.sessions("other") == []


def test_removing_a_session_is_exact(store: Store) -> None:
    entries = fill(store, 600)
    last = list(store.read(NS))[-1].sequence
    assert store.remove_session(NS, "s1") == 200
    assert payloads(store, "s1") == []
    assert payloads(store) == [payload for session, payload in entries if session != "s1"]
    assert store.sessions(NS) == ["s0", "s2"]
    assert store.remove_session(NS, "s1") == 0
    store.append(NS, [("s1", b"again")])
    (entry,) = store.read(NS, session="s1")
    assert entry.payload == b"again"
    assert entry.sequence > last  # cursors of other readers stay valid


def test_sessions_are_listed_once_and_any_unicode_id_works(store: Store) -> None:
    names = ["b", "a", "ünïcode/{x}:*", "日本語 ", "%s' OR 1=1 --", ""]
    for name in names * 2:
        store.append(NS, [(name, name.encode())])
    assert store.sessions(NS) == sorted(names)
    for name in names:
        assert payloads(store, name) == [name.encode()] * 2


def test_an_empty_append_and_an_empty_log(store: Store) -> None:
    store.append(NS, [])
    assert payloads(store) == []
    assert payloads(store, newest=3) == []
    assert store.sessions(NS) == []
    store.ping()


def test_a_large_record(store: Store) -> None:
    payload = bytes(range(256)) * 1600  # about 100 000 tokens
    store.append(NS, [("s", payload)])
    assert payloads(store) == [payload]


def test_threads_may_share_it(store: Store) -> None:
    def work(name: str) -> None:
        for number in range(20):
            store.append(NS, [(name, b"%d" % number)] * 3)
            assert sum(1 for _ in store.read(NS, session=name)) == 3 * (number + 1)

    errors: list[BaseException] = []

    def caught(name: str) -> None:
        try:
            work(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(1 for _ in store.read(NS)) == 240


@pytest.mark.parametrize("namespace", ["", "a{b}", "x" * 129, "a b", "é"])
def test_an_unusable_namespace_is_refused(store: Store, namespace: str) -> None:
    with pytest.raises(InvalidInputError, match="namespace"):
        store.append(namespace, [("s", b"x")])
    with pytest.raises(InvalidInputError, match="namespace"):
        store.read(namespace)


def test_unusable_bounds_are_refused_by_name(store: Store) -> None:
    with pytest.raises(InvalidInputError, match="after"):
        store.read(NS, after="not a cursor")
    with pytest.raises(InvalidInputError, match="newest"):
        store.read(NS, newest=-1)


def test_a_closed_store_says_so(store: Store) -> None:
    store.append(NS, [("s", b"x")])
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.append(NS, [("s", b"x")])
    with pytest.raises(StoreError, match="closed"):
        list(store.read(NS))
    with pytest.raises(StoreError, match="closed"):
        store.ping()
