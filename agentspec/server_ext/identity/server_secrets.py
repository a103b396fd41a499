"""Keep the secrets of a server: the key of all MACs, and the administrator's key."""

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Mapping, MutableMapping

from agentspec.cache.store import Store, mac, open_store
from agentspec.errors import ConfigurationError, StoreError
from agentspec.server_ext.settings import Settings

logger = logging.getLogger("vllm.agentspec")

SECRET = "AGENTSPEC_SECRET"
ADMIN_KEY = "AGENTSPEC_ADMIN_KEY"
_HANDED_ON = "AGENTSPEC_STORE_SECRET"
"""Environment variable by which the process that starts vLLM tells others a store's secret: URL's digest, secret."""

_LEAST_SECRET = 16
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def server_secret(settings: Settings, environ: MutableMapping[str, str] = os.environ) -> bytes:
    """Return the key of this server's MACs: ``AGENTSPEC_SECRET``, else the secret that its store keeps.

    Asks the store once; the processes that this one starts find the answer in the environment. While the store is away
    the secret is a temporary one, which finds no stored session. Raises ConfigurationError for an unusable secret.
    """
    given = environ.get(SECRET)
    if given:
        return _checked_secret(SECRET, given).encode()
    store, _, secret = environ.get(_HANDED_ON, "").partition(" ")
    if store != sha256(settings.store):  # nobody asked yet, or this process started an engine on another store before
        secret = _secret_of_store(settings.store)
        environ[_HANDED_ON] = f"{sha256(settings.store)} {secret}"
    return secret.encode()


def keep_secret(store: Store, secret: bytes, environ: Mapping[str, str] = os.environ) -> None:
    """Let a store that loses its secret take this server's again, unless ``AGENTSPEC_SECRET`` gives the server's.

    secret: the server's (``server_secret``).
    """
    if not environ.get(SECRET):
        store.keep_secret(bytes.fromhex(secret.decode()))


def warn_of_other_secret(store: Store, secret: bytes) -> None:
    """Log a warning if the latest server that started on a store had another secret, and keep this one's id there.

    secret: this server's. It finds nothing that was stored under another one, which would look like a lost history.
    Asks the store, and may wait for it. Raises StoreError.
    """
    secret_id = mac(secret, "secret id")
    if store.swap_secret_id(secret_id) not in (None, secret_id):
        logger.warning(
            "agentspec: the server that started on this store before had another secret: what it has stored is not "
            "found by this one. All servers of a store need the same %s, or none",
            SECRET,
        )


def check_secrets() -> None:
    """Raise ConfigurationError if ``AGENTSPEC_SECRET`` or ``AGENTSPEC_ADMIN_KEY`` cannot be used."""
    admin_key()
    if given := os.environ.get(SECRET):
        _checked_secret(SECRET, given)


def admin_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what ``AGENTSPEC_ADMIN_KEY`` holds, None if nothing.

    Raises ConfigurationError if it is too short, or nothing that a header can hold, as with the line break of a file.
    """
    given = environ.get(ADMIN_KEY)
    if given and (given != given.strip() or _CONTROL.search(given)):
        raise ConfigurationError(f"{ADMIN_KEY}: no request can show it; leave out line breaks, and blanks at its ends")
    return _checked_secret(ADMIN_KEY, given) if given else None


def _checked_secret(variable: str, value: str) -> str:
    if len(value) < _LEAST_SECRET:
        raise ConfigurationError(f"{variable}: at least {_LEAST_SECRET} characters, e.g. from: openssl rand -hex 32")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{variable}: it is not UTF-8; take letters and digits") from None
    return value


def _secret_of_store(url: str) -> str:
    """Return the secret that a store keeps, in hexadecimal; a temporary one, with a warning, if it cannot be read."""
    store = open_store(url, to_write=True)
    try:
        return store.secret().hex()
    except StoreError as error:
        why = "turns of this run will not be found again after it; set AGENTSPEC_SECRET to be independent of the store"
        logger.warning("agentspec: the store's secret cannot be read, so %s: %s", why, error)
        return secrets.token_hex(32)
    finally:
        store.close()


def sha256(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
