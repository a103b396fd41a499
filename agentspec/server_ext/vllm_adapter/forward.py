"""What vLLM hands its drafter after a step, and what a drafter that runs a model there has to offer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.server_ext.fusion import ModelDraft
from agentspec.server_ext.fusion.draft_model import Int64


@dataclass(slots=True)
class ForwardPass:
    """The arguments of vLLM's ``propose_draft_token_ids``, in its order and under its names."""

    scheduler_output: Any
    sampled: Sequence[Sequence[int]]
    """the tokens that each row was given; empty for a prompt that is still being read"""
    sampling_metadata: Any = None
    hidden_states: Any = None
    """[T, H] of all tokens in the pass, after the target's final norm"""
    sample_hidden_states: Any = None
    """[S, H] of those that were sampled from: each row's drafts and one more, row by row"""
    aux_hidden_states: Any = None
    spec_decode_metadata: Any = None
    """None: one sampled position a row"""
    common_attn_metadata: Any = None
    slot_mappings: Any = None
    input_batch: Any = None
    """vLLM's InputBatch: no argument, but the runner's"""

    def newest(self, rows: Sequence[int]) -> list[int]:
        """The last token that each of these rows was given."""
        return [self.sampled[row][-1] for row in rows]

    def positions(self, rows: Sequence[int]) -> list[int]:
        """Where in ``sample_hidden_states`` the state is that produced the newest token of each of these rows."""
        if self.spec_decode_metadata is None:
            return list(rows)
        drafted = self.spec_decode_metadata.num_draft_tokens
        begins, begin = [], 0
        for count in drafted:
            begins.append(begin)
            begin += count + 1
        return [begins[row] + len(self.sampled[row]) - 1 for row in rows]


class BoundModel(ABC):
    """A draft model as it can be asked in one step, once; see ``hybrid.StepModel``."""

    positions: int
    overlaps: bool

    @abstractmethod
    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        """Begin to draft for these rows of the engine's batch; the result is waited for by calling it."""

    def close(self) -> None:
        """The step is over, whether the model was asked or not."""
        return None


class ModelDrafter(ABC):
    """A draft model beside the trees, in one worker."""

    @abstractmethod
    def load(self, target: Any) -> None:
        """Read the weights, before vLLM serves. ``target``: the served model."""

    @abstractmethod
    def bind(self, forward: ForwardPass) -> BoundModel:
        """The model, ready to be asked about this pass; on the rank whose drafts vLLM takes."""

    def follow(self, forward: ForwardPass) -> None:
        """The same on the other tensor-parallel ranks: do one's part of what the first is asked."""
        return None
