"""Test the ratios of the hybrid benchmark, and TensorRT-LLM's rule that it runs."""

from pathlib import Path

import fusion_rules
import hybrid
import numpy as np
import pytest
from report import ROOT

from agentspec.testing.replay import ReplayError, ReplayResult


def measured(seconds: list[float], steps: int = 50) -> ReplayResult:
    """Return the figures of a method that took `seconds` in its turns."""
    turns = tuple((33, duration) for duration in seconds)
    return ReplayResult(tokens=33 * len(seconds), steps=steps, seconds=sum(seconds), turns=turns)


def test_the_hybrid_is_set_against_the_best_single_method() -> None:
    methods = {
        "none": measured([4.0, 4.0, 4.0]),
        "ngram": measured([3.0, 3.0, 3.0]),
        "suffix": measured([2.0, 2.0, 2.0], steps=40),
        "speculator": measured([2.5, 2.5, 2.5]),
        "hybrid": measured([1.0, 1.0, 1.0], steps=20),
        "hybrid-not-scoring": measured([1.5, 1.0, 0.8], steps=25),
    }
    best, scoring = hybrid.compare("mixed", methods)
    assert (best["against"], best["ratio"], best["steps_ratio"], best["noise"]) == ("suffix", 2.0, 2.0, 0.0)
    assert scoring["ratio"] == pytest.approx(1.1)
    assert scoring["noise"] > 0.1


def test_a_drafter_beside_the_suffix_indexes_is_set_against_its_better_part_and_the_threshold() -> None:
    methods = {
        "suffix": measured([2.0, 2.0, 2.0]),
        "eagle3": measured([1.5, 1.5, 1.5]),
        "eagle3+trees": measured([1.0, 1.0, 1.0], steps=40),
        "eagle3+threshold": measured([1.2, 1.2, 1.2]),
        "draft_model+trees": measured([1.0, 1.0, 1.0]),
    }
    part, rule = hybrid.compare("mixed", methods)
    assert (part["figure"], part["against"], part["ratio"]) == ("eagle3+trees / better part", "eagle3", 1.5)
    assert (rule["figure"], rule["ratio"], rule["steps_ratio"]) == ("eagle3+trees / threshold", 1.2, 1.25)


def test_methods_that_nothing_is_set_against_have_figures_and_no_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    for methods in ({"hybrid": measured([1.0])}, {"none": measured([1.0]), "eagle3": measured([1.0])}):
        assert hybrid.compare("mixed", methods) == []
        hybrid._print([hybrid.row("mixed", name, found) for name, found in methods.items()], [])
        assert set(methods) <= set(capsys.readouterr().out.split())


def test_prices_decide_and_not_the_clock() -> None:
    prices = hybrid.Prices(0.1, 0.5)
    suffix = ReplayResult(tokens=100, steps=50, drafted=100, seconds=1.0)
    eagle3 = ReplayResult(tokens=100, steps=40, drafted=100, passes=120, seconds=0.1)
    both = ReplayResult(tokens=100, steps=30, drafted=100, passes=30, seconds=9.0)
    assert prices.rate(suffix) == pytest.approx(100 / 60)
    assert prices.rate(eagle3) == pytest.approx(100 / 110)
    methods = {"suffix": suffix, "eagle3": eagle3, "eagle3+trees": both}
    (part,) = hybrid.compare("mixed", methods, prices)
    assert (part["against"], part["ratio"]) == ("suffix", round(60 / 55, 3))
    assert hybrid.row("mixed", "suffix", suffix, prices)["tokens_per_unit"] == 1.667


def test_an_engine_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise ReplayError("the engine process ended")

    monkeypatch.setattr(hybrid, "write_workloads", lambda *_: {})
    monkeypatch.setattr(hybrid, "measure", fail)
    assert hybrid.main([]) == 1
    assert "error: the engine process ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--methods", "none,eagle4"], "eagle4 is not known"),
        (["--pass-price", ".1"], "give both or none"),
        (["--verify-price", ".1", "--pass-price", ".1", "--batch", "2"], "one request at a time"),
        (["--sessions", "0"], "must be a whole number of at least 1"),
        (["--model", "nowhere"], "there is no config.json in nowhere"),
    ],
)
def test_options_that_cannot_work_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        hybrid.read_options(given)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [5, 6, 1]),  # four tokens match
        ([9, 2, 3, 4, 5, 6, 1, 2, 3, 4], None),  # three
        ([1, 2, 3, 4, 7, 0, 2, 3, 4, 8, 1, 2, 3, 4], [7, 0, 2]),  # the longest match, not the latest
        ([0, 1, 2, 3, 4, 7, 9, 1, 2, 3, 4, 8, 1, 2, 3, 4], [8, 1, 2]),  # two equal matches: the latest
        ([5, 5, 5, 5, 5, 5], [5]),  # it reaches the end of the text
        ([1], None),
    ],
)
def test_the_rivals_rule_copies_behind_a_long_match(text: list[int], copied: list[int] | None) -> None:
    assert fusion_rules.continuation(np.array(text), 4, 3) == copied


def test_added_layers_change_no_answer(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = ROOT / "demo" / "model"
    deep = hybrid.deepen(model, 6, tmp_path / "deep")
    tokens = torch.tensor([[40, 41, 42, 43]])
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (model, deep))
    assert len(other.model.layers) == 6
    with torch.inference_mode():
        assert torch.equal(one(tokens).logits, other(tokens).logits)


def test_every_method_names_settings_that_exist() -> None:
    from agentspec.server_ext.settings import Settings

    for method in hybrid.METHODS.values():
        assert set(method.settings) <= set(Settings.model_fields)
        assert method.replay in ("none", "ngram", "agentspec")
        assert method.drafter is None or method.drafter in hybrid.DRAFTERS
    assert set(hybrid.SINGLE) < set(hybrid.METHODS)
    assert set(hybrid.DEFAULT_METHODS) < set(hybrid.METHODS)
    assert all(Path(config["model"]).is_dir() for config in hybrid.DRAFTERS.values())
