"""Ratios of the hybrid benchmark: against the best single method, with their noise."""

import hybrid
import pytest

from agentspec.testing.replay import ReplayResult


def measured(seconds: list[float], steps: int = 50) -> ReplayResult:
    """Return the figures of a method that took so long in each turn."""
    turns = tuple((33, duration) for duration in seconds)
    return ReplayResult(tokens=33 * len(seconds), steps=steps, seconds=sum(seconds), turns=turns)


def test_the_hybrid_is_set_against_the_best_single_method() -> None:
    methods = {
        "none": measured([4.0, 4.0, 4.0]),
        "ngram": measured([3.0, 3.0, 3.0]),
        "suffix": measured([2.0, 2.0, 2.0], steps=40),
        "speculator": measured([2.5, 2.5, 2.5]),
        "hybrid": measured([1.0, 1.0, 1.0], steps=20),
        "hybrid, not judging": measured([1.5, 1.0, 0.8], steps=25),
    }
    best, judging = hybrid.compare("mixed", methods)
    assert (best["against"], best["ratio"], best["steps_ratio"], best["noise"]) == ("suffix", 2.0, 2.0, 0.0)
    assert judging["ratio"] == pytest.approx(1.1)
    assert judging["noise"] > 0.1


def test_every_method_names_settings_that_exist() -> None:
    from agentspec.server_ext.settings import Settings

    for method, settings in hybrid.METHODS.values():
        assert set(settings) <= set(Settings.model_fields)
        assert method in ("none", "ngram", "agentspec")
    assert set(hybrid.SINGLE) < set(hybrid.METHODS)
