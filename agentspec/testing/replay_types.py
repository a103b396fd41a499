"""Define the replay's input and its counts as plain data. Needs neither vLLM nor torch."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.draft_figures import DraftRates
from agentspec.errors import AgentSpecError, ConfigurationError

Int32 = NDArray[np.int32]

NGRAM_MIN, NGRAM_MAX = 2, 5
"""Shortest and longest n-gram, in tokens, that vLLM's ``ngram`` looks up when a draft limit is given."""
NGRAM_DRAFT = 5
"""Draft tokens of ``ngram`` when no limit is given, from the example in vLLM's documentation: vLLM has no default.
The n-grams then have vLLM's default length, 5 tokens."""

RESERVED_TOKENS = 24
"""Number of token ids, from 0 on, that appear in an engine's warm-up."""


class ReplayError(AgentSpecError):
    """Raised for a replay that cannot be trusted: it gave other tokens than recorded, or extension or engine failed."""


@dataclass(frozen=True, slots=True)
class Call:
    """Hold one recorded model call. ``prompt``: token ids int32[P], P >= 1. ``response``: int32[R], R >= 1.

    ``session``: None: the call names none. ``lane``: calls of one lane never run at the same time. None: the session is
    the lane, and a call without a session has a lane of its own. With as many lanes as slots, each lane keeps its slot
    until its calls run out.
    """

    session: str | None
    prompt: Int32
    response: Int32
    group: str | None = None
    lane: str | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Hold the sizes of a Llama model with random weights. ``heads`` divides ``hidden``.

    ``kv_heads``: divides ``heads``; None: as many as heads. ``inner``: width of the feed-forward layers; None:
    4 * ``hidden``.
    """

    vocab_size: int = 131_072
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int | None = None
    inner: int | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Hold everything that a worker process needs to start its engine."""

    method: str
    model: str
    random_weights: bool
    max_model_len: int
    max_batch: int
    max_draft: int | None
    settings: Mapping[str, Any]
    seed: int
    async_scheduling: bool | None
    kv_cache_bytes: int | None = None
    module_paths: tuple[str, ...] = ()
    timed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    drafter: Mapping[str, Any] | None = None
    prepare: Callable[[], None] | None = None

    def speculative_config(self) -> dict[str, Any] | None:
        """Return vLLM's ``speculative_config``. Raises ConfigurationError if method and drafter do not go together."""
        if self.drafter is None:
            return speculative_config(self.method, self.max_draft)
        if self.method not in ("none", "agentspec"):
            raise ConfigurationError(f"method {self.method!r}: vLLM's drafter runs beside 'agentspec', or with 'none'")
        return dict(self.drafter)

    def agentspec_settings(self) -> dict[str, Any]:
        """Return agentspec's settings. Beside a drafter the longest draft is one of them."""
        limit = {} if self.drafter is None or self.max_draft is None else {"max_draft": self.max_draft}
        return {**limit, **self.settings}


@dataclass(frozen=True, slots=True)
class ReplayResult(DraftRates):
    """Count the work of a replay, in the same way for every method, in vLLM's model runner.

    ``steps``: steps of single requests, counted whenever a row gets tokens, the step that ends the prompt included.
    ``drafted``: draft tokens that were verified. ``accepted``: draft tokens that were accepted and returned.
    ``passes``: forward passes of vLLM's own drafter. ``seconds``: wall-clock time inside the engine. ``cpu_seconds``:
    CPU time of its process meanwhile, all threads together.
    """

    calls: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    decode_seconds: tuple[float, ...] = ()
    """Seconds of each engine step in which all slots decoded and nothing was prefilled: the time between tokens."""
    part_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds that each timed method took in each of those steps."""
    turns: tuple[tuple[int, float], ...] = ()
    """Tokens and seconds of each turn; empty unless engines took turns."""

    @property
    def tokens_per_second(self) -> float:
        """Return the output tokens of all requests per second, prefill time included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_cpu_second(self) -> float:
        """Return the output tokens of all requests per second of CPU time, which other processes change less."""
        return self.tokens / self.cpu_seconds if self.cpu_seconds else 0.0

    def __add__(self, other: "ReplayResult") -> "ReplayResult":
        """Return the sums of both results."""
        sources = Counter(self.accepted_by_source)
        sources.update(other.accepted_by_source)  # Counter's "+" would drop sources with 0
        return ReplayResult(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            passes=self.passes + other.passes,
            seconds=self.seconds + other.seconds,
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            accepted_by_source=dict(sources),
            decode_seconds=self.decode_seconds + other.decode_seconds,
            part_seconds={
                name: self.part_seconds.get(name, ()) + other.part_seconds.get(name, ())
                for name in {**self.part_seconds, **other.part_seconds}
            },
            turns=self.turns + other.turns,
        )


def speculative_config(method: str, max_draft: int | None = None) -> dict[str, Any] | None:
    """Return vLLM's ``speculative_config`` for a method. ``max_draft``: in tokens; None: the method's own default.

    Raises ConfigurationError for a name that is not in METHODS.
    """
    if method not in METHODS:
        raise ConfigurationError(f"method {method!r} is not known; known are: {', '.join(METHODS)}")
    if method in ("none", "vllm"):
        return None
    if method == "agentspec":
        from agentspec.server_ext.vllm_adapter.startup.given_method import own_config

        return own_config() if max_draft is None else {**own_config(), "num_speculative_tokens": max_draft}
    config: dict[str, Any] = {"method": method}
    if max_draft is not None:
        config["num_speculative_tokens"] = max_draft
    if method == "ngram" and max_draft is None:
        config["num_speculative_tokens"] = NGRAM_DRAFT
    elif method == "ngram":
        config.update(prompt_lookup_min=NGRAM_MIN, prompt_lookup_max=NGRAM_MAX)
    return config


METHODS = ("none", "ngram", "suffix", "agentspec", "vllm")
"""``none``: one token a step, scheduled as for the other methods. ``vllm``: one token a step as vLLM runs it by
default, with its own choice of model runner and asynchronous scheduling; it generates as many tokens as recorded, but
the model's own. ``ngram``: vLLM's own prompt lookup. ``suffix``: vLLM's own suffix decoding, which needs
ArcticInference's module and runs with vLLM's defaults. ``agentspec``: this package's extension."""
