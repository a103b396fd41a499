"""Test the loop around an engine that answers at once; a real engine is in end_to_end/test_rollouts.py."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import AgentSpecError
from agentspec.rollout import (
    Journal,
    OfflineEngine,
    Plan,
    Problem,
    RolloutGenerator,
    Sample,
    generator,
    rollout_options,
)
from agentspec.server_ext.vllm_adapter import offline
from agentspec.server_ext.vllm_adapter.offline import DRAFT_FIGURES, Sampling
from tests.rollout.stand_in_engine import LLM, PROBLEMS, Engine, run


def test_each_sample_is_written_once_with_what_a_trainer_needs(tmp_path: Path) -> None:
    engine = Engine()
    figures, samples = run(tmp_path / "r.jsonl", Plan(samples=2, epochs=2), engine)
    assert [sample.key for sample in samples] == [
        (name, epoch, number) for epoch in range(2) for name in "abc" for number in range(2)
    ]
    first = samples[0]
    assert (first.prompt_ids, first.completion_ids, first.logprobs) == ([3, 3], [5, 6], [-0.5, -1.0])
    assert (first.steps, first.drafted, first.accepted, first.fields) == (1, 4, 1, {"answer": "five six"})
    assert [one.tokens_per_step for one in figures] == [2.0, 2.0] and figures[0].acceptance_rate == 0.25
    assert all(one.seconds > 0.0 for one in figures)
    assert {params.extra_args["group_id"] for _, params in engine.asked} == {"a", "b", "c"}


def test_steps_are_counted_and_not_reckoned_from_accepted_tokens(tmp_path: Path) -> None:
    """Accepted tokens behind a stop text, or behind an end within a draft, are not in the answer."""

    class Late(Engine):
        """Give each answer in its third step."""

        steps = 0

        def step(self) -> list[Any]:
            self.steps += 1
            outputs = super().step()
            if self.steps % 3:
                self.open.extendleft(output.request_id for output in outputs)
            for output in outputs:
                output.finished = self.steps % 3 == 0
            return outputs

    figures, samples = run(tmp_path / "r.jsonl", Plan(samples=1), Late(batch=1))
    assert [sample.steps for sample in samples] == [3, 3, 3]
    assert (figures[0].steps, figures[0].tokens) == (9, 6)


@pytest.mark.parametrize(
    ("drafts", "given", "counts"), [(True, False, (8, 5)), (True, True, (0, 0)), (False, False, (0, 0))]
)
def test_where_vllm_gives_no_figures_of_drafts_the_engine_is_asked(
    drafts: bool, given: bool, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.28 has no such figures, and no option for them."""
    monkeypatch.setattr(offline, "has_draft_figures", lambda: given)
    monkeypatch.setattr(generator, "has_draft_figures", lambda: given)

    class Old(Engine):
        def step(self) -> list[Any]:
            outputs = super().step()
            for output in outputs:
                del output.outputs[0].spec_decode_metrics
            return outputs

    engine = OfflineEngine(LLM(Old(drafts=drafts)))
    engine.add("r", [1], Sampling(1.0, 1.0, 2), {})
    (answer,) = engine.step()
    assert (answer.drafted, answer.accepted) == counts
    assert (DRAFT_FIGURES in rollout_options()) == given


def test_an_engine_that_is_started_again_draws_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's default seed is always the same, so a resumed rollout would repeat its samples."""
    seeds: list[int] = []

    def make(model: str, *, seed: int, **options: Any) -> LLM:
        seeds.append(seed)
        return LLM(Engine())

    monkeypatch.setattr("vllm.LLM", make)
    for given in ({}, {}, {"seed": 5}):
        OfflineEngine.start("m", **given, **rollout_options())
    assert seeds[0] != seeds[1] and seeds[2] == 5


def test_a_second_run_samples_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(RuntimeError, match="the engine died"):
        run(path, Plan(samples=4), Engine(fail_after=6))
    engine = Engine()
    figures, samples = run(path, Plan(samples=4), engine)
    assert figures[0].resumed >= 4 and figures[0].resumed + figures[0].finished == 12
    assert len(engine.asked) == figures[0].finished
    assert len({sample.key for sample in samples}) == len(samples) == 12
    complete = path.stat()
    assert run(path, Plan(samples=4), Engine(fail_after=0))[0][0].finished == 0
    assert path.stat() == complete, "nothing was written, although no sample has a reward"


def test_samples_of_other_problems_count_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=3))
    with Journal(path) as journal:
        generator = RolloutGenerator(OfflineEngine(LLM(Engine())), journal)
        (figures,) = generator.run([PROBLEMS[0], Problem("d", [9])], Plan(samples=2))
        assert (figures.resumed, figures.finished, figures.reward_errors) == (2, 2, 0)
        assert [sample.key for sample in generator.samples(0)] == [
            *(("a", 0, number) for number in range(2)),
            *(("d", 0, number) for number in range(2)),
        ]


def test_other_prompts_than_before_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their samples would be in one group with those of the earlier prompts."""
    run(tmp_path / "r.jsonl", Plan(samples=1))
    run(tmp_path / "r.jsonl", Plan(samples=2))
    assert "other prompts" not in caplog.text
    with Journal(tmp_path / "r.jsonl") as journal:
        edited = [*PROBLEMS[1:], Problem("a", "one two three"), Problem("new", "one")]
        list(RolloutGenerator(OfflineEngine(LLM(Engine())), journal).run(edited, Plan(samples=2)))
    assert "other prompts for 1 of these problems, such as 'a'" in caplog.text


def test_an_error_leaves_no_request_in_the_engine(tmp_path: Path) -> None:
    engine = Engine(fail_after=2)
    with pytest.raises(RuntimeError):
        run(tmp_path / "r.jsonl", Plan(samples=4), engine)
    assert not engine.open


@pytest.mark.parametrize("max_waiting", [0, 3])
def test_the_engine_never_holds_more_than_it_can_use(tmp_path: Path, max_waiting: int) -> None:
    engine = Engine(batch=2)
    run(tmp_path / "r.jsonl", Plan(samples=50), engine, max_waiting=max_waiting)
    assert engine.most_open == 2 + max_waiting


def test_samples_that_wait_for_slow_rewards_are_bounded(tmp_path: Path) -> None:
    """They are held in memory, so the engine must wait for rewards."""
    engine, open_ = Engine(batch=2), [0]

    def reward(problem: Any, sample: Sample) -> float:
        time.sleep(0.002)
        open_.append(len(engine.asked) - len(open_))
        return 1.0

    run(tmp_path / "r.jsonl", Plan(samples=400), engine, max_waiting=3, reward=reward)
    limit = 5 + 64
    assert len(open_) > 10 * limit
    assert limit / 2 < max(open_) <= limit + 5  # more than two of 5 requests may finish in a step


def test_it_is_told_how_many_prompts_are_tokens_before_anything_is_sampled(tmp_path: Path) -> None:
    """Tokenising a million problems takes minutes, in which progress is shown."""
    engine, told = Engine(), list[tuple[int, int, int]]()
    problems = [Problem(str(number), [7]) for number in range(250)]
    with Journal(tmp_path / "r.jsonl") as journal:
        samples = RolloutGenerator(OfflineEngine(LLM(engine)), journal)
        list(samples.run(problems, Plan(), tokenised=lambda *counts: told.append((*counts, len(engine.asked)))))
    assert told == [(100, 250, 0), (200, 250, 0), (250, 250, 0)]


def test_a_huge_number_of_samples_takes_no_memory(tmp_path: Path) -> None:
    """Before the first sample, a list of all names would take 844 MB for three problems with two million each."""
    engine = Engine(batch=3, fail_after=9)
    with pytest.raises(RuntimeError, match="the engine died"):
        run(tmp_path / "r.jsonl", Plan(samples=10**12), engine)
    with Journal(tmp_path / "r.jsonl") as journal:
        assert sorted(journal) == [("a", 0, number) for number in range(9)]


def test_weights_are_updated_before_each_epoch_that_lacks_samples(tmp_path: Path) -> None:
    calls = []

    def update(llm: Any, epoch: int) -> str:
        calls.append(epoch)
        return f"step {epoch}"

    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=1, epochs=1), update_weights=update)
    engine = Engine()
    _, samples = run(path, Plan(samples=1, epochs=3), engine, update_weights=update)
    assert calls == [0, 1, 2]
    assert engine.resets == [0, 3]  # otherwise the next samples would begin with what earlier weights computed
    assert [sample.weight_version for sample in samples] == [f"step {epoch}" for epoch in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert engine.asked[0][1].extra_args["weight_version"] == "step 1"
    run(tmp_path / "other.jsonl", Plan(samples=1), engine, update_weights=lambda llm, epoch: Path("step-7"))
    assert engine.asked[-1][1].extra_args["weight_version"] == "step-7"

    _, samples = run(tmp_path / "unknown.jsonl", Plan(samples=1), engine, update_weights=lambda llm, epoch: None)
    assert {sample.weight_version for sample in samples} == {None}

    async def load(llm: Any, epoch: int) -> int:
        return 9

    run(tmp_path / "async.jsonl", Plan(samples=1), engine, update_weights=load)
    assert engine.asked[-1][1].extra_args["weight_version"] == "9"

    loops = set()

    async def load_with_a_client(llm: Any, epoch: int) -> int:
        loops.add(asyncio.get_running_loop())  # to which a client's connections belong
        return epoch

    run(tmp_path / "client.jsonl", Plan(samples=1, epochs=3), engine, update_weights=load_with_a_client)
    assert len(loops) == 1

    async def notebook() -> None:  # a notebook's event loop runs in this thread
        run(tmp_path / "notebook.jsonl", Plan(samples=1), engine, update_weights=load)

    asyncio.run(notebook())
    assert engine.asked[-1][1].extra_args["weight_version"] == "9"
    with pytest.raises(AgentSpecError, match="update_weights: returned dict"):
        run(tmp_path / "wrong.jsonl", Plan(samples=1), engine, update_weights=lambda llm, epoch: {})


def test_an_epoch_of_two_weights_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=1, epochs=2), update_weights=lambda llm, epoch: f"step {epoch}")
    run(path, Plan(samples=2, epochs=2), update_weights=lambda llm, epoch: f"step {epoch}")
    assert "weights" not in caplog.text
    for samples in (1, 2):
        run(tmp_path / "nameless.jsonl", Plan(samples=samples), update_weights=lambda llm, epoch: "")
    assert "weights" not in caplog.text
    run(path, Plan(samples=3, epochs=1))
    assert f"epoch 0: weights step 0 wrote the samples in {path}, and weights None write the rest" in caplog.text


def test_an_error_of_the_weights_says_where_the_samples_are(tmp_path: Path) -> None:
    def update(llm: Any, epoch: int) -> None:
        if epoch == 1:
            raise FileNotFoundError("step-1")

    path = tmp_path / "r.jsonl"
    with pytest.raises(FileNotFoundError, match="step-1") as raised:
        run(path, Plan(samples=1, epochs=2), update_weights=update)
    (note,) = raised.value.__notes__
    assert "update_weights failed before epoch 1" in note and f"{path}: mend it, and run the rollout again" in note
    assert len(path.read_text().splitlines()) == len(PROBLEMS)


def test_each_epoch_that_lacks_samples_is_announced(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=1, epochs=1))
    engine = Engine(drafts=True)
    run(path, Plan(samples=1, epochs=3), engine)
    assert engine.told == [(0, ("new_epoch",)), (3, ("new_epoch",))]
    plain = Engine()
    run(tmp_path / "plain.jsonl", Plan(samples=1, epochs=3), plain)
    assert not plain.told


def test_each_epoch_has_seeds_of_its_own(tmp_path: Path) -> None:
    engine = Engine()
    run(tmp_path / "a.jsonl", Plan(samples=2, epochs=2, seed=1), engine)
    assert len({params.seed for _, params in engine.asked}) == 12


def test_a_seed_belongs_to_the_sample_and_not_to_the_order(tmp_path: Path) -> None:
    whole, half = Engine(), Engine()
    run(tmp_path / "a.jsonl", Plan(samples=2, seed=1), whole)
    with Journal(tmp_path / "b.jsonl") as journal:
        list(RolloutGenerator(OfflineEngine(LLM(half)), journal).run(PROBLEMS[1:], Plan(samples=2, seed=1)))
    seeds = {name: params.seed for name, params in whole.asked}
    assert len(set(seeds.values())) == 6
    assert all(seeds[name] == params.seed for name, params in half.asked)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("word " * 9, "has 9 tokens, but the model takes 1 to 7"),
        ([{"role": "system"}], "chat template refuses its prompt: no user message"),
        ("half \ud83d", "the tokenizer .* refuses its prompt: no text"),
        ([99, 100], "has the token 100"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(tmp_path: Path, prompt: Any, message: str) -> None:
    with Journal(tmp_path / "r.jsonl") as journal, pytest.raises(AgentSpecError, match="problem 'z': .*" + message):
        list(RolloutGenerator(OfflineEngine(LLM(Engine())), journal).run([Problem("z", prompt)], Plan()))


def test_a_chats_template_gets_its_tools(tmp_path: Path) -> None:
    """Without the tools, the samples would answer another prompt than the trainer's."""
    chat = [{"role": "user", "content": "x"}]
    problems = [Problem("none", chat), Problem("some", chat, {"tools": [{"name": "four"}]}), Problem("empty", [])]
    with Journal(tmp_path / "r.jsonl") as journal:
        list(RolloutGenerator(OfflineEngine(LLM(Engine())), journal).run(problems[:2], Plan(samples=1)))
        assert [(sample.id, sample.prompt_ids) for sample in journal.samples()] == [("none", [1]), ("some", [4, 1])]
        with pytest.raises(AgentSpecError, match="'empty': its prompt has 0 tokens"):
            list(RolloutGenerator(OfflineEngine(LLM(Engine())), journal).run(problems[2:], Plan(samples=1)))
        wrong = [Problem("wrong", chat, {"tools": "f, g"})]  # such tools are not silently left out
        with pytest.raises(AgentSpecError, match="'wrong': \"tools\" go into the chat template"):
            list(RolloutGenerator(OfflineEngine(LLM(Engine())), journal).run(wrong, Plan(samples=1)))


def test_two_problems_with_one_id_are_refused(tmp_path: Path) -> None:
    """Of two requests with one id, vLLM answers one and never ends the other."""
    with Journal(tmp_path / "r.jsonl") as journal, pytest.raises(AgentSpecError, match="two problems have the id 'a'"):
        list(RolloutGenerator(OfflineEngine(LLM(Engine())), journal).run([PROBLEMS[0], PROBLEMS[0]], Plan()))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(5, "x"), "^the id 5 of a problem: must be a string"),  # type: ignore[arg-type]
        (Problem("\ud800", "x"), "of a problem: half of a surrogate pair"),
        (Problem("a", "x", {("b", 1): 2}), "^problem 'a': fields: JSON has no form for them .keys must be"),  # type: ignore[dict-item]
    ],
)
def test_a_problem_whose_samples_could_not_be_read_again_is_refused(
    tmp_path: Path, problem: Problem, message: str
) -> None:
    """A file with a number as id cannot be opened again, and fields without a JSON form would end the rollout."""
    engine = Engine()
    with Journal(tmp_path / "r.jsonl") as journal, pytest.raises(AgentSpecError, match=message):
        list(RolloutGenerator(OfflineEngine(LLM(engine)), journal).run([problem], Plan()))
    assert engine.asked == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"epochs": 0},
        {"max_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"temperature": float("nan")},
        {"stop": "\n\n"},
        {"stop": [""]},
        {"stop": [7]},
        {"samples": 2.5},
        {"epochs": "3"},
        {"max_tokens": None},
        {"temperature": "1"},
        {"top_p": None},
    ],
)
def test_a_wrong_plan_names_the_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(AgentSpecError, match=next(iter(wrong))):
        Plan(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reward": "rewards:score"}, "reward: a function expected, got str"),
        ({"update_weights": 3}, "update_weights: a function expected, got int"),
        ({"max_waiting": -1}, "max_waiting: at least 0 expected, got -1"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_sampled(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(AgentSpecError, match=message):
        run(tmp_path / "r.jsonl", Plan(), **wrong)


@pytest.mark.parametrize("prompt", [[1, -1], [1, 100], ["one"], [1.5], None])
def test_what_the_engine_would_die_of_is_refused(tmp_path: Path, prompt: Any) -> None:
    engine = Engine()
    with Journal(tmp_path / "r.jsonl") as journal, pytest.raises(AgentSpecError, match=r"problem 'a': .*its prompt"):
        list(RolloutGenerator(OfflineEngine(LLM(engine)), journal).run([Problem("a", prompt)], Plan()))
    assert engine.asked == []
