"""Test how commands reach a server: addresses, certificates, headers, and the answers of other servers."""

import re
import socket
import ssl
import sys
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.cli.test_cli import Program, agentspec
from tests.server_ext.session_server import ADA, Server, start
from tests.store.test_redis_tls import certificate

from .test_sessions import server

__all__ = ["agentspec", "server", "start"]


def test_a_server_that_does_not_answer_is_named(agentspec: Program) -> None:
    status, printed = agentspec("sessions", "list", "--url", "http://127.0.0.1:1")
    assert status == 2 and "http://127.0.0.1:1 does not answer" in printed
    assert printed.endswith("; is a server running there? Name its address with --url\n")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_machine_is_not_asked_through_a_proxy(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY")
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        status, printed = agentspec("sessions", "list", "--url", f"http://{host}:{server.getsockname()[1]}")
    assert status == 2 and "does not answer" in printed and "refused" not in printed


def test_a_proxy_that_does_not_answer_is_named(agentspec: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:hunter2@127.0.0.1:1")
    status, printed = agentspec("sessions", "list", "--url", "http://elsewhere.invalid")
    assert (
        status == 2 and "through the proxy http://***@127.0.0.1:1: does it run?" in printed and "hunter2" not in printed
    )
    monkeypatch.setenv("no_proxy", "elsewhere.invalid")
    assert "proxy" not in agentspec("sessions", "list", "--url", "http://elsewhere.invalid")[1]


UNUSABLE_PROXIES = [
    ("socks5://user:hunter2@127.0.0.1:1", r"""; pip install "httpx\[socks\]", or unset"""),
    ("socks://user:hunter2@127.0.0.1:1", "; write http://, https:// or socks5://"),
    ("http://user:hunter2@127.0.0.1:port", "; its port is no number"),
    ("http://user:hun/ter2@127.0.0.1:1", "; its port is no number.* percent-encoded"),
]


@pytest.mark.parametrize(("proxy", "remedy"), UNUSABLE_PROXIES)
def test_a_proxy_that_cannot_be_used_is_named(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, proxy: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # as where it is not installed
    monkeypatch.setenv("ALL_PROXY", proxy)
    status, printed = agentspec("sessions", "list", "--url", "http://elsewhere.invalid")
    assert status == 2 and re.match(rf"agentspec: ALL_PROXY={proxy.partition(':')[0]}://\*\*\*@127", printed)
    assert re.search(remedy, printed) and not re.search("hun|ter2", printed)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    assert "ALL_PROXY" not in agentspec("sessions", "list", "--url", "http://elsewhere.invalid")[1]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "unix:///none.sock"])
def test_a_server_of_this_machine_needs_no_proxy_that_can_be_used(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:1")
    status, printed = agentspec("sessions", "list", "--url", url)
    assert status == 2 and "does not answer" in printed and "PROXY" not in printed


def test_an_address_that_is_not_utf_8_is_refused(agentspec: Program) -> None:
    status, printed = agentspec("sessions", "list", "--url", "http://localhost:1/\udcff")
    assert status == 2 and "it is not UTF-8" in printed


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1:8000", "htp://localhost"])
def test_an_address_without_a_scheme_is_refused_with_an_example(agentspec: Program, url: str) -> None:
    status, printed = agentspec("sessions", "list", "--url", url)
    assert status == 2 and printed.startswith(f"agentspec: --url {url}: ") and "http:// or https://" in printed


def test_a_server_behind_a_unix_socket_is_asked(
    agentspec: Program, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTSPEC_API_KEY", ADA)
    monkeypatch.chdir(tmp_path)  # whose path may be longer than a socket's may be
    path = "vllm.sock"
    served = uvicorn.Server(uvicorn.Config(server.http.app, uds=path, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    server.wait(lambda: served.started)
    try:
        for command in (("sessions", "list"), ("sessions", "show", "fix-42"), ("top", "--once")):
            status, printed = agentspec(*command, "--url", f"unix://{path}")
            assert status == 0 and "fix-42" in printed
    finally:
        served.should_exit = True
        thread.join()
    status, printed = agentspec("sessions", "list", "--url", f"unix://{path}")
    assert status == 2 and f"unix://{path} does not answer" in printed


@pytest.mark.parametrize("command", [("sessions", "list"), ("top", "--once")])
@pytest.mark.parametrize(
    "url",
    [
        "http://ada:hunter2@127.0.0.1:1/v1?key=hunter2",
        "htp://ada:hunter2@localhost",
        "http://ada:hunter2@localhost:x",
        "http://ada:hunter2#@localhost",
    ],
)
def test_a_password_in_the_address_is_not_shown(agentspec: Program, command: tuple[str, ...], url: str) -> None:
    status, printed = agentspec(*command, "--url", url)
    assert status == 2 and "://***@" in printed and "hunter2" not in printed


def test_a_certificate_that_is_not_trusted_is_refused_with_the_remedy(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    refused = "self-signed certificate"

    def greet(server: socket.socket) -> None:
        with suppress(OSError):  # the client hangs up, at once or when it expects an answer
            context.wrap_socket(server.accept()[0], server_side=True).close()

    for trusted in (False, True):
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=greet, args=(server,), daemon=True).start()
            status, printed = agentspec("sessions", "list", "--url", f"https://127.0.0.1:{server.getsockname()[1]}")
        assert status == 2 and "does not answer" in printed
        assert (refused in printed) == ("SSL_CERT_FILE" in printed) == (not trusted)


@pytest.mark.parametrize(("asked", "spoken"), [("https", "http"), ("http", "https")])
def test_a_server_with_tls_that_is_asked_without_is_told_apart(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, spoken: str
) -> None:
    """The reverse is, too: an https:// address of a server that speaks plain HTTP."""
    monkeypatch.setenv("COLUMNS", "200")
    certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    def answer(server: socket.socket) -> None:
        with server.accept()[0] as client, suppress(OSError):  # ssl.SSLError is one
            if spoken == "https":
                context.wrap_socket(client, server_side=True)
            else:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        status, printed = agentspec("sessions", "list", "--url", f"{asked}://127.0.0.1:{server.getsockname()[1]}")
    assert status == 2 and "does not answer" in printed and f"give {spoken}://" in printed


@pytest.mark.parametrize(
    ("header", "key", "message"),
    [
        ("X-User: jürgen", "", "does not answer"),
        ("X User: a", "", "--header"),
        ("X-User: a", "secret\n", "--header"),
        ("X-User: a", "secret\udcff", "--header"),  # how Python spells a byte that is not UTF-8
        ("X-User: \udcff", "secret", "--header"),
        ("content-length: 5", "secret", "--header: Content-Length"),
    ],
)
def test_a_header_that_cannot_be_sent_is_named_without_the_key(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, header: str, key: str, message: str
) -> None:
    monkeypatch.setenv("AGENTSPEC_API_KEY", key)
    monkeypatch.setenv("COLUMNS", "200")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        threading.Thread(target=lambda: gone.accept()[0].close(), daemon=True).start()
        status, printed = agentspec("sessions", "list", "--url", url, "-H", header)
    assert status == 2 and message in printed and "secret" not in printed


@pytest.mark.parametrize(
    ("typed", "sent"),
    [("X-User: \t ada \t", b"ada"), ("X-User:ada\u00a0", b"ada\xc2\xa0"), ("X-User: \u2003ada", b"\xe2\x80\x83ada")],
)
def test_a_header_loses_the_spaces_that_a_server_drops_and_no_others(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, typed: str, sent: bytes
) -> None:
    """Otherwise two names that a gateway tells apart would be one here."""
    made = httpx.Client
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.extend(value for name, value in request.headers.raw if name.lower() == b"x-user")
        return httpx.Response(200, json={"sessions": []})

    monkeypatch.setattr(httpx, "Client", lambda **options: made(**options, transport=httpx.MockTransport(answer)))
    assert agentspec("sessions", "list", "-H", typed)[0] == 0
    assert seen == [sent]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(302, headers={"Location": "https://login.example"}),
        httpx.Response(200, text="<html>Sign in</html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"status": "ok"}),
    ],
)
def test_what_another_server_answers_is_no_success(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: httpx.Response
) -> None:
    """A gateway that wants a login redirects every request, so nothing was erased."""
    made = httpx.Client
    transport = httpx.MockTransport(lambda request: answer)
    monkeypatch.setattr(httpx, "Client", lambda **options: made(**options, transport=transport))
    file = tmp_path / "fix-42.json"
    for command in (("list",), ("show", "s"), ("export", "s", str(file)), ("import", "s", __file__), ("delete", "s")):
        status, printed = agentspec("sessions", *command)
        assert status == 2 and "is this a server with agentspec?" in printed and "erased" not in printed
    assert not file.exists()
    status, printed = agentspec("top", "--once")
    assert status == 2 and "is this a server with agentspec?" in printed
