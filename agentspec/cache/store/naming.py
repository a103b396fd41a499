"""Name the logs of a store, and make the keys of sessions and groups: hashes and MACs, which reveal no names."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

SCHEMA = "agentspec-log-1"
"""Part of the hash in every log's name. It stays when records get a new version, so that older logs are still found."""

_MODEL_BYTES, _TENANT_DIGITS, _APART_DIGITS = 8, 24, 16
_REMEMBERED = 1024
"""Most log names that are cached. Each request asks for its tenant's, which takes up to two MACs."""
_LOG = re.compile("([0-9a-f]{16})[.][0-9a-f]{24}([.][0-9a-f]{16})?")
"""A log's name, as LogNames makes it: the model, then what is the tenant's in the logs of every model."""
_APART = re.compile("[0-9a-f]{32}/(.*)", re.DOTALL)
"""A tenant that a LoRA adapter or a cache salt sets apart: a MAC of these, then the name of the tenant without them."""


@dataclass(frozen=True, slots=True)
class LogNames:
    """Name the logs of a model: one for each tenant, ``<16 hexadecimal digits>.<24>``, or ``<16>.<24>.<16>``.

    The first part (``find_model_key``) is the same for all logs of a model and its tokenizer, on every server. The
    second is a MAC of the tenant, so that names in a store reveal nothing about tenants. Tenants that only an adapter
    or a cache salt sets apart from another one share its second part and have a third.

    model: the first part. secret: the servers' (``server_secret``). Servers that share a store need the same one.
    """

    model: str
    secret: bytes = field(repr=False)

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of all logs of the model."""
        return f"{self.model}."

    def of(self, tenant: str | None) -> str:
        """Return the name of a tenant's log. tenant None: the one of callers who cannot be told apart."""
        return _log_of(self, tenant)

    def of_any_model(self, tenants: Iterable[str | None], names: Iterable[str]) -> list[str]:
        """Return the names of these tenants' logs for each model that has a log among ``names``."""
        models = {log[1] for name in names if (log := _LOG.fullmatch(name))}
        parts = {self.of(tenant).removeprefix(self.prefix) for tenant in tenants}
        return [f"{model}.{part}" for model in models for part in parts]

    def family(self, tenant: str | None) -> str:
        """Return the prefix of the names of a tenant's log and of the logs set apart from it."""
        apart = None if tenant is None else _APART.fullmatch(tenant)
        return self.prefix + mac(self.secret, "log", (apart[1] or None) if apart else tenant)[:_TENANT_DIGITS]


@lru_cache(maxsize=_REMEMBERED)
def _log_of(logs: LogNames, tenant: str | None) -> str:
    whole = logs.family(tenant)
    if tenant is not None and _APART.fullmatch(tenant):
        return f"{whole}.{mac(logs.secret, 'log apart', tenant)[:_APART_DIGITS]}"
    return whole


def log_family(name: str) -> str:
    """Return the part of a log's name that it shares with the logs set apart from it (`LogNames.family`)."""
    return ".".join(name.split(".", 2)[:2])


def model_key(config: str, tokenizer: str) -> str:
    """Return the key of a model, 16 hexadecimal digits. config, tokenizer: texts that identify these two."""
    return hashlib.blake2b(frame([SCHEMA, config, tokenizer]), digest_size=_MODEL_BYTES).hexdigest()


def mac(secret: bytes, kind: str, *parts: str | None) -> str:
    """Return a MAC of 32 hexadecimal digits over these parts. kind: its purpose; MACs of two kinds never match.

    The keys of sessions and groups are such MACs, so that a store's keys reveal no names.
    """
    return hmac.digest(secret, frame([kind, *parts]), "sha256")[:16].hex()


def frame(parts: Sequence[str | None]) -> bytes:
    """Encode ``parts`` unambiguously as bytes: presence, length and UTF-8 of each."""
    framed = bytearray()
    for part in parts:
        if part is None:
            framed += b"\x00"
            continue
        raw = part.encode("utf-8", "surrogatepass")
        framed += b"\x01" + len(raw).to_bytes(8, "big") + raw
    return bytes(framed)
