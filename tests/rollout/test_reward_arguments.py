"""Test reward functions that change the problem and the sample that they get."""

from pathlib import Path
from typing import Any

import pytest

from agentspec.rollout import Plan, Problem, Sample
from agentspec.rollout.rewards import Rewards
from tests.rollout.stand_in_engine import PROBLEMS, run


class Unwritable:
    """Raise an error in `repr`."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


def endless() -> list[Any]:
    """Return a list that holds itself."""
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize("value", [{(1, 2): "a key"}, endless(), Unwritable()], ids=["key", "endless", "text"])
@pytest.mark.parametrize("where", ["sample", "problem"])
def test_fields_that_cannot_be_written_cost_their_samples_reward(tmp_path: Path, value: Any, where: str) -> None:
    path = tmp_path / "r.jsonl"
    wrong = True

    def reward(problem: Problem, sample: Sample) -> float:
        fields = sample.fields if where == "sample" else problem.fields
        if problem.id == "a" and wrong:
            fields["note"] = value
        return 1.0

    for _ in range(2):  # the same when they are scored again
        figures, samples = run(path, Plan(samples=2), reward=reward)
        assert len(samples) == 6 and {sample.reward for sample in samples if sample.id != "a"} == {1.0}
        errors = {sample.reward_error for sample in samples if sample.id == "a"}
        if where == "problem":  # each reward has its own problem
            assert errors == {None}
        else:
            (error,) = errors
            assert error is not None and "sample.fields" in error and "JSON" in error
        assert {sample.fields.get("answer") for sample in samples if sample.id == "a"} == {"five six"}
        assert "note" not in PROBLEMS[0].fields
    wrong = False
    figures, _ = run(path, Plan(samples=2), reward=reward)
    assert (figures[0].rewarded, figures[0].reward_errors) == (6, 0)


def test_what_a_failing_reward_wrote_into_a_sample_stays_with_it(tmp_path: Path) -> None:
    def reward(problem: Problem, sample: Sample) -> float:
        sample.fields["log"] = "1 test failed"
        raise ValueError(sample.id)

    _, samples = run(tmp_path / "r.jsonl", Plan(samples=1), reward=reward)
    assert {sample.fields["log"] for sample in samples} == {"1 test failed"}
    assert samples[0].reward_error == "ValueError: a"


def test_what_a_reward_writes_into_a_sample_stays_with_it(tmp_path: Path) -> None:
    def reward(problem: Problem, sample: Sample) -> float:
        sample.fields["note"] = sample.sample
        return 1.0

    _, samples = run(tmp_path / "r.jsonl", Plan(samples=3), reward=reward)
    assert all(sample.fields["note"] == sample.sample for sample in samples)


def test_long_prompts_are_not_copied_token_by_token(tmp_path: Path) -> None:
    """Each reward gets a copy of its problem. A deep copy of 32,000 tokens holds the interpreter's lock for 10 ms."""

    class Token(int):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    rewards = Rewards(lambda problem, sample: float(len(problem.prompt)))
    prompt: list[int] = [Token(1), Token(2)]
    rewards.give(Problem("a", prompt), Sample("a", 0, 0, prompt, [1], [0.0], "x"))
    (scored,) = rewards.take(wait=True)
    assert (scored.reward, scored.reward_error) == (2.0, None)


def test_a_reward_that_extends_what_it_was_given_changes_no_sample(tmp_path: Path) -> None:
    """`ids = sample.prompt_ids; ids += ...` must not extend the prompt of the problem's later samples."""

    def reward(problem: Problem, sample: Sample) -> float:
        said = sample.completion_ids
        said.pop()
        sample.logprobs.clear()
        whole = sample.prompt_ids
        whole += said
        if isinstance(problem.prompt, list):
            problem.prompt.append({"role": "user", "content": "y"})  # type: ignore[arg-type]
            return float(len(problem.prompt))
        return 0.0

    _, samples = run(tmp_path / "r.jsonl", Plan(samples=2, epochs=2), reward=reward)
    assert {(sample.id, tuple(sample.prompt_ids), sample.reward) for sample in samples} == {
        ("a", (3, 3), 0.0),
        ("b", (1,), 2.0),
        ("c", (7, 8), 3.0),
    }
    assert {tuple(sample.completion_ids) for sample in samples} == {(5, 6)}
    assert {tuple(sample.logprobs) for sample in samples} == {(-0.5, -1.0)}
