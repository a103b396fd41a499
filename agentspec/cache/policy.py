"""Set how SuffixCache drafts: which tokens it takes and where it ends a draft.

A draft grows token by token. At each position every source (`types.SOURCES` before "model") proposes the two most
frequent successors of its longest match. A resume point proposes one more: if a draft copied a passage and one token
was rejected, it continues the passage behind that token. The acceptance table gives each proposal its probability, by
source, match length, agreement among the matched places, and depth. The reranker, a logistic regression over hashed
token features that is learned online, corrects the four most probable. The draft takes the most probable token. It
ends where (1 + sum of cumulative probabilities) / (1 + 1.3 * cost * length) is highest, and is empty if no length
exceeds 1. The factor 1.3 is there because the most probable of several candidates is overrated. The table and the
reranker learn from every candidate whose position the verified tokens reveal.
"""

from dataclasses import dataclass

from agentspec.errors import ConfigurationError

MAX_DRAFT = 128
"""Longest draft that vLLM's rejection sampler verifies, in tokens."""
DEFAULT_COST = 0.03
"""Price of verifying one more token, as a share of a decode step, until one is given or measured."""


@dataclass(frozen=True, slots=True)
class ArcticSettings:
    """Hold the parameters of ArcticInference's drafting rule; `DraftPolicy.fixed` explains them.

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

    @property
    def drafts_nothing(self) -> bool:
        """Return whether every draft of the rule is empty, so that only a draft model drafts."""
        return self.max_spec_factor == self.max_spec_offset == 0


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """Hold the settings of the drafting rule.

    cost: price of verifying one more token, as a share of a decode step; a higher price gives shorter drafts. None: use
    the price measured while serving, and DEFAULT_COST until there is one. max_draft: most tokens in a draft. min_match:
    shortest match to draft from, in tokens. rerank: whether the reranker corrects the acceptance table; without it
    drafting takes about half the time and fewer tokens are accepted. prior_weight: weight of the table's prior, in
    observations. memory: observations of one kind after which older ones count half. learning_rate: the reranker's.
    arctic: set by `fixed`; then only max_draft applies beside it. Raises ConfigurationError for a value out of range.
    """

    cost: float | None = None
    max_draft: int = MAX_DRAFT
    min_match: int = 1
    rerank: bool = True
    prior_weight: float = 200.0
    memory: float = 1000.0
    learning_rate: float = 0.5
    arctic: ArcticSettings | None = None

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
        if self.arctic is not None and not isinstance(self.arctic, ArcticSettings):
            raise ConfigurationError(f"arctic={self.arctic!r}: use DraftPolicy.fixed(...) or leave it None")

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

        The policy learns nothing and does not draft from sessions and groups.

        max_depth: most tokens of context and draft together. A match of n tokens allows a draft of
        max_spec_factor * n + max_spec_offset tokens, at most max_draft. The draft ends before its probability, computed
        from counts, falls below min_token_prob. Raises ConfigurationError for a value out of range.
        """
        return cls(
            max_draft=max_draft, arctic=ArcticSettings(max_depth, max_spec_factor, max_spec_offset, min_token_prob)
        )


def _check(name: str, value: float, low: float, high: float) -> None:
    kind = int if isinstance(low, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "an integer" if isinstance(low, int) else "a number"
        raise ConfigurationError(f"{name}={value!r}: give {what} from {low:g} to {high:g}")
