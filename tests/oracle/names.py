"""Name what requests and turns belong to. Implemented by csrc/cache/entry."""

from dataclasses import dataclass
from typing import Literal

from agentspec.cache import Scope

Key = tuple[Literal["session", "group", "family"], str, str]
"""Kind, tenant, name. A session without a group uses its family's, under the name of the family's root."""


@dataclass(frozen=True, slots=True)
class Names:
    """Hold what a request or a stored turn belongs to.

    tenant: "" for all that name none, None for what belongs to none. shared: it uses its named group and its tenant.
    family: the session that started this one, or the root of its family. owner, tenant_owner: whom session and group,
    and the tenant, count for from now on; None: as before, at first the tenant. stored: a stored turn's names, whose
    owner holds for new entries only.
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
        """Return the names under a scope. tenant: None where none is named."""
        if scope == "none":
            return cls(None, None, None, False)
        return cls(session, group, tenant or "", scope == "tenant", family)
