"""Say how the drafts of a reply fared: rates, and the tokens of its decode steps. Loads no other module."""

from typing import NamedTuple


class DraftRates:
    """Add the rates of drafting to a class that counts tokens, decode steps, drafted and accepted tokens."""

    __slots__ = ()

    tokens: int
    steps: int
    drafted: int
    accepted: int

    @property
    def tokens_per_step(self) -> float:
        """Return the mean tokens of a decode step, with or without a draft; 0 without steps."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Return accepted / drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class DraftedToken(NamedTuple):
    """Hold a token's text, and the source that drafted it; None for the model itself.

    text: None if the server does not tell a rejected token, because it may quote another caller.
    """

    text: str | None
    source: str | None


class DecodeStep(NamedTuple):
    """Hold one decode step: the tokens that it added to the reply, and the drafted ones that it rejected."""

    tokens: tuple[DraftedToken, ...]
    rejected: tuple[DraftedToken, ...]
