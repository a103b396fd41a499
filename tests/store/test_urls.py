"""Test store URLs: what opens, what is refused and how, and that no password is ever shown."""

import os
from pathlib import Path

import pytest

from agentspec.cache.store import (
    MemoryStore,
    NewEntry,
    RedisStore,
    SQLiteStore,
    can_write,
    default_store_url,
    open_store,
    redact,
    snapshot_path,
)
from agentspec.errors import ConfigurationError, StoreError, StoreUnavailableError, StoreURLError
from tests.store.helpers import NS


def test_memory() -> None:
    assert isinstance(open_store("memory://"), MemoryStore)


def test_sqlite_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    absolute = f"sqlite:///{tmp_path}/new/folders/a.db"
    assert absolute.startswith("sqlite:////")
    for url, path in (
        (absolute, tmp_path / "new" / "folders" / "a.db"),
        ("sqlite:///relative/b.db", tmp_path / "relative" / "b.db"),
        ("sqlite:///~/c.db", tmp_path / "home" / "c.db"),
        ("sqlite:///d%20?@.db", tmp_path / "d%20?@.db"),
    ):
        store = open_store(url)
        assert isinstance(store, SQLiteStore)
        store.append(NS, [NewEntry("s", b"x")])
        store.close()
        assert path.is_file()


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:1/3?prefix=team.a",
        "redis://user:p%40ss@[::1]:6379/0",
        "rediss://host:6380/1?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=2&prefix=x",
    ],
)
def test_redis_opens_without_being_contacted(url: str) -> None:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    store.close()


def test_the_parts_of_a_redis_url_arrive() -> None:
    store = open_store("redis://user:p%40ss@somewhere:7000/3?prefix=team")
    assert isinstance(store, RedisStore)
    settings = store._client._connected().connection_pool.connection_kwargs
    assert (settings["host"], settings["port"], settings["db"]) == ("somewhere", 7000, 3)
    assert (settings["username"], settings["password"]) == ("user", "p@ss")
    assert settings["socket_timeout"] <= 0.25
    assert settings["socket_connect_timeout"] <= 0.25
    assert store._shards(NS)[0].tag == "{team:0123abcd}:3:"


@pytest.mark.parametrize(
    ("url", "database"), [("unix:///3?db=3", 3), ("unix:///3", 0), ("unix:///run/redis.sock?db=2", 2)]
)
def test_a_sockets_database_is_an_option_and_never_its_path(url: str, database: int) -> None:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    settings = store._client._connected().connection_pool.connection_kwargs
    assert (settings["path"], settings["db"]) == (url.partition("?")[0].removeprefix("unix://"), database)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "unknown kind"),
        ("memory", "unknown kind"),
        ("memory://x", "unknown kind"),
        ("postgres://u:hunter2@host/db", "unknown kind"),
        ("/var/lib/store.db", "unknown kind"),
        ("sqlite://store.db", "three slashes"),
        ("sqlite:///", "no file named"),
        ("sqlite:///folder/", "no file named"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite:///a\x00b", "NUL"),
        ("sqlite:///a\udcff.db", "UTF-8"),  # as Python reads a Latin-1 name
        ("sqlite:///~nobody-of-this-name/x.db", "home"),
        ("redis://", "no host"),
        ("redis://:hunter2@/0", "no host"),
        ("redis://host:http/0", "port"),
        ("redis://host:99999/0", "port"),
        ("redis://host/zero", "database"),
        ("redis://host/0/1", "database"),
        ("redis://host/0?socket_timeout=60", "socket_timeout"),
        ("redis://host/0?prefix=a{b}", "prefix"),
        ("redis://host/0?prefix=", "prefix"),
        ("redis://[::1/0", "malformed"),
        ("unix://", "socket"),
        ("unix://host/path", "socket"),
        ("redis://user:hun/ter2@host:1/0", "percent-encoded|port"),
        ("redis://user:12/hunter2@host/0", "percent-encoded"),
        ("redis://user:12?hunter2=1@host/0", "percent-encoded"),
        ("redis://user:12#hunter2@host/0", "percent-encoded"),
        ("redis://user:hunter2\udcff@host/0", "not UTF-8"),  # as os.environ has it
        ("redis://host\udcff/0", "not UTF-8"),
    ],
)
def test_other_urls_are_refused_with_the_forms_that_work(url: str, says: str) -> None:
    with pytest.raises(StoreURLError, match=says) as error:
        open_store(url)
    assert "redis+sentinel://host:port" in str(error.value)
    assert "sqlite:////absolute/path.db" in str(error.value)
    assert "hunter2" not in str(error.value)
    assert "ter2" not in str(error.value)


def test_a_url_that_is_no_string() -> None:
    with pytest.raises(ConfigurationError, match="string"):
        open_store(Path("x.db"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pass@host:1/0?prefix=p", "redis://***@host:1/0?…"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://user:pa@ss@host/0", "redis://***@host/0"),
        ("redis://user:pa/ss@host/0", "redis://***@host/0"),
        ("redis://user:pa?ss@host/0", "redis://***@host/0"),
        ("user:pass@host", "***@host"),
        ("sqlite:///home/a@b?c.db", "sqlite:///home/a@b?c.db"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_an_unreachable_server_is_an_error_without_the_password() -> None:
    store = open_store("redis://user:hunter2@127.0.0.1:1/0")
    for call in (
        store.ping,
        lambda: store.append(NS, [NewEntry("s", b"x")]),
        lambda: list(store.read(NS)),
        lambda: store.sessions(NS),
        lambda: store.erase_session(NS, "s"),
    ):
        with pytest.raises(StoreUnavailableError, match=r"redis://\*\*\*@127.0.0.1:1/0") as error:
            call()
        assert isinstance(error.value, StoreError)
        assert "hunter2" not in str(error.value)
        assert error.value.__cause__ is None


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user whom the machine does not know, as in OpenShift's containers."""

    def unknown(_: object) -> object:
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_without_a_home_folder_the_default_store_is_away_and_redis_has_no_snapshot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert default_store_url("server.db").endswith("/server.db")
    default = default_store_url("server.db")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_store_url("server.db") == default and "relative" not in default
    assert snapshot_path("redis://host/0", "log", 0) is not None
    without_home(monkeypatch)
    with pytest.raises(StoreUnavailableError, match="set XDG_DATA_HOME"):
        default_store_url("server.db")
    assert snapshot_path("redis://host/0", "log", 0) is None
    assert "XDG_DATA_HOME" in caplog.text


def test_a_home_folder_that_is_not_utf_8_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", os.fsdecode(b"/data-\xff"))
    with pytest.raises(StoreUnavailableError, match=r"/data-.*: not UTF-8.*set XDG_DATA_HOME"):
        default_store_url("server.db")


def test_each_part_of_a_redis_has_a_snapshot_of_its_own_whatever_the_password() -> None:
    urls = ("redis://h/0", "redis://h/1", "redis://h/0?prefix=a", "redis://h/0?prefix=b", "unix:///s", "unix:///s?db=1")
    assert len({snapshot_path(url, "log", 0) for url in urls}) == len(urls)
    same = ("redis://h", "redis://h/0", "redis://h:6379/0", "redis://u:p@h/0", "redis://h/0?shards=2")
    assert len({snapshot_path(url, "log", 0) for url in same}) == 1
    one, other = (snapshot_path(f"redis://u:{password}@h/0?prefix=a", "log", 0) for password in ("1", "2"))
    assert one == other != snapshot_path("redis://u:1@h/0?prefix=b", "log", 0)


def test_an_sqlite_file_has_one_snapshot_whichever_link_leads_to_it(tmp_path: Path) -> None:
    folder, link, loop = tmp_path / "data", tmp_path / "link.db", tmp_path / "loop.db"
    folder.mkdir()
    link.symlink_to(folder / "server.db")
    loop.symlink_to(loop)
    (tmp_path / "linked").symlink_to(folder)
    snapshot = folder / "server.db-log-0.snapshot"
    for path in (folder / "server.db", link, tmp_path / "linked" / "server.db", folder / ".." / "data" / "server.db"):
        assert snapshot_path(f"sqlite:///{path}", "log", 0) == snapshot  # the same before the file exists
    open_store(f"sqlite:///{link}").close()
    assert (folder / "server.db").is_file()
    assert snapshot_path(f"sqlite:///{loop}", "log", 0) is not None
    with pytest.raises(StoreUnavailableError):
        open_store(f"sqlite:///{loop}")


def test_where_a_file_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert can_write(file) and can_write(tmp_path / "new" / "folders" / "a.db")
    assert not can_write(file / "a.db") and not can_write(file / "new" / "a.db")
