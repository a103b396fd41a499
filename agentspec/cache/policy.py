"""DraftPolicy: what to draft and how long it is worth it, by odds of acceptance that are learned while serving.

A draft grows token by token. At each position every source (request, session, group, global) proposes the two most
frequent successors of its longest match. A resume point proposes one more: the text behind a place that was being
copied when the copy went wrong once. A table that counts acceptance gives each proposal its probability, by its origin,
match length, agreement among the matched places and depth. A reranker corrects the likeliest four: a logistic
regression, learned online, over hashed features that see which tokens these are. The likeliest token is taken. The
draft is cut where it brings the most expected tokens for the step's price, (1 + sum of cumulative probabilities) /
(1 + cost * length), and left out where none pays. Every candidate at a position that verified tokens reveal is learned
from.
"""

from dataclasses import dataclass

from agentspec.errors import ConfigurationError

MAX_DRAFT = 128
"""Tokens: vLLM's rejection sampler verifies no longer draft."""
DEFAULT_COST = 0.03
"""Price of verifying one more token, as a share of a decode step, where none is given and none measured yet."""


@dataclass(frozen=True, slots=True)
class FixedRule:
    """Parameters of ArcticInference's drafting rule, as it means them; `DraftPolicy.fixed` explains them.

    Raises ConfigurationError for a value out of range.
    """

    max_depth: int = 64
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        _check("max_depth", self.max_depth, 2, 256)
        _check("max_spec_factor", self.max_spec_factor, 0.0, 1e6)
        _check("max_spec_offset", self.max_spec_offset, -1e6, 1e6)
        _check("min_token_prob", self.min_token_prob, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """Settings of the drafting rule.

    cost: price of verifying one more token, as a share of a decode step; higher means shorter drafts. None: measured
    while serving, and DEFAULT_COST until then. max_draft: most tokens in a draft. min_match: shortest context, in
    tokens, that may be drafted from. rerank: whether the reranker corrects the table; without it drafting costs about
    half the time and finds less. prior_weight: observations that the prior odds count for. memory: observations
    of one kind after which the older ones count half. learning_rate: of the reranker. rule: set by `fixed`; the other
    settings but max_draft are not used then. Raises ConfigurationError for a value out of range.
    """

    cost: float | None = None
    max_draft: int = MAX_DRAFT
    min_match: int = 1
    rerank: bool = True
    prior_weight: float = 200.0
    memory: float = 1000.0
    learning_rate: float = 0.5
    rule: FixedRule | None = None

    def __post_init__(self) -> None:
        if self.cost is not None:
            _check("cost", self.cost, 0.0, 10.0)
        _check("max_draft", self.max_draft, 0, MAX_DRAFT)
        _check("min_match", self.min_match, 1, 256)
        _check("prior_weight", self.prior_weight, 0.1, 1e6)
        _check("memory", self.memory, 2.0, 1e12)
        _check("learning_rate", self.learning_rate, 0.0, 10.0)
        if not isinstance(self.rerank, bool):
            raise ConfigurationError(f"rerank={self.rerank!r}: give True or False")
        if self.rule is not None and not isinstance(self.rule, FixedRule):
            raise ConfigurationError(f"rule={self.rule!r}: use DraftPolicy.fixed(...) or leave it None")

    @classmethod
    def fixed(
        cls,
        max_depth: int = 64,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        max_draft: int = 32,
    ) -> "DraftPolicy":
        """Return a policy that drafts by the rule of ArcticInference's suffix decoding.

        Nothing is learned, and session and group are not drafted from.

        max_depth: most tokens of context and draft together. A match of n tokens allows a draft of
        max_spec_factor * n + max_spec_offset tokens, at most max_draft, as long as its probability, by the counts, is
        at least min_token_prob. Raises ConfigurationError for a value out of range.
        """
        return cls(max_draft=max_draft, rule=FixedRule(max_depth, max_spec_factor, max_spec_offset, min_token_prob))


def _check(name: str, value: float, low: float, high: float) -> None:
    kind = int if isinstance(low, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "an integer" if isinstance(low, int) else "a number"
        raise ConfigurationError(f"{name}={value!r}: give {what} from {low:g} to {high:g}")
