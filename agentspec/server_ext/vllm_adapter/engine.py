"""Whether agentspec can work in this engine, and the proposer that it gets."""

import os
from typing import Any

from agentspec.cache.store import namespace, open_store
from agentspec.errors import UnsupportedEngineError
from agentspec.server_ext.draft_budget import EngineLimits
from agentspec.server_ext.drafter_settings import MedusaSettings, NgramSettings
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.model_key import model_name, tokenizer_fingerprint
from agentspec.server_ext.persistence import Persistence
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.vllm_adapter.forward import ModelDrafter
from agentspec.server_ext.vllm_adapter.native_drafters import MedusaDrafter, NgramDrafter
from agentspec.server_ext.vllm_adapter.speculator import SpeculatorDrafter

_LOGITS_COPIES = 4
"""Of each position, in float32, while vLLM's rejection sampler works: the logits, the target's among them, a clone that
is processed while the first stays for logprobs, and its softmax where sampling is random."""
_LOGITS_COPIES_SORTED = 8
"""Without Triton, top-p sorts them too: values, 64-bit indices and the softmax of the values."""
_FREE_ON_HOST = 0.25

OLDEST_VERSION = (0, 32)
NEWEST_VERSION = (0, 32)


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


def is_first_rank() -> bool:
    """Whether this process is the rank whose drafts vLLM takes."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()) == 0


def build_engine(vllm_config: Any, settings: Settings, max_draft: int) -> DraftingEngine:
    """The proposer of this model and tenant, on the store of the settings."""
    model = vllm_config.model_config
    key = namespace(
        model_name(model.model),
        tokenizer_fingerprint(model.tokenizer, model.tokenizer_revision),
        settings.tenant,
    )
    persistence = Persistence(open_store(settings.store), key, settings.tenant, settings.preload_records)
    return DraftingEngine(settings, persistence, model.get_vocab_size(), max_draft, engine_limits(vllm_config))


def engine_limits(vllm_config: Any) -> EngineLimits:
    """Return what vLLM leaves for drafts on its device.

    On CUDA that is what ``gpu_memory_utilization`` leaves of the memory, beside what vLLM's profiling run has measured:
    a sampler's step with one draft token for each of ``max_num_seqs`` rows. Elsewhere a share of the physical memory
    counts as free.
    """
    from vllm.platforms import current_platform

    scheduler = vllm_config.scheduler_config
    if current_platform.is_cuda_alike():
        unclaimed = 1.0 - vllm_config.cache_config.gpu_memory_utilization
        free, copies = unclaimed * current_platform.get_device_total_memory(), _LOGITS_COPIES
        provided = scheduler.max_num_seqs
    else:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free, copies, provided = _FREE_ON_HOST * physical, _LOGITS_COPIES_SORTED, 0
    return EngineLimits(
        free_bytes=int(free),
        position_bytes=4 * copies * vllm_config.model_config.get_vocab_size(),
        provided_tokens=provided,
        scheduled_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
    )


def draft_model(settings: Settings, vllm_config: Any) -> ModelDrafter | None:
    """The draft model beside the trees, not loaded yet; None where the settings name none."""
    if not settings.enabled:
        return None
    if isinstance(settings.drafter, NgramSettings):
        return NgramDrafter(settings.drafter, vllm_config)
    if isinstance(settings.drafter, MedusaSettings):
        return MedusaDrafter(settings.drafter, vllm_config)
    return None if settings.speculator is None else SpeculatorDrafter(settings, vllm_config.model_config)
