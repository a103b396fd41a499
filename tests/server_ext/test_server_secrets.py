"""Test the secrets of a server: the key of all MACs, the administrator's key, and a store with another secret."""

import logging
import os
from contextlib import closing
from pathlib import Path

import pytest

from agentspec.cache.store import NewEntry, open_store
from agentspec.errors import ConfigurationError
from agentspec.server_ext.identity.server_secrets import (
    admin_key,
    check_secrets,
    keep_secret,
    server_secret,
    warn_of_other_secret,
)
from agentspec.server_ext.pricing import EngineLimits
from agentspec.server_ext.settings import Settings, load_settings
from agentspec.server_ext.vllm_adapter.worker.engine_builder import build_engine
from agentspec.testing.redis_server import RedisServer
from tests.server_ext.vllm_configs import DENSE, engine_args
from tests.store.helpers import wait_until


def test_the_environments_secret_is_used_and_not_handed_on() -> None:
    environ = {"AGENTSPEC_SECRET": "0123456789abcdef"}
    assert server_secret(Settings(store="memory://"), environ) == b"0123456789abcdef"
    assert len(environ) == 1


@pytest.mark.parametrize("variable", ["AGENTSPEC_SECRET", "AGENTSPEC_ADMIN_KEY"])
def test_a_short_one_is_refused_without_being_shown(variable: str) -> None:
    environ = {variable: "hunter2"}
    with pytest.raises(ConfigurationError, match=f"{variable}: at least 16") as error:
        server_secret(Settings(store="memory://"), environ)
        admin_key(environ)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("variable", ["AGENTSPEC_SECRET", "AGENTSPEC_ADMIN_KEY"])
def test_one_that_is_not_utf_8_is_refused_at_the_start(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise such a secret would be a traceback at the start, and such a key HTTP 500 for every wrong key."""
    monkeypatch.setenv(variable, os.fsdecode(b"\xff" * 20))
    with pytest.raises(ConfigurationError, match=f"{variable}: it is not UTF-8"):
        check_secrets()


@pytest.mark.parametrize("key", ["0123456789abcdef\n", " 0123456789abcdef", "01234567\r\n89abcdef", " " * 20])
def test_an_admin_key_that_no_header_can_hold_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may end with a line break, for one. The server would start, and no key would be the administrator's."""
    monkeypatch.setenv("AGENTSPEC_ADMIN_KEY", key)
    with pytest.raises(ConfigurationError, match="AGENTSPEC_ADMIN_KEY: no request can show it") as error:
        check_secrets()
    assert "0123" not in str(error.value)


def test_each_store_has_a_secret_and_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Settings(store=f"sqlite:///{tmp_path / name}.db") for name in ("one", "other"))
    environ: dict[str, str] = {}
    first = server_secret(one, environ)
    second = server_secret(other, environ)  # an engine that this process starts later
    assert second != first == server_secret(one, environ) and len(first) == 64
    monkeypatch.setattr("agentspec.server_ext.identity.server_secrets.open_store", None)
    assert server_secret(one, dict(environ)) == first  # in a process that it started
    assert str(tmp_path) not in str(environ)


def test_a_store_that_is_away_costs_stored_sessions_and_not_the_start(caplog: pytest.LogCaptureFixture) -> None:
    away = Settings(store="redis://user:hunter2@127.0.0.1:1/0")
    environ: dict[str, str] = {}
    secret = server_secret(away, environ)
    assert len(secret) == 64 and server_secret(away, environ) == secret
    assert "AGENTSPEC_SECRET" in caplog.text and "hunter2" not in caplog.text
    assert server_secret(away, {}) != secret


def test_a_store_that_is_emptied_takes_the_servers_secret_again_but_not_the_environments() -> None:
    with RedisServer() as server:
        settings, environ = Settings(store=server.url), dict[str, str]()
        for given in ({}, {"AGENTSPEC_SECRET": "0123456789abcdef"}):
            server.client().flushall()
            secret = server_secret(settings, environ | given)
            with closing(open_store(server.url)) as store:
                keep_secret(store, secret, given)
                store.append("0123", [NewEntry("s", b"1")])
                server.client().flushall()
                store.append("0123", [NewEntry("s", b"2")])
                held = server.client().get("agentspec:secret")
                assert held == (None if given else bytes.fromhex(secret.decode()))
                if not given:
                    assert server_secret(settings, {}) == secret  # a server that starts now gets the same


def test_no_secret_is_in_the_settings_that_vllm_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSPEC_SECRET", "0123456789abcdef")
    monkeypatch.setenv("AGENTSPEC_ADMIN_KEY", "fedcba9876543210")
    shown = repr(load_settings({}, os.environ))
    assert "0123456789abcdef" not in shown and "fedcba9876543210" not in shown


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_server_with_another_secret_says_that_it_finds_nothing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart with another AGENTSPEC_SECRET, or with the first one, would look like a lost history."""
    with RedisServer() as server:
        url = server.url if kind == "redis" else f"sqlite:///{tmp_path}/store.db"
        with closing(open_store(url)) as store:
            own = store.secret().hex().encode()
            for secret in (own, own):
                warn_of_other_secret(store, secret)
            assert not caplog.messages
            warn_of_other_secret(store, b"0123456789abcdef")
            (line,) = caplog.messages
            assert "had another secret" in line and "AGENTSPEC_SECRET" in line
            assert "0123456789abcdef" not in line and own.decode() not in line
            warn_of_other_secret(store, b"0123456789abcdef")
            assert len(caplog.messages) == 1
            warn_of_other_secret(store, own)  # two servers with two secrets share nothing
            assert len(caplog.messages) == 2


def test_an_engine_that_starts_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_args(tmp_path / "model", DENSE, max_model_len=1024).create_engine_config()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    settings = Settings(store=f"sqlite:///{tmp_path}/store.db")

    def starts_with_a_warning(secret: str) -> bool:
        monkeypatch.setenv("AGENTSPEC_SECRET", secret)
        engine = build_engine(config, settings, max_draft=16, limits=EngineLimits())
        wait_until(lambda: engine.stats()["store"]["jobs"] == 0)
        engine.close()
        return any("had another secret" in line for line in caplog.messages)

    assert not starts_with_a_warning("0123456789abcdef")
    assert starts_with_a_warning("fedcba9876543210")
