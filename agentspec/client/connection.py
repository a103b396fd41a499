"""Make the OpenAI client of an agent's client. Check its options first, with errors that name them and quote no key.

The HTTP client would refuse wrong options at the first call, as "Connection error", with the key in the traceback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar
from urllib.parse import urlsplit

import openai

from agentspec.addresses import proxy_refusal, without_secrets
from agentspec.client.messages import THOUGHTS
from agentspec.client.option_checks import check_header_value, check_headers, check_mapping, check_retries
from agentspec.client.session_naming import spelled_here
from agentspec.errors import ConfigurationError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_UNKNOWN = re.compile("unknown|unrecogni[sz]ed|unexpected|unsupported|extra|not (permitted|allowed)", re.IGNORECASE)
_OUR_FIELD = re.compile(r"\b(session_id|vllm_xargs)\b")
_THOUGHTS = re.compile(rf"\b({'|'.join(THOUGHTS)})\b")
_REASONS = ("loc", "msg", "message", "param", "detail", "error", "errors")
"""Fields of an error's body that say what is wrong. Others, such as FastAPI's `input`, quote the request."""
_DEEPEST_REASON = 10  # levels of an error's body
_LONGEST_REASON = 300  # characters of a note
_TOO_LONG = re.compile(
    "context.?(length|window)|max_model_len|tokens is too large"
    "|max_(completion_)?tokens.*(valid range|above maximum|less than or equal)",
    re.IGNORECASE,
)
_NO_KEY = "EMPTY"  # the placeholder for a server that wants no key
_ROUTES = ("/chat/completions", "/completions", "/responses", "/messages")
_BROKEN = frozenset({"ReadError", "RemoteProtocolError"})
"""Names of the HTTP client's errors after it has connected; names, because it is httpx or httpx2."""


class ConnectionOptions(TypedDict, total=False):
    """List the OpenAI client's options. Both clients pass on these, and any others, unchanged."""

    organization: str | None
    project: str | None
    timeout: float | openai.Timeout | httpx.Timeout | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None


class ClientOptions(ConnectionOptions, total=False):
    """List the options of AgentClient."""

    http_client: openai.DefaultHttpxClient | httpx.Client | None


class AsyncClientOptions(ConnectionOptions, total=False):
    """List the options of AsyncAgentClient."""

    http_client: openai.DefaultAsyncHttpxClient | httpx.AsyncClient | None


def connect(make: Callable[..., T], base_url: str | None, api_key: str | None, options: Mapping[str, Any]) -> T:
    """Return an OpenAI client, which takes options that are None from its environment variables.

    make: openai.OpenAI or openai.AsyncOpenAI. With a base_url but no key it gets a placeholder key, because it insists
    on one. Raises ConfigurationError or InvalidInputError, which name the option or variable that cannot work.
    """
    check_retries(options.get("max_retries"))
    for name in ("default_headers", "default_query"):
        check_mapping(name, options.get(name))
    headers: Mapping[Any, str] = options.get("default_headers") or {}
    check_headers("default_headers", headers)
    if headers:
        options = {**options, "default_headers": spelled_here(headers)}
    address, name = _given("base_url", base_url, "OPENAI_BASE_URL")
    if address is not None:
        check_address(name, address)
    for option, variable in (("organization", "OPENAI_ORG_ID"), ("project", "OPENAI_PROJECT_ID")):
        value, name = _given(option, options.get(option), variable)
        if value:
            check_header_value(name, value)
    key, name = _given("api_key", api_key, "OPENAI_API_KEY")
    if key and not callable(key):
        check_header_value(name, key)
    if api_key is None and not key and address is not None:
        api_key = _NO_KEY
    try:
        return make(**{**options, "base_url": base_url, "api_key": api_key})
    except OSError as error:  # HTTPX reads certificates of authorities at this point
        named = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)}
        if not named:
            raise
        shown = ", ".join(f"{name}={value}" for name, value in named.items())
        raise ConfigurationError(f"{shown}: no certificates can be read there ({error}); name a PEM file") from error
    except Exception as error:  # of HTTPX: ImportError, ValueError, or InvalidURL of httpx or httpx2
        kind = type(error).__name__
        refusal = proxy_refusal(error) if kind in ("ImportError", "ValueError", "InvalidURL") else None
        if refusal is None:
            raise
        raise ConfigurationError(refusal) from None  # the error may quote a part of a password


@contextmanager
def remedies_noted(connection: openai.OpenAI | openai.AsyncOpenAI) -> Iterator[None]:
    """Add a note to an error of the OpenAI client: which address, key or connection failed, and what to do.

    connection: the OpenAI client that makes the block's calls.
    """
    try:
        with _openai_errors():
            yield
    except openai.APITimeoutError as error:
        error.add_note(f"agentspec: {_address_of(connection)} did not answer in time")
        raise
    except openai.APIConnectionError as error:
        address = _address_of(connection)
        if type(error.__cause__).__name__ in _BROKEN:
            error.add_note(
                f"agentspec: the connection to {address} broke before the answer was complete: try the call again, and"
                " see the server's log if it breaks again"
            )
            raise
        error.add_note(f"agentspec: {address} cannot be reached: wait until its server is up, or give another base_url")
        raise
    except openai.AuthenticationError as error:
        error.add_note(
            f"agentspec: give the key of {_address_of(connection)} as api_key, or in the variable OPENAI_API_KEY"
        )
        raise
    except openai.NotFoundError as error:
        if remedy := _remedy_of_address(_address_of(connection), connection.base_url.path):
            error.add_note(f"agentspec: {remedy}")
        raise
    except openai.APIStatusError as error:
        for note in _notes_of(error, connection.api_key):
            error.add_note(f"agentspec: {note}")
        raise


@contextmanager
def _openai_errors() -> Iterator[None]:
    """Raise the OpenAI client's own error where an older one (2.25) lets HTTPX's through while it reads a stream."""
    try:
        yield
    except Exception as error:
        import httpx  # takes longer than the rest of the client, and a newer OpenAI client has no need of it

        if not isinstance(error, httpx.TransportError):
            raise
        kind = openai.APITimeoutError if isinstance(error, httpx.TimeoutException) else openai.APIConnectionError
        request: Any = error.request  # of HTTPX, which such a client uses
        raise kind(request=request) from error


def _notes_of(error: openai.APIStatusError, key: str) -> Iterator[str]:
    """Yield the server's reason for an error if its text lacks it, and what to do. key: the API key."""
    reason = _reason_in(error.body)
    said = f"{error} {reason}"
    if reason and str(error) == f"Error code: {error.status_code}":  # the client quotes a text `message` alone
        yield f"the server says: {_shortened(reason, key)}"
    if error.status_code in (400, 422) and _UNKNOWN.search(said):
        if _OUR_FIELD.search(said):
            yield 'a gateway may refuse fields that it does not know: give session_tags="header"'
        elif _THOUGHTS.search(said):
            yield "the server refuses a reasoning model's thoughts: give thoughts=False"
        elif "max_completion_tokens" in said and "max_tokens" not in said:  # OpenAI names it in place of the other
            yield "the server does not know max_completion_tokens, which a budget of tokens sets: give max_tokens=…"
    if wants_too_much(error):
        yield (
            "the messages and the answer that was asked for do not fit into the model's context: ask for fewer tokens,"
            " or go on in session.child() with the messages that you choose"
        )


def wants_too_much(error: openai.APIStatusError) -> bool:
    """Return whether a call was refused because it wants more tokens than the context, or the model, allows."""
    return error.status_code in (400, 422) and _TOO_LONG.search(f"{error} {_reason_in(error.body)}") is not None


def _reason_in(body: object, depth: int = 0) -> str:
    """Return what the body of an error says is wrong; "" if it says nothing. depth: levels of the body above this."""
    if body is None or depth > _DEEPEST_REASON:
        return ""
    if isinstance(body, Mapping):
        said = [_reason_in(body[name], depth + 1) for name in _REASONS if name in body]
        if not said and depth == 0:
            said = [f"{name} {_reason_in(value, 1)}" for name, value in body.items()]
        return ": ".join(filter(None, said))
    if isinstance(body, list):
        parts = [_reason_in(part, depth + 1) for part in body]
        is_path = all(isinstance(part, str | int) for part in body)  # such as FastAPI's `loc`
        return (".".join if is_path else "; ".join)(filter(None, parts))
    return str(body)


def _shortened(reason: str, key: str) -> str:
    """Return a server's reason as a note has it: on one line, not long, and without the API key."""
    text = " ".join((reason.replace(key, "***") if len(key) > len(_NO_KEY) else reason).split())
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"


def _remedy_of_address(address: str, path: str) -> str | None:
    """Return what to do about an address below which nothing is found; None if the address is not at fault."""
    if path in ("", "/"):  # no server reads a model's name there
        return f"most servers answer below /v1: give {address}/v1 as base_url"
    for route in _ROUTES:
        if address.endswith(route):
            return f"the address of a route is no base_url: give {address.removesuffix(route)}"
    return None


def _address_of(connection: openai.OpenAI | openai.AsyncOpenAI) -> str:
    return without_secrets(str(connection.base_url).rstrip("/"))


def check_address(name: str, given: object) -> None:
    """Raise ConfigurationError, which names the option, unless its value is the address of an HTTP server."""
    text = str(given)
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or the IPv6 address not valid
        usable = False
    if not usable or isinstance(given, bytes) or not text.isprintable() or " " in text:
        raise ConfigurationError(
            f"{name}: an address such as http://localhost:8000/v1 is needed, not {without_secrets(text)!r}"
        )


def _given(name: str, option: object, variable: str) -> tuple[Any, str]:
    """Return the value of an option, or of its environment variable if it is None, and the name of the one used."""
    return (os.environ.get(variable), variable) if option is None else (option, name)
