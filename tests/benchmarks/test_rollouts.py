"""Test the benchmark of rollouts: which samples an epoch has, and what is compared with a target."""

from pathlib import Path

import pytest

import rollouts  # isort: skip
from agentspec.errors import ConfigurationError
from agentspec.testing.replay import ReplayResult


def read(traces: Path, *given: str) -> rollouts.Epochs:
    return rollouts.read_epochs(rollouts._parser().parse_args(["--traces", str(traces), *given]))


def test_an_epoch_replays_other_samples_of_the_same_problems(traces: Path) -> None:
    epochs = read(traces, "--problems", "1", "--samples", "1", "--epochs", "3")
    assert [[int(call.prompt[0]) for call in epoch] for epoch in epochs] == [[0], [10], [20]]
    assert all(call.session is None and call.group is None for epoch in epochs for call in epoch), "no ids"


def test_too_few_samples_name_the_option(traces: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--problems 1: .* has 0 problems with 4 samples"):
        read(traces, "--problems", "1", "--samples", "2", "--epochs", "2")


def test_one_epoch_has_no_figures_of_later_ones() -> None:
    once = ReplayResult(calls=1, tokens=100, steps=50, seconds=1.0, turns=((100, 1.0),))
    rows = rollouts.figures({"none": [once], "agentspec": [once]}, 8)
    assert not any(row["figure"].endswith(", epochs") for row in rows)


def test_steps_and_speed_are_compared_with_their_targets() -> None:
    def result(steps: int, seconds: float) -> ReplayResult:
        return ReplayResult(calls=1, tokens=100, steps=steps, seconds=seconds, turns=((100, seconds),))

    results = {
        "none": [result(100, 1.0), result(100, 1.0)],
        "suffix": [result(55, 1.0), result(55, 1.0)],
        "agentspec": [result(80, 1.0), result(50, 1.1)],
    }
    rows = [row for row in rollouts.figures(results, 8) if row["target"]]
    assert [(row["figure"].removeprefix("batch 8: "), row["value"], row["met"]) for row in rows] == [
        ("steps of none over agentspec's, siblings", 1.25, False),
        ("steps of suffix over agentspec's, siblings", 0.6875, False),
        ("steps of none over agentspec's, epochs", 2.0, True),
        ("steps of suffix over agentspec's, epochs", 1.1, False),
        ("tokens/s of agentspec over none's, all epochs", 0.9524, False),
    ]
