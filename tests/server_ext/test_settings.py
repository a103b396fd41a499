"""Test settings and launch arguments: errors name the field and the remedy."""

import importlib.metadata
import inspect
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentspec.cli.app import serve
from agentspec.errors import ConfigurationError, UnsupportedEngineError
from agentspec.server_ext.settings import Settings, check_draft_limit, load_settings, settle_store
from agentspec.server_ext.vllm_adapter import check_version
from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH
from agentspec.server_ext.vllm_adapter.startup.launch import OPTIONS, hand_on, prepare_environment, serve_arguments
from agentspec.server_ext.vllm_adapter.startup.speculative_config import engine_options


def test_defaults_are_the_embedded_store_and_no_tenant() -> None:
    settings = load_settings({}, environ={})
    assert settings.store.startswith("sqlite:///")
    assert settings.verify_cost is None  # measured
    assert settings.tenant is None


def test_a_default_store_that_nobody_can_write_is_in_memory_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("XDG_DATA_HOME", str(file))
    for _ in range(2):
        assert load_settings({}, environ={}).store == "memory://"
    assert len(caplog.messages) == 1
    assert str(file) in caplog.text and "--store" in caplog.text
    monkeypatch.setenv("AGENTSPEC_SETTINGS", "")  # so that it is put back at the end
    monkeypatch.delenv("AGENTSPEC_STORE", raising=False)
    assert settle_store({}).store == "memory://"
    # for the engine's process, which need not say so again
    assert json.loads(os.environ["AGENTSPEC_SETTINGS"]) == {"store": "memory://"}
    named = f"sqlite:///{file}/named.db"
    assert load_settings({}, environ={"AGENTSPEC_STORE": named}).store == named


def test_the_environment_wins_so_that_secrets_need_no_argument() -> None:
    config = {"agentspec": {"store": "memory://", "tenant": "a"}}
    settings = load_settings(config, environ={"AGENTSPEC_STORE": "redis://:secret@localhost:1/0"})
    assert settings.store == "redis://:secret@localhost:1/0"
    assert settings.tenant == "a"


def test_settings_in_the_environment_apply_where_the_engine_has_none() -> None:
    environ = {"AGENTSPEC_SETTINGS": '{"max_draft": 2, "scope": "none"}'}
    assert load_settings(None, environ).max_draft == 2
    settings = load_settings({"agentspec": {"scope": "session"}}, environ)
    assert (settings.scope, settings.max_draft) == ("session", 2)
    for wrong, message in (
        ("{", "AGENTSPEC_SETTINGS is not JSON"),
        ("[" * 100_000, "AGENTSPEC_SETTINGS is not JSON"),
        ("[1]", "must be a JSON object of settings, got list"),
        (
            '{"max_draft": 2, "scope": "none", "max_draft": 3}',
            "AGENTSPEC_SETTINGS: the field 'max_draft' stands there twice",
        ),
        ('{"max_draft": 0}', "max_draft"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_settings({}, {"AGENTSPEC_SETTINGS": wrong})


@pytest.mark.parametrize("key", ["Agentspec", "agentSpec", "AGENTSPEC"])
def test_settings_under_another_spelling_are_refused_instead_of_dropped(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"additional-config: '{key}' is not known; spell it 'agentspec'"):
        load_settings({key: {"scope": "session"}}, {})
    others = {"ascend_scheduler_config": {"enabled": True}, "agentspec": {"scope": "session"}}
    assert load_settings(others, {}).scope == "session"


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"max_tokens": 10}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"verify_cost": 0}, "verify_cost"),
        ({"verify_cost": 2}, "verify_cost"),
        ({"verify_cost": True}, "verify_cost"),
        ({"max_draft": True}, "max_draft"),
        ({"retention_days": True}, "retention_days"),
        ({"preload_records": -1}, "preload_records"),
        ({"tenant": "bad\nname"}, "tenant"),
        ({"tenant": "x" * 1000}, "tenant"),
        ({"max_tree": 5}, "max_tree"),
        ({"speculator_tokens": 3}, "speculator_tokens.*there is no speculator"),
        ({"speculator_dtype": "float16"}, "speculator_dtype.*there is no speculator"),
        ({"speculator_fp8": "all"}, "speculator_fp8.*there is no speculator"),
        ({"cost": 0.1}, "verify_cost"),
        ({"judge": False}, "score_suffix_drafts"),
        ("text", "agentspec"),
        # Numbers that no core, SQLite column or clock could hold.
        *(({name: 10**30}, name) for name in ("max_bytes", "max_session_tokens", "retention_days", "retention_bytes")),
        ({"retention_days": float("inf")}, "retention_days"),
        ({"retention_records": 10**30}, "retention_records"),
        ({"history_window": f"{10**30} tokens"}, "history_window"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(section: object, field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        load_settings({"agentspec": section}, environ={})


def test_options_of_a_speculator_are_taken_with_one_and_as_the_defaults_that_they_are() -> None:
    given = {"speculator_fp8": "all", "speculator_tokens": 3, "speculator": "folder"}
    assert load_settings({"agentspec": given}, environ={}).speculator_tokens == 3
    assert load_settings({"agentspec": {"speculator_dtype": "auto", "speculator_tokens": None}}, environ={})


def test_an_error_quotes_the_beginning_of_a_long_value() -> None:
    with pytest.raises(ConfigurationError) as error:
        load_settings({"agentspec": {"tenant": "x" * 5_000}}, environ={})
    assert str(error.value).endswith("x…, 5000 characters)") and len(str(error.value)) < 400


@pytest.mark.parametrize("field", ["tenant", "model_key"])
def test_an_unusable_name_is_reported_under_its_own(field: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_settings({"agentspec": {field: ""}}, environ={})
    assert str(error.value) == f"agentspec setting '{field}': must not be empty; leave it out to have none (got '')"


def test_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="max_tokens"):
        load_settings({"agentspec": {"max_tokenz": 5000}}, environ={})


PASSWORD = "hunter2-hunter2"
URL = f"redis://user:{PASSWORD}@cache:6379/0"


class TestSecrets:
    @pytest.mark.parametrize(
        "section",
        [
            {"store": [URL]},
            {"store": {"url": URL}},
            {"store": URL, "max_tokens": 1},
            {"store": URL, "typo": 1},
            {"store": URL, "drafter": {"method": "ngram", "model": URL}},
            {"record": {"to": URL}},
            URL,
            [URL],
        ],
    )
    def test_no_error_about_settings_shows_a_password(self, section: object) -> None:
        with pytest.raises(ConfigurationError) as error:
            load_settings({"agentspec": section}, environ={})
        assert PASSWORD not in str(error.value) and error.value.__cause__ is None

    @pytest.mark.parametrize("text", [f'"{URL}"', f'["{URL}"]', f'{{"agentspec": "{URL}"}}', f'{{"{URL}"'])
    def test_no_error_about_arguments_shows_one(self, text: str) -> None:
        with pytest.raises(ConfigurationError) as error:
            serve_arguments(["--additional-config", text], {}, 8, {})
        assert PASSWORD not in str(error.value)

    def test_a_store_goes_to_vllm_by_the_environment_because_vllm_prints_its_arguments(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        environ: dict[str, str] = {}
        config = json.dumps({"agentspec": {"store": URL, "tenant": "t"}})
        arguments = serve_arguments(["--additional-config", config], {}, 8, environ)
        assert PASSWORD not in " ".join(arguments) and environ == {"AGENTSPEC_STORE": URL}
        assert "AGENTSPEC_STORE" in caplog.text and PASSWORD not in caplog.text

    def test_the_environments_store_wins_over_the_configs_and_loses_to_the_option(self) -> None:
        environ = {"AGENTSPEC_STORE": "memory://"}
        serve_arguments(["--additional-config", json.dumps({"agentspec": {"store": URL}})], {}, 8, environ)
        assert environ == {"AGENTSPEC_STORE": "memory://"}
        hand_on(environ, store=URL)
        assert environ == {"AGENTSPEC_STORE": URL}

    def test_an_option_wins_over_the_environment(self) -> None:
        environ = {"AGENTSPEC_TENANT": "theirs", "AGENTSPEC_RECORD": "/tmp/theirs.jsonl"}
        hand_on(environ, store=None, tenant="ours", record=None)
        settings = load_settings({"agentspec": {"tenant": "another"}}, environ)
        assert (settings.tenant, settings.record) == ("ours", "/tmp/theirs.jsonl")

    def test_a_store_without_a_password_is_no_reason_to_warn(self, caplog: pytest.LogCaptureFixture) -> None:
        for url in ("memory://", "redis://cache:6379/0", "sqlite:////data/me@home/x.db"):
            hand_on({}, store=url)
        assert not caplog.records


@pytest.mark.parametrize("value", [0, -3, 129, None])
def test_a_draft_limit_out_of_range_names_the_range(value: int | None) -> None:
    with pytest.raises(ConfigurationError, match="between 1 and 128"):
        check_draft_limit(value)


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0.0", "dev", "0.9"])
def test_other_vllm_versions_are_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=r"pip install"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.29.1", "0.32.1+cpu", "0.33.0"])
def test_supported_vllm_versions_pass(version: str) -> None:
    check_version(version)


class TestLaunch:
    def test_arguments_are_passed_on_and_ours_added(self) -> None:
        result = serve_arguments(["--port", "1234"], {"tenant": "t"}, 8)
        assert result[:2] == ["--port", "1234"]
        speculative = json.loads(result[result.index("--speculative-config") + 1])
        assert speculative == {"method": "custom_class", "model": PROPOSER_PATH}
        additional = json.loads(result[result.index("--additional-config") + 1])
        assert additional == {"agentspec": {"tenant": "t", "max_draft": 8}}

    def test_the_users_additional_config_is_kept(self) -> None:
        result = serve_arguments(
            ["--additional-config", '{"x": 1, "agentspec": {"verify_cost": 0.1}}'], {"tenant": "t"}, 8
        )
        assert result.count("--additional-config") == 1
        additional = json.loads(result[result.index("--additional-config") + 1])
        assert additional == {"x": 1, "agentspec": {"verify_cost": 0.1, "tenant": "t", "max_draft": 8}}

    @pytest.mark.parametrize(
        "argument",
        [
            "--additional-config.agentspec.max_bytes=2000000",
            "--additional_config.foo",
            "--additional-conf={}",
            "--ad",
        ],
    )
    def test_spellings_that_would_hide_a_setting_are_refused(self, argument: str) -> None:
        """vLLM would make the section anew from such a spelling, and the server would share what it was told not to."""
        with pytest.raises(ConfigurationError, match=r"give it in full, as --additional-config '{…}'"):
            serve_arguments(["--scope", "none", argument, "1"], {}, 8)

    def test_the_last_of_several_counts(self) -> None:
        """vLLM does the same."""
        twice = [f'--additional_config={{"agentspec": {{"scope": "{scope}"}}}}' for scope in ("session", "none")]
        result = serve_arguments([*twice, "--port", "1"], {}, 8)
        assert result[:2] == ["--port", "1"] and result.count("--additional-config") == 1
        assert json.loads(result[-1]) == {"agentspec": {"scope": "none", "max_draft": 8}}

    @pytest.mark.parametrize(
        ("misspelt", "meant"),
        [("--storre", "--store"), ("--tennant=a", "--tenant"), ("--api_key_file", "--api-keys-file")],
    )
    def test_a_misspelt_option_is_passed_on_with_a_warning(
        self, caplog: pytest.LogCaptureFixture, misspelt: str, meant: str
    ) -> None:
        """vLLM, which alone knows all its options, refuses it some 15 seconds later."""
        assert serve_arguments(["m", misspelt, "x"], {}, 8, {})[:3] == ["m", misspelt, "x"]
        name = misspelt.partition("=")[0]
        assert caplog.messages == [f"agentspec: {name} goes to vLLM, since it is no option here; did you mean {meant}?"]

    def test_vllms_own_options_are_not_called_misspelt(self, caplog: pytest.LogCaptureFixture) -> None:
        """These are the likest of all."""
        own = ("--stream-interval", "--tokens-only", "--api-key", "--tensor-parallel-size", "--max-logprobs")
        serve_arguments(["m", *(each for name in own for each in (name, "--store"))], {}, 8, {})
        assert not caplog.messages

    @pytest.mark.parametrize("as_text", [True, False])
    def test_vllms_file_of_options_counts(self, tmp_path: Path, as_text: bool) -> None:
        settings = {"agentspec": {"scope": "none", "verify_cost": 0.5}, "x": 1}
        method = {"method": "ngram", "num_speculative_tokens": 3}
        file = tmp_path / "vllm.yaml"
        values = [json.dumps(each) if as_text else each for each in (settings, method)]
        file.write_text(json.dumps({"port": 1, "additional_config": values[0], "speculative-config": values[1]}))
        result = serve_arguments(["--config", str(file)], {"verify_cost": 0.1}, None)
        assert result[:2] == ["--config", str(file)]
        assert json.loads(result[-1]) == {"agentspec": {"scope": "none", "verify_cost": 0.1}, "x": 1}
        assert json.loads(result[result.index("--speculative-config") + 1]) == method
        own = serve_arguments([f"--config={file}", "--additional-config", "{}"], {}, None)
        assert own[:2] == ["--config", str(file)]  # vLLM reads no file of --config=FILE
        assert json.loads(own[-1]) == {"agentspec": {}}

    @pytest.mark.parametrize("name", ["tenant", "principal_header", "principal-header", "max_bytes", "store"])
    def test_a_setting_among_vllms_own_options_is_refused_with_its_place(self, tmp_path: Path, name: str) -> None:
        """vLLM would call it an unrecognized argument and quote it, password included."""
        file = tmp_path / "vllm.yaml"
        file.write_text(f"port: 1\n{name}: 'redis://:hunter2@host'")
        setting = name.replace("-", "_")
        with pytest.raises(ConfigurationError, match=rf"additional-config: {{agentspec: {{{setting}: …}}}}") as error:
            serve_arguments(["--config", str(file)], {}, None)
        assert "hunter2" not in str(error.value)

    @pytest.mark.parametrize(
        ("argument", "remedy"),
        [
            ("--max-bytes", '--additional-config \'{"agentspec": {"max_bytes": …}}\''),
            ("--history_window", '--additional-config \'{"agentspec": {"history_window": …}}\''),
            ("--principal_header", "--principal-header"),
        ],
    )
    def test_a_setting_that_is_no_option_is_refused_with_its_place(self, argument: str, remedy: str) -> None:
        """vLLM would print its usage and call it an unrecognized argument."""
        for arguments in ([argument, "1"], ["m", f"{argument}=1"]):
            with pytest.raises(ConfigurationError) as error:
                serve_arguments(arguments, {}, None)
            assert str(error.value) == f"{argument}: there is no such option; give the setting as {remedy}"

    def test_the_settings_with_options_are_those_of_the_command(self) -> None:
        assert set(inspect.signature(serve).parameters) == {"context", "model"} | OPTIONS

    def test_no_option_of_vllms_is_named_like_a_setting(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs

        assert {field.name for field in fields(AsyncEngineArgs)}.isdisjoint(Settings.model_fields)

    def test_vllms_file_may_be_refused_or_unreadable(self, tmp_path: Path) -> None:
        file = tmp_path / "vllm.yml"
        file.write_text("pipeline-parallel-size: 2")
        with pytest.raises(UnsupportedEngineError, match="tensor-parallel"):
            serve_arguments(["--config", str(file)], {}, 8)
        for text in ("additional-config.agentspec.scope: none", "additional-conf: {}", "speculative_conf: {}"):
            file.write_text(text)
            with pytest.raises(ConfigurationError, match="give it in full, as --"):
                serve_arguments(["--config", str(file)], {}, 8)
        file.write_text("spec_method: ngram")
        with pytest.raises(ConfigurationError, match="--spec-method: give the speculative method as"):
            serve_arguments(["--config", str(file)], {}, 8)
        for text in ("[1]", ": : :", ""):  # vLLM says what is wrong with them
            file.write_text(text)
            assert serve_arguments(["--config", str(file)], {}, 8)[:2] == ["--config", str(file)]
        assert serve_arguments(["--config", "missing.yaml"], {}, 8)

    @pytest.mark.parametrize("name", ["store", "record", "api_keys_file", "public", "speculator"])
    def test_an_empty_setting_is_refused(self, name: str) -> None:
        """It may come from an unset variable. An empty `store` must not mean the default one, on disk."""
        with pytest.raises(ConfigurationError, match=f"{name}.*it is empty; give a value, or leave it out"):
            load_settings({"agentspec": {name: ""}}, {})

    @pytest.mark.parametrize("name", ["record", "api_keys_file", "public", "speculator"])
    def test_a_name_with_a_nul_character_is_refused(self, name: str) -> None:
        """JSON may hold one. For a record and a file of API keys it would be a traceback at the start."""
        environ = {"AGENTSPEC_SETTINGS": json.dumps({name: "./a\0b"})}
        with pytest.raises(ConfigurationError, match=f"{name}.*NUL character"):
            load_settings({}, environ)

    @pytest.mark.parametrize("name", ["store", "record", "api_keys_file", "public", "speculator"])
    def test_a_name_with_half_of_a_surrogate_pair_is_refused(self, name: str) -> None:
        environ = {"AGENTSPEC_SETTINGS": json.dumps({name: "./a\ud83d"})}
        with pytest.raises(ConfigurationError, match=f"{name}.*half of a surrogate pair"):
            load_settings({}, environ)
        if name == "record":  # how Python spells a name of a file that is not UTF-8
            assert load_settings({"agentspec": {name: "./a\udcff"}}, {}).record == "./a\udcff"

    @pytest.mark.parametrize("name", ["store", "tenant", "record"])
    def test_an_empty_option_is_refused(self, name: str) -> None:
        environ = {"AGENTSPEC_STORE": "redis://h/0"}
        with pytest.raises(ConfigurationError, match=f"--{name}: it is empty"):
            hand_on(environ, **{name: ""})
        assert environ == {"AGENTSPEC_STORE": "redis://h/0"}

    def test_a_name_that_no_file_can_have_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="give a file of public texts that exists"):
            load_settings({"agentspec": {"public": "a" * 5000}}, {})

    @pytest.mark.parametrize("name", ["record", "api_keys_file"])
    def test_a_home_folder_that_is_not_there_is_named(self, name: str) -> None:
        """In a container ``~`` may have no folder. That would be a traceback."""
        with pytest.raises(ConfigurationError, match=rf"{name} ~nobody-here/file: .*there is no such home folder; "):
            serve_arguments([], {name: "~nobody-here/file"}, 8, {})

    def test_a_pipe_without_a_reader_does_not_hold_up_the_start(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ConfigurationError, match=r"record .*pipe: cannot be written"):
            serve_arguments([], {"record": str(tmp_path / "pipe")}, 8, {})

    def test_too_short_a_secret_is_refused_before_vllm_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AGENTSPEC_SECRET", "short")
        with pytest.raises(ConfigurationError, match="AGENTSPEC_SECRET: at least 16"):
            serve_arguments([], {}, 8, {})

    @pytest.mark.parametrize("arguments", [["-pp", "2"], ["--pipeline-parallel-size=2"]])
    def test_pipeline_parallel_is_refused(self, arguments: list[str]) -> None:
        with pytest.raises(UnsupportedEngineError, match="tensor-parallel"):
            serve_arguments(arguments, {}, 8)

    def test_a_second_speculative_method_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="speculative-config"):
            serve_arguments(["--speculative-config", "{}"], {}, 8)

    def test_a_draft_limit_out_of_range_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="num_speculative_tokens"):
            serve_arguments([], {}, 1000)

    @pytest.mark.parametrize("place", ["", "file/below-a-file"])
    def test_a_step_record_that_cannot_be_written_is_refused(self, tmp_path: Path, place: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match=f"record {tmp_path / place}: .*; name another file"):
            serve_arguments([], {"record": str(tmp_path / place)}, 8, {})

    def test_broken_json_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="additional-config"):
            serve_arguments(["--additional-config", "{"], {}, 8)

    def test_plugins_that_the_user_named_stay(self) -> None:
        environ = {"VLLM_PLUGINS": "mine"}
        prepare_environment(environ)
        assert environ["VLLM_PLUGINS"] == "agentspec,mine"

    def test_offline_options_check_their_settings(self) -> None:
        assert engine_options(store="memory://")["additional_config"] == {"agentspec": {"store": "memory://"}}
        with pytest.raises(ConfigurationError, match="verify_cost"):
            engine_options(verify_cost=-1)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().tenant = "x"


def test_the_page_on_settings_names_exactly_those_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE)
    assert sorted(named) == sorted(Settings.model_fields)


def test_the_page_on_settings_gives_the_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    given = dict(re.findall(r"^\| `(\w+)`[^|]*\| ([^|]+) \|", page, flags=re.MULTILINE))
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, bool | int | float | str):
            assert given[name].startswith(f"`{json.dumps(field.default).strip(chr(34))}`"), name
        else:
            assert not given[name].startswith("`"), name


def test_the_fallback_of_one_engine_leaves_the_named_store_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AGENTSPEC_STORE", "AGENTSPEC_SETTINGS"):
        monkeypatch.setenv(name, "")  # so that what the call sets is undone
        monkeypatch.delenv(name)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert settle_store({"agentspec": {}}).store == "memory://"
    named = f"sqlite:///{tmp_path / 's.db'}"
    assert settle_store({"agentspec": {"store": named}}).store == named
    assert settle_store({"agentspec": {}}).store == "memory://"


def test_the_other_plugins_of_vllm_stay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    groups = {
        "vllm.general_plugins": "agentspec both",
        "vllm.platform_plugins": "chip",
        "vllm.endpoint_plugins": "both",
    }
    found = lambda group: [SimpleNamespace(name=name) for name in groups.get(group, "").split()]  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    environ = dict[str, str]()
    prepare_environment(environ)
    assert environ["VLLM_PLUGINS"] == "agentspec,both,chip"
    assert "the plugins both add their HTTP routes" in caplog.text
