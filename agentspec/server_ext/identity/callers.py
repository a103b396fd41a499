"""Find out who sent a request, from the API key that vLLM checked and from the headers of a trusted gateway.

A principal owns sessions. It is a MAC over the API key and the values of ``principal_header`` and ``tenant_header``. So
neither key nor names travel on, and nobody without the secret can try keys against it. If none of these is given, all
callers are one principal. A caller that cannot be told apart although it should be (no key on a server that checks
keys, a header that is missing, unusable or given twice) is NOBODY, and shares nothing.
"""

import hmac
import logging
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentspec.cache.store import mac
from agentspec.errors import ConfigurationError, InvalidSessionError
from agentspec.files import expand_home
from agentspec.identifiers import check_session_id
from agentspec.server_ext.identity.server_secrets import admin_key, sha256
from agentspec.server_ext.settings import Settings

logger = logging.getLogger("vllm.agentspec")

NOBODY = "?"
"""Principal of a caller that cannot be told apart from others and should be."""

_WHITE = " \t"
"""White space around a header's value, by HTTP. Other white space is part of it."""
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LOOK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Presented:
    """Hold what an HTTP request shows of its sender.

    headers: as ASGI gives them, names in lower case. verified: whether vLLM found its key among ``--api-key``; None:
    vLLM checks no keys. prediction: the tokens that it expects as its response. quotable: the tokens that its response
    may quote, as the bytes of an int32 array. batch: whether vLLM numbers the requests that it makes of this
    one, with ``_`` in front: chats of a batch, turns of a response.
    call: tells it from others that have the same ``X-Request-Id``.
    """

    headers: Sequence[tuple[bytes, bytes]]
    verified: bool | None = None
    prediction: tuple[int, ...] = ()
    quotable: bytes = b""
    batch: bool = False
    call: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    def all(self, name: str) -> list[str]:
        """Return all values of a header, in order, as text, so that an id reads the same as in a body or a path.

        Clients send UTF-8. Bytes that aren't UTF-8 are read as Latin-1, which takes any.
        """
        return [_text(value).strip(_WHITE) for value in self._raw(name)]

    def only(self, name: str) -> str | None:
        """Return the value of a header that must be there exactly once, read as UTF-8; None if it cannot be used.

        Where a gateway adds the header, a second one may be the caller's own, so neither is trusted. Other encodings
        are refused, so that no two names read the same.
        """
        values = self._raw(name)
        try:
            return check_session_id(values[0].decode().strip(_WHITE)) if len(values) == 1 else None
        except (UnicodeDecodeError, InvalidSessionError):
            return None

    def _raw(self, name: str) -> list[bytes]:
        wanted = name.lower().encode()
        return [value for key, value in self.headers if key == wanted]

    def bearer(self) -> str | None:
        """Return the API key that the request shows, checked or not."""
        for value in self.all("authorization"):  # the first, as vLLM does
            scheme, _, key = value.partition(" ")
            return key if scheme.lower() == "bearer" and key else None
        return None


@dataclass(frozen=True, slots=True)
class Caller:
    """Name the sender of a request.

    principal: a MAC, without any ``cache_salt``; None: all callers, where nothing tells them apart; or NOBODY. tenant:
    the one that the operator or a gateway named; None: the principal is a tenant of its own.
    """

    principal: str | None = None
    tenant: str | None = None


class Callers:
    """Tell callers apart as the settings say.

    secret: key of all MACs (``server_secret``). Raises ConfigurationError for an unusable file of API keys.
    """

    def __init__(self, settings: Settings, secret: bytes) -> None:
        self._secret = secret
        self._principal_header = settings.principal_header
        self._tenant_header = settings.tenant_header
        self._tenant = settings.tenant
        self._keys = None if settings.api_keys_file is None else ApiKeysFile(settings.api_keys_file)
        self._told: set[str] = set()  # headers of which it was logged that a request lacks them

    def mac(self, kind: str, *parts: str | None) -> str:
        """Return a MAC of 32 hexadecimal digits over these parts. kind: its purpose, so that no two purposes mix."""
        return mac(self._secret, kind, *parts)

    def caller_of(self, presented: Presented | None) -> Caller:
        """Return the sender of a request. presented: None for a request that did not come by HTTP."""
        if presented is None:
            apart = self._principal_header or self._tenant_header or self._keys
            return Caller(NOBODY if apart else None, self._tenant)
        if presented.verified is False:
            return Caller(NOBODY)
        bearer = presented.bearer()
        key = bearer if presented.verified or (self._keys is not None and self._keys.has(bearer)) else None
        name = tenant = None
        if self._principal_header is not None:
            name = presented.only(self._principal_header)
            if name is None:
                return self._nobody("principal_header", self._principal_header)
        if self._tenant_header is not None and presented.all(self._tenant_header):
            tenant = presented.only(self._tenant_header)
            if tenant is None:
                return self._nobody("tenant_header", self._tenant_header)
        parts = (key, name, tenant)
        principal = None if all(part is None for part in parts) else self.mac("principal", *parts)
        of_key = None if self._keys is None else self._keys.tenant_of(key)
        return Caller(principal, of_key or tenant or self._tenant)

    def _nobody(self, setting: str, header: str) -> Caller:
        """Return a caller without a usable header. Say so once, as a gateway that does not send it costs all drafts."""
        if header not in self._told:
            self._told.add(header)
            message = "agentspec: a request without a usable header %s (%s) shares nothing; further ones are not logged"
            logger.warning(message, header, setting)
        return Caller(NOBODY)


class _UnfinishedError(Exception):
    """Tell that a file may still be written."""


class ApiKeysFile:
    """Read which API key belongs to which tenant, from a file of lines ``sha256-of-key tenant``.

    Empty lines and lines that begin with # do not count. The file is read again when it has changed; if its last line
    has no end then, only once a second look finds the same text, because it may still be written. If it is then
    empty or has an error, that is logged once, and the keys that were read before stay in force. If it cannot be read,
    as while the process has too many files open, it is tried again. Raises ConfigurationError with file and line.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.path = expand_home(path)
        except OSError as error:
            raise ConfigurationError(f"api_keys_file {path}: {error.strerror}; write the path out") from None
        self._seen = self._state()
        self._unfinished = ""  # a text without a line end, which may still be written
        self._tenants: dict[str, str] = {}
        self._tenants = self._read(first=True)
        self._looked = time.monotonic()
        self._unreadable = False  # at the latest try

    def has(self, key: str | None) -> bool:
        """Return whether the file names this API key."""
        return self.tenant_of(key) is not None

    def tenant_of(self, key: str | None) -> str | None:
        """Return the tenant of an API key, or None if the file does not name it."""
        self._refresh()
        return None if key is None else self._tenants.get(sha256(key))

    def _refresh(self) -> None:
        """Read the file again if it has changed. Looks at most once a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK_AGAIN_SECONDS:
            return
        self._looked = now
        state = self._state()
        if state == self._seen:
            return
        try:
            self._tenants = self._read()
        except _UnfinishedError:  # look again
            return
        except ConfigurationError as error:
            unreadable = isinstance(error.__cause__, OSError)
            if not (unreadable and self._unreadable):
                logger.error("agentspec: %s; the keys that were read before stay in force", error)
            self._unreadable = unreadable
            if unreadable:  # try again, because the file need not change for that
                return
        else:
            self._unreadable = False
            logger.info("agentspec: api_keys_file %s has changed: %d keys in force", self.path, len(self._tenants))
        self._seen = state

    def _state(self) -> tuple[int, ...] | None:
        """Return numbers that change when the file or its permissions do; None if they cannot be read."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _read(self, *, first: bool = False) -> dict[str, str]:
        """Return the tenant of each digest. Raises ConfigurationError. first: the file is not read again."""
        try:
            text = self.path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            remedy = "give a file of lines `sha256-of-key tenant`"
            raise ConfigurationError(f"api_keys_file {self.path}: cannot be read: {why}; {remedy}") from error
        if not text.endswith("\n") and not first and text != self._unfinished:
            self._unfinished = text
            raise _UnfinishedError
        if not text and self._tenants:  # many programs empty a file first, and without its keys all callers are one
            raise ConfigurationError(f"api_keys_file {self.path}: empty; leave a comment in it to name no key")
        tenants: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                digest, tenant = self._parse(number, line)
                if tenants.setdefault(digest, tenant) != tenant:
                    raise self._wrong(number, "this key has another tenant in a line above; name it once")
        return tenants

    def _parse(self, number: int, line: str) -> tuple[str, str]:
        """Return digest and tenant of a line. Raises ConfigurationError."""
        # Never quote the line: whoever mistakes the format may have put a key into it.
        digest, tenant = [*line.split(maxsplit=1), ""][:2]  # a tab divides as a space does
        if not _DIGEST.fullmatch(digest):
            how = "printf %s KEY | sha256sum"
            raise self._wrong(number, f"begin with the SHA-256 of an API key, 64 hexadecimal digits ({how})")
        if not tenant.strip():
            raise self._wrong(number, "no tenant; name it behind the digest, or remove the line")
        try:
            return digest.lower(), check_session_id(tenant.strip(), field="tenant")
        except InvalidSessionError as error:
            raise self._wrong(number, str(error)) from None

    def _wrong(self, number: int, why: str) -> ConfigurationError:
        return ConfigurationError(f"api_keys_file {self.path}, line {number}: {why}")


def shows_admin_key(presented: Presented | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a request shows the key in ``AGENTSPEC_ADMIN_KEY``, in a time that does not reveal the key."""
    key = admin_key(environ)
    shown = None if presented is None else presented.bearer()
    return key is not None and shown is not None and hmac.compare_digest(sha256(shown), sha256(key))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
