"""Test what vLLM leaves for drafts, and what it allocates for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.vllm_adapter.startup.draft_limit import engine_limits, host_memory
from agentspec.server_ext.vllm_adapter.startup.speculative_config import engine_options
from agentspec.server_ext.vllm_adapter.worker import grammar_bitmask
from tests.server_ext.vllm_configs import DENSE, engine_args


@pytest.fixture
def config(tmp_path: Path) -> Any:
    options = engine_options(store="memory://")
    return engine_args(tmp_path, DENSE, max_num_batched_tokens=4096, **options).create_engine_config()


def test_on_a_host_a_share_of_its_memory_counts_as_free(config: Any) -> None:
    limits = engine_limits(config)
    assert limits.free_bytes == host_memory() // 4
    assert limits.position_bytes == 1000 * 4 * 8
    assert limits.provided_tokens == 0
    assert limits.scheduled_tokens == 4096


def test_a_container_has_as_much_memory_as_it_may(tmp_path: Path) -> None:
    host = host_memory(tmp_path)
    assert host > 1 << 28
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path) == host
    (tmp_path / "memory.max").write_text(f"{1 << 27}\n")
    assert host_memory(tmp_path) == 1 << 27
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none, in version 1
    assert host_memory(tmp_path) == 1 << 27


def test_on_cuda_what_vllm_leaves_counts_as_free(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms

    cuda = SimpleNamespace(is_cuda_alike=lambda: True, get_device_total_memory=lambda: 80 << 30)
    monkeypatch.setattr(platforms, "current_platform", cuda)
    config.cache_config.gpu_memory_utilization = 0.9
    limits = engine_limits(config)
    assert limits.free_bytes == pytest.approx(8 << 30, rel=1e-6)
    assert limits.position_bytes == 1000 * 4 * 4
    assert limits.provided_tokens == config.scheduler_config.max_num_seqs
    config.cache_config.kv_cache_memory_bytes = 60 << 30  # vLLM takes this in place of the share
    assert engine_limits(config).free_bytes == 0


class Grammar:
    """Allow and accept every token."""

    def __init__(self) -> None:
        self.filled: list[int] = []

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        self.filled.append(index)
        bitmask[index].fill_(index)

    def is_terminated(self) -> bool:
        return False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def rollback(self, tokens: int) -> None:
        pass


def manager_of(config: Any) -> tuple[Any, list[int]]:
    """Return vLLM's structured output manager for this engine, and the sizes that it allocates."""
    from vllm.v1.structured_output import StructuredOutputManager

    allocated: list[int] = []

    def allocate(rows: int) -> torch.Tensor:
        allocated.append(rows)
        return torch.zeros((rows, 4), dtype=torch.int32)

    manager: Any = object.__new__(StructuredOutputManager)
    manager.vllm_config = config
    manager.backend = SimpleNamespace(allocate_token_bitmask=allocate)
    manager.reasoner_cls = manager._reasoner = manager.reasoner = None
    manager._grammar_bitmask = None
    manager._full_mask = torch.tensor(-1, dtype=torch.int32)
    manager.fill_bitmask_parallel_threshold = 1_000
    manager.enable_in_reasoning = False
    return manager, allocated


def test_the_bitmask_grows_with_the_drafts_that_there_are(config: Any) -> None:
    vllm_adapter.register()
    vllm_adapter.register()
    manager, allocated = manager_of(config)
    seqs = config.scheduler_config.max_num_seqs
    requests = {
        name: SimpleNamespace(structured_output_request=SimpleNamespace(grammar=Grammar(), reasoning_ended=True))
        for name in ("a", "b")
    }
    for drafts, rows in (({}, 2), ({"a": [1, 2, 3]}, 5), ({"a": [1] * 128, "b": [1] * 128}, 258)):
        bitmask = manager.grammar_bitmask(requests, ["a", "b"], drafts)
        assert bitmask.shape == (rows, 4)
        assert bitmask[:, 0].tolist() == list(range(rows))
        assert manager.vllm_config is config
    assert allocated[0] < seqs * 129 / 8
    assert len(allocated) == len(set(allocated)) <= 2


def test_the_bitmask_is_laid_out_for_the_longest_draft_of_the_step(config: Any) -> None:
    """From vLLM 0.33 on, each request has a block of as many rows as vLLM's configuration has draft tokens."""
    manager, allocated = manager_of(config)

    def fill(manager: Any, requests: Any, ids: list[str], drafts: Any) -> torch.Tensor:
        assert manager.vllm_config.model_config is config.model_config
        rows = len(ids) * (1 + manager.vllm_config.num_speculative_tokens)
        assert len(manager._grammar_bitmask) >= rows
        bitmask: torch.Tensor = manager._grammar_bitmask[:rows]
        return bitmask

    for drafts, rows in (({}, 2), ({"a": [1, 2, 3]}, 8), ({"b": [1] * 128, "c": [1]}, 258)):
        assert len(grammar_bitmask.even_grammar_bitmask(fill, manager, {}, ["a", "b"], drafts)) == rows
        assert manager.vllm_config is config
    with pytest.raises(KeyError):
        grammar_bitmask.even_grammar_bitmask(lambda *_: dict[str, int]()["missing"], manager, {}, ["a"], {})
    assert manager.vllm_config is config
    assert max(allocated) == 512


def test_a_bitmask_that_was_large_for_one_step_is_given_back(config: Any) -> None:
    manager, allocated = manager_of(config)
    seqs = 1 << (config.scheduler_config.max_num_seqs - 1).bit_length()
    many = [str(i) for i in range(seqs)]
    for ids, drafts in ((["0"], {}), (many, {"0": [1] * 15}), (many, {"0": [1]}), (["0"], {})):
        grammar_bitmask.even_grammar_bitmask(lambda *_: None, manager, {}, ids, drafts)
    assert allocated == [seqs, 16 * seqs, seqs]
