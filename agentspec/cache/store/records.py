"""What is stored: turns on the server's side, messages on the client's."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.types import Scope

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TurnRecord:
    """One finished turn of a session, with only what is new in it.

    The turn's prompt is ``previous_context[:kept] + prompt_tail``, where the previous context is prompt and response
    of the session's turn before. The arrays must not change once the record is handed on.
    """

    session: str
    """Empty: a turn of no session, kept for its tenant's global tree."""
    kept: int
    """Tokens of the session's previous context that this prompt repeats."""
    prompt_tail: Int32
    """Token ids [P], what the prompt adds."""
    response: Int32
    """Token ids [N]."""
    created: float
    """Seconds since the epoch."""
    gap: bool = False
    """True: a turn of this session was lost just before this one, so ``kept`` counts a context not in the log."""
    group: str | None = None
    """Sessions of one group draw on each other's responses."""
    tenant: str | None = None
    """Who shares the turn. Requests without API key, cache salt and adapter have None, which is a tenant too."""
    scope: Scope | None = None
    """What the turn was given to. None: not known, for the record was written before scopes were."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TurnRecord):
            return NotImplemented
        return (
            (self.session, self.group, self.tenant, self.scope, self.kept, self.created, self.gap)
            == (other.session, other.group, other.tenant, other.scope, other.kept, other.created, other.gap)
            and np.array_equal(self.prompt_tail, other.prompt_tail)
            and np.array_equal(self.response, other.response)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """One message of a session as the client saw it."""

    session: str
    message: dict[str, Any]
    """A JSON-able object."""
    created: float
    """Seconds since the epoch."""


Record = TurnRecord | MessageRecord
