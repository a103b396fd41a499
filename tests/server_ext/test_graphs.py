"""Test which CUDA graph a step gets, on vLLM's own configuration, model runner and dispatcher, without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.vllm_adapter.startup import conflicts
from agentspec.server_ext.vllm_adapter.startup.speculative_config import engine_options
from agentspec.server_ext.vllm_adapter.worker import cuda_graphs
from agentspec.server_ext.vllm_adapter.worker.cuda_graphs import drafts_are_ragged
from tests.server_ext.vllm_configs import DENSE, HYBRID, engine_args

DEFAULT_SIZES: list[int] = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
ROWS = range(1, 257)


@dataclass(frozen=True)
class Graph:
    """Hold what a step runs as: name of the mode, padded tokens, whether all rows must have the same length."""

    mode: str
    tokens: int
    uniform: bool


class Engine:
    """Hold vLLM's objects as its workers set them up on a GPU. draft: longest draft, None: no speculation.

    replays: what attention can replay, as the name of vLLM's AttentionCGSupport.
    """

    def __init__(
        self,
        folder: Path,
        draft: int | None,
        model: dict[str, Any] = DENSE,
        rows: int = 256,
        replays: str = "UNIFORM_BATCH",
        parallel: Mapping[str, Any] | None = None,
        **compilation: Any,
    ) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        options = {} if draft is None else engine_options(max_draft=draft, store="memory://")
        arguments = engine_args(folder, model, max_num_seqs=rows, max_num_batched_tokens=8192, **options)
        self.config = arguments.create_engine_config()
        for name, value in (parallel or {}).items():
            setattr(self.config.parallel_config, name, value)
        made = self.config.compilation_config
        # Undo what the CPU platform switches off:
        made.mode, made.cudagraph_mode = CompilationMode.VLLM_COMPILE, CUDAGraphMode.FULL_AND_PIECEWISE
        made.cudagraph_capture_sizes = made.max_cudagraph_capture_size = made.splitting_ops = None
        for name, value in compilation.items():
            setattr(made, name, value)
        made.set_splitting_ops_for_v1(all2all_backend="naive")
        self.config._set_cudagraph_sizes()

        runner: Any = object.__new__(GPUModelRunner)
        runner.vllm_config, runner.model_config = self.config, self.config.model_config
        runner.parallel_config, runner.compilation_config = self.config.parallel_config, made
        runner.input_batch = SimpleNamespace(lora_id_to_lora_request={})
        runner.uniform_decode_query_len = 1 + (draft or 0)  # vLLM's constructor
        runner.cudagraph_dispatcher = CudagraphDispatcher(self.config)
        runner.observability_config = SimpleNamespace(cudagraph_metrics=False)
        runner.speculative_config, runner.kv_cache_config, runner.max_num_reqs = None, None, rows
        runner._check_and_update_cudagraph_mode([{backend(replays)}], [SimpleNamespace(kv_cache_spec=None)])
        self.runner = runner
        self.sizes: list[int] = made.cudagraph_capture_sizes

    def graph(self, tokens_of_rows: list[int]) -> Graph:
        """Return the graph of a step whose rows have these numbers of tokens."""
        counts = np.array(tokens_of_rows, np.int32)
        mode, found, *_ = self.runner._determine_batch_execution_and_padding(
            num_tokens=int(counts.sum()),
            num_reqs=len(counts),
            num_scheduled_tokens_np=counts,
            max_num_scheduled_tokens=int(counts.max()),
        )
        return Graph(mode.name, found.num_tokens, found.uniform)


def backend(replays: str) -> Any:
    """Return an attention backend whose metadata builder supports `replays`."""
    from vllm.v1.attention.backend import AttentionCGSupport

    class Builder:
        @staticmethod
        def get_cudagraph_support(vllm_config: Any, kv_cache_spec: Any) -> Any:
            return AttentionCGSupport[replays]

    class Backend:
        @staticmethod
        def get_builder_cls() -> type[Builder]:
            return Builder

    return Backend


@pytest.fixture
def patched() -> None:
    vllm_adapter.install(vllm_adapter.current_patches())


@pytest.fixture
def unpatched(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the patches off vLLM."""
    from vllm.config import VllmConfig
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = VllmConfig.uniform_decode_query_len.fget.__wrapped__
    monkeypatch.setattr(VllmConfig, "uniform_decode_query_len", property(original))
    monkeypatch.setattr(VllmConfig, "_set_cudagraph_sizes", VllmConfig._set_cudagraph_sizes.__wrapped__)
    for owner in (GPUModelRunner, CudagraphDispatcher):
        monkeypatch.delattr(owner, "uniform_decode_query_len")
    resolve = GPUModelRunner._check_and_update_cudagraph_mode.__wrapped__
    monkeypatch.setattr(GPUModelRunner, "_check_and_update_cudagraph_mode", resolve)


def plain_steps(engine: Engine) -> dict[int, Graph]:
    """Return the graphs of steps without drafts, by number of rows."""
    return {rows: engine.graph([1] * rows) for rows in ROWS}


def ragged_steps(engine: Engine) -> dict[int, Graph]:
    """Return the graphs of steps in which one of up to 256 rows has a draft, by number of tokens."""
    rows = {tokens: min(tokens - 1, 256) for tokens in range(2, 513)}
    return {tokens: engine.graph([tokens - n + 1, *[1] * (n - 1)]) for tokens, n in rows.items()}


def next_default(tokens: int) -> int:
    """Return vLLM's next default size."""
    return next(size for size in DEFAULT_SIZES if size >= tokens)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("draft", [16, 128])
def test_a_step_without_drafts_runs_as_without_speculation(tmp_path: Path, draft: int) -> None:
    ours, without = Engine(tmp_path, draft), Engine(tmp_path, None)
    assert ours.sizes == without.sizes == DEFAULT_SIZES
    expected = {rows: Graph("FULL", next_default(rows), True) for rows in ROWS}
    assert plain_steps(ours) == plain_steps(without) == expected
    assert ours.runner.uniform_decode_query_len == ours.runner.cudagraph_dispatcher.uniform_decode_query_len == 1


@pytest.mark.usefixtures("patched")
def test_a_step_with_drafts_takes_the_piecewise_graph_of_the_next_size(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 128)
    expected = {n: Graph("PIECEWISE", next_default(n), False) for n in range(2, 513)}
    assert ragged_steps(engine) == expected
    assert {n: engine.graph([n]) for n in range(2, 130)} == {n: expected[n] for n in range(2, 130)}  # one row alone
    assert engine.graph([129] * 4).mode == "NONE"  # beyond the largest graph, as ever
    assert engine.graph([3, 3]) == Graph("PIECEWISE", 8, False)  # drafts that happen to be as long as each other


@pytest.mark.usefixtures("patched")
def test_a_step_with_drafts_runs_as_a_full_graph_where_attention_replays_any_batch(tmp_path: Path) -> None:
    engine, without = Engine(tmp_path, 128, replays="ALWAYS"), Engine(tmp_path, None, replays="ALWAYS")
    assert ragged_steps(engine) == {n: Graph("FULL", next_default(n), False) for n in range(2, 513)}
    assert plain_steps(engine) == plain_steps(without) == {n: Graph("FULL", next_default(n), True) for n in ROWS}
    assert engine.graph([129] * 4).mode == "NONE"
    captured = {mode.name: sizes for mode, sizes in engine.runner.cudagraph_dispatcher.get_capture_descs()}
    assert sorted((size.num_tokens, size.num_reqs) for size in captured["FULL"] if not size.uniform) == [
        (tokens, min(tokens, 256)) for tokens in DEFAULT_SIZES
    ]
    assert "PIECEWISE" not in captured  # no step runs as such a graph


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    "parallel", [{"data_parallel_size": 2}, {"decode_context_parallel_size": 2}, {"enable_dbo": True}]
)
def test_ranks_that_agree_on_a_graph_keep_vllms(tmp_path: Path, parallel: dict[str, Any]) -> None:
    engine = Engine(tmp_path, 128, replays="ALWAYS", parallel=parallel)
    sizes = dict(engine.runner.cudagraph_dispatcher.get_capture_descs())
    assert {mode.name for mode in sizes} == {"PIECEWISE", "FULL"}
    assert all(size.uniform for mode, found in sizes.items() if mode.name == "FULL" for size in found)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("kind", ["is_encoder_decoder", "is_mm_prefix_lm"])
def test_models_with_other_attention_keep_vllms_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = Engine(tmp_path, 128).config
    assert cuda_graphs.may_replay_drafts(config)
    monkeypatch.setattr(cuda_graphs, "drafts_are_ragged", lambda config: True)
    model = SimpleNamespace(**{"is_encoder_decoder": False, "is_mm_prefix_lm": False, kind: True})
    other = SimpleNamespace(parallel_config=config.parallel_config, model_config=model)
    assert not cuda_graphs.may_replay_drafts(other)


@pytest.mark.usefixtures("patched")
def test_the_users_choice_of_graphs_stays(tmp_path: Path) -> None:
    from vllm.config import CUDAGraphMode

    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
        engine = Engine(tmp_path, 128, replays="ALWAYS", cudagraph_mode=mode)
        assert engine.graph([5, 1, 1]).mode == mode.mixed_mode().name


@pytest.mark.usefixtures("patched")
def test_a_replay_is_prepared_for_the_longest_row_that_was_captured(tmp_path: Path) -> None:
    runner = SimpleNamespace(vllm_config=Engine(tmp_path, 128, replays="ALWAYS").config)

    def prepared(**given: Any) -> Any:
        return cuda_graphs.build_attention_metadata(lambda runner, **kwargs: kwargs["max_query_len"], runner, **given)

    assert prepared(max_query_len=9, num_tokens_padded=24) == 24
    assert prepared(max_query_len=1, num_tokens_padded=8) == 1  # the graph for steps without drafts
    assert prepared(max_query_len=700, num_tokens_padded=None) == 700  # no full graph


@pytest.mark.usefixtures("unpatched")
def test_vllm_as_it_comes_pads_every_step(tmp_path: Path) -> None:
    """This is the reason for the patch, and shows that the tests above can fail."""
    engine = Engine(tmp_path, 128)
    assert all(size % 129 == 0 for size in engine.sizes)
    for rows, graph in plain_steps(engine).items():
        assert graph.mode == "PIECEWISE" and graph.tokens >= 129 and graph.tokens % 129 == 0, rows
    for tokens, graph in ragged_steps(engine).items():
        assert graph != Graph("PIECEWISE", next_default(tokens), False), tokens


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 100])
def test_few_rows_have_graphs_for_their_drafts(tmp_path: Path, rows: int) -> None:
    ours, without = Engine(tmp_path, 128, rows=rows), Engine(tmp_path, None, rows=rows)
    for count in range(1, rows + 1):
        assert ours.graph([1] * count) == without.graph([1] * count), count
    drafts = ours.graph([129, *[1] * (rows - 1)])
    assert drafts.mode == "PIECEWISE" and drafts.tokens == next_default(128 + rows)
    assert without.sizes[-1] <= 2 * rows


@pytest.mark.usefixtures("patched")
def test_sizes_that_the_user_chose_stay(tmp_path: Path) -> None:
    assert Engine(tmp_path, 128, cudagraph_capture_sizes=[1, 7, 50]).sizes == [1, 7, 50]
    assert Engine(tmp_path, 128, max_cudagraph_capture_size=32).sizes[-1] == 32


@pytest.mark.usefixtures("patched")
def test_models_with_states_keep_vllms_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflicts, "on_cpu", lambda: False)
    engine = Engine(tmp_path, 4, HYBRID)
    assert not drafts_are_ragged(engine.config)
    assert engine.config.uniform_decode_query_len == engine.runner.uniform_decode_query_len == 5
    assert engine.graph([5] * 8) == Graph("FULL", 40, True)
    assert engine.graph([1] * 8).mode == "PIECEWISE"


@pytest.mark.usefixtures("patched")
def test_another_method_keeps_vllms_length(tmp_path: Path) -> None:
    arguments = engine_args(tmp_path, DENSE, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert arguments.create_engine_config().uniform_decode_query_len == 4
