"""What a session, group or tenant id may look like.

Ids travel in HTTP headers, log lines and database keys, so they are short and free of characters that could end a
line or hide in a terminal. Everything else of Unicode is allowed.
"""

import unicodedata

from agentspec.errors import InvalidSessionError

MAX_ID_LENGTH = 256
"""Characters."""

# control characters, lone surrogates (not encodable), line and paragraph separators
_REFUSED = frozenset({"Cc", "Cs", "Zl", "Zp"})


def check_session_id(value: str, field: str = "session") -> str:
    """Return ``value`` if it can serve as an id of a session, group or tenant.

    Raises InvalidSessionError, naming ``field`` and the remedy, for anything but a string of 1 to 256 characters
    that is not blank and holds no control characters.
    """
    if not isinstance(value, str):
        raise InvalidSessionError(f"{field}: must be a string, got {type(value).__name__}")
    if not value.strip():
        raise InvalidSessionError(f"{field}: must not be empty; leave it out to have none")
    if len(value) > MAX_ID_LENGTH:
        raise InvalidSessionError(
            f"{field}: at most {MAX_ID_LENGTH} characters, got {len(value)}; use a hash of it as the id"
        )
    if not (value.isascii() and value.isprintable()):
        _check_characters(value, field)
    return value


def check_ids(**ids: str | None) -> None:
    """Check each id that is given, under its name, as `check_session_id` does."""
    for name, value in ids.items():
        if value is not None:
            check_session_id(value, name)


def key_of(tenant: str | None, name: str | None) -> str | None:
    """Name a session or group so that no two pairs of tenant and name share a key; the tenant's length frames it."""
    if name is None:
        return None
    return f"-{name}" if tenant is None else f"{len(tenant)}:{tenant}{name}"


def _check_characters(value: str, field: str) -> None:
    for position, character in enumerate(value):
        if unicodedata.category(character) in _REFUSED:
            raise InvalidSessionError(
                f"{field}: control character U+{ord(character):04X} at position {position}; remove it"
            )
