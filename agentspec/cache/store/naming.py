"""Names logs and frames what is hashed: tokens of another model or tokenizer can never be drafted from."""

import hashlib
from collections.abc import Sequence

from agentspec.cache.identifiers import check_session_id
from agentspec.errors import ConfigurationError

SCHEMA = "agentspec-log-1"
"""Part of every namespace: a change of what records mean starts new logs."""


def namespace(model: str, tokenizer: str, tenant: str | None) -> str:
    """Return the name of a log, as 40 hexadecimal digits: that of a model, a tokenizer and the tenant of a server.

    Where the operator named no tenant, the records say whose they are (``TurnRecord.tenant``).

    ``tokenizer`` must identify the vocabulary itself (a digest of its files, not its path). ``tenant`` None differs
    from every named tenant. BLAKE2b over length-framed parts, so no two triples share the hashed bytes.
    Raises ConfigurationError for an empty model or tokenizer, InvalidSessionError for an unusable tenant.
    """
    for field, value in (("model", model), ("tokenizer", tokenizer)):
        if not value:
            raise ConfigurationError(f"{field}: must not be empty; it keeps the logs of different models apart")
    if tenant is not None:
        check_session_id(tenant, field="tenant")
    return hashlib.blake2b(frame([SCHEMA, model, tokenizer, tenant]), digest_size=20).hexdigest()


def frame(parts: Sequence[str | None]) -> bytes:
    """``parts`` as bytes that no other sequence gives: each as present or absent, length, UTF-8."""
    framed = bytearray()
    for part in parts:
        if part is None:
            framed += b"\x00"
            continue
        raw = part.encode("utf-8", "surrogatepass")
        framed += b"\x01" + len(raw).to_bytes(8, "big") + raw
    return bytes(framed)
