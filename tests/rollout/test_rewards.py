"""Test rewards beside the engine: one that fails, hangs or is interrupted costs at most its sample's reward."""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agentspec.awaiting import awaited
from agentspec.errors import AgentSpecError
from agentspec.rollout import Journal, OfflineEngine, Plan, Problem, RolloutGenerator, Sample, generator
from agentspec.rollout.formats import folder_for
from agentspec.rollout.rewards import Rewards
from tests.rollout.stand_in_engine import LLM, PROBLEMS, Engine, run
from tests.store.helpers import wait_until


def test_rewards_are_written_and_a_failing_one_ends_nothing(tmp_path: Path) -> None:
    def reward(problem: Problem, sample: Sample) -> float:
        return float(problem.fields["answer"] == sample.text)

    figures, samples = run(tmp_path / "r.jsonl", Plan(samples=1), reward=reward)
    assert {sample.id: sample.reward for sample in samples} == {"a": 1.0, "b": None, "c": None}
    assert {sample.reward_error for sample in samples} == {None, "KeyError: 'answer'"}
    assert (figures[0].mean_reward, figures[0].reward_errors) == (1.0, 2)


class Unprintable(BaseException):
    """Be no Exception, like pytest's Failed, and raise an error in `str`."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise asyncio.CancelledError('late')", "CancelledError: late"),
        ("raise Unprintable", "Unprintable"),
        ("float('inf')", "ValueError: inf is not a finite number"),
        ("float('nan')", "ValueError: nan is not a finite number"),
        ("None", "TypeError: it returned None; return a number"),
        ("{'score': 1}", "TypeError: it returned dict, {'score': 1}; return a number"),
        ("'0.5'", "TypeError: it returned str, '0.5'; return a number"),
        ("b'0.5'", "TypeError: it returned bytes, b'0.5'; return a number"),
    ],
)
def test_an_answer_that_a_reward_runs_ends_nothing(tmp_path: Path, answer: str, said: str) -> None:
    def reward(problem: Problem, sample: Sample) -> float:
        if problem.id != "b":
            return 1.0
        if answer.startswith("raise"):
            exec(answer)
        return eval(answer)  # type: ignore[no-any-return]

    figures, samples = run(tmp_path / "r.jsonl", Plan(samples=1), reward=reward)
    assert {sample.id: sample.reward for sample in samples} == {"a": 1.0, "b": None, "c": 1.0}
    assert {sample.reward_error for sample in samples} == {None, said}
    assert (figures[0].mean_reward, figures[0].reward_errors) == (1.0, 1)


def test_a_reward_that_always_fails_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def reward(problem: Problem, sample: Sample) -> float:
        raise ValueError(f"sample {sample.sample}")

    figures, samples = run(tmp_path / "r.jsonl", Plan(samples=20), reward=reward)
    assert figures[0].reward_errors == len(samples) == 60
    assert all(sample.reward_error == f"ValueError: sample {sample.sample}" for sample in samples)
    said = [record.getMessage() for record in caplog.records if record.name == "agentspec.rollout.rewards"]
    assert len(said) == 11 and "further failures are counted" in said[-1]


def test_a_slow_reward_does_not_hold_up_what_others_write(tmp_path: Path) -> None:
    """A finished and scored sample survives a kill, although an earlier reward is not known yet."""
    written, path = threading.Event(), tmp_path / "r.jsonl"

    def reward(problem: Problem, sample: Sample) -> float:
        if problem.id == "a":
            assert written.wait(60)
        return 1.0

    def progress(figures: Any) -> None:
        if figures.finished >= 2:
            written.set()

    with Journal(path) as journal:
        generator = RolloutGenerator(OfflineEngine(LLM(Engine())), journal, reward=reward)
        (figures,) = generator.run(PROBLEMS, Plan(samples=1), progress)
        assert [sample.id for sample in journal.samples()][-1] == "a"
        assert {sample.reward_error for sample in journal.samples()} == {None}
    assert figures.finished == 3


def test_samples_whose_rewards_were_not_known_are_written_when_the_engine_dies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    said = "6 finished samples wait for their rewards; Ctrl-C leaves these to the next run"

    def reward(problem: Problem, sample: Sample) -> float:
        until = time.monotonic() + 60
        while said not in caplog.text and time.monotonic() < until:  # a slow disk may hold up the samples
            time.sleep(0.01)
        return 1.0

    with pytest.raises(RuntimeError, match="the engine died"):
        run(path, Plan(samples=4), Engine(fail_after=6), reward=reward)
    with Journal(path) as journal:
        assert len(journal) == 6
    assert said in caplog.text  # otherwise the program seems to hang after Ctrl-C


def test_samples_are_written_though_a_dead_engine_cannot_abort_the_others(tmp_path: Path) -> None:
    class Dead(Engine):
        def abort_request(self, request_ids: list[str]) -> None:
            raise ValueError("it is dead")

    path = tmp_path / "r.jsonl"

    def reward(problem: Problem, sample: Sample) -> float:
        time.sleep(0.1)
        return 1.0

    with pytest.raises(ValueError, match="it is dead"):
        run(path, Plan(samples=4), Dead(fail_after=6), reward=reward)
    with Journal(path) as journal:
        assert len(journal) == 6 and not journal.without_reward()


def test_the_wait_for_the_last_rewards_takes_no_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, calls = Rewards.take, []

    def counted(self: Rewards, *, wait: bool = False) -> Any:
        calls.append(wait)
        return take(self, wait=wait)

    def reward(problem: Problem, sample: Sample) -> float:
        time.sleep(0.3)
        return 1.0

    monkeypatch.setattr(Rewards, "take", counted)
    run(tmp_path / "r.jsonl", Plan(samples=1), reward=reward)
    assert len(calls) < 20


def test_samples_of_an_earlier_run_are_read_as_their_rewards_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "_MOST_WAITING_REWARDS", 4)
    give, waiting = Rewards.give, []

    def noted(self: Rewards, problem: Problem, sample: Sample) -> None:
        give(self, problem, sample)
        waiting.append(len(self))

    monkeypatch.setattr(Rewards, "give", noted)
    run(tmp_path / "r.jsonl", Plan(samples=10))
    waiting.clear()

    def reward(problem: Problem, sample: Sample) -> float:
        time.sleep(0.02 * (1 + sample.sample % 4))
        return 1.0

    run(tmp_path / "r.jsonl", Plan(samples=10), reward=reward)
    assert len(waiting) == 30 and max(waiting) == 4


def test_a_second_interrupt_begins_no_more_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def reward(problem: Problem, sample: Sample) -> float:
        calls.append(sample.key)
        time.sleep(0.3)
        return 1.0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r.jsonl", Plan(samples=20), Engine(batch=64), reward=reward)
    assert len(calls) < 30


def test_a_second_interrupt_leaves_the_rewards_to_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished samples must stay. Otherwise a slow reward could cost 161 of 169 of them."""
    path, hung = tmp_path / "r.jsonl", threading.Event()

    def hang(problem: Problem, sample: Sample) -> float:
        return float(hung.wait(60))

    def interrupt(self: Rewards, *, wait: bool = False) -> Any:
        if wait:
            raise KeyboardInterrupt
        return iter(())

    with monkeypatch.context() as patched:
        patched.setattr(Rewards, "take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(path, Plan(samples=4), Engine(fail_after=6), reward=hang)
    hung.set()
    engine = Engine()
    _, samples = run(path, Plan(samples=4), engine, reward=lambda problem, sample: 1.0)
    assert (len(samples), len(engine.asked)) == (12, 6) and {sample.reward for sample in samples} == {1.0}


def test_a_hung_reward_holds_up_nothing_but_its_sample(tmp_path: Path) -> None:
    """Each hung call leaves its thread, and another begins in its place."""
    hung = threading.Event()

    def reward(problem: Problem, sample: Sample) -> float:
        if problem.id == "a":
            hung.wait(60)
        return 1.0

    plan = Plan(samples=6)  # so more hang than run at a time
    figures, samples = run(tmp_path / "r.jsonl", plan, reward=reward, reward_seconds=2.0)
    hung.set()
    errors = {(sample.id, sample.reward, sample.reward_error) for sample in samples}
    assert errors == {("a", None, "TimeoutError: took over 2 s"), ("b", 1.0, None), ("c", 1.0, None)}
    assert (len(samples), figures[0].rewarded, figures[0].reward_errors) == (18, 12, 6)


def test_hung_rewards_take_so_many_threads_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds over several epochs. When hung calls end, others begin."""
    monkeypatch.setattr("agentspec.rollout.rewards._MOST_HUNG", 3)
    calls, hung = [], threading.Event()

    def reward(problem: Problem, sample: Sample) -> float:
        calls.append(sample.key)
        hung.wait(60)
        return 1.0

    def progress(figures: Any) -> None:
        if figures.epoch == 2:
            hung.set()
            while any(thread.name == "agentspec-reward" for thread in threading.enumerate()):
                time.sleep(0.01)

    with Journal(tmp_path / "r.jsonl") as journal:
        generator = RolloutGenerator(OfflineEngine(LLM(Engine())), journal, reward=reward, reward_seconds=1.0)
        figures = list(generator.run(PROBLEMS, Plan(samples=2, epochs=4), progress))
        errors = {sample.reward_error for sample in generator.samples(1)}
    assert [each.reward_errors for each in figures[:2]] == [6, 6] and figures[3].rewarded == 6
    assert len([key for key in calls if key.epoch < 2]) < 3 + 4  # four run at a time
    (error,) = errors
    assert error is not None and "still run" in error and "timeout of its own" in error


def test_calls_of_an_interrupted_run_count_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.rollout.rewards._MOST_HUNG", 1)
    hung = threading.Event()
    rewards = Rewards(lambda problem, sample: float(hung.wait(60)))
    first, second = (Sample("a", 0, number, [1], [2], [-0.1], "x") for number in range(2))
    rewards.give(PROBLEMS[0], first)
    rewards.drop()
    assert not rewards
    rewards.give(PROBLEMS[0], second)
    (scored,) = rewards.take(wait=True)
    assert scored.key == second.key and "1 calls that were given up still run" in str(scored.reward_error)
    hung.set()


def test_an_asynchronous_reward_that_hangs_is_cancelled(tmp_path: Path) -> None:
    cancelled = []

    async def reward(problem: Problem, sample: Sample) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(sample.id)
            raise
        return 1.0

    _, samples = run(tmp_path / "r.jsonl", Plan(samples=1), reward=reward, reward_seconds=0.1)
    assert {sample.reward_error for sample in samples} == {"TimeoutError: took over 0.1 s"}
    until = time.monotonic() + 60
    while len(cancelled) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(cancelled) == ["a", "b", "c"]


def test_a_thread_that_cannot_be_started_costs_its_samples_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def limited(self: threading.Thread) -> None:
        started.append(self)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    figures, samples = run(tmp_path / "r.jsonl", Plan(samples=2), reward=lambda problem, sample: 1.0)
    (error,) = [sample.reward_error for sample in samples if sample.reward is None]
    assert error is not None and "can't start new thread" in error and "ulimit -u" in error
    assert (figures[0].rewarded, figures[0].reward_errors) == (5, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_an_interrupted_run_left_is_not_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def interrupt(*_: Any) -> None:
        raise error

    with Journal(tmp_path / "r.jsonl") as journal:
        engine = OfflineEngine(LLM(Engine(batch=64)))
        generator = RolloutGenerator(engine, journal, reward=lambda problem, sample: 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write", interrupt)
            with pytest.raises(type(error)):
                list(generator.run(PROBLEMS, Plan(samples=20)))
        (figures,) = generator.run(PROBLEMS, Plan(samples=20))
        assert (len(journal), figures.finished, figures.rewarded) == (60, 60, 60)


def test_an_asynchronous_reward_is_awaited(tmp_path: Path) -> None:
    async def reward(problem: Problem, sample: Sample) -> float:
        return 0.5

    _, samples = run(tmp_path / "r.jsonl", Plan(samples=1), reward=reward)
    assert [sample.reward for sample in samples] == [0.5] * 3


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("in_a_task", [False, True])
def test_an_answer_that_an_asynchronous_reward_runs_may_exit(
    tmp_path: Path, error: type[BaseException], in_a_task: bool
) -> None:
    """Such an error ends the event loop on which the next rewards run, too."""

    async def exits() -> None:
        raise error("bye")

    async def reward(problem: Problem, sample: Sample) -> float:
        if problem.id == "b":
            await (asyncio.create_task(exits()) if in_a_task else exits())
        await asyncio.sleep(0.001)
        return 1.0

    for name in ("r.jsonl", "again.jsonl"):
        _, samples = run(tmp_path / name, Plan(samples=2), reward=reward, reward_seconds=30.0)
        assert {sample.id: sample.reward_error for sample in samples} == {
            "a": None,
            "b": f"{error.__name__}: bye",
            "c": None,
        }


def test_a_reward_may_change_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that run what the model wrote do, and it counts for the whole process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def reward(problem: Problem, sample: Sample) -> float:
        os.chdir(tmp_path / "elsewhere")
        return 1.0

    _, samples = run(Path("r.jsonl"), Plan(samples=2), reward=reward)
    assert [sample.reward for sample in samples] == [1.0] * 6
    assert folder_for(Path("r.jsonl"), "verl").is_absolute()


def test_asynchronous_rewards_may_share_a_client(tmp_path: Path) -> None:
    """A module's AsyncOpenAI, for example, has connections that belong to the event loop that made them."""
    one_at_a_time, loops = asyncio.Semaphore(1), set()

    async def reward(problem: Problem, sample: Sample) -> float:
        async with one_at_a_time:
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0.005)
            return 0.5

    figures, _ = run(tmp_path / "r.jsonl", Plan(samples=6), reward=reward, reward_seconds=30.0)
    assert (figures[0].rewarded, len(loops)) == (18, 1)


def test_an_interrupt_keeps_the_rewards_that_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=4))
    take, taken = Rewards.take, []

    def interrupted(self: Rewards, *, wait: bool = False) -> Any:
        for sample in take(self, wait=wait):
            taken.append(sample)
            yield sample
        if len(taken) >= 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Rewards, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(path, Plan(samples=4), reward=lambda problem, sample: 1.0)
    with Journal(path) as journal:
        assert sum(sample.reward == 1.0 for sample in journal.samples()) >= 5
        assert len(journal) == 12


def test_what_has_no_reward_is_scored_by_the_next_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "r.jsonl"

    def wrong(problem: Problem, sample: Sample) -> float:
        return problem.fields["answer"] == sample.text and 1.0

    _, before = run(path, Plan(samples=2), reward=wrong)
    calls = []

    def right(problem: Problem, sample: Sample) -> float:
        calls.append(sample.id)
        return 0.25

    engine = Engine()
    figures, after = run(path, Plan(samples=2), engine, reward=right)
    assert not engine.asked and sorted(calls) == ["b", "b", "c", "c"]
    assert [sample.key for sample in after] == [sample.key for sample in before]
    assert {(sample.id, sample.reward, sample.reward_error) for sample in after} == {
        ("a", 1.0, None),
        ("b", 0.25, None),
        ("c", 0.25, None),
    }
    assert (figures[0].mean_reward, figures[0].reward_errors) == (0.5, 0)
    assert "4 samples of" in caplog.text and "4 samples have a reward now, 0 have none" in caplog.text
    caplog.clear()
    run(path, Plan(samples=2), reward=right)
    assert not caplog.messages, "nothing was left to score"
    figures, _ = run(path, Plan(samples=2))  # without a reward function
    assert (figures[0].mean_reward, figures[0].reward_errors) == (0.5, 0)


def test_samples_of_other_problems_are_not_scored(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=2))
    with Journal(path) as journal:
        engine = OfflineEngine(LLM(Engine()))
        generator = RolloutGenerator(engine, journal, reward=lambda problem, sample: 1.0)
        (figures,) = generator.run(PROBLEMS[:1], Plan(samples=2))
        assert (figures.rewarded, len(journal.without_reward())) == (2, 4)


def test_a_kill_while_samples_are_scored_again_keeps_what_was_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "_REWARDS_WRITTEN_S", 0.0)
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=4))
    held: list[int] = []
    told: list[tuple[int, int]] = []

    def reward(problem: Problem, sample: Sample) -> float:
        time.sleep(0.02)
        held.append(sum('"reward": 0.5' in line for line in path.read_text().splitlines()))
        return 0.5

    with Journal(path) as journal:
        again = RolloutGenerator(OfflineEngine(LLM(Engine())), journal, reward=reward)
        list(again.run(PROBLEMS, Plan(samples=4), scored=lambda *counts: told.append(counts)))
        assert len(journal) == 12 and {sample.reward for sample in journal.samples()} == {0.5}
    assert max(held) >= 1  # samples are in the file before the last one is scored
    assert told[-1] == (12, 12) and [scored for scored, _ in told] == sorted({scored for scored, _ in told})


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_wrong_limit_of_rewards_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(AgentSpecError, match="reward_seconds"):
        run(tmp_path / "r.jsonl", Plan(), reward_seconds=seconds)


def test_rewards_that_are_known_are_not_dropped() -> None:
    release = threading.Event()
    rewards = Rewards(lambda problem, sample: 1.0 if sample.sample else float(release.wait(60)))
    for number in range(3):
        rewards.give(Problem("a", "x"), Sample("a", 0, number, [1], [2], [0.0], "t"))
    wait_until(lambda: rewards._done.qsize() == 2)
    assert sorted((sample.sample, sample.reward) for sample in rewards.drop() if sample.reward is not None) == [
        (1, 1.0),
        (2, 1.0),
    ]
    release.set()


def test_an_asynchronous_reward_that_blocks_costs_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    async def block() -> None:
        release.wait(60)

    async def one() -> float:
        return 1.0

    with pytest.raises(TimeoutError):
        awaited(block(), 0.1)
    assert awaited(one(), 60.0) == 1.0
    release.set()


def test_a_forked_process_has_an_event_loop_of_its_own() -> None:
    async def one() -> float:
        return 1.0

    assert awaited(one()) == 1.0
    child = os.fork()
    if child == 0:
        os._exit(0 if awaited(one(), 30.0) == 1.0 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_reward_whose_square_is_no_number_is_refused(tmp_path: Path) -> None:
    _, samples = run(tmp_path / "r.jsonl", Plan(samples=1), reward=lambda problem, sample: 1e300)
    assert {sample.reward_error for sample in samples} == {
        "ValueError: 1e+300 is too large; return a number up to 1e+150"
    }
