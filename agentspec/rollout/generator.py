"""Sample problems on a vLLM engine in this process, one decode step at a time, and write each sample as it finishes."""

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

from agentspec.errors import ConfigurationError, InvalidInputError, RolloutError, first_line
from agentspec.identifiers import check_session_id
from agentspec.problems import Problem
from agentspec.rollout.journal import Journal
from agentspec.rollout.plan import EpochFigures, Plan, distribution
from agentspec.rollout.ray_engine import RayEngine
from agentspec.rollout.rewards import Reward, Rewards
from agentspec.rollout.samples import Key, Sample, as_text
from agentspec.server_ext.vllm_adapter.offline import DRAFT_FIGURES, Answer, OfflineEngine, Sampling, has_draft_figures

logger = logging.getLogger(__name__)

UpdateWeights = Callable[[Any, int], Any]
"""Function that is called with the ``vllm.LLM`` and the epoch, before each epoch of which samples are missing.

It returns the weights' version: a text, a number, a path or None, or an awaitable of one.
"""

_REWARDS_WRITTEN_S = 30.0
"""How often the rewards of samples that had none are written, in seconds."""

_MOST_WAITING_REWARDS = 64
"""Most finished samples that may wait for their rewards before fewer requests are started, one for each beyond.

It is also how many samples of an earlier run, which have no reward yet, are read ahead.
"""

_PROMPTS_TOLD = 100
"""Number of prompts after which the progress of tokenising is told again."""

PLAIN_OPTIONS = {"logprobs_mode": "processed_logprobs"}
"""Options of a rollout for a ``vllm.LLM`` without drafts, which would refuse the option for draft figures."""


def rollout_options(**options: Any) -> dict[str, Any]:
    """Return keyword arguments for ``vllm.LLM``, with which it drafts and gives the figures that samples hold.

    options: as ``engine_options`` takes them. Raises ConfigurationError for a wrong setting.
    """
    from agentspec.server_ext.vllm_launch import engine_options

    figures = {DRAFT_FIGURES: "summary"} if has_draft_figures() else {}
    return {**engine_options(**options), **PLAIN_OPTIONS, **figures}


class RolloutGenerator:
    """Sample problems with an engine, and write the samples to a journal.

    engine: an engine of this process, or on Ray. Made with ``rollout_options`` it drafts, and the samples have draft
        figures. A problem's samples are a group: they draft from each other and from those of earlier epochs and runs.
    reward_seconds: longest time for a call of ``reward``; None: no limit.
    max_waiting: requests given to the engine beyond those that it runs, so that it always has a next one.

    Raises ConfigurationError for arguments that cannot work.
    """

    def __init__(
        self,
        engine: OfflineEngine | RayEngine,
        journal: Journal,
        *,
        reward: Reward | None = None,
        reward_seconds: float | None = None,
        update_weights: UpdateWeights | None = None,
        max_waiting: int = 64,
    ) -> None:
        for name, function in (("reward", reward), ("update_weights", update_weights)):
            if function is not None and not callable(function):
                raise ConfigurationError(f"{name}: a function expected, got {type(function).__name__}")
        if max_waiting < 0:  # no request might ever start
            raise ConfigurationError(f"max_waiting: at least 0 expected, got {max_waiting}")
        self._engine = engine
        self._journal = journal
        self._scores = reward is not None
        self._rewards = Rewards(reward, reward_seconds)
        self._update_weights = update_weights
        self._max_open = engine.max_running + max_waiting
        self._prompts: dict[str, list[int]] = {}  # token ids of the latest run's prompts, by the problem's id
        self._samples = 0  # of each problem, in the latest run
        self._sampling: dict[str, Any] = {}  # of the latest run

    def run(
        self,
        problems: Sequence[Problem],
        plan: Plan,
        progress: Callable[[EpochFigures], None] = lambda figures: None,
        scored: Callable[[int, int], None] = lambda scored, of: None,
        tokenised: Callable[[int, int], None] = lambda tokenised, of: None,
    ) -> Iterator[EpochFigures]:
        """Sample the answers that the journal lacks, epoch by epoch. Yields each epoch's figures when it is complete.

        progress: called after each engine step that finished a sample.
        scored: called while samples that the journal holds without a reward are scored, with the number of those scored
            so far and the number of all.
        tokenised: called while the prompts become tokens, with the number of problems so far and the number of all.

        If the caller stops, or an error is raised, the engine's open requests are aborted; the journal has all finished
        samples. A sample is written as soon as its reward is known. A KeyboardInterrupt during the wait for rewards
        writes the other samples without one. With a reward function, samples that the journal holds without a reward
        are scored first, and written every half minute.

        Raises InvalidInputError for two problems with one id, and for an id or fields that cannot be written and read
        again. Raises it also for prompts that the model cannot take, and for a journal of another model or sampling.
        """
        by_id = _by_id(problems)
        self._sampling = distribution(self._engine.model, plan) | self._engine.loaded
        self._journal.check_sampling(self._sampling)
        if self._journal.has_other_weights(self._sampling["weights"]):  # only a warning: a copy has other times, too
            logger.warning(
                "agentspec: the files of %s have changed since samples in %s were written. To keep the samples of "
                "other weights apart, write to another file",
                *(self._engine.model, self._journal.path),
            )
        self._prompts, self._samples = self._tokenise(problems, tokenised), plan.samples
        changed = [name for name, prompt in self._prompts.items() if self._journal.holds_another_prompt(name, prompt)]
        if changed:  # only a warning, as a chat template may write the day's date
            logger.warning(
                "agentspec: %s holds samples of other prompts for %d of these problems, such as %r: the problems or "
                "the model's tokens changed. To keep the samples apart, write to another file",
                *(self._journal.path, len(changed), changed[0]),
            )
        self._rewards.drop()  # samples that an interrupted run left
        if self._scores:
            self._score_again(by_id, scored)
        for epoch in range(plan.epochs):
            there = [key for key in self._journal if key.epoch == epoch and self._is_asked_for(key)]
            figures = EpochFigures(epoch, wanted=len(problems) * plan.samples, resumed=len(there))
            for key in there:
                reward = self._journal.reward(key)
                figures.add_reward(reward, failed=reward is None and self._scores)
            if figures.resumed < figures.wanted:
                self._engine.begin_epoch()
                if self._update_weights is not None:
                    figures.weight_version = self._new_weights(self._update_weights, epoch)
                before = self._journal.weight_version(epoch)
                if there and before != figures.weight_version:  # only a warning: a version may be the time of loading
                    logger.warning(
                        "agentspec: epoch %d: weights %s wrote the samples in %s, and weights %s write the rest",
                        *(epoch, before, self._journal.path, figures.weight_version),
                    )
                self._run_epoch(by_id, plan, figures, progress)
            yield figures

    def samples(self, epoch: int) -> list[Sample]:
        """Return an epoch's samples, of those that the latest run's problems and plan ask for, from the journal."""
        return [sample for sample in self._journal.samples(epoch) if self._is_asked_for(sample.key)]

    def _is_asked_for(self, key: Key) -> bool:
        """Return whether the latest run's problems and plan ask for a sample."""
        return key.id in self._prompts and 0 <= key.sample < self._samples

    def _new_weights(self, update: UpdateWeights, epoch: int) -> str | None:
        try:
            version = self._engine.update_weights(update, epoch)
        except RolloutError:
            raise
        except Exception as error:  # the user's function: the traceback says where it failed, the note what to do
            error.add_note(
                f"agentspec: update_weights failed before epoch {epoch}; all finished samples are in "
                f"{self._journal.path}: mend it, and run the rollout again to go on"
            )
            raise
        if version is not None and not isinstance(version, str | int | float | PathLike):
            raise RolloutError(
                f"update_weights: returned {type(version).__name__}; return the weights' version, a text, or None"
            )
        return None if version is None else str(version) or None  # the journal takes "" for none

    def _score_again(self, problems: dict[str, Problem], told: Callable[[int, int], None]) -> None:
        """Score the samples of these problems that the journal holds without a reward."""
        left = {key for key in self._journal.without_reward() if key.id in problems}
        if not left:
            return
        logger.info("agentspec: %d samples of %s get a reward first", len(left), self._journal.path)
        waiting = (sample for sample in self._journal.samples() if sample.key in left)
        scored: dict[Key, Sample] = {}
        count = failed = 0
        write_at = time.monotonic() + _REWARDS_WRITTEN_S
        try:
            while True:
                for sample in itertools.islice(waiting, _MOST_WAITING_REWARDS - len(self._rewards)):
                    self._rewards.give(problems[sample.id], sample)
                if not self._rewards:
                    break
                for sample in self._rewards.take(wait=True):
                    scored[sample.key] = sample
                    count += 1
                    failed += sample.reward is None
                told(count, len(left))
                if (begin := time.monotonic()) >= write_at:
                    self._journal.replace(scored)
                    scored = {}
                    now = time.monotonic()
                    # A write takes the whole file, so writing may take 5 % of the time at most.
                    write_at = now + max(_REWARDS_WRITTEN_S, 20 * (now - begin))
        finally:  # an interrupt must not cost the rewards that are known
            if scored:
                self._journal.replace(scored)
            logger.info("agentspec: %d samples have a reward now, %d have none", count - failed, failed)

    def _run_epoch(
        self,
        problems: dict[str, Problem],
        plan: Plan,
        figures: EpochFigures,
        progress: Callable[[EpochFigures], None],
    ) -> None:
        begin = time.perf_counter()
        running: dict[str, Key] = {}
        rewards = self._rewards
        keys = (Key(name, figures.epoch, number) for name in problems for number in range(plan.samples))
        missing = (key for key in keys if key not in self._journal)

        def fill() -> None:
            room = self._max_open - len(running) - max(0, len(rewards) - _MOST_WAITING_REWARDS)
            for key in itertools.islice(missing, max(0, room)):
                running[self._add(key, plan, figures.weight_version)] = key

        try:
            fill()
            while running or rewards:
                for answer in self._engine.step() if running else ():
                    key = running.pop(answer.request_id)
                    sample = self._sample(key, problems[key.id], answer, figures.weight_version)
                    rewards.give(problems[key.id], sample)
                fill()
                written = figures.finished
                # If there is nothing else to do, wait for the next reward.
                for sample in rewards.take(wait=not running):
                    self._write(sample, figures)
                figures.seconds = time.perf_counter() - begin
                if figures.finished > written:
                    progress(figures)
        finally:
            try:
                if running:
                    self._engine.abort(list(running))
            finally:
                self._wait_for_rewards(figures)

    def _wait_for_rewards(self, figures: EpochFigures) -> None:
        """Write the finished samples with their rewards. At a KeyboardInterrupt write the rest without."""
        rewards = self._rewards
        if rewards:
            waiting = "agentspec: %d finished samples wait for their rewards; Ctrl-C leaves these to the next run"
            logger.warning(waiting, len(rewards))
        try:
            while rewards:
                for sample in rewards.take(wait=True):
                    self._write(sample, figures)
        except KeyboardInterrupt:  # a second one ends the wait, and the next run scores samples without a reward
            for sample in rewards.drop():
                self._write(sample, figures)
            raise

    def _write(self, sample: Sample, figures: EpochFigures) -> None:
        self._journal.write(sample)
        figures.add(sample)

    def _add(self, key: Key, plan: Plan, weight_version: str | None) -> str:
        extra: dict[str, Any] = {"group_id": key.id}
        if weight_version is not None:
            extra["weight_version"] = weight_version
        request_id = f"rollout-{key.epoch}-{key.sample}-{key.id}"
        seed = None if plan.seed is None else _seed(plan.seed, key)
        sampling = Sampling(plan.temperature, plan.top_p, plan.max_tokens, seed, plan.stop)
        self._engine.add(request_id, self._prompts[key.id], sampling, extra)
        return request_id

    def _tokenise(self, problems: Sequence[Problem], told: Callable[[int, int], None]) -> dict[str, list[int]]:
        prompts, wrong = {}, []
        for number, problem in enumerate(problems, 1):
            try:
                prompts[problem.id] = self._engine.tokenise(problem.prompt, problem.tools)
            except InvalidInputError as error:
                wrong.append(f"problem {problem.id!r}: {error}")
            if number % _PROMPTS_TOLD == 0 or number == len(problems):
                told(number, len(problems))
        if wrong:
            more = f" ({len(wrong)} problems have such prompts)" if len(wrong) > 1 else ""
            raise InvalidInputError(f"{wrong[0]}{more}; leave it out or change it")
        return prompts

    def _sample(self, key: Key, problem: Problem, answer: Answer, weight_version: str | None) -> Sample:
        return Sample(
            id=key.id,
            epoch=key.epoch,
            sample=key.sample,
            prompt_ids=self._prompts[key.id],
            completion_ids=answer.tokens,
            logprobs=answer.logprobs,
            text=answer.text,
            finish_reason=answer.finish_reason,
            weight_version=weight_version,
            steps=answer.steps,
            drafted=answer.drafted,
            accepted=answer.accepted,
            sampling=self._sampling,
            fields=problem.fields,
        )


def _by_id(problems: Sequence[Problem]) -> dict[str, Problem]:
    """Return the problems by id. Raises InvalidInputError for an id or fields with which a journal cannot work."""
    by_id: dict[str, Problem] = {}
    for problem in problems:
        name = check_session_id(problem.id, f"the id {problem.id!r:.40} of a problem")
        if name in by_id:
            raise InvalidInputError(f"two problems have the id {name!r}; give each its own")
        try:
            as_text(problem.fields)
        except Exception as error:  # a value's own `str` may raise anything
            raise InvalidInputError(
                f"problem {name!r}: fields: JSON has no form for them ({first_line(error)})"
            ) from None
        by_id[name] = problem
    return by_id


def _seed(seed: int, key: Key) -> int:
    """Return a seed for a sample that does not depend on which samples came before it."""
    text = f"{seed} {key.epoch} {key.sample} {key.id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
