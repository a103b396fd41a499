"""Test the benchmarks on replay engines: what they start, the rows that they print, and errors that name the remedy."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

import beside  # isort: skip
import serve  # isort: skip
from agentspec.errors import ConfigurationError
from agentspec.testing.replay import ReplayResult
from agentspec.testing.replay_types import EngineSpec, speculative_config


def serve_options(traces: Path, *given: str) -> argparse.Namespace:
    """Return the options of serve.py, filled in."""
    options = serve._parser().parse_args(["--traces", str(traces), "--workload", "chat_mtbench", *given])
    serve.fill_limits(options)
    return options


def test_the_defaults_name_nothing_but_a_store_that_leaves_nothing(traces: Path) -> None:
    options = serve_options(traces)
    assert options.limits == "defaults"
    assert serve.our_settings(options) == {"store": "memory://"}


def test_equal_limits_give_a_tenant_and_a_price(traces: Path) -> None:
    options = serve_options(traces, "--limits", "equal")
    assert options.max_draft == 16
    assert serve.our_settings(options) == {"store": "memory://", "tenant": "replay", "verify_cost": 0.02}
    options = serve_options(traces, "--limits", "equal", "--verify-cost", "measured", "--tenant", "")
    assert serve.our_settings(options) == {"store": "memory://", "tenant": None, "verify_cost": None}


@pytest.mark.parametrize("given", [("--max-draft", "32"), ("--tenant", "me"), ("--verify-cost", ".1")])
def test_an_option_of_equal_limits_is_refused_with_the_defaults(traces: Path, given: tuple[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=f"{given[0]}.*--limits equal"):
        serve_options(traces, *given)


def test_every_method_runs_with_its_own_limit_where_none_is_given() -> None:
    assert speculative_config("none") is None
    assert speculative_config("suffix") == {"method": "suffix"}
    assert speculative_config("ngram") == {"method": "ngram", "num_speculative_tokens": 5}
    assert speculative_config("ngram", 16) == {
        "method": "ngram",
        "num_speculative_tokens": 16,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }


def test_a_drafter_of_vllms_runs_alone_or_beside_agentspec() -> None:
    drafter = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    spec = EngineSpec("agentspec", "model", False, 64, 1, 16, {"store": "memory://"}, 0, False, drafter=drafter)
    assert spec.speculative_config() == drafter
    assert spec.agentspec_settings() == {"store": "memory://", "max_draft": 16}
    assert replace(spec, method="none").speculative_config() == drafter
    assert replace(spec, drafter=None).agentspec_settings() == {"store": "memory://"}
    with pytest.raises(ConfigurationError, match="beside 'agentspec', or with 'none'"):
        replace(spec, method="ngram").speculative_config()


def played(seconds: float, steps: int) -> ReplayResult:
    """Return the figures of a method that took `seconds` in each of three turns."""
    return ReplayResult(tokens=300, steps=steps, seconds=3 * seconds, turns=3 * ((100, seconds),))


def test_a_row_says_how_far_ahead_agentspec_is() -> None:
    ours = played(1.0, steps=100)
    slower = serve.row("suffix", played(2.0, steps=150), ours)
    assert (slower["agentspec_speed_ratio"], slower["agentspec_tokens_per_step_ratio"]) == (2.0, 1.5)
    assert slower["ahead"] is True
    assert serve.row("suffix", played(0.5, steps=150), ours)["ahead"] is False
    assert serve.row("suffix", played(2.0, steps=90), ours)["ahead"] is False
    assert "ahead" not in serve.row("agentspec", ours, ours)
    assert "ahead" not in serve.row("none", ours)


def beside_options(traces: Path, *given: str) -> argparse.Namespace:
    """Return the options of beside.py."""
    return beside._parser().parse_args(["--traces", str(traces), *given])


def test_each_row_of_the_batch_keeps_to_its_workload_and_a_session_to_its_row(traces: Path) -> None:
    calls = beside.mixed_calls(beside_options(traces, "--quiet-rows", "2", "--copying-rows", "1"))
    assert [(call.session, call.lane) for call in calls] == [
        ("chat_mtbench-0", "chat_mtbench, row 0"),
        ("chat_mtbench-1", "chat_mtbench, row 1"),
        ("chat_mtbench-2", "chat_mtbench, row 0"),
        ("refine_code_ldb-0", "refine_code_ldb, row 0"),
        ("refine_code_ldb-1", "refine_code_ldb, row 0"),
        ("refine_code_ldb-2", "refine_code_ldb, row 0"),
    ]


def test_too_few_sessions_for_the_rows_are_named(traces: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--copying refine_code_ldb.*--copying-rows"):
        beside.mixed_calls(beside_options(traces, "--quiet-rows", "2", "--copying-rows", "4"))


def test_steps_beside_drafts_are_held_to_a_multiple_of_plain_ones() -> None:
    plain = ReplayResult(steps=100, decode_seconds=(0.01,) * 100)
    quick = beside.row("agentspec", ReplayResult(steps=100, decode_seconds=(0.015,) * 99 + (0.1,)), plain)
    assert quick["times_none"]["median"] == 1.5 and quick["times_none"]["max"] == 10.0
    assert quick["met"] is True
    slow = beside.row("suffix", ReplayResult(steps=100, decode_seconds=(0.015,) * 90 + (0.03,) * 10), plain)
    assert slow["met"] is False
    with pytest.raises(ConfigurationError, match="--calls"):
        beside.row("none", ReplayResult(), plain)


def test_the_times_of_plain_vllm_are_needed(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beside.main(["--traces", str(traces), "--methods", "agentspec"]) == 2
    assert "--methods: none" in capsys.readouterr().err
