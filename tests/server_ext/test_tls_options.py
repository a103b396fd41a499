"""Files of `--ssl-…` that cannot be used are refused before vLLM loads the model; its own error names none of them."""

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from agentspec.errors import ConfigurationError
from agentspec.server_ext.vllm_adapter.launch import serve_arguments
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
