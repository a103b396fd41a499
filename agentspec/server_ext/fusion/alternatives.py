"""Score two alternative drafts of one request: the suffix draft and the draft model's.

The two may begin with the same tokens; they part at the first position where the model would take another token. Both
are lists of scored tokens. `DraftAlternatives` makes from them the drafts to merge into the suffix index's, and learns
from verified tokens how the scored tokens fared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentspec.server_ext.fusion.calibrator import (
    BEHIND_AGREED,
    BEHIND_RIVAL,
    SILENT,
    AcceptanceCalibrator,
    ScoredToken,
    SuffixToken,
)
from agentspec.server_ext.fusion.draft_model import ModelDraft

ScoredDraft = list[tuple[int, float]]
"""Tokens of a draft, each with the probability that it is accepted if those before it are."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Hold one row of a draft model's answer: the columns of ModelDraft as lists [n]."""

    tokens: list[int]
    probabilities: list[float]
    top: list[int]
    top_probabilities: list[float]

    @classmethod
    def of(cls, draft: ModelDraft, row: int) -> "ModelRow":
        """Return one row of a draft model's answer."""
        return cls(
            draft.tokens[row].tolist(),
            draft.probabilities[row].tolist(),
            draft.top[row].tolist(),
            draft.top_probabilities[row].tolist(),
        )


class DraftAlternatives:
    """Hold the scored alternatives for one request whose text has ``length`` tokens.

    shared: the tokens that both drafts begin with. suffix: the suffix draft's tokens behind them, each with the model's
    token if that differs. model: the model's tokens behind the shared ones.
    """

    __slots__ = ("_calibrator", "_observation_weights", "length", "model", "shared", "suffix")

    def __init__(self, calibrator: AcceptanceCalibrator, length: int, observation_weights: Sequence[int]) -> None:
        self._calibrator = calibrator
        self._observation_weights = observation_weights
        self.length = length
        self.shared: list[ScoredToken] = []
        self.suffix: list[tuple[ScoredToken, ScoredToken | None]] = []
        self.model: list[ScoredToken] = []

    @classmethod
    def score(
        cls,
        calibrator: AcceptanceCalibrator,
        length: int,
        draft: Sequence[SuffixToken],
        forced: ModelRow | None,
        unforced: ModelRow,
        limit: int,
        observation_weights: Sequence[int] = (1,),
    ) -> "DraftAlternatives":
        """Score both drafts, at most ``limit`` tokens far.

        draft: the suffix draft's tokens. forced: the model's row that was forced to follow them. unforced: the row in
        which the model chose its own tokens. observation_weights: by position; the last one counts for later positions,
        too.
        """
        result = cls(calibrator, length, observation_weights)
        row = forced or unforced
        limit = min(limit, len(row.top))
        # 1. The tokens on which both agree.
        fork = result._score_shared(draft, row, limit)
        preceded_by = BEHIND_AGREED if fork else SILENT
        if fork < limit and fork < len(draft):
            # 2. Both tokens at the fork.
            result._score_fork(draft, row, fork)
            preceded_by = BEHIND_RIVAL
            # 3. The suffix draft behind the fork, and the model's tokens behind that.
            if forced is not None:
                result._score_forced(draft, forced, fork + 1, limit)
        # 4. The model's own continuation, unless rounding has led the unforced row another way.
        taken = [scored.token for scored in result.shared + result.model]
        if unforced.tokens[: len(taken)] == taken:
            result.model += result._score_own(unforced, len(taken), limit, preceded_by)
        elif not result.suffix:  # the forced row goes on behind a short suffix draft
            result.model += result._score_own(row, fork, limit, preceded_by)
        return result

    def drafts(self) -> list[ScoredDraft]:
        """Return the drafts that may be worth more than the current suffix draft.

        They are the suffix draft with its new probabilities, the model's draft, and the suffix draft up to the first
        position behind the fork where the model's token is the more probable one, with that token.
        """
        suffix = [scored for scored, _ in self.suffix]
        result = []
        if suffix or not self.model:
            result.append(self.shared + suffix)
        if self.model:
            result.append(self.shared + self.model)
        for at, (scored, rival) in enumerate(self.suffix):
            if at > 0 and rival is not None and rival.probability > scored.probability:
                result.append([*self.shared, *suffix[:at], rival])
                break
        return [[(scored.token, scored.probability) for scored in draft] for draft in result if draft]

    def learn(self, verified: Sequence[int]) -> None:
        """Learn from the verified tokens that followed."""
        begin = len(self.shared)
        if self._learn(self.shared, verified, 0) < begin:
            return
        for at, (scored, rival) in enumerate(self.suffix, begin):
            if at == len(verified):
                break
            self._note(scored, verified[at])
            if rival is not None and at > begin:  # the one at `begin` is the first of `model`, learned below
                self._note(rival, verified[at])
            if scored.token != verified[at]:
                break
        self._learn(self.model, verified, begin)

    def _learn(self, draft: Sequence[ScoredToken], verified: Sequence[int], begin: int) -> int:
        """Learn from a draft's tokens up to the first wrong one. Return how many were right.

        begin: place in ``verified`` of the draft's first token.
        """
        right = 0
        for scored, token in zip(draft, verified[begin:], strict=False):
            self._note(scored, token)
            if scored.token != token:
                break
            right += 1
        return right

    def _note(self, scored: ScoredToken, verified: int) -> None:
        weights = self._observation_weights
        weight = weights[min(scored.position, len(weights) - 1)]
        self._calibrator.learn(scored, scored.token == verified, weight)

    def _score_shared(self, draft: Sequence[SuffixToken], row: ModelRow, limit: int) -> int:
        """Score the tokens that both drafts begin with. Return the position behind them."""
        for at, suffix in enumerate(draft[:limit]):
            if row.top[at] != suffix.token:
                return at
            self.shared.append(self._calibrator.agreed(suffix, at, row.top_probabilities[at]))
        return min(limit, len(draft))

    def _score_fork(self, draft: Sequence[SuffixToken], row: ModelRow, fork: int) -> None:
        """Score both tokens of the first position where the model would take another token."""
        suffix = draft[fork]
        top = row.top_probabilities[fork]
        known = row.probabilities[fork] if row.tokens[fork] == suffix.token else None
        rival = self._calibrator.rival(row.top[fork], fork, top, suffix)
        self.suffix.append((self._calibrator.disputed(suffix, fork, known, top), rival))
        self.model.append(rival)

    def _score_forced(self, draft: Sequence[SuffixToken], forced: ModelRow, begin: int, limit: int) -> None:
        """Score the rest of the suffix draft and the model's tokens behind it, by the model's forced row."""
        for at, suffix in enumerate(draft[begin:limit], begin):
            top = forced.top_probabilities[at]
            if forced.top[at] == suffix.token:
                self.suffix.append((self._calibrator.agreed(suffix, at, top), None))
            else:
                disputed = self._calibrator.disputed(suffix, at, forced.probabilities[at], top)
                self.suffix.append((disputed, self._calibrator.rival(forced.top[at], at, top, suffix)))
        behind = self._score_own(forced, max(begin, len(draft)), limit, BEHIND_AGREED)
        self.suffix += [(scored, None) for scored in behind]

    def _score_own(self, row: ModelRow, begin: int, limit: int, preceded_by: int) -> list[ScoredToken]:
        """Score the model's tokens at positions without a suffix draft."""
        own, tokens, probabilities = self._calibrator.own, row.tokens, row.probabilities
        return [own(tokens[at], at, probabilities[at], preceded_by) for at in range(begin, limit)]


def pack(drafts: Sequence[ScoredDraft], width: int) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int32]]:
    """Pack drafts for `SuffixCache.merge_drafts`: tokens [n, width], probabilities [n, width], lengths [n]."""
    tokens = np.zeros((len(drafts), width), dtype=np.int32)
    probabilities = np.zeros((len(drafts), width), dtype=np.float64)
    for row, draft in enumerate(drafts):
        tokens[row, : len(draft)] = [token for token, _ in draft]
        probabilities[row, : len(draft)] = [probability for _, probability in draft]
    return tokens, probabilities, np.array([len(draft) for draft in drafts], dtype=np.int32)
