"""What knows vLLM's internals, with ``vllm_batch``: engine state -> Step, drafts -> engine.

vLLM's ``custom_class`` proposer gets neither request ids nor the scheduler's output, and is not told when a
request ends. Three methods of its V1 model runner are therefore wrapped, once a process:

``propose_draft_token_ids``    gives the drafter the runner and the scheduler's output
``_on_request_state_removed``  tells it that a request has finished or was aborted (never inferred from a batch)
``_input_fits_in_drafter``     near ``max_model_len`` vLLM would skip the whole batch; drafts are cut per row instead

Three more keep a step without any draft as cheap as in vLLM without speculation, where vLLM would run its rejection
sampler over the whole vocabulary although there is nothing to verify, and hand empty drafts round:
``_calc_spec_decode_metadata``, ``_sample``, ``take_draft_token_ids``.

Everything else stays vLLM's: scheduling, verification, sampling. A new vLLM version is a change here.
"""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.cache.store import namespace, open_store
from agentspec.errors import InvalidSessionError, UnsupportedEngineError
from agentspec.server_ext.identity import SESSION_KEY, merge_session
from agentspec.server_ext.persistence import Persistence
from agentspec.server_ext.proposer import Proposer
from agentspec.server_ext.settings import Settings, check_draft_limit, load_settings
from agentspec.server_ext.vllm_batch import BatchReader
from agentspec.server_ext.vllm_launch import PROPOSER_PATH

logger = logging.getLogger("vllm.agentspec")

OLDEST_VERSION = (0, 32)
NEWEST_VERSION = (0, 32)
RPC_METHOD = "agentspec_rpc"


class AgentSpecProposer:
    """vLLM's drafter object: ``--speculative-config '{"method": "custom_class", "model": PROPOSER_PATH, …}'``.

    Raises UnsupportedEngineError or ConfigurationError at start, with the remedy; later it never raises.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_engine(vllm_config)
        self.settings = load_settings(vllm_config.additional_config)
        self.max_draft = check_draft_limit(vllm_config.speculative_config.num_speculative_tokens)
        self.idle = False
        """Whether the latest step left every row without a draft."""
        self._reported = False
        # Under tensor parallelism vLLM takes the drafts of the first rank: the trees live only there.
        self.engine = _build_engine(vllm_config, self.settings, self.max_draft) if _is_first_rank() else None
        knows = self.engine.knows if self.engine is not None else bool
        self._reader = BatchReader(self.max_draft, vllm_config.model_config.max_model_len, self.settings.tenant, knows)
        install_hooks()

    def load_model(self, *_: Any, **__: Any) -> None:
        """Called by vLLM before it serves: the moment to read the store."""
        if self.engine is not None:
            restored = self.engine.warm_up()
            logger.info("agentspec: %d stored turns restored, tenant %s", restored, self.settings.tenant or "-")

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """vLLM's own entry, which says too little: only reached if the wrapped runner was bypassed."""
        return [[] for _ in sampled_token_ids]

    def propose_for(self, runner: Any, scheduler_output: Any, sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        """Drafts for the runner's batch, one list a row. Never raises."""
        self.idle = True
        if self.engine is None or not self.settings.enabled:
            return [[] for _ in sampled]
        try:
            step = self._reader.read(runner, scheduler_output, sampled)
            drafts = self.engine.propose(step)
            self.idle = not any(drafts)
            if len(drafts) == len(sampled):
                return drafts
            return _spread(drafts, step.rows.tolist(), len(sampled))
        except Exception:  # the engine's state was not as expected: no drafts, said once
            self.engine.metrics.counters["errors_adapter"] += 1
            if not self._reported:
                self._reported = True
                logger.exception("agentspec: reading the engine's state failed, it goes on without drafts")
        return [[] for _ in sampled]

    def request_removed(self, request_id: str, state: Any) -> None:
        """The request has finished or was aborted. ``state``: vLLM's CachedRequestState, or None."""
        if self.engine is not None:
            self.engine.finish(request_id, None if state is None else returned_tokens(state))


def _spread(drafts: Sequence[list[int]], rows: Sequence[int], count: int) -> list[list[int]]:
    """The drafts of some rows of a batch of ``count``, with empty ones for the others."""
    result: list[list[int]] = [[] for _ in range(count)]
    for row, draft in zip(rows, drafts, strict=True):
        result[row] = draft
    return result


def check_engine(vllm_config: Any) -> None:
    """Raise UnsupportedEngineError for a vLLM version or a parallel layout that cannot work."""
    import vllm

    check_version(vllm.__version__)
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedEngineError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: vLLM's V1 engine cannot verify drafts over "
            "several pipeline stages; use tensor parallelism, or serve without agentspec"
        )


def check_version(version: str) -> None:
    """Raise UnsupportedEngineError unless ``version`` is one that the wrapped methods were written for."""
    try:
        found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        found = ()
    if not OLDEST_VERSION <= found <= NEWEST_VERSION:
        known = sorted({".".join(map(str, v)) for v in (OLDEST_VERSION, NEWEST_VERSION)})
        raise UnsupportedEngineError(
            f"vLLM {version} is not supported: agentspec works with vLLM {' to '.join(known)}; "
            f'install it, e.g. pip install "vllm=={known[-1]}.*"'
        )


def returned_tokens(state: Any) -> int:
    """How many tokens of the response vLLM returned: accepted drafts may run past a stop or ``max_tokens``."""
    output = state.output_token_ids
    params = state.sampling_params
    if params is None:
        return len(output)
    end = len(output) if params.max_tokens is None else min(len(output), params.max_tokens)
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos and getattr(params, "eos_token_id", None) is not None:
        stops.add(params.eos_token_id)
    for i in range(min(params.min_tokens or 0, end), end):
        if output[i] in stops:
            return i + 1
    return end


def install_hooks() -> None:
    """Wrap the methods of vLLM's V1 model runner; doing it again changes nothing."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, "_agentspec_hooked", False):
        return
    for name, wrap in (
        ("propose_draft_token_ids", _wrap_propose),
        ("_on_request_state_removed", _wrap_removed),
        ("_input_fits_in_drafter", _wrap_fits),
        ("_calc_spec_decode_metadata", _wrap_metadata),
        ("_sample", _wrap_sample),
        ("take_draft_token_ids", _wrap_take),
    ):
        method = getattr(GPUModelRunner, name, None)
        if method is None:
            raise UnsupportedEngineError(f"this vLLM has no GPUModelRunner.{name}; see the supported versions")
        setattr(GPUModelRunner, name, wrap(method))
    GPUModelRunner._agentspec_hooked = True


def _drafter(runner: Any) -> AgentSpecProposer | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, AgentSpecProposer) else None


def _wrap_propose(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any) -> Any:
        drafter = _drafter(self)
        if drafter is None:
            return method(self, scheduler_output, sampled_token_ids, *args)
        return drafter.propose_for(self, scheduler_output, sampled_token_ids)

    return propose_draft_token_ids


def _wrap_removed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _on_request_state_removed(self: Any, req_id: str, req_state: Any) -> None:
        method(self, req_id, req_state)
        drafter = _drafter(self)
        if drafter is not None:
            drafter.request_removed(req_id, req_state)

    return _on_request_state_removed


def _wrap_fits(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        if _drafter(self) is not None:
            return common_attn_metadata is not None
        return bool(method(self, common_attn_metadata))

    return _input_fits_in_drafter


def _wrap_metadata(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _calc_spec_decode_metadata(self: Any, num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> Any:
        if _drafter(self) is None or np.count_nonzero(num_draft_tokens):
            return method(self, num_draft_tokens, cu_num_scheduled_tokens)
        return metadata_without_drafts(cu_num_scheduled_tokens, self.device)

    return _calc_spec_decode_metadata


def metadata_without_drafts(cu_num_scheduled_tokens: Any, device: Any) -> Any:
    """What vLLM would compute for n rows without drafts: one logit a row, at its last token."""
    rows = len(cu_num_scheduled_tokens)
    decoding = _decode_metadata(rows, device)
    if cu_num_scheduled_tokens[-1] == rows:
        return decoding
    import torch

    indices = torch.from_numpy(cu_num_scheduled_tokens - 1).to(device, non_blocking=True)
    return dataclasses.replace(decoding, logits_indices=indices)


@functools.cache
def _decode_metadata(rows: int, device: Any) -> Any:
    """It for rows with one token each, which most steps have: nobody changes it, so one serves all of them."""
    import torch
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    none = torch.empty(0, dtype=torch.int32, device=device)
    counts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    return SpecDecodeMetadata(
        draft_token_ids=none,
        num_draft_tokens=[0] * rows,
        cu_num_draft_tokens=torch.zeros(rows, dtype=torch.int32, device=device),
        cu_num_sampled_tokens=counts[1:],
        target_logits_indices=none,
        bonus_logits_indices=counts[:-1],
        logits_indices=counts[:-1],
    )


def _wrap_sample(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        nothing = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
        return method(self, logits, None if nothing and _drafter(self) is not None else spec_decode_metadata)

    return _sample


def _wrap_take(method: Callable[..., Any]) -> Callable[..., Any]:
    """None, which vLLM knows as "no news", in place of an empty draft for every row.

    The scheduler has taken away a request's draft when it scheduled it, so there is nothing left to be replaced.
    Under asynchronous scheduling the answer also fills in placeholders: then it stays vLLM's.
    """

    @functools.wraps(method)
    def take_draft_token_ids(self: Any) -> Any:
        drafter = _drafter(self)
        if drafter is not None and drafter.idle and not self.use_async_scheduling:
            return None
        return method(self)

    return take_draft_token_ids


def _is_first_rank() -> bool:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()) == 0


def _build_engine(vllm_config: Any, settings: Settings, max_draft: int) -> Proposer:
    model = vllm_config.model_config
    key = namespace(
        model_name(model.model),
        tokenizer_fingerprint(model.tokenizer, model.tokenizer_revision),
        settings.tenant,
    )
    persistence = Persistence(open_store(settings.store), key, settings.tenant, settings.preload_records)
    return Proposer(settings, persistence, model.get_vocab_size(), max_draft)


def model_name(name: str) -> str:
    """The model's hub id, or the absolute path of its folder, so that two spellings of one folder share a key."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def tokenizer_fingerprint(name: str, revision: str | None) -> str:
    """What tells one tokenizer from another: a hash of its files where they are local, else name and revision."""
    folder = Path(name)
    if not folder.is_dir():
        return f"{name}@{revision or 'default'}"
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("tokenizer", "vocab", "merges", "tekken", "special_tokens", "added_tokens")):
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def worker_rpc(worker: Any, what: str, *args: Any) -> Any:
    """Answer of one worker to the HTTP routes: ``stats``, or ``request`` with an id. None where no trees live."""
    runner = getattr(worker, "model_runner", None)
    drafter = _drafter(runner) if runner is not None else None
    if drafter is None or drafter.engine is None:
        return None
    if what == "request":
        return drafter.engine.request(str(args[0]))
    return drafter.engine.stats()


def add_worker_rpc() -> None:
    """Let ``collective_rpc`` reach ``worker_rpc``: a method on every worker."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, RPC_METHOD, worker_rpc)


def carry_session_ids() -> None:
    """Copy vLLM's ``session_id``, which ends in the engine core, into ``extra_args``, which reaches the worker."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs
    if getattr(original, "_agentspec_hooked", False):
        return

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params = request.sampling_params
        if isinstance(params, SamplingParams) and uses_agentspec(self.vllm_config):
            try:
                params.extra_args = merge_session(params.extra_args, request.session_id)
            except InvalidSessionError as error:  # vLLM answers 400 only to its own kind
                raise VLLMValidationError(str(error), parameter=SESSION_KEY) from error
        return request

    process_inputs._agentspec_hooked = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def uses_agentspec(vllm_config: Any) -> bool:
    """Whether this engine drafts with agentspec."""
    spec = vllm_config.speculative_config
    return spec is not None and spec.method == "custom_class" and spec.model == PROPOSER_PATH


def mend_cpu_sampling() -> None:
    """vLLM's CPU build loses temperature, top-k and top-p of drafted positions: its kernel fills a converted copy.

    ``expand_batch_to_tokens`` is replaced there by the same in plain torch. Needed for T > 0 with any drafter.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return

    def expand_batch_to_tokens(
        x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = x if replace_from == replace_to else torch.where(x == replace_from, replace_to, x)
        return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
