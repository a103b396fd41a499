"""Define the questions about sessions that the HTTP routes ask the engines, where `SessionAdmin` answers them.

vLLM's RPC carries plain values alone, so a question travels as the name of its class and its values (``packed``).
Sessions are named by their keys (`Identity.session`), which the routes make for the caller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args


@dataclass(frozen=True, slots=True)
class ListSessions:
    """Ask for the ``count`` sessions used last, as dicts, and all used at the same moment as the last of them.

    tenant: stands for itself and for the tenants that an adapter or a cache salt sets apart from it.
    anybody: whether to list the sessions of any tenant and principal.
    before: only sessions used before this time (epoch seconds); None: any.
    prefix: only sessions whose ids begin so; None: any.
    """

    tenant: str | None
    principal: str | None
    anybody: bool
    count: int
    before: float | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class ReadSession:
    """Ask for a session's records, under whichever tenant they were stored, and those yet to be stored."""

    session: str


@dataclass(frozen=True, slots=True)
class ImportRecords:
    """Ask to append the records that a session lacks, and to load it. The answer is their number, in a list.

    only_new: whether to leave a session that exists as it is. owner: of the tenant's log (`Identity.log_owner`). begun:
    the end of the tenant's log (`FindEnd`) before any engine imported, because an erasure behind it ends the import;
    None: no other engine imports.
    """

    session: str
    tenant: str | None
    records: Sequence[bytes]
    only_new: bool
    owner: str = ""
    begun: str | None = None


@dataclass(frozen=True, slots=True)
class FindEnd:
    """Ask for the cursor at which a tenant's log ends, in a list."""

    tenant: str | None


@dataclass(frozen=True, slots=True)
class FindTenants:
    """Ask for the tenants under which a session holds text."""

    session: str


@dataclass(frozen=True, slots=True)
class EraseSession:
    """Ask to remove a session everywhere. tenants: those known to hold it. The answer is an `Erasure` as a dict."""

    session: str
    tenants: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class ApplyErasures:
    """Ask to apply what other processes have erased by now. The answer is None."""


SessionQuestion = ListSessions | ReadSession | ImportRecords | FindEnd | FindTenants | EraseSession | ApplyErasures

_CLASSES = {kind.__name__: kind for kind in get_args(SessionQuestion)}


def packed(question: SessionQuestion) -> tuple[str, dict[str, Any]]:
    """Return a question as plain values. ``asdict`` would copy the many records of an import, one by one."""
    return type(question).__name__, {part.name: getattr(question, part.name) for part in fields(question)}


def unpacked(name: str, values: Mapping[str, Any]) -> SessionQuestion:
    """Return the question that was ``packed`` into these values."""
    question: SessionQuestion = _CLASSES[name](**values)
    return question
