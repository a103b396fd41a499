"""Test vLLM's own drafting methods as users configure them: longer drafts, and what cannot work beside the indexes."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import ConfigurationError, UnsupportedEngineError
from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.vllm_adapter.startup.native_methods import as_configured, drafter_tokens
from agentspec.server_ext.vllm_adapter.startup.speculative_config import engine_options, uses_agentspec

MODEL = Path(__file__).parents[2] / "demo" / "model"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
SPECULATOR = str(MODEL.parent / "drafter")
BESIDE = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}


def configured(method: dict[str, Any], max_draft: int | None = None, **options: Any) -> Any:
    """Return vLLM's configuration of the demo's model with one of its own methods and agentspec's settings."""
    from vllm.engine.arg_utils import EngineArgs

    vllm_adapter.register()
    given = engine_options(speculative_config=method, max_draft=max_draft, store="memory://")
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    return EngineArgs(model=str(MODEL), **{**settings, **given, **options}).create_engine_config()


class TestConfiguration:
    def test_drafts_are_longer_than_the_drafters(self) -> None:
        config = configured(NGRAM)
        assert config.speculative_config.method == "ngram"
        assert config.speculative_config.prompt_lookup_max == 4
        assert (config.num_speculative_tokens, drafter_tokens(config.speculative_config)) == (MAX_DRAFT, 5)
        assert uses_agentspec(config)
        assert not config.scheduler_config.async_scheduling

    def test_the_drafter_gets_kv_slots_for_its_own_tokens(self) -> None:
        config = configured(BESIDE)
        assert config.num_speculative_tokens == MAX_DRAFT
        assert config.num_lookahead_tokens == 3
        assert config.speculative_config.max_num_new_slots_for_drafting == 1
        assert config.uniform_decode_query_len == 1
        assert not config.use_v2_model_runner
        assert not config.scheduler_config.async_scheduling, "vLLM's default for draft models"

    def test_the_number_survives_the_way_to_the_worker(self) -> None:
        config = pickle.loads(pickle.dumps(configured(NGRAM)))
        assert drafter_tokens(config.speculative_config) == 5

    def test_a_drafter_is_made_for_its_own_tokens(self) -> None:
        config = configured(BESIDE)
        own = as_configured(config)
        assert own.num_speculative_tokens == 3
        assert config.num_speculative_tokens == MAX_DRAFT
        assert own.compilation_config is config.compilation_config, "where layers register for their KV cache"

    @pytest.mark.parametrize(("limit", "longest"), [(16, 16), (2, 5)])
    def test_the_longest_draft_holds_the_drafters(self, limit: int, longest: int) -> None:
        assert configured(NGRAM, max_draft=limit).num_speculative_tokens == longest

    def test_without_settings_of_ours_it_is_vllms(self) -> None:
        config = configured(NGRAM, additional_config={})
        assert config.num_speculative_tokens == 5
        assert not uses_agentspec(config)

    def test_switched_off_it_is_vllms(self) -> None:
        config = configured(NGRAM, additional_config={"agentspec": {"enabled": False, "store": "memory://"}})
        assert config.num_speculative_tokens == 5
        assert not uses_agentspec(config)

    @pytest.mark.parametrize(
        ("method", "options", "message"),
        [
            ({"method": "ngram_gpu", "num_speculative_tokens": 3}, {}, 'use "ngram"'),
            (NGRAM, {"async_scheduling": True}, "leave the option out"),
            ({**NGRAM, "num_speculative_tokens": 129}, {}, "num_speculative_tokens 129: .* at most 128"),
            ({**NGRAM, "rejection_sample_method": "block"}, {}, "rejection_sample_method"),
            (NGRAM, {"additional_config": {"agentspec": {"speculator": "x"}}}, "give one of them"),
            ({**BESIDE, "model": SPECULATOR}, {}, "'draft_model' cannot run: give it as .*arctic"),
        ],
    )
    def test_what_cannot_work_is_refused_with_the_remedy(
        self, method: dict[str, Any], options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises((ConfigurationError, UnsupportedEngineError), match=message):
            configured(method, **options)

    def test_the_other_model_runner_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        with pytest.raises(ConfigurationError, match="unset the variable"):
            configured(NGRAM)
