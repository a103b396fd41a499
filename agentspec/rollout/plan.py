"""Define what a rollout samples, and count the results of each epoch."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentspec.draft_figures import DraftRates
from agentspec.errors import ConfigurationError
from agentspec.files import weight_files
from agentspec.rollout.samples import Sample

_MOST_TOKENS = 2**31 - 1
"""More than any model takes. vLLM sends the number to its engine's process in 64 bits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Say what to sample.

    samples: answers to each problem in each epoch.
    max_tokens: longest response.
    seed: seeds each sample's random numbers, together with the sample's key, so that a rollout without drafts can be
        repeated. vLLM then draws them row by row, which takes time in large batches. None: the engine's seed, which
        must differ from run to run: otherwise a resumed rollout repeats samples.
    stop: texts that end a response.

    Raises ConfigurationError for a value out of range.
    """

    samples: int = 8
    epochs: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("samples", "epochs", "max_tokens"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ConfigurationError(f"{name}: a whole number, at least 1 expected, got {value!r}")
        if self.max_tokens > _MOST_TOKENS:
            raise ConfigurationError(f"max_tokens: at most {_MOST_TOKENS:,} expected, got {self.max_tokens}")
        if isinstance(self.stop, str):  # each of its characters would end a response
            raise ConfigurationError(f"stop: a list of texts expected, got the text {self.stop!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigurationError(f"stop: texts that are not empty expected, got {self.stop!r}")
        numbers = all(isinstance(value, int | float) for value in (self.temperature, self.top_p))
        if not numbers or not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:  # also refuses nan
            raise ConfigurationError(
                f"temperature={self.temperature!r}, top_p={self.top_p!r}: a temperature of at least 0 and a top_p "
                "above 0 and up to 1 expected"
            )


def distribution(model: str, plan: Plan) -> dict[str, Any]:
    """Return the settings that decide the distribution of a rollout's samples, except how the model is loaded.

    "weights" is a digest of the model's weight files; "" for a hub id.

    model: a folder or a hub id. A folder becomes an absolute path without links, because a relative path or a link may
    lead to another folder in the next run.
    """
    folder = Path(model)
    weights = repr(weight_files(folder)) if folder.is_dir() else ""
    return {
        "model": str(folder.resolve()) if folder.exists() else model,
        "weights": hashlib.sha256(weights.encode()).hexdigest()[:16] if weights else "",
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "max_tokens": plan.max_tokens,
        "stop": list(plan.stop),
    }


@dataclass(slots=True)
class EpochFigures(DraftRates):
    """Count the results of an epoch so far.

    resumed: samples that the journal held before; their rewards count, their tokens don't. steps: decode steps of the
    samples, added up. seconds: since the epoch began. reward_errors: samples whose reward failed.
    """

    epoch: int
    wanted: int
    resumed: int
    finished: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    weight_version: str | None = None
    rewarded: int = 0
    reward_sum: float = 0.0
    reward_errors: int = 0

    @property
    def mean_reward(self) -> float | None:
        """Return the mean reward; None if no sample has one."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    def add(self, sample: Sample) -> None:
        """Count a finished sample."""
        self.finished += 1
        self.tokens += len(sample.completion_ids)
        self.steps += sample.steps
        self.drafted += sample.drafted
        self.accepted += sample.accepted
        self.add_reward(sample.reward, failed=sample.reward_error is not None)

    def add_reward(self, reward: float | None, *, failed: bool) -> None:
        """Count the reward of a sample."""
        self.reward_errors += failed
        if reward is not None:
            self.rewarded += 1
            self.reward_sum += reward
