"""The adapter on vLLM's own classes, without a running engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from agentspec.errors import UnsupportedEngineError
from agentspec.server_ext import plugin, vllm_adapter
from agentspec.server_ext.model_key import tokenizer_fingerprint
from agentspec.server_ext.vllm_adapter.drafter import returned_tokens
from agentspec.server_ext.vllm_adapter.empty_steps import metadata_without_drafts, wrap_take
from agentspec.server_ext.vllm_adapter.hooks import install_hooks
from agentspec.server_ext.vllm_launch import PROPOSER_PATH


def finished(output: list[int], **params: Any) -> CachedRequestState:
    """A request as vLLM's model runner keeps it."""
    return CachedRequestState(
        req_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=SamplingParams(**params),
        generator=None,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=output,
    )


class TestReturnedTokens:
    def test_accepted_drafts_past_max_tokens_are_cut(self) -> None:
        assert returned_tokens(finished([5, 6, 7, 8], max_tokens=3)) == 3

    def test_accepted_drafts_past_a_stop_token_are_cut(self) -> None:
        assert returned_tokens(finished([5, 9, 7, 8], max_tokens=10, stop_token_ids=[9])) == 2

    def test_accepted_drafts_past_the_end_token_are_cut(self) -> None:
        state = finished([5, 2, 7, 8], max_tokens=10)
        state.sampling_params.update_from_generation_config({}, 2)
        assert returned_tokens(state) == 2

    def test_the_end_token_is_text_when_it_is_ignored(self) -> None:
        state = finished([5, 2, 7, 8], max_tokens=10, ignore_eos=True)
        state.sampling_params.update_from_generation_config({}, 2)
        assert returned_tokens(state) == 4

    def test_a_stop_before_min_tokens_does_not_count(self) -> None:
        state = finished([9, 5, 9, 8], max_tokens=10, min_tokens=2, stop_token_ids=[9])
        assert returned_tokens(state) == 3


def test_the_mended_expansion_fills_its_result_in_place_of_a_copy() -> None:
    plugin.register()
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)
    values = torch.tensor([0.5, 7.0, -1.0])
    result = rejection_sampler.expand_batch_to_tokens(values, counts, 5, replace_from=-1, replace_to=1)
    assert result.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    whole = rejection_sampler.expand_batch_to_tokens(torch.tensor([3, 4], dtype=torch.int32), counts[1:], 5)
    assert whole.tolist() == [3, 3, 4, 4, 4]


def test_api_ids_lose_the_engines_decoration() -> None:
    assert vllm_adapter.api_request_id("chatcmpl-abc-12345678") == "chatcmpl-abc"
    assert vllm_adapter.api_request_id("1_cmpl-abc-0-deadbeef") == "cmpl-abc"


def test_pipeline_parallel_is_refused_with_the_remedy() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(UnsupportedEngineError, match="tensor parallelism"):
        vllm_adapter.check_engine(config)


def test_only_our_own_method_is_recognised() -> None:
    def config(method: str, model: str | None) -> Any:
        return SimpleNamespace(speculative_config=SimpleNamespace(method=method, model=model))

    assert vllm_adapter.uses_agentspec(config("custom_class", PROPOSER_PATH))
    assert not vllm_adapter.uses_agentspec(config("custom_class", "other.Class"))
    assert not vllm_adapter.uses_agentspec(config("ngram", None))
    assert not vllm_adapter.uses_agentspec(SimpleNamespace(speculative_config=None))


def test_the_tokenizer_decides_the_fingerprint(tmp_path: Any) -> None:
    one, other, same = tmp_path / "one", tmp_path / "other", tmp_path / "same"
    for folder, text in ((one, "a"), (other, "b"), (same, "a")):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(text)
        (folder / "weights.bin").write_text(folder.name)
    marks = [tokenizer_fingerprint(str(folder), None) for folder in (one, other, same)]
    assert marks[0] == marks[2] != marks[1]
    assert tokenizer_fingerprint("org/name", "r1") != tokenizer_fingerprint("org/name", "r2")


@pytest.mark.parametrize("ends", [[4, 104, 105, 209], [1, 2, 3, 4]])
def test_metadata_of_a_step_without_drafts_is_what_vllm_computes(ends: list[int]) -> None:
    import numpy as np
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    scheduled = np.array(ends, dtype=np.int32)
    runner: Any = object.__new__(GPUModelRunner)
    runner.device = torch.device("cpu")
    runner.input_ids = SimpleNamespace(gpu=torch.arange(500, dtype=torch.int32))
    runner._arange_scratch = np.arange(500, dtype=np.int32)
    runner.arange_np = np.arange(500, dtype=np.int32)
    calculate = GPUModelRunner._calc_spec_decode_metadata
    theirs = getattr(calculate, "__wrapped__", calculate)(runner, np.zeros(4, dtype=np.int32), scheduled)
    ours = metadata_without_drafts(scheduled, runner.device)
    assert vars(ours).keys() == vars(theirs).keys()
    for name, value in vars(theirs).items():
        mine = getattr(ours, name)
        assert (mine.tolist() == value.tolist()) if isinstance(value, torch.Tensor) else (mine == value), name


class TestTakingDrafts:
    """What the scheduler is told after a step: nothing, where no row has a draft."""

    @staticmethod
    def take(*, idle: bool, asynchronous: bool = False) -> Any:
        drafter = object.__new__(vllm_adapter.AgentSpecProposer)
        drafter.idle = idle
        runner = SimpleNamespace(drafter=drafter, use_async_scheduling=asynchronous)
        return wrap_take(lambda self: "vLLM's answer")(runner)

    def test_nothing_when_no_row_has_a_draft(self) -> None:
        assert self.take(idle=True) is None

    def test_the_drafts_when_there_are_some(self) -> None:
        assert self.take(idle=False) == "vLLM's answer"

    def test_under_asynchronous_scheduling_it_stays_vllms(self) -> None:
        assert self.take(idle=True, asynchronous=True) == "vLLM's answer"

    def test_another_drafter_is_left_alone(self) -> None:
        runner = SimpleNamespace(drafter=object(), use_async_scheduling=False)
        assert wrap_take(lambda self: "theirs")(runner) == "theirs"


def test_hooks_are_installed_once() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    install_hooks()
    first = GPUModelRunner.propose_draft_token_ids
    install_hooks()
    assert GPUModelRunner.propose_draft_token_ids is first
