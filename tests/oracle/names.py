"""Name the session, group and tenant of requests and turns. Implemented by csrc/cache/entry."""

from dataclasses import dataclass
from typing import Literal

from agentspec.cache import Scope

Key = tuple[Literal["session", "group", "family"], str, str]
"""Kind, tenant and name of an entry. A session without a group uses its family, named after the family's root."""


@dataclass(frozen=True, slots=True)
class Names:
    """Hold the session, group, tenant and owners of a request or a stored turn.

    tenant: "" if none was named; None under the scope "none". shared: it also uses its named group and its tenant.
    family: the session that started this one, or the root of its family. owner: who the session and the group count
    for when memory is scarce. tenant_owner: who the tenant counts for. None keeps the present owner; the first owner is
    the tenant. stored: these are the names of a stored turn, whose owner holds for new entries only.
    """

    session: str | None
    group: str | None
    tenant: str | None
    shared: bool = True
    family: str | None = None
    owner: str | None = None
    tenant_owner: str | None = None
    stored: bool = False

    @classmethod
    def of(
        cls, scope: Scope, session: str | None, group: str | None, tenant: str | None, family: str | None
    ) -> "Names":
        """Return the names that a request uses under a scope. tenant: None if it names none."""
        if scope == "none":
            return cls(None, None, None, False)
        return cls(session, group, tenant or "", scope == "tenant", family)
