"""Test how long drafts may be if the user gives no number, on vLLM's own model configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import AgentSpecError, SpeculatorError, StoreUnavailableError
from agentspec.server_ext.settings import Settings, load_settings
from agentspec.server_ext.vllm_adapter.startup import conflicts
from agentspec.server_ext.vllm_adapter.startup.draft_limit import LEAST_STATES, MOST_STATES, STATE_SHARE, _state_bytes
from agentspec.server_ext.vllm_adapter.startup.speculative_config import describe, engine_options
from tests.server_ext.vllm_configs import DENSE, HYBRID, MAMBA, engine_args
from tests.speculator.files import H, V, lstm, mlp


@pytest.fixture(autouse=True)
def _no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this is no CPU, where models with recurrent states are refused."""
    monkeypatch.setattr(conflicts, "on_cpu", lambda: False)


def draft_limit(
    folder: Path, model: dict[str, Any], options: dict[str, Any] | None = None, **more: Any
) -> tuple[int, tuple[Any, Any, Any]]:
    """Return the draft limit in vLLM's speculative configuration, and the arguments that it was computed from."""
    from vllm.config import ParallelConfig

    arguments = engine_args(folder, model, **(options or engine_options(store="memory://")), **more)
    config = arguments.create_model_config()
    speculative = arguments.create_speculative_config(config, ParallelConfig())
    return speculative.num_speculative_tokens, (arguments, config, ParallelConfig())


def test_attention_alone_drafts_what_the_sampler_verifies(tmp_path: Path) -> None:
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    assert draft_limit(tmp_path, DENSE)[0] == MAX_DRAFT == MAX_SPEC_LEN


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"record": "{file}/steps.jsonl"}, r"record .*steps.jsonl: cannot be written: .*; name another file"),
        ({"store": "sqlite:///{file}/s.db"}, r"store .*s.db: .*; name another file \(--store or AGENTSPEC_STORE\)"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_the_engine_starts(
    tmp_path: Path, setting: dict[str, str], message: str
) -> None:
    """A worker's error would come a minute later, and tell a trainer only that the engine did not start."""
    (tmp_path / "file").write_text("")
    options: dict[str, Any] = {name: value.format(file=tmp_path / "file") for name, value in setting.items()}
    with pytest.raises(AgentSpecError, match=message):
        draft_limit(tmp_path, DENSE, engine_options(**{"store": "memory://"} | options))


def test_an_engine_whose_default_store_cannot_be_opened_keeps_turns_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This is so for ``vllm serve`` and a trainer's engine, say on a full disk: the user did not choose that store."""

    def full(path: Path) -> None:
        raise StoreUnavailableError(f"{path}: database or disk is full")

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("AGENTSPEC_STORE", "")
    monkeypatch.setenv("AGENTSPEC_SETTINGS", "")
    monkeypatch.setenv("AGENTSPEC_STORE_SECRET", "")
    monkeypatch.setattr("agentspec.cache.store.urls.SQLiteStore", full)
    assert draft_limit(tmp_path / "model", DENSE, engine_options())[0] == MAX_DRAFT
    assert load_settings({}).store == "memory://"  # as the worker reads them
    assert "disk is full" in caplog.text and "--store" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name", "speculator nowhere: no such folder; give one with config.json and weights, or a hub id"),
        ("hidden", r"input_hidden_dim .* is 24, but the target's is 256; .*: take one for your target"),
        ("vocabulary", "vocab_size is 50, but the target's is 1000"),
        ("cut", "pytorch_model.bin: cannot be read .*; it must hold tensors by name"),
        ("other weights", "tensor forget_emb.0.weight is missing"),
    ],
)
def test_a_speculator_that_does_not_fit_is_refused_before_the_engine_starts(
    tmp_path: Path, change: str, message: str
) -> None:
    """A worker's error would come a minute later, amid two tracebacks."""
    folder = (mlp() if change == "other weights" else lstm()).write(tmp_path / "speculator")
    (folder / "config.json").write_text(json.dumps(lstm().config))
    if change == "cut":
        (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:2000])
    fits = {"hidden_size": DENSE["hidden_size"] if change == "hidden" else H, "vocab_size": V}
    if change == "vocabulary":
        fits["vocab_size"] = DENSE["vocab_size"]
    options = engine_options(store="memory://", speculator="nowhere" if change == "name" else str(folder))
    with pytest.raises(SpeculatorError, match=message):
        draft_limit(tmp_path / "model", DENSE | fits | {"num_attention_heads": 2, "head_dim": 12}, options)


@pytest.mark.parametrize("longest", [8192, 16384, 20480, 65536])
def test_states_take_a_share_of_what_the_cache_holds(tmp_path: Path, longest: int) -> None:
    limit, parts = draft_limit(tmp_path, HYBRID, max_model_len=longest)
    assert LEAST_STATES <= limit <= MOST_STATES
    cache = longest * 12 * 2 * 2 * 256 * 2  # 12 attention layers, keys and values, 2 heads of 256 in 2 bytes
    taken = {tokens: 36 * tokens * _state_bytes(*parts, tokens) for tokens in (limit, limit + 1)}
    assert taken[limit] <= STATE_SHARE * cache or limit == LEAST_STATES
    assert taken[limit + 1] > STATE_SHARE * cache or limit == MOST_STATES


def test_the_share_decides_between_the_bounds(tmp_path: Path) -> None:
    limits = [draft_limit(tmp_path, HYBRID, max_model_len=n)[0] for n in (4096, 65536, 262144)]
    assert limits[0] == LEAST_STATES < limits[1] < limits[2] == MOST_STATES


def test_a_model_without_attention_gets_the_least(tmp_path: Path) -> None:
    assert draft_limit(tmp_path, MAMBA)[0] == LEAST_STATES


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"max_num_batched_tokens": 2048, "max_num_seqs": 64}, 31),
        ({"max_num_seqs": 1024}, 1),
        ({}, 15),
        ({"max_model_len": 64, "max_num_seqs": 4}, 63),
        ({"performance_mode": "throughput"}, 15),
        ({"performance_mode": "throughput", "max_num_seqs": 128}, 31),
    ],
)
def test_adapters_leave_what_a_step_can_hold(tmp_path: Path, given: dict[str, Any], limit: int) -> None:
    """Drafts of all requests must fit, or vLLM does not start. Its defaults for a CPU leave 15 tokens."""
    from vllm.usage.usage_lib import UsageContext

    for usage in (UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER):
        options = {**engine_options(store="memory://"), "enable_lora": True, "enforce_eager": True, **given}
        config = engine_args(tmp_path / "model", DENSE, **options).create_engine_config(usage)
        assert config.speculative_config.num_speculative_tokens == limit


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_a_given_number_wins(tmp_path: Path, model: dict[str, Any]) -> None:
    assert draft_limit(tmp_path, model, engine_options(max_draft=37, store="memory://"))[0] == 37
    setting = {**engine_options(store="memory://"), "additional_config": {"agentspec": {"max_draft": 36}}}
    assert draft_limit(tmp_path, model, setting)[0] == 36


def test_a_draft_model_may_draft_all_it_was_told_to(tmp_path: Path) -> None:
    method = {"method": "ngram", "num_speculative_tokens": 9}
    options = engine_options(store="memory://", speculative_config=method)
    assert draft_limit(tmp_path, MAMBA, options)[0] == 9


def test_other_methods_keep_their_number(tmp_path: Path) -> None:
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    assert draft_limit(tmp_path, DENSE, options)[0] == 3


INDEX = "suffix index (session, group, tenant)"
LENGTH = "up to 128 tokens, price measured"


@pytest.mark.parametrize(
    ("settings", "method", "has_keys", "line"),
    [
        ({}, "eagle3", False, f"{INDEX} + eagle3, {LENGTH}; shared by all callers, --api-key separates them"),
        ({}, "eagle3", None, f"{INDEX} + eagle3, {LENGTH}"),
        ({"verify_cost": 0.05}, None, True, f"{INDEX}, up to 128 tokens, price 0.05; shared within each API key"),
        (
            {"scope": "session"},
            None,
            False,
            f"suffix index (session, family), {LENGTH}; each session drafts from itself, its parent and children "
            "alone, whoever names it, --api-key separates callers",
        ),
        (
            {"scope": "session", "principal_header": "x-user"},
            None,
            False,
            f"suffix index (session, family), {LENGTH}; each session drafts from itself, its parent and children "
            "alone, for its principal",
        ),
        (
            {"scope": "none"},
            None,
            False,
            f"suffix index (own text), {LENGTH}; each request drafts from its own text alone",
        ),
        (
            {"arctic_suffix_rule": {"max_spec_factor": 0.0}, "tenant": "acme"},
            "speculator",
            True,
            f"speculator, {LENGTH}; all callers of tenant 'acme' share answers, but not sessions",
        ),
        (
            {"tenant": "acme"},
            None,
            False,
            f"{INDEX}, {LENGTH}; all callers of tenant 'acme' share answers, --api-key keeps sessions apart",
        ),
        ({"tenant_header": "x-tenant"}, None, False, f"{INDEX}, {LENGTH}; shared within each tenant"),
        ({"principal_header": "x-user"}, None, True, f"{INDEX}, {LENGTH}; shared within each principal"),
    ],
)
def test_one_line_says_what_drafts_and_for_whom(
    settings: dict[str, Any], method: str | None, has_keys: bool | None, line: str
) -> None:
    assert describe(Settings(store="memory://", **settings), method, 128, has_keys=has_keys) == line
