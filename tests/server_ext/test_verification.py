"""Test that corrected and cheap verification gives vLLM's own results, and is not used where it could not."""

import functools
import os
import platform
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils.cpu_triton_utils import _rejection_greedy_sample_kernel_impl
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from agentspec.server_ext.vllm_adapter.worker import cpu, sampling_faults
from agentspec.server_ext.vllm_adapter.worker.cpu import only_argmax_decides, verified

VOCABULARY = 50


class Engine:
    """Hold the attributes of vLLM's rejection sampler that are read."""

    synthetic_mode = False
    sampler = Sampler


def never(*_: Any) -> Any:
    raise AssertionError("vLLM's own verification was called")


verify = functools.partial(cpu.verify, never)
current_platform.import_kernels()


def sampling(rows: int, **changes: Any) -> SamplingMetadata:
    """Return the sampling metadata of plain greedy requests."""
    none = torch.zeros(rows)
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none + 1,
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors()),
    )
    return replace(metadata, **changes)


def processors() -> list[Any]:
    """Return vLLM's own processors that may change the largest logit, without a request to serve."""
    bias = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    # The constructor wants a whole vLLM configuration.
    min_tokens = MinTokensLogitsProcessor.__new__(MinTokensLogitsProcessor)
    min_tokens.min_toks = {}
    return [bias, min_tokens]


def metadata_of(drafts: list[list[int]]) -> SpecDecodeMetadata:
    """Return what vLLM's model runner says about the drafts of a step."""
    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    ends = metadata.cu_num_sampled_tokens.tolist()
    targets = [i for end, draft in zip(ends, drafts, strict=True) for i in range(end - len(draft) - 1, end - 1)]
    metadata.target_logits_indices = torch.tensor(targets, dtype=torch.int32)
    metadata.bonus_logits_indices = metadata.cu_num_sampled_tokens - 1
    return metadata


@pytest.mark.parametrize("seed", range(20))
def test_it_accepts_what_vllm_accepts(seed: int) -> None:
    """The drafts have 0 to 6 tokens and are right up to some position."""
    luck = random.Random(seed)
    logits = torch.randn((100, VOCABULARY), generator=torch.Generator().manual_seed(seed))
    best = logits.argmax(-1).tolist()
    drafts: list[list[int]] = []
    at = 0
    for _ in range(luck.randint(1, 9)):
        length = luck.randint(0, 6)
        wrong = luck.randint(0, 8)
        right = best[at : at + length]
        drafts.append([token if i < wrong else (token + 1) % VOCABULARY for i, token in enumerate(right)])
        at += length + 1
    drafts.append([best[at]])  # vLLM never verifies a step without any draft here
    metadata, logits = metadata_of(drafts), logits[: at + 2]
    theirs = torch.full((len(drafts), metadata.max_spec_len + 1), -1, dtype=torch.int32)
    _rejection_greedy_sample_kernel_impl(
        theirs,
        metadata.cu_num_draft_tokens,
        torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32),
        logits[metadata.target_logits_indices].argmax(-1),
        logits[metadata.bonus_logits_indices].argmax(-1),
        None,
        metadata.max_spec_len,
    )
    ours = verify(Engine, metadata, None, logits, sampling(len(drafts)))
    assert ours.sampled_token_ids.tolist() == theirs.tolist()
    assert ours.sampled_token_ids.dtype == theirs.dtype


def test_a_row_ends_with_the_targets_own_choice() -> None:
    metadata = metadata_of([[4, 5, 6], [], [7]])
    choices = torch.tensor([4, 9, 6, 1, 2, 7, 3])
    assert verified(choices, metadata).tolist() == [[4, 9, -1, -1], [2, -1, -1, -1], [7, 3, -1, -1]]


def test_half_precision_is_compared_as_vllm_compares_it() -> None:
    metadata = metadata_of([[1]])
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]], dtype=torch.bfloat16)
    ours = verify(Engine, metadata, None, logits, sampling(1))
    assert ours.sampled_token_ids.tolist() == [[1, 0]]


class Foreign:
    """Stand in for a processor that isn't vLLM's own."""

    def is_argmax_invariant(self) -> bool:
        return False


def busy(kind: str) -> Any:
    """Return vLLM's processor with a request to serve."""
    bias, min_tokens = processors()
    bias.biases = {0: {1: 2.0}}
    min_tokens.min_toks = {0: (3, [], {1}, False)}
    return {"bias": bias, "min_tokens": min_tokens, "foreign": Foreign()}[kind]


@pytest.mark.parametrize(
    "changes",
    [
        {"all_greedy": False},
        {"no_penalties": False},
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"bad_words_token_ids": {0: [[1]]}},
        {"allowed_token_ids_mask": torch.zeros((1, VOCABULARY), dtype=torch.bool)},
        {"logitsprocs": LogitsProcessors([busy("bias")])},
        {"logitsprocs": LogitsProcessors([busy("min_tokens")])},
        {"logitsprocs": LogitsProcessors([busy("foreign")])},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_where_more_than_the_largest_logit_matters_vllm_verifies(changes: dict[str, Any]) -> None:
    assert only_argmax_decides(sampling(1))
    assert not only_argmax_decides(sampling(1, **changes))


@pytest.mark.parametrize("most", [None, 2])
def test_named_tokens_have_their_log_probabilities_at_each_position(most: int | None) -> None:
    """Row 0 names two tokens, and its draft is accepted but for the last one. Row 1 names one, and has no draft."""
    logits = torch.randn((5, VOCABULARY), generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1)
    metadata = metadata_of([[int(best[0]), int(best[1]), (int(best[2]) + 1) % VOCABULARY], []])
    sampler = RejectionSampler.__new__(RejectionSampler)  # the constructor needs a worker's kernels
    torch.nn.Module.__init__(sampler)
    sampler.sampler, sampler.is_logits_logprobs_mode = Sampler(), False

    def forward(_: Any, metadata: Any, __: Any, logits: Any, wanted: Any) -> SamplerOutput:
        assert (wanted.max_num_logprobs, wanted.logprob_token_ids) == (most or 0, None)
        targets, bonus = logits[metadata.target_logits_indices], logits[metadata.bonus_logits_indices]
        sampled = verified(best, metadata)
        found = sampler._get_logprobs_tensors(wanted.max_num_logprobs, metadata, logits, targets, bonus, sampled)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=found)

    wanted = sampling(2, max_num_logprobs=most, logprob_token_ids={0: [7, 8], 1: [9]})
    output = sampling_faults.named_logprobs(forward, sampler, metadata, None, logits, wanted)
    tokens, found = RejectionSampler.parse_output(output.sampled_token_ids, VOCABULARY, (), output.logprobs_tensors)
    assert tokens == [best[:3].tolist(), best[4:].tolist()] and found is not None
    rows = [(best[i].item(), 7, 8) for i in range(3)] + [(best[4].item(), 9)]
    expected = torch.log_softmax(logits[[0, 1, 2, 4]], -1)
    for i, columns in enumerate(rows):
        assert tuple(found.logprob_token_ids[i][: len(columns)]) == columns
        assert found.logprobs[i][: len(columns)] == pytest.approx(expected[i, list(columns)].numpy())
    assert "gather_logprobs" not in vars(sampler.sampler)


def test_a_draft_counts_towards_min_tokens_at_the_token_behind_it() -> None:
    """Both rows have 3 of at least 6 tokens. Behind a draft of 3 the response may end, behind one of 2 it may not."""
    end = 1
    processor = MinTokensLogitsProcessor.__new__(MinTokensLogitsProcessor)  # the constructor needs a VllmConfig
    processor.device, processor.neg_inf_tensor = torch.device("cpu"), torch.tensor(-float("inf"))
    processor.min_toks = {row: (6, [2, 2, 2], {end}, False) for row in range(2)}
    none = torch.tensor([], dtype=torch.int32)
    processor.restore_logits_slice = (none, none)
    rows = torch.tensor([0, 1], dtype=torch.int32)
    processor.logits_slice = (rows, torch.full_like(rows, end))
    metadata = metadata_of([[2, 2, 2], [2, 2]])

    def forward(_: Any, metadata: Any, __: Any, logits: Any, corrected: Any) -> tuple[list[bool], list[bool]]:
        (of_ours,) = corrected.logitsprocs.non_argmax_invariant
        behind = of_ours.apply(torch.zeros((2, VOCABULARY)))
        inside = of_ours.apply_with_spec_decode(torch.zeros((5, VOCABULARY)), metadata.num_draft_tokens)
        return behind[:, end].isinf().tolist(), inside[:, end].isinf().tolist()

    wanted = sampling(2, logitsprocs=LogitsProcessors([processor]))
    found = sampling_faults.min_tokens_behind_drafts(forward, None, metadata, None, None, wanted)
    assert found == ([False, True], [True] * 5)
    assert processor.apply(torch.zeros((2, VOCABULARY)))[:, end].isinf().tolist() == [True, True]


PAGE_FAULTS = """
import random, resource, sys, torch
from agentspec.server_ext.vllm_adapter.worker.cpu import keep_freed_memory

kept = len(sys.argv) > 1 and keep_freed_memory(int(sys.argv[1]))
numbers = random.Random(1)
def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        torch.empty(numbers.randint(8, 200), 100_000).fill_(1.0).argmax(-1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, faults(20), faults(20))
"""
NOT_CHOSEN = {name: value for name, value in os.environ.items() if name not in cpu.USERS_CHOICE}
"""The environment, without the variables by which a user may configure freed memory."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone can be told what to keep")


def page_faults(*arguments: str, **environment: str) -> tuple[bool, int, int]:
    """Return whether memory is kept, and how many pages 20 steps asked for, and 20 more. Logits take up to 80 MB."""
    run = [sys.executable, "-c", PAGE_FAULTS, *arguments]
    told = subprocess.run(run, capture_output=True, text=True, check=True, env=NOT_CHOSEN | environment)
    kept, first, later = told.stdout.split()
    return kept == "True", int(first), int(later)


@of_glibc
def test_the_memory_of_logits_is_not_asked_for_in_every_step() -> None:
    kept, _, with_it = page_faults(str(400 << 20))
    assert kept
    _, _, without = page_faults()
    assert with_it * 10 < without


@of_glibc
@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here")
def test_the_first_logits_come_in_huge_pages() -> None:
    _, small, _ = page_faults()
    kept, huge, _ = page_faults(str(400 << 20))
    assert kept
    assert huge * 10 < small


@of_glibc
def test_memory_can_be_made_ready_for_the_first_logits() -> None:
    code = """
from agentspec.server_ext.vllm_adapter.worker.cpu import keep_freed_memory
def resident():
    return 4 * int(open("/proc/self/statm").read().split()[1])
before = resident()
keep_freed_memory(400 << 20)
between = resident()
keep_freed_memory(400 << 20, 128 << 20)
print(between - before, resident() - between)
"""
    run = [sys.executable, "-c", code]
    told = subprocess.run(run, capture_output=True, text=True, check=True, env=NOT_CHOSEN).stdout
    unused, ready = map(int, told.split())
    assert unused < 8 << 10
    assert 100 << 10 < ready < 136 << 10


def test_what_the_environment_says_of_freed_memory_stays() -> None:
    kept, _, _ = page_faults(str(200 << 20), MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
