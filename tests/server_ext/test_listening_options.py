"""Options of how a server listens are checked before vLLM starts, which takes long.

vLLM's own error names no file of TLS, and it says that a port is taken when it has imported everything.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from agentspec.errors import ConfigurationError
from agentspec.server_ext.vllm_adapter.startup.launch import check_port, serve_arguments
from tests.store.test_redis_tls import certificate

CERT, KEY = "--ssl-certfile", "--ssl-keyfile"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two pairs of certificate and key, a file that holds neither, and one with both."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        certificate(tmp_path / name)
    (tmp_path / "junk.pem").write_text("junk")
    (tmp_path / "both.pem").write_bytes(b"".join((tmp_path / "own" / f"{n}.pem").read_bytes() for n in ("key", "cert")))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((CERT, "own/cert.pem", KEY, "own/none.pem"), f"{KEY} .*own/none.pem: there is no such file"),
        ((CERT, "own", KEY, "own/key.pem"), f"{CERT} .*own: it cannot be read"),
        ((CERT, "both.pem", "--ssl-ca-certs", "none.pem"), "--ssl-ca-certs .*none.pem: there is no such file"),
        ((CERT, "own/cert.pem", KEY, "other/key.pem"), f"{CERT} .*cert.pem {KEY} .*key.pem: .*its own key are needed"),
        ((CERT, "junk.pem", KEY, "own/key.pem"), f"{CERT} .*junk.pem {KEY} .*key.pem: .*its own key are needed"),
        ((CERT, "own/cert.pem"), f"{CERT} .*own/cert.pem: .*its own key are needed"),
        ((KEY, "own/key.pem"), f"{KEY}: give the certificate of this key, too, as {CERT}"),
    ],
)
def test_unusable_files_are_named(folder: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        serve_arguments([each if each.startswith("--") else str(folder / each) for each in options], {}, 8, {})


@pytest.mark.parametrize("options", [(CERT, "own/cert.pem", KEY, "own/key.pem"), (CERT, "both.pem")])
def test_usable_files_are_passed_on(folder: Path, options: tuple[str, ...]) -> None:
    given = [each if each.startswith("--") else str(folder / each) for each in options]
    assert serve_arguments(given, {}, 8, {})[: len(given)] == given


def test_a_key_with_a_password_and_a_pipe_are_left_to_vllm(folder: Path) -> None:
    """vLLM asks for the password, and a pipe can be read only once."""
    key = serialization.load_pem_private_key((folder / "own" / "key.pem").read_bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    encrypted = key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret"))
    (folder / "locked.pem").write_bytes(encrypted)
    os.mkfifo(folder / "pipe.pem")
    for name in ("locked.pem", "pipe.pem"):
        given = [CERT, str(folder / "own" / "cert.pem"), KEY, str(folder / name)]
        assert serve_arguments(given, {}, 8, {})[:4] == given


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which another program listens, as vLLM does: at all addresses."""
    with socket.create_server(("", 0)) as listener:
        yield str(listener.getsockname()[1])


def test_a_taken_port_is_named(taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"port: {taken}\n")
    message = f"--port {taken}: another program listens there; give another --port"
    for options in (
        ("--port", taken),
        (f"--port={taken}", "--host", "127.0.0.1"),
        ("--port", "0", "--port", taken, "--host", "0.0.0.0"),
        ("--config", str(file)),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check_port(["m", *options])
    monkeypatch.setattr("agentspec.server_ext.vllm_adapter.startup.launch._DEFAULT_PORT", taken)
    with pytest.raises(ConfigurationError, match=message):
        check_port(["m"])


def test_a_port_that_vllm_may_take_is_left_to_it(taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is free, not used at all, or the options leave open which one it is."""
    check_port(["m", "--port", "0"])
    for options in (
        ("--uds", "vllm.sock"),
        ("--headless",),
        ("--data-parallel-size", "2"),
        ("-dp=2",),
        ("--host", "localhost"),
        ("--por", "0"),
        ("--hos", "127.0.0.2"),
        ("--api-server-count", "0"),
        ("--grpc",),
    ):
        check_port(["m", "--port", taken, *options])
    file = tmp_path / "serve.yaml"
    file.write_text(f"port: {taken}\n")
    monkeypatch.setattr("agentspec.server_ext.vllm_adapter.startup.launch._DEFAULT_PORT", taken)
    check_port(["m", "--por", "0"])
    file.write_text("por: 0\n")
    check_port(["m", "--config", str(file)])
    for port in ("x", "65536", "-1"):
        check_port(["m", "--port", port])


def test_a_port_is_free_for_a_second_api_server_of_one_server() -> None:
    """Two of vLLM's API servers share a port (SO_REUSEPORT), and a port may be bound at another address."""
    with socket.socket() as shared, socket.socket() as other:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for listener, host in ((shared, "127.0.0.1"), (other, "127.0.0.2")):
            listener.bind((host, 0))
            listener.listen()
        check_port(["m", "--host", "127.0.0.1", "--port", str(shared.getsockname()[1])])
        check_port(["m", "--host", "127.0.0.1", "--port", str(other.getsockname()[1])])
