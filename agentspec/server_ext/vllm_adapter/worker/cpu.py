"""Make verification cheaper on CPUs: avoid copies of the logits, and new memory pages for them in every step."""

import ctypes
import os
from collections.abc import Callable
from typing import Any

_PLACEHOLDER = -1
"""Token id with which vLLM's sampler fills a row behind its last accepted token."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``: most free bytes to keep at the end of the heap (M_TRIM_THRESHOLD), and the least
bytes of an array outside the heap (M_MMAP_THRESHOLD)."""
_HUGE_PAGE_BYTES, _USE_HUGE_PAGES, _FILL_PAGES = 2 << 20, 14, 23
"""Size of a huge page, and advice for Linux's ``madvise``: MADV_HUGEPAGE, and MADV_POPULATE_WRITE (pages at once)."""
_OLD_GLIBC_LIMIT = 32 << 20
"""Largest M_MMAP_THRESHOLD, in bytes, that old versions of glibc take."""
USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables by which a user decides how much freed memory is kept."""


def on_cpu() -> bool:
    """Return whether vLLM serves on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


# --- Greedy verification. vLLM's rejection sampler copies the logits of each draft position twice and those of each row
# --- once, float32 over the whole vocabulary, before it takes the largest. On a CPU the copies take as long as the
# --- output layer of a small model does; on a GPU they take microseconds.


def verify(
    original: Callable[..., Any],
    sampler: Any,
    metadata: Any,
    draft_probs: Any,
    logits: Any,
    sampling_metadata: Any,
) -> Any:
    """Verify drafts by the largest logits, read in place, if all requests are greedy and nothing changes a logit."""
    if sampler.synthetic_mode or not only_argmax_decides(sampling_metadata):
        return original(sampler, metadata, draft_probs, logits, sampling_metadata)
    import torch
    from vllm.v1.outputs import SamplerOutput

    # Without speculation vLLM chooses by this function, so ties fall the same way.
    choices = sampler.sampler.greedy_sample(logits.to(torch.float32))
    return SamplerOutput(sampled_token_ids=verified(choices, metadata), logprobs_tensors=None)


def only_argmax_decides(sampling_metadata: Any) -> bool:
    """Return whether every request takes its largest raw logit and wants nothing else: no logprobs, no processors."""
    holder = sampling_metadata.thinking_budget_state_holder
    return bool(
        sampling_metadata.all_greedy
        and sampling_metadata.no_penalties
        and not sampling_metadata.bad_words_token_ids
        and sampling_metadata.allowed_token_ids_mask is None
        and sampling_metadata.max_num_logprobs is None
        and not sampling_metadata.logprob_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(_serves_nobody(processor) for processor in sampling_metadata.logitsprocs.non_argmax_invariant)
    )


def _serves_nobody(processor: Any) -> bool:
    """Return whether a logits processor has no request to serve. One that is not vLLM's counts as serving some."""
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

    if type(processor) is MinTokensLogitsProcessor:
        return not processor.min_toks
    return type(processor) is LogitBiasLogitsProcessor and not processor.biases


def verified(choices: Any, metadata: Any) -> Any:
    """Return int32 [rows, longest draft + 1]: each row's accepted tokens, the choice behind them, then placeholders.

    choices: [draft tokens + rows], the target's choice at each position, in the order of the logits.
    """
    import torch

    counts = torch.tensor(metadata.num_draft_tokens)
    rows, longest = len(counts), metadata.max_spec_len
    drafted = torch.arange(longest) < counts[:, None]
    agrees = torch.zeros((rows, longest), dtype=torch.bool)
    agrees[drafted] = choices[metadata.target_logits_indices] == metadata.draft_token_ids
    accepted = agrees.cumprod(1).sum(1)
    at = torch.arange(longest + 1)
    begins = metadata.bonus_logits_indices - counts
    result = torch.full((rows, longest + 1), _PLACEHOLDER, dtype=torch.int32)
    kept = at <= accepted[:, None]
    result[kept] = choices[(begins[:, None] + at)[kept]].to(torch.int32)
    return result


# --- Memory of the logits. glibc returns large arrays to the operating system as soon as they are freed, so every step
# --- with drafts asks for each page of the logits again. That took about as long as filling and searching the logits,
# --- so freed memory is kept. A step with more tokens than any before still needs new pages: such steps took 20 to
# --- 100 ms where others took 8 to 15. So some pages are made ready at the start.


def keep_freed_memory(num_bytes: int, ready_bytes: int = 0) -> bool:
    """Let this process keep freed memory for later allocations. Return whether it does.

    num_bytes: most free bytes at the end of the heap, and about the largest array that is kept. Freed memory between
    arrays that are in use is kept beyond that. ready_bytes: how many of the heap's next bytes get their pages now.

    Return False and change nothing with a C library other than glibc, or if the user has set one of USERS_CHOICE.
    """
    libc = ctypes.CDLL(None)
    set_option = getattr(libc, "mallopt", None)
    if set_option is None or any(name in os.environ for name in USERS_CHOICE):
        return False
    most = min(num_bytes, 2**31 - 1)  # mallopt takes an int
    heaped = any(set_option(_MMAP_THRESHOLD, min(most, limit)) for limit in (most, _OLD_GLIBC_LIMIT))
    kept = heaped and bool(set_option(_TRIM_THRESHOLD, most))
    if kept:
        _prepare_heap(libc, most // 2, ready_bytes)
    return kept


def _prepare_heap(libc: ctypes.CDLL, num_bytes: int, ready_bytes: int) -> None:
    """Ask Linux for huge pages for the heap's next ``num_bytes``, for the first ``ready_bytes`` at once.

    A kernel that has no such pages or advice refuses, and the heap stays as it is.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(num_bytes)
    if block:
        begin = -(-block // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (block + num_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if begin < end:
            libc.madvise(begin, end - begin, _USE_HUGE_PAGES)
            libc.madvise(begin, min(ready_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES, end - begin), _FILL_PAGES)
        libc.free(block)
