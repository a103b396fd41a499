"""Replace parts of agentspec's fusion in the engines of `hybrid.py`: a rival's rule, and prices that are given.

Each function is called in an engine's process, before the engine is made.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.cache import SOURCES, StepDrafts
from agentspec.server_ext import UNFORCED
from agentspec.server_ext.fusion.draft_model import RESTS, StepModel
from agentspec.server_ext.fusion.fusion import DraftFusion, FusedDrafts
from agentspec.server_ext.fusion.scheduler import PassTime
from agentspec.server_ext.step import DraftRows
from agentspec.server_ext.vllm_adapter import Patch, install

THRESHOLD = 4
"""Default of TensorRT-LLM's `sa_spec_threshold`, in tokens."""

_FUSION = "agentspec.server_ext.fusion.fusion:DraftFusion"
_PASS_TIME = "agentspec.server_ext.fusion.scheduler:PassTime"


def fix_threshold() -> None:
    """Choose between suffix and drafter as TensorRT-LLM does with `use_sa_spec`.

    Where the end of the request's text occurred in it before, THRESHOLD tokens long or longer, copy what followed the
    longest such match; otherwise take the drafter's tokens. The drafter drafts all its tokens in every step. Drafts
    that are copied may be as long as agentspec's, which TensorRT-LLM's are not.
    """
    install([Patch("runner", _FUSION, "draft", _draft_by_threshold, "decides by a fixed threshold")])


def _draft_by_threshold(
    original: Any, fusion: DraftFusion, rows: DraftRows, model: StepModel, cost: float, unit: float | None
) -> FusedDrafts:
    nothing = np.zeros_like(rows.max_draft_tokens)
    fed = fusion._cache.step(
        rows.handle, rows.tokens, rows.rows, rows.lengths, nothing, nothing, cost=cost, work_seconds=rows.work_seconds
    )
    assert model.choices is not None
    batch = [int(row) for row in rows.rows]
    answer = model.launch(batch, np.full((len(batch), model.choices.most), UNFORCED, dtype=np.int64))().tokens
    drafts = []
    for i, row in enumerate(batch):
        most = int(rows.max_draft_tokens[i])
        copied = continuation(rows.tokens[row, : rows.lengths[i]], THRESHOLD, most)
        drafts.append(answer[i, :most].tolist() if copied is None else copied)
    return FusedDrafts(_as_step_drafts(drafts, fed))


def continuation(text: NDArray[np.integer], threshold: int, most: int) -> list[int] | None:
    """Return up to `most` tokens that followed the longest, then latest, earlier occurrence of the text's end.

    text: [n] tokens. None: no occurrence has `threshold` tokens.
    """
    ends = np.flatnonzero(text[:-1] == text[-1])
    length = 1
    while len(ends):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[len(text) - 1 - length]] if length < len(text) else longer[:0]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < threshold:
        return None
    begin = int(ends[-1]) + 1
    copied: list[int] = text[begin : begin + most].tolist()
    return copied


def _as_step_drafts(drafts: Sequence[Sequence[int]], fed: StepDrafts) -> StepDrafts:
    """Return the drafts as the engine takes them. fed: the index's answer, which has no drafts."""
    tokens = [token for draft in drafts for token in draft]
    return StepDrafts(
        token_ids=np.array(tokens, np.int32),
        offsets=np.cumsum([0, *map(len, drafts)], dtype=np.int32),
        sources=np.full(len(tokens), SOURCES.index("model"), np.uint8),
        probabilities=np.ones(len(tokens), np.float32),
        match_lengths=np.zeros(len(drafts), np.int32),
        accepted=fed.accepted,
        drafted=fed.drafted,
    )


def fix_prices(pass_price: float) -> None:
    """Make fusion reckon with fixed times: 1 s a row for a step without drafts, `pass_price` s for a drafter's pass."""

    def passes_for(tokens: int) -> int:
        return 0 if tokens == RESTS else max(1, tokens)

    def draft(original: Any, fusion: DraftFusion, rows: DraftRows, model: StepModel, cost: float, unit: Any) -> Any:
        return original(fusion, rows, model, cost, 1.0)

    def saved(original: Any, passes: PassTime, rows: int, tokens: int, least: int) -> float:
        return pass_price * (passes_for(tokens) - passes_for(least))

    why = "a price is given"
    install([Patch("runner", _FUSION, "draft", draft, why), Patch("runner", _PASS_TIME, "saved", saved, why)])
