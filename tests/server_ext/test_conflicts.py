"""Test vLLM options that exclude drafts: they are refused before the model is loaded, or the engine stays plain."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.errors import ConfigurationError
from agentspec.server_ext.vllm_adapter.startup import conflicts, speculative_config
from agentspec.server_ext.vllm_adapter.startup.conflicts import conflict
from agentspec.server_ext.vllm_launch import engine_options
from tests.server_ext.vllm_configs import DENSE, MAMBA, engine_args


def attention_only() -> Any:
    """Return the fields of vLLM's ModelConfig that are read."""
    return SimpleNamespace(runner_type="generate", is_hybrid=False, is_attention_free=False)


ONE_STAGE = SimpleNamespace(pipeline_parallel_size=1)
CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"async_scheduling": True}, "--async-scheduling: .* leave the option out"),
    ({"logits_processors": ["module:Processor"]}, "--logits-processors: .* leave the option out"),
]


@pytest.mark.parametrize(("option", "message"), CONFLICTS)
def test_an_engine_that_was_told_to_draft_names_the_remedy(
    option: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arguments = engine_args(
        tmp_path / "model", DENSE, enforce_eager=True, **engine_options(store="memory://"), **option
    )
    with pytest.raises(ConfigurationError, match=message):
        arguments.create_engine_config()


@pytest.mark.parametrize(("option", "message"), CONFLICTS)
@pytest.mark.parametrize("config", [None, {"method": "ngram", "num_speculative_tokens": 4}])
def test_an_engine_that_everybody_switched_on_stays_as_it_is(
    option: dict[str, Any], message: str, config: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = SimpleNamespace(speculative_config=config, additional_config={}, **option)
    speculative_config.switch_on(arguments, attention_only(), ONE_STAGE, {"AGENTSPEC": "1"})
    assert arguments.speculative_config == config
    assert arguments.additional_config == {}
    assert bool(re.search(message, caplog.text)) == (config is None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}, "one rank an engine"),
        ({"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 1}, None),
        ({"distributed_executor_backend": "mp", "tensor_parallel_size": 2}, None),
    ],
)
def test_what_no_engine_can_draft_with_names_the_remedy(options: dict[str, Any], message: str | None) -> None:
    """With an external launcher all ranks schedule by themselves. Other drafts on each would mix up their tokens."""
    arguments = SimpleNamespace(**{"async_scheduling": None, **options})
    found = conflict(arguments, attention_only(), ONE_STAGE, {})
    assert found is None if message is None else message in (found or "")


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({"max_num_seqs": 256, "max_num_batched_tokens": 300}, False),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 512}, True),
        ({"max_num_seqs": 1500}, False),
        ({"max_num_seqs": 4, "max_model_len": 64}, True),
        ({"max_num_seqs": 300, "performance_mode": "throughput"}, True),
    ],
)
def test_adapters_without_room_for_a_draft_name_the_remedy(limits: dict[str, Any], room: bool, tmp_path: Path) -> None:
    """vLLM's own error names neither option."""
    arguments = engine_args(
        tmp_path / "model", DENSE, enforce_eager=True, enable_lora=True, **engine_options(store="memory://"), **limits
    )
    if room:
        config = arguments.create_engine_config()
        assert config.speculative_config.num_speculative_tokens >= 1
    else:
        with pytest.raises(ConfigurationError, match="hold two tokens for each"):
            arguments.create_engine_config()


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        *((None, True), ({"method": "suffix"}, True)),
        *(({"method": "ngram"}, False), ({"method": "deepseek_mtp"}, False), ({"model": "heads/eagle3"}, False)),
    ],
)
def test_logits_processors_of_installed_packages_are_not_dropped_in_silence(
    config: dict[str, Any] | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads none with any speculative decoding, its own methods included, and says so of other things only."""
    plugins = {"vllm.logits_processors": [SimpleNamespace(name="safety")]}
    monkeypatch.setattr(conflicts, "entry_points", lambda group: plugins[group])
    arguments = SimpleNamespace(async_scheduling=None, speculative_config=config)
    found = conflict(arguments, attention_only(), ONE_STAGE, {})
    assert (found is not None and "installed packages (safety)" in found) == refused


def test_the_other_model_runner_is_a_conflict_and_other_values_are_none() -> None:
    arguments = SimpleNamespace(async_scheduling=None, logits_processors=None)
    assert "unset the variable" in (
        conflict(arguments, attention_only(), ONE_STAGE, {"VLLM_USE_V2_MODEL_RUNNER": "1"}) or ""
    )
    for environ in ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}):
        assert conflict(arguments, attention_only(), ONE_STAGE, environ) is None
        assert (
            conflict(
                SimpleNamespace(async_scheduling=False, logits_processors=[]), attention_only(), ONE_STAGE, environ
            )
            is None
        )


@pytest.mark.parametrize(
    "option",
    [
        {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"},
        {"enable_trace_replay": True},
        {"watermark_config": {"algo": "any"}},
        {"enable_batch_sharded_sampling": True},
    ],
)
def test_options_that_only_the_other_model_runner_has_exclude_drafts(option: dict[str, Any], tmp_path: Path) -> None:
    """vLLM would end with an error that doesn't say what to do, of an engine that the switch alone made draft too."""
    name = f"--{next(iter(option)).replace('_', '-')}"
    arguments = engine_args(
        tmp_path / "model", DENSE, enforce_eager=True, **engine_options(store="memory://"), **option
    )
    with pytest.raises(ConfigurationError, match=f"{name}: only vLLM's V2 model runner .* leave it out"):
        arguments.create_engine_config()
    arguments.speculative_config = None
    speculative_config.switch_on(arguments, attention_only(), parallel_of(arguments), {"AGENTSPEC": "1"})
    assert arguments.speculative_config is None


def parallel_of(arguments: Any) -> Any:
    """Return the fields of vLLM's ParallelConfig that are read."""
    return SimpleNamespace(
        pipeline_parallel_size=1, enable_batch_sharded_sampling=arguments.enable_batch_sharded_sampling
    )


def test_the_rust_frontend_is_a_conflict_because_it_writes_no_identities() -> None:
    """A caller's ``vllm_xargs`` would reach the engine unchanged, an identity included."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    environ = {"VLLM_USE_RUST_FRONTEND": "1"}
    server, offline = AsyncEngineArgs(model="m"), EngineArgs(model="m")
    assert "unset the variable" in (conflict(server, attention_only(), ONE_STAGE, environ) or "")
    assert conflict(offline, attention_only(), ONE_STAGE, environ) is None
    assert conflict(server, attention_only(), ONE_STAGE, {"VLLM_USE_RUST_FRONTEND": "0"}) is None
    assert conflict(server, attention_only(), ONE_STAGE, {}) is None


@pytest.mark.parametrize("method", [None, {"method": "ngram", "num_speculative_tokens": 4}])
def test_recurrent_states_on_a_cpu_are_refused(method: dict[str, Any] | None, tmp_path: Path) -> None:
    """With drafts, vLLM's CPU build answers with other text, or crashes."""
    options = engine_options(store="memory://", speculative_config=method)
    arguments = engine_args(tmp_path / "model", MAMBA, enforce_eager=True, **options)
    with pytest.raises(ConfigurationError, match=r"Mamba2ForCausalLM on a CPU: .* start plain 'vllm serve'"):
        arguments.create_engine_config()


@pytest.mark.parametrize("method", [None, {"method": "suffix"}])
def test_a_model_that_generates_no_text_is_served_as_by_vllm(
    method: dict[str, Any] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets no proposer and no store, as with ``AGENTSPEC=1``."""
    options = engine_options(store="memory://", speculative_config=method)
    arguments = engine_args(tmp_path / "model", DENSE, enforce_eager=True, runner="pooling", **options)
    with caplog.at_level("INFO"):
        config = arguments.create_engine_config()
    assert config.speculative_config is None
    assert "agentspec: this model generates no text, so nothing is drafted" in caplog.messages
