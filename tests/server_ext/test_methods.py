"""Test speculative methods as users write them: what they become, and that errors name a wrong key."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.cache import DraftPolicy
from agentspec.errors import ConfigurationError, SpeculatorError, UnsupportedEngineError
from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.arctic_methods import translate
from agentspec.server_ext.settings import Settings, load_settings
from agentspec.server_ext.vllm_adapter.startup import speculative_config
from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH, own_config
from agentspec.server_ext.vllm_adapter.startup.launch import serve_arguments
from agentspec.server_ext.vllm_adapter.startup.speculative_config import engine_options

DRAFTER = str(Path(__file__).parents[2] / "demo" / "drafter")
"""A speculator that drafts 3 tokens."""
ARCTIC = {
    "method": "arctic",
    "model": "Snowflake/Arctic-LSTM-Speculator-Llama-3.1-8B-Instruct",
    "num_speculative_tokens": 3,
    "enable_suffix_decoding": True,
}


def test_arctic_with_suffix_decoding_is_a_speculator_beside_the_suffix_indexes() -> None:
    translation = translate(ARCTIC)
    assert translation.max_draft is None
    assert translation.settings == {"speculator": ARCTIC["model"], "speculator_tokens": 3}


def test_arctic_alone_drafts_without_the_suffix_indexes() -> None:
    translation = translate({**ARCTIC, "enable_suffix_decoding": False})
    assert translation.max_draft == 3
    settings = Settings(store="memory://", **translation.settings)
    rule = settings.draft_policy(3).arctic
    assert rule is not None
    assert rule.max_spec_factor == rule.max_spec_offset == 0


def test_suffix_drafts_beside_arctic_may_be_longer() -> None:
    assert translate({**ARCTIC, "suffix_speculative_tokens": 64}).max_draft == 64
    assert translate({**ARCTIC, "num_speculative_tokens": 20}, 16).max_draft == 20
    assert translate({**ARCTIC, "suffix_speculative_tokens": None}, 16).max_draft == 16  # as other keys without a value


def test_the_operators_limit_lowers_that_of_the_config() -> None:
    for config, name in (({"method": "suffix"}, "num_speculative_tokens"), (ARCTIC, "suffix_speculative_tokens")):
        longest = [translate({**config, name: tokens}, 16).max_draft for tokens in (8, 16, 64)]
        assert longest == [8, 16, 16]
    for tokens, found in ((32, 32), (0, 24), (None, 24)):  # 0 is ArcticInference's default
        assert translate({"method": "suffix", "suffix_speculative_tokens": tokens}).max_draft == found
    both = {**ARCTIC, "num_speculative_tokens": 5, "suffix_speculative_tokens": 2}
    assert [translate(both, limit).max_draft for limit in (None, 1, 2, 8)] == [2, 2, 2, 2], "never longer by it"


def test_arctic_with_a_parameter_of_the_rule_drafts_by_the_rule() -> None:
    translation = translate({**ARCTIC, "suffix_max_spec_factor": 2.0, "disable_by_batch_size": 64})
    settings = Settings(store="memory://", **translation.settings)
    assert settings.draft_policy(16) == DraftPolicy.fixed(max_depth=64, max_spec_factor=2.0, max_draft=16)
    assert settings.disable_by_batch_size == 64
    assert settings.tenant is None and settings.scope == "tenant"


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, DraftPolicy.fixed(max_depth=24, max_draft=24)),
        (
            {
                "suffix_decoding_max_tree_depth": 32,
                "suffix_decoding_max_spec_factor": 2.0,
                "suffix_decoding_min_token_prob": 0.3,
                "num_speculative_tokens": 12,
            },
            DraftPolicy.fixed(max_depth=32, max_spec_factor=2.0, min_token_prob=0.3, max_draft=12),
        ),
        (
            {"suffix_cache_max_depth": 48, "suffix_max_spec_offset": -1.0, "suffix_min_token_prob": 0.2},
            DraftPolicy.fixed(max_depth=48, max_spec_offset=-1.0, min_token_prob=0.2, max_draft=48),
        ),
    ],
)
def test_suffix_is_the_fixed_rule_with_its_parameters(config: dict[str, Any], policy: DraftPolicy) -> None:
    translation = translate({"method": "suffix", **config})
    settings = Settings(store="memory://", **translation.settings)
    assert translation.max_draft is not None
    assert settings.draft_policy(translation.max_draft) == policy
    assert settings.tenant is None and settings.scope == "tenant"  # the requests of a principal share


@pytest.mark.parametrize("config", [{"method": "suffix"}, ARCTIC, {**ARCTIC, "suffix_max_spec_factor": 2.0}])
def test_no_cached_requests_means_that_each_drafts_from_itself(config: dict[str, Any]) -> None:
    assert translate({**config, "suffix_cache_max_requests": 0}).settings["scope"] == "none"
    assert "scope" not in translate({**config, "suffix_cache_max_requests": -1}).settings, "ArcticInference: no limit"


def test_suffix_decoding_without_a_method_is_the_method_suffix() -> None:
    assert translate({"enable_suffix_decoding": True, "suffix_cache_max_depth": 48}) == translate(
        {"method": "suffix", "suffix_cache_max_depth": 48}
    )
    own = serve_arguments(["m", "--speculative-config", '{"enable_suffix_decoding": true}'], {}, environ={})
    assert json.loads(own[own.index("--additional-config") + 1])["agentspec"]["arctic_suffix_rule"] == {"max_depth": 24}
    for config in ({"enable_suffix_decoding": False}, {"enable_suffix_decoding": True, "model": "m"}):
        with pytest.raises(ConfigurationError, match="speculative method None"):
            translate(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**ARCTIC, "sufix_max_spec_factor": 1.0}, "sufix_max_spec_factor"),
        ({**ARCTIC, "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "arctic"}, "model"),
        ({**ARCTIC, "enable_suffix_decoding": "yes"}, "enable_suffix_decoding"),
        ({**ARCTIC, "enable_suffix_decoding": False, "suffix_max_spec_factor": 1.0}, "enable_suffix_decoding"),
        ({**ARCTIC, "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({**ARCTIC, "disable_by_batch_size": 0}, "disable_by_batch_size"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 2.5}, "suffix_decoding_max_tree_depth"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24, "suffix_cache_max_depth": 24}, "same"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests"),
        ({"method": "suffix", "enable_suffix_decoding": False}, "enable_suffix_decoding"),
        ({"method": "suffix", "suffix_speculative_tokens": -1}, "suffix_speculative_tokens"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 500}, "suffix_decoding_max_tree_depth=500: .* to 256"),
        ({"method": "eagle3"}, "eagle3"),
    ],
)
def test_a_key_that_cannot_work_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        translate(config)


@pytest.mark.parametrize("name", ["suffix", "fixed_rule", "speculator_graphs", "speculator_kernels"])
def test_switches_for_developers_are_no_settings(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' is not known"):
        load_settings({"agentspec": {name: False}}, environ={})


def test_a_parameter_of_the_rule_out_of_range_is_named() -> None:
    with pytest.raises(ConfigurationError, match="min_token_prob"):
        load_settings({"agentspec": {"arctic_suffix_rule": {"min_token_prob": 2.0}}}, environ={})


def test_the_setting_that_was_names_the_new_way() -> None:
    drafter = {"method": "ngram", "num_speculative_tokens": 4}
    with pytest.raises(ConfigurationError, match="give the method to vLLM"):
        load_settings({"agentspec": {"drafter": drafter}}, environ={})


class TestServe:
    @staticmethod
    def served(
        config: dict[str, Any], *more: str, max_draft: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        arguments = serve_arguments(["--speculative-config", json.dumps(config), *more], {}, max_draft)
        assert arguments.count("--speculative-config") == 1
        values = [
            json.loads(arguments[arguments.index(f"--{name}-config") + 1]) for name in ("speculative", "additional")
        ]
        return values[0], values[1]["agentspec"]

    def test_arctic_works_unchanged(self) -> None:
        speculative, settings = self.served(ARCTIC)
        assert speculative == {"method": "custom_class", "model": PROPOSER_PATH}
        assert settings["speculator"] == ARCTIC["model"]
        assert settings["speculator_tokens"] == 3

    def test_the_longest_draft_is_the_option_where_the_config_names_none(self) -> None:
        assert self.served(ARCTIC, max_draft=32)[1]["max_draft"] == 32

    @pytest.mark.parametrize(("more", "longest"), [({}, 24), ({"suffix_decoding_max_tree_depth": 200}, 128)])
    def test_a_suffix_draft_is_as_long_as_rule_and_option_allow(self, more: dict[str, Any], longest: int) -> None:
        assert self.served({"method": "suffix", **more})[1]["max_draft"] == longest
        assert self.served({"method": "suffix", **more}, max_draft=10)[1]["max_draft"] == 10
        setting = ("--additional-config", json.dumps({"agentspec": {"max_draft": 8}}))
        assert self.served({"method": "suffix", **more}, *setting)[1]["max_draft"] == 8
        assert self.served({"method": "suffix", **more}, *setting, max_draft=10)[1]["max_draft"] == 10

    def test_the_longest_draft_is_no_number_of_vllms_method(self) -> None:
        """Where a checkpoint names a drafter, vLLM would take it for the number of that drafter's tokens."""
        own = {"method": "custom_class", "model": PROPOSER_PATH}
        assert self.served({"method": "suffix"}, max_draft=10)[0] == own
        given = engine_options(max_draft=10, store="memory://")
        assert (given["speculative_config"], given["additional_config"]["agentspec"]["max_draft"]) == (own, 10)

    def test_a_setting_of_the_environment_limits_a_suffix_draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AGENTSPEC_SETTINGS", '{"max_draft": 8}')
        assert self.served({"method": "suffix"})[1]["max_draft"] == 8

    @pytest.mark.parametrize("method", [[], {}, 5])
    def test_a_method_that_is_no_text_is_named(self, method: Any) -> None:
        with pytest.raises(ConfigurationError, match="method: a text expected"):
            self.served({"method": method})

    def test_settings_of_the_user_win(self) -> None:
        own = json.dumps({"agentspec": {"tenant": "acme"}})
        assert self.served({"method": "suffix"}, "--additional-config", own)[1]["tenant"] == "acme"

    @pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp", "ngram"])
    def test_vllms_methods_stay_as_they_are(self, method: str) -> None:
        given = {"method": method, "model": "m", "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
        speculative, settings = self.served(given, max_draft=32)
        assert speculative == given
        assert settings == {"max_draft": 32}

    def test_vllm_finds_the_method_of_a_model_itself(self) -> None:
        assert self.served({"model": "head-eagle3", "num-speculative-tokens": 3})[0] == {
            "model": "head-eagle3",
            "num_speculative_tokens": 3,
        }

    @pytest.mark.parametrize(
        ("method", "remedy"),
        [(None, "vllm serve"), ("custom_class", "vllm serve"), ("dspark", "vllm serve"), ("mlp_speculator", "arctic")],
    )
    def test_another_method_is_refused_with_the_remedy(self, method: str | None, remedy: str) -> None:
        with pytest.raises((ConfigurationError, UnsupportedEngineError), match=remedy):
            self.served({"method": method})

    def test_more_tokens_than_a_speculator_drafts_show_before_vllm_starts(self) -> None:
        self.served({**ARCTIC, "model": DRAFTER})
        with pytest.raises(SpeculatorError, match=f"{DRAFTER}: num_speculative_tokens: 1 to 3 .*, got 4"):
            self.served({**ARCTIC, "model": DRAFTER, "num_speculative_tokens": 4})

    @pytest.mark.parametrize(("method", "named"), [("eagle3", "method 'eagle3'"), (None, "vLLM's methods")])
    def test_a_speculator_under_another_method_shows_before_vllm_starts(self, method: str | None, named: str) -> None:
        config = {"model": DRAFTER, "num_speculative_tokens": 3}
        with pytest.raises(ConfigurationError, match=rf"{named} cannot run: give it as .*\"arctic\".*speculator\.md"):
            self.served(config if method is None else {**config, "method": method})

    def test_a_folder_that_holds_no_speculator_shows_before_vllm_starts(self, tmp_path: Path) -> None:
        with pytest.raises(SpeculatorError, match=r"config\.json"):
            self.served({**ARCTIC, "model": str(tmp_path)})
        for missing in (str(tmp_path / "missing"), "missing/", "no/such/folder"):
            with pytest.raises(SpeculatorError, match="no such folder"):
                self.served({**ARCTIC, "model": missing})
        for name in ("./" + "a" * 5_000, "a" * 5_000 + "/b"):
            with pytest.raises(SpeculatorError, match="File name too long; give another folder"):
                self.served({**ARCTIC, "model": name})
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        with pytest.raises(SpeculatorError, match="architectures"):
            self.served({**ARCTIC, "model": str(tmp_path)})

    @pytest.mark.parametrize(
        "argument",
        ["--speculative-config.method", "--speculative_config.method", "-sc.method", "--spec-method", "--spec_method"],
    )
    def test_other_spellings_are_refused(self, argument: str) -> None:
        with pytest.raises(ConfigurationError, match="--speculative-config"):
            serve_arguments([argument, "arctic"], {})


class TestOffline:
    """Test the place where vLLM makes its speculative config, offline or without ``agentspec serve``."""

    @staticmethod
    def arguments(config: dict[str, Any] | None, additional: Any = None, **more: Any) -> Any:
        values = {"spec_method": None, "spec_model": None, "spec_tokens": None, **more}
        return SimpleNamespace(speculative_config=config, additional_config=additional or {}, **values)

    def test_arctic_becomes_our_proposer(self) -> None:
        arguments = self.arguments(dict(ARCTIC), {"other": 1})
        speculative_config.translate_method(arguments)
        assert arguments.speculative_config["model"] == PROPOSER_PATH
        assert arguments.additional_config["agentspec"]["speculator"] == ARCTIC["model"]
        assert arguments.additional_config["other"] == 1

    def test_vllms_short_options_mean_the_same(self) -> None:
        arguments = self.arguments(None, spec_method="arctic", spec_model="folder", spec_tokens=3)
        speculative_config.translate_method(arguments)
        assert arguments.additional_config["agentspec"] == {
            "speculator": "folder",
            "speculator_tokens": 3,
            "arctic_suffix_rule": {"max_spec_factor": 0.0},
            "max_draft": 3,
        }
        assert arguments.spec_method is arguments.spec_model is arguments.spec_tokens is None

    @pytest.mark.parametrize(("tokens", "limit"), [(None, 3), (2, 2)])
    def test_a_speculator_alone_sets_the_draft_limit(self, tokens: int | None, limit: int) -> None:
        arguments = self.arguments({"method": "arctic", "model": DRAFTER, "num_speculative_tokens": tokens})
        speculative_config.translate_method(arguments)
        speculative_config.set_draft_limit(arguments, None, None)
        assert arguments.speculative_config["num_speculative_tokens"] == limit

    def test_more_tokens_than_a_speculator_drafts_show_before_the_model_is_loaded(self) -> None:
        sizes = json.loads((Path(DRAFTER) / "config.json").read_text())
        model = SimpleNamespace(
            get_hidden_size=lambda: sizes["input_hidden_dim"], get_vocab_size=lambda: sizes["vocab_size"]
        )
        settings = Settings(store="memory://", speculator=DRAFTER, speculator_tokens=3)
        speculative_config.check_draft_model(settings, model)
        with pytest.raises(SpeculatorError, match=r"num_speculative_tokens: 1 to 3 with this speculator .*, got 4"):
            speculative_config.check_draft_model(settings.model_copy(update={"speculator_tokens": 4}), model)

    @pytest.mark.parametrize("config", [None, {"method": "ngram", "prompt_lookup_max": 3}])
    def test_other_methods_are_left_alone(self, config: dict[str, Any] | None) -> None:
        arguments = self.arguments(config)
        speculative_config.translate_method(arguments)
        assert arguments.speculative_config == config
        assert arguments.additional_config == {}

    @pytest.mark.parametrize(("additional", "ours"), [({}, False), ({"agentspec": {}}, True)])
    def test_where_the_peer_is_installed_it_takes_a_section_of_settings(
        self, additional: dict[str, Any], ours: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(speculative_config, "_has_arctic_inference", lambda: True)
        arguments = self.arguments({"method": "suffix"}, additional)
        speculative_config.translate_method(arguments)
        assert (arguments.speculative_config["method"] == "custom_class") == ours

    @pytest.mark.parametrize(
        ("runner", "switch", "warned"), [("generate", "", 1), ("generate", "1", 0), ("pooling", "", 0)]
    )
    def test_settings_without_a_method_are_said_to_draft_nothing(
        self,
        runner: str,
        switch: str,
        warned: int,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("AGENTSPEC", switch)
        monkeypatch.setattr(speculative_config, "switch_on", lambda *_: None)  # as where something excludes drafts
        arguments = self.arguments(None, {"agentspec": {"tenant": "a"}})
        model = SimpleNamespace(runner_type=runner)
        assert speculative_config.create_speculative_config(lambda *_: None, arguments, model, None) is None
        assert [("so nothing is drafted" in said) for said in caplog.messages] == [True] * warned

    def test_vllm_itself_makes_such_a_config(self) -> None:
        """agentspec wraps the method in which vLLM makes its SpeculativeConfig from the user's."""
        from vllm.engine.arg_utils import EngineArgs

        vllm_adapter.register()
        vllm_adapter.register()
        arguments = object.__new__(EngineArgs)
        vars(arguments).update(vars(self.arguments({"method": "arctic", "model": 5})))
        with pytest.raises(ConfigurationError, match="model"):
            arguments.create_speculative_config(None, None)


class TestSwitch:
    """Test ``AGENTSPEC=1``: engines that a trainer makes draft, although it configures no speculation."""

    @staticmethod
    def switched(
        config: dict[str, Any] | None = None, *, stages: int = 1, runner: str = "generate", **more: Any
    ) -> Any:
        """Return the engine's arguments after the switch."""
        arguments = TestOffline.arguments(config, **more)
        model = SimpleNamespace(runner_type=runner, is_hybrid=False, is_attention_free=False)
        parallel = SimpleNamespace(pipeline_parallel_size=stages)
        speculative_config.switch_on(arguments, model, parallel, {"AGENTSPEC": "1"})
        return arguments

    def test_an_engine_without_a_method_drafts(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO"):
            assert self.switched().speculative_config == own_config()
        assert caplog.messages == ["agentspec: AGENTSPEC=1: this engine drafts from suffix indexes"]

    @pytest.mark.parametrize("environ", [{}, {"AGENTSPEC": ""}, {"AGENTSPEC": "0"}])
    def test_without_the_variable_nothing_happens(
        self, environ: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        arguments = TestOffline.arguments(None)
        with caplog.at_level("DEBUG"):
            speculative_config.switch_on(arguments, None, None, environ)
        assert arguments.speculative_config is None and not caplog.messages

    @pytest.mark.parametrize(
        "config",
        [
            {"method": "eagle3", "model": "heads/eagle3"},
            {"method": "deepseek_mtp"},
            {"model": "heads/eagle3", "num-speculative-tokens": 3},
            {"method": "arctic", "model": "a/speculator"},
            {"enable_suffix_decoding": True, "suffix_cache_max_depth": 48},
        ],
    )
    def test_a_drafter_that_somebody_chose_stays(self, config: dict[str, Any]) -> None:
        assert self.switched(dict(config)).speculative_config == config
        assert self.switched(None, spec_model="heads/eagle3").speculative_config is None

    @pytest.mark.parametrize(
        ("method", "why"),
        [
            *(("eagle3", None), ("mtp", None), ("ngram", None)),
            *(("mlp_speculator", "docs/speculator.md"), ("dspark", "V2")),
            ("suffix", "ArcticInference is installed; --additional-config"),  # else it would be agentspec's own by now
        ],
    )
    def test_agentspec_drafts_beside_a_method_that_vllm_found(
        self, method: str, why: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO"):
            arguments, beside = self.switched_beside(SimpleNamespace(method=method, num_speculative_tokens=3))
        assert beside == (why is None)
        assert arguments.additional_config == ({"agentspec": {}} if beside else {})
        (said,) = caplog.messages
        assert (why or f"drafts from suffix indexes beside {method}") in said

    def test_agentspec_drafts_beside_no_method_that_its_engine_excludes(self) -> None:
        spec = SimpleNamespace(method="eagle3", num_speculative_tokens=3)
        given = {"agentspec": {"enabled": False}}
        assert self.switched_beside(spec, given) == (TestOffline.arguments(None, given), False)
        assert not self.switched_beside(spec, stages=2)[1]
        assert not self.switched_beside(spec, environ={})[1]
        assert not self.switched_beside(spec, async_scheduling=True)[1]
        assert not self.switched_beside(SimpleNamespace(method="eagle3", num_speculative_tokens=200))[1]

    @staticmethod
    def switched_beside(
        spec: Any,
        additional: dict[str, Any] | None = None,
        *,
        stages: int = 1,
        environ: dict[str, str] | None = None,
        **more: Any,
    ) -> tuple[Any, bool]:
        """Return the arguments of an engine whose method vLLM has found, after the switch, and what it returned."""
        arguments = TestOffline.arguments(None, additional, **more)
        model = SimpleNamespace(runner_type="generate", is_hybrid=False, is_attention_free=False)
        parallel = SimpleNamespace(pipeline_parallel_size=stages)
        environ = {"AGENTSPEC": "1"} if environ is None else environ
        return arguments, speculative_config.switch_on_beside(spec, arguments, model, parallel, environ)

    @pytest.mark.parametrize("engine", [{"stages": 2}, {"runner": "pooling"}])
    def test_an_engine_that_cannot_draft_stays_as_it_is(self, engine: dict[str, Any]) -> None:
        assert self.switched(**engine).speculative_config is None

    def test_another_value_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="AGENTSPEC='yes': 1 lets"):
            speculative_config.switch_on(None, None, None, {"AGENTSPEC": "yes"})


@pytest.mark.parametrize(("name", "value"), [("dtype", "float16"), ("tokens", 2), ("fp8", "all")])
def test_settings_of_the_speculator_that_the_method_names_are_its_settings(name: str, value: object) -> None:
    config = {"method": "arctic", "model": "a/speculator", "num_speculative_tokens": 3}
    additional = {"agentspec": {f"speculator_{name}": value}}
    arguments = ["m", "--speculative-config", json.dumps(config), "--additional-config", json.dumps(additional)]
    done = serve_arguments(arguments, {}, environ={})
    section = json.loads(done[done.index("--additional-config") + 1])["agentspec"]
    assert (section["speculator"], section[f"speculator_{name}"]) == ("a/speculator", value)
    setting: dict[str, Any] = {f"speculator_{name}": value}
    engine_options(speculative_config=config, **setting)
    with pytest.raises(ConfigurationError, match="there is no speculator"):
        engine_options(**setting)
