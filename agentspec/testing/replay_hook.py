"""The replay's hold on vLLM: forces recorded tokens and counts, in the V1 model runner of this process.

The counterpart, on the side of testing, of ``server_ext.vllm_adapter``: no other module of the replay knows
vLLM's internals. Two methods of the runner are wrapped, for every method of speculation alike:

``_sample``            the recorded token is made the target's choice at every position; the sampler and the
                       rejection sampler that follow are vLLM's own
``_bookkeeping_sync``  where verified tokens enter a request: counts them
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.errors import UnsupportedEngineError

REPLAY_KEY = "agentspec_replay"
"""Entry of ``SamplingParams.extra_args`` that carries the recorded response: a flat list of ints."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the model runner; the three sequences have one entry for each row that was given tokens."""

    request_ids: Sequence[str]
    sampled: Sequence[int]
    """tokens that the row was given: accepted and bonus"""
    drafted: Sequence[int]
    """draft tokens that were verified for it"""
    scheduled: int
    """tokens in the forward pass, of all rows"""

    @property
    def prefills(self) -> bool:
        """Whether the forward pass held more than the last token and the draft of each row."""
        return self.scheduled != len(self.sampled) + sum(self.drafted)


def install_replay(record: Callable[[StepRecord], None]) -> None:
    """Wrap the runner; ``record`` is called after every step. Once a process: each call wraps again.

    Raises UnsupportedEngineError when this vLLM's runner has no such methods.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's runner inherits from it

    for name, wrapped in (("_sample", _forcing), ("_bookkeeping_sync", functools.partial(_counting, record))):
        method = getattr(GPUModelRunner, name, None)
        if method is None:
            raise UnsupportedEngineError(f"replay: this vLLM has no GPUModelRunner.{name}")
        setattr(GPUModelRunner, name, wrapped(method))


def _forcing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if logits is not None:
            drafts = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
            force(logits, self.requests, self.input_batch.req_ids, drafts)
        return method(self, logits, spec_decode_metadata, *args, **kwargs)

    return _sample


def force(logits: Any, requests: Any, request_ids: Sequence[str], drafts: Sequence[int] | None) -> None:
    """Make the recorded token the largest logit of its row, in place.

    ``logits``: [rows, vocab]. Request ``i`` has ``drafts[i] + 1`` rows in batch order (one without drafts), the
    ``j``-th of which decides output token ``len(output_token_ids) + j``. Rows past the end of the recorded
    response, and requests without one, keep the model's own choice.
    """
    import torch

    rows: list[int] = []
    tokens: list[int] = []
    row = 0
    for i, request_id in enumerate(request_ids):
        width = 1 if drafts is None else drafts[i] + 1
        state = requests[request_id]
        response = (state.sampling_params.extra_args or {}).get(REPLAY_KEY, ())
        begin = len(state.output_token_ids)
        wanted = response[begin : begin + width]
        rows.extend(range(row, row + len(wanted)))
        tokens.extend(wanted)
        row += width
    if tokens:
        logits[rows, tokens] = torch.finfo(logits.dtype).max / 2


def _counting(record: Callable[[StepRecord], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _bookkeeping_sync(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        request_ids = list(self.input_batch.req_ids)
        outputs = [self.requests[request_id].output_token_ids for request_id in request_ids]
        before = [len(output) for output in outputs]
        result = method(self, scheduler_output, *args, **kwargs)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        sampled = [len(output) - n for output, n in zip(outputs, before, strict=True)]
        given = [i for i, n in enumerate(sampled) if n]
        record(
            StepRecord(
                request_ids=[request_ids[i] for i in given],
                sampled=[sampled[i] for i in given],
                # A prefix-cache hit can leave placeholders (-1) where no draft was.
                drafted=[sum(token >= 0 for token in drafts.get(request_ids[i], ())) for i in given],
                scheduled=scheduler_output.total_num_scheduled_tokens,
            )
        )
        return result

    return _bookkeeping_sync
