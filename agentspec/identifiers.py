"""Check session, group and tenant ids, for the client, the server and the cache.

Ids travel in HTTP headers, log lines and database keys. So they are short and hold no character that could end a line
or hide in a terminal. All other Unicode characters are allowed.
"""

import hashlib
import re
import unicodedata
import uuid
from urllib.parse import quote, unquote

from agentspec.errors import InvalidSessionError

MAX_ID_LENGTH = 256
"""Longest id, in characters."""

_SHOWN_OF_HELPERS = 200
"""Characters of a session's id with which the ids of its loops' sessions begin."""

_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")

_REFUSED = {
    "Cc": "control character",
    "Cs": "half of a surrogate pair",  # cannot be encoded
    "Zl": "line separator",
    "Zp": "paragraph separator",
}
"""Unicode categories of the characters that no id may hold, with their names in errors."""


def check_session_id(value: str, field: str = "session") -> str:
    """Return ``value`` if it can serve as an id of a session, group or tenant.

    Raises InvalidSessionError, naming ``field`` and the remedy, for anything but a string of 1 to 256 characters
    that is not blank and holds no control character, line end or half of a surrogate pair.
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
    """Check each id that is not None with `check_session_id`; the keyword names it in errors."""
    for name, value in ids.items():
        if value is not None:
            check_session_id(value, name)


def helpers_of(session: str) -> str:
    """Return the beginning of the ids of the sessions that one object's loops of a session use, unique."""
    return f"{prefix_of_helpers(session)}{uuid.uuid4().hex[:8]}"


def is_helper(value: str, session: str) -> bool:
    """Return whether an id is of a session that a loop of this session has used, in any process."""
    return re.fullmatch(rf"{re.escape(prefix_of_helpers(session))}[0-9a-f]{{8}}\.\d+", value) is not None


def prefix_of_helpers(session: str) -> str:
    """Return what the ids of the sessions of a session's loops begin with, in any process; ids of others may, too.

    It is the session's id, or its beginning and a hash, which no other long id with this beginning has.
    """
    begin = session
    if len(session) > _SHOWN_OF_HELPERS:
        begin = f"{session[:_SHOWN_OF_HELPERS]}.{hashlib.sha256(session.encode()).hexdigest()[:16]}"
    return f"{begin}."


def to_header(text: str) -> str:
    """Return a session id or a cache salt as the value of an HTTP header: percent-encoded UTF-8 outside visible ASCII.

    "%" is encoded too, so that two ids never share a value. Ordinary ids stay unchanged.
    """
    return quote(text, safe=_VISIBLE)


def to_path(text: str) -> str:
    """Return an id as one part of a URL's path. HTTP clients resolve "." and ".." unless they are encoded, too."""
    encoded = quote(text, safe="")
    return encoded.replace(".", "%2E") if text in (".", "..") else encoded


def from_header(value: str) -> str:
    """Return the text for which `to_header` returns this value. A value that isn't such UTF-8 is returned unchanged."""
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        return value


def _check_characters(value: str, field: str) -> None:
    for position, character in enumerate(value):
        if (kind := _REFUSED.get(unicodedata.category(character))) is not None:
            raise InvalidSessionError(f"{field}: {kind} U+{ord(character):04X} at position {position}; remove it")
