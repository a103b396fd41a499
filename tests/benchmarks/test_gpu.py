"""Test the calls and figures of benchmarks/gpu.py."""

import argparse
from pathlib import Path

import engines
import gpu
import numpy as np
import pytest
import trace_files

from agentspec.errors import ConfigurationError
from agentspec.testing.replay import Call, ModelShape, ReplayResult
from agentspec.testing.replay_types import speculative_config


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(tokens=10, traces=tmp_path, max_prompt=100)


def test_batch_sizes_have_token_ids_of_their_own(monkeypatch: pytest.MonkeyPatch, options: argparse.Namespace) -> None:
    tokens = np.array([5, 6, 5, 6, trace_files.VOCABULARY - 1], np.int32)
    recorded = [Call(f"s{i}", tokens, tokens) for i in range(20)]
    monkeypatch.setattr(engines, "short_calls", lambda options, workload: iter(recorded))
    one, eight = (gpu.read_calls(options, "any", batch) for batch in (1, 8))
    assert (len(one), len(eight)) == (2, 8)  # 10 tokens, and 4 times as many
    assert not set(one[0].prompt) & set(eight[0].prompt)
    assert {call.session for call in one}.isdisjoint(call.session for call in eight)
    for call in (*one, *eight):
        assert call.prompt.dtype == np.int32 and call.prompt.max() < trace_files.VOCABULARY
        assert call.prompt[0] == call.prompt[2] != call.prompt[1] == call.prompt[3]  # repeats are kept


def test_a_workload_without_short_prompts_is_named(
    monkeypatch: pytest.MonkeyPatch, options: argparse.Namespace
) -> None:
    monkeypatch.setattr(engines, "short_calls", lambda options, workload: iter([]))
    with pytest.raises(ConfigurationError, match="--max-prompt 100: no call of any has a prompt that short"):
        gpu.read_calls(options, "any", 1)


def test_a_row_compares_with_agentspec() -> None:
    ours = ReplayResult(tokens=100, steps=50, seconds=1.0, turns=((50, 0.5), (50, 0.5)))
    other = ReplayResult(tokens=100, steps=100, seconds=2.0, turns=((50, 1.0), (50, 1.0)), decode_seconds=(0.02,))
    row = gpu.figures(other, ours)
    assert (row["agentspec_speed_ratio"], row["tokens_per_step"], row["step_ms"]) == (2.0, 1.0, 20.0)
    assert "agentspec_speed_ratio" not in gpu.figures(ours, ours)


def test_shapes_are_models_that_vllm_can_make() -> None:
    for shape in gpu.SHAPES.values():
        assert shape.hidden % shape.heads == 0 == shape.heads % (shape.kv_heads or shape.heads)
    assert speculative_config("vllm") is None
    assert ModelShape().inner is None
