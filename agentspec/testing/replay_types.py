"""Plain data of the replay: what goes into an engine, and what is counted. Needs neither vLLM nor torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import AgentSpecError, ConfigurationError

Int32 = NDArray[np.int32]

NGRAM_MIN, NGRAM_MAX = 2, 5
"""Lengths of the n-grams that vLLM's own ``ngram`` looks up under a given draft limit: the usual small window."""
NGRAM_DRAFT = 5
"""Draft tokens of ``ngram`` without a given limit: what the example in vLLM's documentation has; there is no default.
The n-grams then have vLLM's default length, 5."""

RESERVED_TOKENS = 24
"""An engine warms up on the token ids below this."""


class ReplayError(AgentSpecError):
    """A replay that cannot be trusted: other tokens than recorded, an error in the extension, a dead engine."""


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded model call. ``prompt``: token ids int32[P], P >= 1. ``response``: int32[R], R >= 1.

    ``lane``: calls of one lane never run at the same time (default: the session is the lane). With as many lanes as
    slots, each lane keeps its slot until its calls run out.
    """

    session: str
    prompt: Int32
    response: Int32
    group: str | None = None
    lane: str | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama model with random weights. ``heads`` divides ``hidden``; every size is a count."""

    vocab_size: int = 131_072
    hidden: int = 64
    layers: int = 2
    heads: int = 2


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that a worker process needs to start its engine."""

    method: str
    model: str
    random_weights: bool
    max_model_len: int
    max_batch: int
    max_draft: int | None
    settings: Mapping[str, Any]
    seed: int
    async_scheduling: bool | None
    module_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did. Every method is counted alike, in vLLM's model runner.

    ``steps`` are verification steps of single requests (one row that was given tokens, the step that ends the
    prompt included), ``drafted`` the draft tokens that were verified, ``accepted`` those that were right and
    returned, ``seconds`` the wall-clock time inside the engine.
    """

    calls: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    decode_seconds: tuple[float, ...] = ()
    """Duration of each engine step in which all slots decoded and nothing was prefilled: the time between tokens."""
    turns: tuple[tuple[int, float], ...] = ()
    """Tokens and seconds of each turn, where engines took turns."""

    @property
    def tokens_per_step(self) -> float:
        """Mean acceptance length, bonus token included; 0 before the first step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests per second, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: "ReplayResult") -> "ReplayResult":
        """Both together."""
        sources = Counter(self.accepted_by_source)
        sources.update(other.accepted_by_source)  # "+" would drop the sources that gave nothing
        return ReplayResult(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            seconds=self.seconds + other.seconds,
            accepted_by_source=dict(sources),
            decode_seconds=self.decode_seconds + other.decode_seconds,
            turns=self.turns + other.turns,
        )


def speculative_config(method: str, max_draft: int | None = None) -> dict[str, Any] | None:
    """Return vLLM's ``speculative_config`` for a method. ``max_draft``: its longest draft; None: its own default.

    Raises ConfigurationError for a name that is not in METHODS.
    """
    if method not in METHODS:
        raise ConfigurationError(f"method {method!r} is not known; known are: {', '.join(METHODS)}")
    if method == "none":
        return None
    if method == "agentspec":
        from agentspec.server_ext.vllm_adapter.launch import speculative_config as agentspec_config

        return agentspec_config(max_draft)
    config: dict[str, Any] = {"method": method}
    if max_draft is not None:
        config["num_speculative_tokens"] = max_draft
    if method == "ngram" and max_draft is None:
        config["num_speculative_tokens"] = NGRAM_DRAFT
    elif method == "ngram":
        config.update(prompt_lookup_min=NGRAM_MIN, prompt_lookup_max=NGRAM_MAX)
    return config


METHODS = ("none", "ngram", "suffix", "agentspec")
"""``none``: one token a step. ``ngram``: vLLM's own prompt lookup. ``suffix``: vLLM's own suffix decoding, which needs
ArcticInference's module and runs with vLLM's defaults. ``agentspec``: this package's extension."""
