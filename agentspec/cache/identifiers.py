"""Check session, group and tenant ids, and make the core's keys of them.

Ids travel in HTTP headers, log lines and database keys. So they are short and hold no character that could end a line
or hide in a terminal. All other Unicode characters are allowed.
"""

import unicodedata
from dataclasses import dataclass

from agentspec.cache.types import SCOPES, FinishedTurn, Scope
from agentspec.errors import InvalidInputError, InvalidSessionError

MAX_ID_LENGTH = 256
"""Longest id, in characters."""

UNNAMED_TENANT = ""
"""The core's name for the tenant of all requests that name no tenant."""

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
    """Check each id that is not None with `check_session_id`; the keyword names it in errors."""
    for name, value in ids.items():
        if value is not None:
            check_session_id(value, name)


def key_of(tenant: str | None, name: str | None) -> str | None:
    """Return a key for a session or group: the tenant's length, the tenant, the name. No two pairs share a key."""
    if name is None:
        return None
    return f"-{name}" if tenant is None else f"{len(tenant)}:{tenant}{name}"


def name_in(tenant: str | None, key: str) -> str:
    """Return the name of which `key_of` made a key."""
    return key[1 if tenant is None else len(f"{len(tenant)}:{tenant}") :]


def keys_to_load(
    tenant: str | None, session: str | None, group: str | None, family: str | None
) -> tuple[str | None, str | None, str | None, str]:
    """Return the core's keys of a session, a named group, a family or, where none is given, a tenant's corpus.

    Raises InvalidSessionError, and InvalidInputError where more than one is given.
    """
    check_ids(session=session, group=group, family=family, tenant=tenant)
    if sum(name is not None for name in (session, group, family)) > 1:
        raise InvalidInputError(f"session={session!r}, group={group!r}, family={family!r}: name one of them, or none")
    return key_of(tenant, session), key_of(tenant, group), key_of(tenant, family), tenant or UNNAMED_TENANT


@dataclass(frozen=True, slots=True)
class Names:
    """Hold what a request or a turn belongs to, as the caller named it.

    family: the session that started this one, or the root of its family; None: none is known.
    Raises InvalidSessionError for a name that cannot be used, and InvalidInputError for an unknown scope.
    """

    session: str | None
    group: str | None
    tenant: str | None
    scope: Scope
    family: str | None = None

    def __post_init__(self) -> None:
        check_ids(session=self.session, group=self.group, tenant=self.tenant, family=self.family)
        if self.scope not in SCOPES:
            raise InvalidInputError(f"scope={self.scope!r}: give one of {', '.join(SCOPES)}")

    @classmethod
    def of(cls, turn: FinishedTurn) -> "Names":
        """Return the names of a turn. Raises InvalidSessionError and InvalidInputError."""
        check_ids(owner=turn.owner)
        return cls(turn.session, turn.group, turn.tenant, turn.scope, turn.family)

    def keys(self) -> tuple[str | None, str | None, str | None, bool, str | None]:
        """Return the core's keys of session, group and tenant, whether the tenant is shared, and the family's key."""
        if self.scope == "none":
            return None, None, None, False, None
        session, group, family = (key_of(self.tenant, name) for name in (self.session, self.group, self.family))
        return session, group, self.tenant or UNNAMED_TENANT, self.scope == "tenant", family


def _check_characters(value: str, field: str) -> None:
    for position, character in enumerate(value):
        if unicodedata.category(character) in _REFUSED:
            raise InvalidSessionError(
                f"{field}: control character U+{ord(character):04X} at position {position}; remove it"
            )
