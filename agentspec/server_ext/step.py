"""Plain data that passes between the engine's adapter, the drafting engine and fusion."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentspec.server_ext.identity import Identity

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is seen for the first time.

    prompt: token ids [P]. end_tokens: those that end its response. api_id: the id under which its figures are asked
    for; None: the request id.
    """

    request_id: str
    prompt: Sequence[int]
    identity: Identity
    end_tokens: Sequence[int] = ()
    api_id: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The n requests that have a row in a step, in order.

    Rows change much more rarely than steps. A reader makes a new batch when they change and hands out the same one
    while they stay, so what depends on the rows alone is worked out once a batch.
    """

    request_ids: tuple[str, ...]
    rows: Int32
    """[n] which row of the engine's token array"""

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(slots=True)
class Step:
    """One decode step: n rows that have just been given verified tokens.

    Its reader may fill it anew for the next step, so it is good for one call of ``propose``.
    """

    batch: Batch
    started: Sequence[NewRequest]
    """the requests of the batch that are seen for the first time"""
    tokens: Int32
    """[R, L] the engine's token array, prompt and verified output of each row; read in place"""
    lengths: Int32
    """[n] how many tokens of a row are valid"""
    max_draft_tokens: Int32
    """[n] how many tokens may be drafted"""
    num_verified_draft_tokens: Int32
    """[n] how many tokens of the previous draft were really verified"""
    num_draft_tokens: int
    """draft tokens in the step's forward pass, of all rows: at least the sum of ``num_verified_draft_tokens``"""
    seconds: float | None = None
    """how long the step took, if it was one of decoding only, else None"""
