"""Estimate the probability that a token is accepted from those of the draft model and the suffix index.

The suffix index's probabilities are calibrated already. A draft model's are not: it is a small model, and it reads
drafted tokens. In each of four situations, the calibrator learns the probability from verified tokens:

``OWN``      the model's token at a position without a suffix draft. It starts from the model's probability, and counts
             acceptances by position and by bins of the log-odds of that probability. A second count also tells apart
             where the suffix index is silent, where both agreed before, and where the model left the suffix draft
``AGREED``   the token that the model and the suffix draft share
``RIVAL``    the model's token if the suffix draft has another one
``DISPUTED`` the suffix draft's token if the model would take another one

The last three are logistic regressions, learned online (AdaGrad; Duchi et al., Adaptive Subgradient Methods, 2011),
with a bias for each of the first positions and for each source of the suffix draft's token. Their inputs are the
logarithm of the match's length, the log-odds of the token's probability by its own drafter, and log(1 - p), where p is
the probability that the other drafter gives its token. If p is 0, so is that input, so an uninformed model changes
nothing. ``DISPUTED`` also has log(q / p), where q is the model's probability of the suffix draft's token; -1 if
unknown. The first weights combine the two drafters' probabilities as independent evidence.
"""

import math
from dataclasses import dataclass

from agentspec.cache import SOURCES

OWN, AGREED, RIVAL, DISPUTED = range(4)
SILENT, BEHIND_AGREED, BEHIND_RIVAL = range(3)
"""What precedes a token of the model's own: no drafted token, agreed tokens, or a rival of the suffix draft's token."""

UNKNOWN = 0.5
"""Probability that is assumed where a model gives none."""
_LIMIT = 6.0
"""Largest absolute log-odds; anything beyond counts as certain."""
_BINS = 13
_PRIOR = 6.0
"""Weight of the model's own probability, in observations."""
_MEMORY = 1_000.0
"""Observations in a bin after which the older ones count half."""
_POSITIONS = 3
"""Positions with a bias of their own; the later ones share the last."""
_LONG_MATCH = 5.0
"""Divisor of log2(1 + length of the match): a match of 31 tokens is an input of 1."""
_TINY = 1e-9
_RATE, _SMOOTH = 0.15, 1.0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Hold a token, the probability that it is accepted, and the inputs to learn from its verification."""

    token: int
    probability: float
    kind: int
    position: int
    evidence: tuple[float, ...]
    """OWN: the model's probability; otherwise: the inputs of the regression"""
    category: int = 0
    """OWN: what precedes it; otherwise: the source of the suffix draft's token"""


@dataclass(frozen=True, slots=True)
class SuffixToken:
    """Hold a token of the suffix draft. source: index into SOURCES. match: tokens before it that its source matched."""

    token: int
    probability: float
    source: int = 0
    match: int = 0


class AcceptanceCalibrator:
    """Score tokens, and learn from verified tokens. Plain arithmetic."""

    def __init__(self) -> None:
        self._bins: dict[tuple[int, ...], list[float]] = {}  # counts of tokens accepted and seen
        self._positions: dict[int, list[float]] = {}  # the same by position alone
        bias = [0.0] * (_POSITIONS + len(SOURCES))
        self._weights = {
            AGREED: [*bias, 0.0, 1.0, -0.5],
            RIVAL: [*bias, 0.0, 0.8, 0.6],
            DISPUTED: [*bias, 0.0, 1.0, 0.6, 0.1],
        }
        self._squares = {kind: [0.0] * len(weights) for kind, weights in self._weights.items()}
        self.seen = [0, 0, 0, 0]
        self.accepted = [0, 0, 0, 0]

    def own(self, token: int, position: int, by_model: float, preceded_by: int = SILENT) -> ScoredToken:
        """Score the model's token at a position without a suffix draft.

        by_model: the model's probability of it. preceded_by: SILENT, BEHIND_AGREED or BEHIND_RIVAL.
        """
        key = _bin(position, by_model)
        probability = min(by_model, 1.0)  # a sum of rounded numbers may be slightly more
        for counted in (key, (*key, preceded_by)):  # the second count corrects what the first one says
            accepted, seen = self._bins.get(counted, (0.0, 0.0))
            probability = (accepted + _PRIOR * probability) / (seen + _PRIOR)
        return ScoredToken(token, probability, OWN, position, (by_model,), preceded_by)

    def worth(self, tokens: int) -> list[float]:
        """Return the expected accepted tokens of a draft of 1, 2, … ``tokens`` tokens that the model is yet to make."""
        result, total, reached = [], 0.0, 1.0
        for position in range(tokens):
            accepted, seen = self._positions.get(position, (0.0, 0.0))
            reached *= (accepted + _PRIOR * UNKNOWN) / (seen + _PRIOR)
            total += reached
            result.append(total)
        return result

    def agreed(self, suffix: SuffixToken, position: int, by_model: float) -> ScoredToken:
        """Score a token that both drafts share. by_model: the model's probability of it."""
        return self._weigh(suffix.token, AGREED, position, suffix, (log_odds(suffix.probability), _log(1.0 - by_model)))

    def rival(self, token: int, position: int, by_model: float, suffix: SuffixToken) -> ScoredToken:
        """Score the model's token where the suffix draft has another. by_model: the model's probability of it."""
        return self._weigh(token, RIVAL, position, suffix, (log_odds(by_model), _log(1.0 - suffix.probability)))

    def disputed(self, suffix: SuffixToken, position: int, by_model: float | None, top: float) -> ScoredToken:
        """Score the suffix draft's token where the model would take another one.

        by_model: the model's probability of this token, None if unknown. top: the probability of the model's own token.
        """
        relative = -1.0 if by_model is None else _log(by_model / max(top, _TINY))
        evidence = (log_odds(suffix.probability), _log(1.0 - top), relative)
        return self._weigh(suffix.token, DISPUTED, position, suffix, evidence)

    def learn(self, scored: ScoredToken, accepted: bool, observation_weight: int = 1) -> None:
        """Learn whether the target accepted the token.

        observation_weight: how many observations a token of the model's own counts for. The regressions need no such
        number, as they learn from each token what they can.
        """
        self.seen[scored.kind] += 1
        self.accepted[scored.kind] += accepted
        if scored.kind == OWN:
            key = _bin(scored.position, scored.evidence[0])
            for counted in (key, (*key, scored.category)):
                _count(self._bins.setdefault(counted, [0.0, 0.0]), accepted, observation_weight)
            _count(self._positions.setdefault(scored.position, [0.0, 0.0]), accepted, observation_weight)
            return
        weights, squares = self._weights[scored.kind], self._squares[scored.kind]
        error = float(accepted) - scored.probability
        first = _POSITIONS + len(SOURCES)
        biases = ((min(scored.position, _POSITIONS - 1), 1.0), (_POSITIONS + scored.category, 1.0))
        for i, value in (*biases, *enumerate(scored.evidence, first)):
            step = error * value
            squares[i] += step * step
            weights[i] += _RATE * step / math.sqrt(squares[i] + _SMOOTH)

    def stats(self) -> dict[str, dict[str, int]]:
        """Return how many tokens of each kind were seen and accepted, as JSON. ``judged`` has the disputed ones."""
        names = ("own", "agreed", "rival", "judged")
        return {name: {"seen": self.seen[kind], "right": self.accepted[kind]} for kind, name in enumerate(names)}

    def _weigh(
        self, token: int, kind: int, position: int, suffix: SuffixToken, evidence: tuple[float, ...]
    ) -> ScoredToken:
        """Score a token by the regression of its kind. evidence: its inputs, without the first, the match's length."""
        weights = self._weights[kind]
        odds = weights[min(position, _POSITIONS - 1)] + weights[_POSITIONS + suffix.source]
        evidence = (math.log2(1 + suffix.match) / _LONG_MATCH, *evidence)
        for weight, value in zip(weights[_POSITIONS + len(SOURCES) :], evidence, strict=True):
            odds += weight * value
        probability = 1.0 / (1.0 + math.exp(-max(-_LIMIT, min(_LIMIT, odds))))
        return ScoredToken(token, probability, kind, position, evidence, suffix.source)


def _count(counts: list[float], accepted: bool, weight: int) -> None:
    """Add an observation to counts of tokens accepted and seen. weight: times that it counts. Older ones fade."""
    if counts[1] >= _MEMORY:
        counts[0], counts[1] = counts[0] / 2, counts[1] / 2
    counts[0] += accepted * weight
    counts[1] += weight


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)), clipped to +-_LIMIT."""
    if probability <= 0.0:
        return -_LIMIT
    if probability >= 1.0:
        return _LIMIT
    return max(-_LIMIT, min(_LIMIT, math.log(probability / (1.0 - probability))))


def _log(ratio: float) -> float:
    """Return the log of a number up to 1, clipped from below."""
    return max(-_LIMIT, math.log(max(ratio, _TINY)))


def _bin(position: int, probability: float) -> tuple[int, int]:
    return position, round((log_odds(probability) + _LIMIT) * (_BINS - 1) / (2 * _LIMIT))
