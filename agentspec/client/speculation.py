"""What speculation did for one reply, as the server's extension reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Speculation:
    """Counts of one request: tokens, except `steps` (decode steps of the target model) and `drafts` (those of them
    that verified a draft).

    `tokens` is what the reply has, `drafted` what was proposed and verified, `accepted` what of it was kept.
    The `_by_source` counts sum to the totals; sources are "request", "session", "group", "global"
    and "model" (tokens of a draft model).
    """

    drafted: int
    accepted: int
    steps: int
    drafts: int
    tokens: int
    accepted_by_source: dict[str, int]
    drafted_by_source: dict[str, int]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a drafted step yields, the bonus token included, as vLLM counts: 1 + accepted / drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


def read_speculation(answer: object) -> Speculation | None:
    """The server's answer as a Speculation; None when it is not one, because a count never costs a reply."""
    if not isinstance(answer, Mapping):
        return None
    try:
        return Speculation(
            drafted=int(answer["drafted"]),
            accepted=int(answer["accepted"]),
            steps=int(answer["steps"]),
            drafts=int(answer["drafts"]),
            tokens=int(answer["tokens"]),
            accepted_by_source=_counts(answer.get("accepted_by_source")),
            drafted_by_source=_counts(answer.get("drafted_by_source")),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _counts(value: Any) -> dict[str, int]:
    return {str(source): int(count) for source, count in (value or {}).items()}
