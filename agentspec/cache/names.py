"""Hold the session, group, tenant and family of a request, and make the core's keys of these names."""

from dataclasses import dataclass
from typing import NamedTuple, overload

from agentspec.cache.types import SCOPES, FinishedTurn, Scope
from agentspec.errors import InvalidInputError
from agentspec.identifiers import check_ids, check_session_id

UNNAMED_TENANT = ""
"""The core's name for the tenant of all requests that name no tenant."""


class CoreNames(NamedTuple):
    """Hold the names of a request, a turn or an entry as the core takes them: sessions, groups and families as keys."""

    session: str | None
    group: str | None
    tenant: str | None
    """the tenant's own name; None: it uses no tenant's index, session or group"""
    shared: bool
    """whether its named group and its tenant are used"""
    family: str | None
    """the session that started this one, or the root of its family"""


@overload
def key_of(tenant: str | None, name: str) -> str: ...
@overload
def key_of(tenant: str | None, name: str | None) -> str | None: ...
def key_of(tenant: str | None, name: str | None) -> str | None:
    """Return a key for a session or group: the tenant's length, the tenant, the name. Each pair has its own key."""
    if name is None:
        return None
    return f"-{name}" if tenant is None else f"{len(tenant)}:{tenant}{name}"


def name_in(tenant: str | None, key: str) -> str:
    """Return the name from which `key_of` made a key."""
    return key[1 if tenant is None else len(f"{len(tenant)}:{tenant}") :]


def session_key(tenant: str | None, session: str) -> str:
    """Return the core's key of a session. Raises InvalidSessionError for a name that cannot be used."""
    check_session_id(session)
    check_ids(tenant=tenant)
    return key_of(tenant, session)


def names_to_load(tenant: str | None, session: str | None, group: str | None, family: str | None) -> CoreNames:
    """Return the core's names of a session, a named group, a family or, where none is given, a tenant's corpus.

    Raises InvalidSessionError, and InvalidInputError where more than one is given.
    """
    check_ids(session=session, group=group, family=family, tenant=tenant)
    if sum(name is not None for name in (session, group, family)) > 1:
        raise InvalidInputError(f"session={session!r}, group={group!r}, family={family!r}: name one of them, or none")
    return CoreNames(
        key_of(tenant, session), key_of(tenant, group), tenant or UNNAMED_TENANT, True, key_of(tenant, family)
    )


@dataclass(frozen=True, slots=True)
class Names:
    """Hold the session, group, tenant and family of a request or a turn, as the caller named them.

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
        """Return the names of a turn. Raises as the class does, and InvalidInputError for any other object."""
        if not isinstance(turn, FinishedTurn):
            raise InvalidInputError(f"turn: give a FinishedTurn, not {type(turn).__name__}")
        check_ids(owner=turn.owner)
        return cls(turn.session, turn.group, turn.tenant, turn.scope, turn.family)

    def for_core(self) -> CoreNames:
        """Return the names as the core takes them: none of them under scope "none"."""
        if self.scope == "none":
            return CoreNames(None, None, None, False, None)
        session, group, family = (key_of(self.tenant, name) for name in (self.session, self.group, self.family))
        return CoreNames(session, group, self.tenant or UNNAMED_TENANT, self.scope == "tenant", family)
