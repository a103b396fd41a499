"""Run other drafters beside agentspec: ArcticInference's suffix decoding and vLLM's n-grams.

`AgentSpecIndex` and `ArcticIndex` put both indexes behind the same few calls, so that both do the same timed work.
`OtherDrafters` counts the tokens that other drafters draft for recorded conversations, verified greedily against the
record, in file order, one request at a time. The counts are exact and repeatable, so they are kept in a folder and
computed once.

ArcticInference's suffix decoding has three sets of defaults: its library's, its vLLM plugin's, and vLLM's own method
`suffix`, which calls the library. vLLM's `ngram` has a default length for n-grams and none for drafts: here it drafts
five tokens, as in the example of vLLM's documentation.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import arctic
import numpy as np
from report import say
from trace_files import Tokens, accepted_tokens, calls, fingerprint

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.files import replacing

TENANT = "bench"
DEPTH = 64
MAX_DRAFT = 32
NGRAM_LENGTH = 5
"""vLLM's default for `prompt_lookup_min` and `prompt_lookup_max`, in tokens."""
NGRAM_DRAFT = 5
"""Draft tokens of vLLM's `ngram`, from the example in vLLM's documentation: vLLM has no default."""

NGRAM = "vLLM ngram"
_NOTHING = np.zeros(0, np.int32)


class AgentSpecIndex:
    """Draft from a SuffixCache whose requests have one tenant. `filled`: seconds spent adding documents."""

    def __init__(self, policy: DraftPolicy) -> None:
        self.cache = SuffixCache(policy=policy)
        self.filled = 0.0

    def fill(self, documents: Sequence[Tokens]) -> None:
        """Add finished responses."""
        begin = perf_counter()
        for document in documents:
            self.cache.start("fill", _NOTHING, tenant=TENANT)
            self.cache.extend("fill", document)
            self.cache.finish("fill")
        self.cache.catch_up()
        self.filled += perf_counter() - begin

    def start(self, name: str, prompt: Tokens, session: str | None = None) -> None:
        self.cache.start(name, prompt, session=session, tenant=TENANT)

    def step(self, names: Sequence[str], table: Tokens, length: int, max_draft: int = MAX_DRAFT) -> None:
        """Run one decode step as the engine does. Row i of the table holds `length` tokens of request i."""
        count = len(names)
        limits = np.full(count, MAX_DRAFT, np.int32)
        self.cache.step(names, table, np.arange(count), np.full(count, length), np.full(count, max_draft), limits)

    def propose(self, name: str) -> None:
        self.cache.propose([name], MAX_DRAFT)

    def extend(self, name: str, tokens: Tokens) -> None:
        self.cache.extend(name, tokens)

    def stop(self, name: str) -> None:
        self.cache.finish(name)

    def forget(self, name: str) -> None:
        """End a request without keeping its text."""
        self.cache.abort(name)


class ArcticIndex:
    """Draft from ArcticInference's SuffixDecodingCache with its defaults, depth 64 tokens."""

    def __init__(self, folder: Path | None) -> None:
        self.cache: Any = arctic.load(folder).SuffixDecodingCache(max_tree_depth=DEPTH)
        self.filled = 0.0
        self._documents = 0

    def fill(self, documents: Sequence[Tokens]) -> None:
        begin = perf_counter()
        for document in documents:
            self._documents += 1
            self.cache.start_request(self._documents, _NOTHING)
            self.cache.add_active_response(self._documents, document)
            self.cache.stop_request(self._documents)
        self.filled += perf_counter() - begin

    def start(self, name: str, prompt: Tokens) -> None:
        self.cache.start_request(name, prompt)

    def speculate(self, name: str, context: Tokens) -> None:
        """Draft for a request. `context`: the last tokens of prompt and response, at most the depth."""
        self.cache.speculate(name, context, max_spec_tokens=MAX_DRAFT)

    def extend(self, name: str, tokens: Tokens) -> None:
        self.cache.add_active_response(name, tokens)

    def forget(self, name: str) -> None:
        self.cache.stop_request(name)
        self.cache.evict_cached_response(name)


def take(documents: Iterator[Tokens], tokens: int) -> list[Tokens]:
    """Return the next documents, with at least `tokens` tokens altogether."""
    taken: list[Tokens] = []
    while tokens > 0:
        taken.append(next(documents))
        tokens -= len(taken[-1])
    return taken


@dataclass(slots=True)
class Counts:
    """Count what one setting did on one workload."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    def throughput(self, cost: float) -> float:
        """Return tokens per unit of time; `cost` is the price of verifying one more token, as a share of a step."""
        return self.tokens / (self.steps + cost * self.drafted)


@dataclass(frozen=True, slots=True)
class Setting:
    """Hold parameters of ArcticInference's rule. `depth` and `limit` are in tokens; `limit` bounds a draft."""

    factor: float
    probability: float
    depth: int = DEPTH
    limit: int = MAX_DRAFT

    def __str__(self) -> str:
        return f"{self.factor:g}/{self.probability:g}"


ARCTIC_SETTINGS = [Setting(*pair) for pair in product((1.0, 2.0, 4.0), (0.1, 0.2, 0.3, 0.5))]
"""Settings (12) from which ArcticInference's best is chosen, all with the same depth and limit."""

ARCTIC_DEFAULTS = {
    "ArcticInference library": Setting(1.0, 0.1, 64, 64),
    "ArcticInference plugin": Setting(1.0, 0.1, 64, 16),
    "vLLM suffix": Setting(1.0, 0.1, 24, 24),
}
"""Settings that a user gets from each without options. Their limits on requests (10,000 and more) are not reached."""


def best_settings(counts: Mapping[str, Counts], costs: Sequence[float]) -> dict[float, tuple[Setting, float]]:
    """Return for each cost ArcticInference's setting with the highest throughput, and that throughput."""
    found = {}
    for cost in costs:
        best = max(ARCTIC_SETTINGS, key=lambda setting: counts[str(setting)].throughput(cost))
        found[cost] = best, counts[str(best)].throughput(cost)
    return found


class OtherDrafters:
    """Count the drafts of other drafters, and keep the counts in `folder` (default: with ArcticInference's build).

    `traces` holds the recordings. With `again`, kept counts are computed anew.
    """

    def __init__(self, traces: Path, folder: Path | None = None, again: bool = False) -> None:
        self._traces = traces
        self._folder = folder
        self._again = again

    def settings(self, workload: str) -> dict[str, Counts]:
        """Return ArcticInference's counts for ARCTIC_SETTINGS. Raises PeerUnavailableError where it can't be built."""
        wanted = {str(setting): setting for setting in ARCTIC_SETTINGS}
        return self._kept(f"counts-{arctic.VERSION}", workload, lambda: self._suffix(workload, wanted))

    def defaults(self, workload: str) -> dict[str, Counts]:
        """Return the counts of every other drafter with its defaults; vLLM's `ngram` only where vLLM is installed.

        Raises PeerUnavailableError where ArcticInference can't be built.
        """
        found = self._kept(f"defaults-{arctic.VERSION}", workload, lambda: self._suffix(workload, ARCTIC_DEFAULTS))
        propose = ngram_rule()
        if propose is None:
            say("vLLM is not installed: its ngram is left out")
            return found
        kept = self._kept(
            f"ngram-{NGRAM_LENGTH}-{NGRAM_DRAFT}", workload, lambda: {NGRAM: self._ngram(workload, propose)}
        )
        return {**found, **kept}

    def _kept(self, name: str, workload: str, compute: Callable[[], dict[str, Counts]]) -> dict[str, Counts]:
        folder = self._folder or arctic.default_folder()
        kept = folder / f"{name}-{workload}-{fingerprint(self._traces, workload)}.json"
        if kept.is_file() and not self._again:
            return {key: Counts(**counts) for key, counts in json.loads(kept.read_text()).items()}
        say(f"{workload}: computing {name}")
        found = compute()
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(kept) as part:
            part.write_text(json.dumps({key: asdict(counts) for key, counts in found.items()}, indent=1))
        return found

    def _suffix(self, workload: str, settings: Mapping[str, Setting]) -> dict[str, Counts]:
        """Count all settings in one pass: the suffix tree at a token of the record doesn't depend on the drafts."""
        suffix = arctic.load(self._folder)
        caches = {
            depth: suffix.SuffixDecodingCache(max_tree_depth=depth) for depth in {s.depth for s in settings.values()}
        }
        counts = {name: Counts() for name in settings}
        for call in calls(self._traces, workload):
            text = np.concatenate([call.prompt, call.response])
            begin, end = len(call.prompt), len(text)
            for cache in caches.values():
                cache.start_request(call.line, call.prompt)
            due = dict.fromkeys(settings, begin)  # position of each setting's next step
            for at in range(begin, end):
                for cache in caches.values():
                    if at > begin:
                        cache.add_active_response(call.line, text[at - 1 : at])
                for name, setting in settings.items():
                    if due[name] == at:
                        draft = _suffix_draft(caches[setting.depth], call.line, text[:at], setting)
                        due[name] += _verify(draft, text[at:], counts[name])
            for cache in caches.values():
                cache.add_active_response(call.line, text[max(begin, end - 1) :])  # empty if the response is
                cache.stop_request(call.line)
            for found in counts.values():
                found.tokens += end - begin
        return counts

    def _ngram(self, workload: str, propose: "NgramRule") -> Counts:
        counts = Counts()
        for call in calls(self._traces, workload):
            text = np.concatenate([call.prompt, call.response])
            at, end = len(call.prompt), len(text)
            counts.tokens += end - at
            while at < end:
                at += _verify(propose(text[:at]), text[at:], counts)
        return counts


NgramRule = Callable[[Tokens], Sequence[int]]


def ngram_rule() -> NgramRule | None:
    """Return a function from a text to the draft of vLLM's n-gram look-up, or None if vLLM is not installed."""
    try:
        from vllm.v1.spec_decode import ngram_proposer
    except ImportError:
        return None
    look_up = ngram_proposer._find_longest_matched_ngram_and_propose_tokens

    def propose(text: Tokens) -> Sequence[int]:
        found: list[int] = look_up(text, NGRAM_LENGTH, NGRAM_LENGTH, 2**31 - 1, NGRAM_DRAFT).tolist()
        return found

    return propose


def _suffix_draft(cache: Any, name: int, text: Tokens, setting: Setting) -> list[int]:
    draft: list[int] = cache.speculate(
        name,
        text[-setting.depth :],
        max_spec_tokens=setting.limit,
        max_spec_factor=setting.factor,
        min_token_prob=setting.probability,
    ).token_ids
    return draft


def _verify(draft: Sequence[int], truth: Tokens, counts: Counts) -> int:
    """Count one step. Return the number of tokens that it gives."""
    counts.steps += 1
    counts.drafted += len(draft)
    return accepted_tokens(draft, truth[: len(draft)].tolist()) + 1
