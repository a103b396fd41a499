"""Talk to a server's routes from the command line: its address, its key, and errors that name the remedy."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
import typer

from agentspec.addresses import is_loopback, proxy_refusal, without_secrets
from agentspec.errors import ConfigurationError, InvalidInputError, StoreUnavailableError
from agentspec.files import create_private, replacing, resolved
from agentspec.protocol import ROUTE

DEFAULT_URL = "http://127.0.0.1:8000"

UrlOption = Annotated[
    str,
    typer.Option(
        help="The server's address: http://host:8000, or unix:///path/to/socket for vLLM's --uds. Its key comes from"
        " the environment variable AGENTSPEC_API_KEY."
    ),
]
HeaderOption = Annotated[
    list[str] | None, typer.Option("--header", "-H", help="A header of your gateway: 'Name: value'. Can be repeated.")
]
TokenizerOption = Annotated[
    str | None, typer.Option(help="Tokenizer, if the server was given one; else the model's is taken.")
]
TokenizerRevisionOption = Annotated[
    str | None, typer.Option(help="Revision of the tokenizer, if the server was given one.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Revision of the model, if the server was given one.")]
OverridesOption = Annotated[
    str | None, typer.Option("--hf-overrides", help="JSON, as the server was given it; it tells the model from others.")
]

_SECONDS = 60.0
_OTHER_RELEASE = "is it of another release of agentspec?"
_TRUST = "; if you trust this server, name a file with its authority's certificate in the variable SSL_CERT_FILE"
_ENCODE = "give http:// or https://, then user:password@host, with special characters of both percent-encoded"
_BAD_HEADER = (
    "a header cannot be sent: give --header and AGENTSPEC_API_KEY as UTF-8, without control characters, and no space in"
    " a header's name"
)
_UNIX = "unix://"
_WHITE = " \t"
"""What a server drops around a header's value. Other spaces tell two names of a gateway apart."""


@contextmanager
def server_at(url: str, headers: list[str] | None, seconds: float = _SECONDS) -> Iterator[httpx.Client]:
    """Open a client whose paths start at ``/v1/agentspec``. seconds: longest wait for the next bytes of an answer.

    Raises ConfigurationError for a URL or header that cannot work, and StoreUnavailableError, also from calls in the
    block, where no server answers.
    """
    sent = _headers_of(headers or [])
    if not url.startswith(_UNIX) and any("\ud800" <= sign <= "\udfff" for sign in url):
        raise ConfigurationError(f"--url {without_secrets(url)}: it is not UTF-8")
    try:
        way: dict[str, Any] = {}
        if url.startswith(_UNIX):
            way["transport"] = httpx.HTTPTransport(uds=url.removeprefix(_UNIX))
        elif is_loopback(httpx.URL(url).host):  # what a proxy reaches there is not this machine
            way = {"trust_env": False, "verify": httpx.create_ssl_context()}  # of the environment, only certificates
        base = str(httpx.URL(root_of(url) + f"/v1/{ROUTE}"))  # an InvalidURL below is a proxy's
        with _client(base_url=base, headers=sent, timeout=seconds, **way) as client:
            yield client
    except httpx.LocalProtocolError:  # its text quotes the value, which may be a key
        raise ConfigurationError(_BAD_HEADER) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        wrong = str(error)
        if "@" in url:  # the error may quote a part of a password
            wrong = _ENCODE
        elif isinstance(error, httpx.UnsupportedProtocol):
            wrong = f"give it with http:// or https://, as in {DEFAULT_URL}"
        raise ConfigurationError(f"--url {without_secrets(url)}: {wrong}") from None
    except httpx.HTTPError as error:
        why = f"{error or type(error).__name__}{_remedy(url, error)}"
        raise StoreUnavailableError(f"{without_secrets(url)} does not answer: {why}") from None


def _client(**options: Any) -> httpx.Client:
    """Return a new HTTP client. Raises ConfigurationError for a proxy of the environment that cannot be used."""
    try:
        return httpx.Client(**options)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        if (refusal := proxy_refusal(error)) is None:
            raise
        raise ConfigurationError(refusal) from None  # the error may quote a part of a password


def _headers_of(headers: list[str]) -> httpx.Headers:
    """Return the headers of each call: those given, and the key. Raises ConfigurationError for one that cannot work."""
    given = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip(_WHITE):
            raise ConfigurationError("--header: give it as 'Name: value'")
        if name.strip(_WHITE).lower() == "content-length":  # h11's error for a wrong one would be a traceback
            raise ConfigurationError("--header: Content-Length is counted here; leave it out")
        given[name.strip(_WHITE)] = value.strip(_WHITE)
    if key := os.environ.get("AGENTSPEC_API_KEY"):
        given["Authorization"] = f"Bearer {key}"
    try:
        return httpx.Headers(given, encoding="utf-8")  # servers read it, too: names in headers need not be ASCII
    except UnicodeEncodeError:
        raise ConfigurationError(_BAD_HEADER) from None


def _remedy(url: str, error: httpx.HTTPError) -> str:
    """Return what to add to an error of a connection; "" if nothing is known about its cause."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return _TRUST
    if isinstance(error, httpx.ConnectError) and "refused" in str(error):
        if (proxy := _proxy_of(url)) is not None:
            return f"; the environment sends this through the proxy {without_secrets(proxy)}: does it run?"
        return "; is a server running there? Name its address with --url"
    if url.startswith("https:") and "SSL" in str(error):
        return "; if this server does not use TLS, give http://"
    if url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return "; if this server uses TLS, give https://"
    return ""


def _proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a server, as httpx reads it; None without one."""
    parts, proxies = urlsplit(root_of(url)), getproxies()
    host = parts.hostname or ""
    if url.startswith(_UNIX) or is_loopback(host) or proxy_bypass(host):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


def ask(server: httpx.Client, method: str, path: str, expected: str, **more: Any) -> httpx.Response:
    """Return the server's answer, a JSON object that has the field `expected`.

    Raises ConfigurationError without the right key, StoreUnavailableError for a 503, and InvalidInputError for any
    other error, in the server's words, and for an answer of something else, such as a gateway's page.
    """
    answer = server.request(method, path, **more)
    if answer.status_code == 401:
        if os.environ.get("AGENTSPEC_API_KEY"):
            raise ConfigurationError("the server refuses the API key in the environment variable AGENTSPEC_API_KEY")
        raise ConfigurationError("the server wants an API key: put it into the environment variable AGENTSPEC_API_KEY")
    if answer.is_error:
        why = _reason(answer)
        if why in ("", "Not Found"):
            why = f"HTTP {answer.status_code}; is this a server with agentspec?"
            if answer.status_code == 404:
                why += " Plain `vllm serve` needs VLLM_PLUGINS=agentspec"
        raise (StoreUnavailableError if answer.status_code == 503 else InvalidInputError)(why)
    if not _has(answer, expected):
        location = answer.headers.get("Location")
        sent_on = f" sends on to {without_secrets(location)}" if location else ""
        raise InvalidInputError(f"HTTP {answer.status_code}{sent_on}; is this a server with agentspec?")
    return answer


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise InvalidInputError where an answer lacks a field that is read, or has something else in it."""
    try:
        yield
    except KeyError as error:
        raise InvalidInputError(f"{what}: the server's answer lacks {error}; {_OTHER_RELEASE}") from None
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"{what}: the server's answer is not understood ({error}); {_OTHER_RELEASE}") from None


def shown_time(seconds: float, *, today: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time of the epoch as local date and time. today: format of a time of this day."""
    try:
        at = datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):  # imported from a file that says so
        return f"{seconds:.0f} s"
    return at.strftime(today if at.date() == datetime.now().date() else "%Y-%m-%d %H:%M:%S")


def _has(answer: httpx.Response, field: str) -> bool:
    try:
        said = answer.json()
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and field in said


def _reason(answer: httpx.Response) -> str:
    """Return what a server says about its error: vLLM's `error.message`, or FastAPI's `detail`; "" without either."""
    try:
        said = answer.json()
        return str(said["error"]["message"] if "error" in said else said["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read; warn of one that others may read already.

    Raises OSError. A file that cannot be written whole, as on a full disk, is left as it was.
    """
    if path.exists() and not path.is_file():  # a pipe or a device; /dev/stdout leads to a pipe that has no name
        path.write_bytes(data)
        return
    target = resolved(path)
    warning = create_private(target) if target.exists() else None
    with replacing(path) as part:
        create_private(part)
        part.write_bytes(data)
        if target.exists():
            part.chmod(stat.S_IMODE(target.stat().st_mode))
    if warning:
        typer.echo(f"warning: {warning}", err=True)


def root_of(url: str) -> str:
    """Return a server's address without ``/v1`` at its end; behind a Unix socket any host's."""
    return "http://localhost" if url.startswith(_UNIX) else url.rstrip("/").removesuffix("/v1")


def served_key(
    model: str,
    tokenizer: str | None,
    *,
    revision: str | None,
    tokenizer_revision: str | None,
    hf_overrides: str | None,
    given: str | None,
) -> str:
    """Return the key under which a server of this model stores turns. given: its setting ``model_key``.

    Raises ConfigurationError for ``hf_overrides`` that are no JSON object.
    """
    from agentspec.server_ext.persistence.model_key import find_model_key, overrides_text  # needs the core
    from agentspec.server_ext.settings import json_object

    return find_model_key(
        model,
        tokenizer,
        revision=revision,
        tokenizer_revision=tokenizer_revision,
        overrides=overrides_text(json_object("--hf-overrides", hf_overrides or "{}")),
        given=given,
    )
