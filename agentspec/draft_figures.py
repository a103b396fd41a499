"""Define figures of a reply's drafts: rates, and the tokens of its decode steps. Imports no other agentspec module."""

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
    """Hold a token's text and its source.

    text: None for a rejected token that the server keeps secret, because it may quote another caller. source: the
    source that drafted the token; None: the model itself gave it.
    """

    text: str | None
    source: str | None


class DecodeStep(NamedTuple):
    """Hold one decode step: the tokens that it added to the reply, and the drafted ones that it rejected."""

    tokens: tuple[DraftedToken, ...]
    rejected: tuple[DraftedToken, ...]
