"""Make token streams that are hard on suffix indexes, and run the core and the oracle side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.cache import (
    Budget,
    DraftPolicy,
    Drafts,
    FinishedTurn,
    HistoryWindow,
    Scope,
    StepDrafts,
    SuffixCache,
    _native,
)
from agentspec.cache.arguments import MAX_VOCAB, as_prompt
from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS
from agentspec.cache.types import record_number
from tests.oracle.cache import Oracle
from tests.oracle.entries import Limits
from tests.oracle.request import Drafted
from tests.oracle.session import Turn

LARGEST = 2**31 - 1


def fibonacci(length: int, a: int = 0, b: int = 1) -> list[int]:
    """Return the Fibonacci word over two tokens: it repeats everywhere, yet has no period."""
    previous, current = [b], [a]
    while len(current) < length:
        previous, current = current, current + previous
    return current[:length]


class Pair:
    """Run the core and the oracle side by side: every call goes to both, and every answer is compared."""

    def __init__(
        self,
        policy: DraftPolicy | None = None,
        max_tokens: int | None = None,
        vocab_size: int = MAX_VOCAB,
        history: HistoryWindow | None = None,
        **budgets: Any,
    ) -> None:
        _native.watch_clock(False)  # the oracle knows no clock: answers may not depend on the machine's speed
        self.policy = policy
        self.vocab_size = vocab_size
        self.history = history
        budgets |= {"max_tokens": max_tokens}
        self.core = SuffixCache(policy=policy, vocab_size=vocab_size, history=history, **budgets)
        self.oracle = Oracle(policy, limits_of(**budgets), vocab_size, history)
        self.published: list[list[int]] | None = None

    def start(
        self,
        request: str,
        prompt: Sequence[int],
        session: str | None,
        tenant: str | None,
        group: str | None = None,
        scope: Scope = "tenant",
        end_tokens: Sequence[int] = (),
        owner: str | None = None,
        tenant_owner: str | None = None,
        parent: str | None = None,
        prediction: Sequence[int] = (),
        quotable: Sequence[int] = (),
    ) -> None:
        names: dict[str, Any] = {"session": session, "group": group, "tenant": tenant, "scope": scope}
        names |= {"owner": owner, "tenant_owner": tenant_owner, "parent": parent}
        names |= {"end_tokens": end_tokens, "prediction": prediction, "quotable": quotable}
        self.core.start(request, prompt, **names)
        self.oracle.start(request, prompt, **names)

    def extend(self, request: str, new: Sequence[int]) -> None:
        self.core.extend(request, new)
        self.oracle.extend(request, new)

    def propose(self, requests: Sequence[str], max_draft: int) -> list[list[int]]:
        ours, expected = (
            self.core.propose(requests, max_draft),
            self.oracle.propose(requests, [max_draft] * len(requests)),
        )
        for draft, right in zip(ours, expected, strict=True):
            assert draft.token_ids.tolist() == right.tokens
            assert draft.probabilities.tolist() == right.probabilities  # bit for bit
            assert draft.sources.tolist() == right.sources
            assert draft.match_length == right.match_length
        return [draft.token_ids.tolist() for draft in ours]

    def step(
        self,
        requests: Sequence[str],
        texts: Sequence[Sequence[int]],
        max_draft: Sequence[int],
        num_verified: Sequence[int],
        *,
        has_time: bool = True,
    ) -> StepDrafts:
        """Take a step whose engine array holds the texts in reverse order of rows, with rubbish behind them.

        has_time: if False, the step does nothing beside its drafting, so text waits to be indexed.
        """
        width = max(map(len, texts), default=0) + 2
        table = np.full((len(texts) + 1, width), -1, np.int32)
        rows = [len(texts) - 1 - i for i in range(len(texts))]
        for row, text in zip(rows, texts, strict=True):
            table[row, : len(text)] = text
        lengths, seconds = [len(text) for text in texts], DEFAULT_WORK_SECONDS if has_time else 0.0
        ours = self.core.step(requests, table, rows, lengths, max_draft, num_verified, work_seconds=seconds)
        expected = self.oracle.step(requests, texts, max_draft, num_verified, has_time=has_time)
        assert_same(ours, expected)
        assert ours.accepted.tolist() == [drafted.accepted for drafted in expected]
        assert ours.drafted.tolist() == [drafted.verified for drafted in expected]
        assert ours.accepted.dtype == ours.drafted.dtype == np.int32
        return ours

    def merge_drafts(
        self,
        requests: Sequence[str],
        offers: Sequence[Sequence[tuple[int, float]]],
        max_draft: Sequence[int],
        cost: float | None = None,
    ) -> Drafts:
        """Merge tokens with their probabilities, given as one array with rubbish behind each row."""
        shape = (len(offers), max(map(len, offers), default=0) + 1)
        tokens, probabilities = np.full(shape, -1, np.int32), np.full(shape, np.nan)
        for row, given in enumerate(offers):
            for column, (token, probability) in enumerate(given):
                tokens[row, column], probabilities[row, column] = token, probability
        lengths = [len(given) for given in offers]
        ours = self.core.merge_drafts(requests, tokens, probabilities, lengths, max_draft, cost=cost)
        assert_same(ours, self.oracle.merge_drafts(requests, offers, max_draft, cost))
        return ours

    def finish(
        self, request: str, output_limit: int | None = None, name: tuple[str, int] | None = None
    ) -> FinishedTurn | None:
        ours = self.core.finish(request, output_limit=output_limit, name=name)
        expected = self.oracle.finish(request, output_limit, record_number(*name) if name else 0)
        if ours is None or expected is None:
            assert ours is None and expected is None
            return None
        assert ours.prompt_tail.dtype == ours.response.dtype == np.int32
        tail, response = as_prompt(ours.prompt_tail, "tail", self.vocab_size).tolist(), ours.response.tolist()
        assert Turn(ours.kept, ours.parent, ours.block, tail, response, ours.record) == expected
        return ours

    def abort(self, request: str) -> None:
        self.core.abort(request)
        self.oracle.abort(request)

    def restore(self, turn: FinishedTurn, *, held_only: bool = False) -> None:
        self.core.restore(turn, held_only=held_only)
        self.oracle.restore(turn, held_only)

    def learn_from(self, turn: FinishedTurn) -> None:
        assert self.core.learn_from(turn) == self.oracle.learn_from(turn)

    def forget_tenant(self, tenant: str | None) -> None:
        assert self.core.forget_tenant(tenant) == self.oracle.forget_tenant(tenant)

    def check_loaded(
        self,
        tenant: str | None,
        session: str | None = None,
        group: str | None = None,
        family: str | None = None,
    ) -> bool:
        """Return whether a load is needed, and mark it as done."""
        needed = self.core.needs_load(tenant, session, group=group, family=family)
        assert needed == self.oracle.needs_load(tenant, session, group, family)
        self.core.mark_loaded(tenant, session, group=group, family=family)
        self.oracle.mark_loaded(tenant, session, group, family)
        return needed

    def begin_weights(self) -> None:
        self.core.begin_weights()
        self.oracle.begin_period("weights")

    def begin_epoch(self) -> None:
        self.core.begin_epoch()
        self.oracle.begin_period("epochs")

    def publish(self, texts: list[list[int]]) -> None:
        self.published = texts
        self.core.publish(texts, max_bytes=1 << 30)
        self.oracle.publish(texts)

    def free_session(self, tenant: str | None, session: str) -> None:
        self.core.free_session(tenant, session)
        self.oracle.free_session(tenant, session)

    def remove_session(self, tenant: str | None, session: str) -> None:
        self.core.remove_session(tenant, session)
        self.oracle.remove_session(tenant, session)

    def check_candidates(self, request: str) -> None:
        assert self.core.candidates(request) == self.oracle.candidates(request)

    def catch_up(self, budget: int) -> None:
        assert self.core.catch_up(budget) == self.oracle.catch_up(budget)

    def resize(self, **limits: Any) -> None:
        self.core.resize(**limits)
        self.oracle.resize(limits_of(**limits))

    def reload(self, folder: Path, **limits: Any) -> None:
        """Save the core and go on with the loaded one, which must answer as if nothing had happened."""
        self.core.save(folder / "snapshot")
        as_before: dict[str, Any] = {"policy": self.policy, "vocab_size": self.vocab_size, "history": self.history}
        self.core = SuffixCache.load(folder / "snapshot", **as_before, **limits)
        self.oracle.reload()
        if self.published is not None:
            self.publish(self.published)

    def check_stats(self) -> None:
        assert self.core.tenants() == self.oracle.tenants()
        ours = self.core.stats()
        for name, expected in self.oracle.stats().items():
            assert getattr(ours, name) == expected, name
        sums = (ours.tokens, ours.bytes, ours.sessions, ours.pending, ours.leaving)
        assert self.core._core.recount() == sums


def limits_of(
    max_tokens: int | None = None,
    per_tenant: Budget | None = None,
    per_session: Budget | None = None,
) -> Limits:
    return Limits(Budget(max_tokens), per_tenant or Budget(), per_session or Budget())


def assert_same(ours: Drafts, expected: Sequence[Drafted]) -> None:
    """Check that the core's drafts are the oracle's, bit for bit."""
    dtypes = [array.dtype for array in (ours.token_ids, ours.offsets, ours.sources, ours.probabilities)]
    assert dtypes == [np.int32, np.int32, np.uint8, np.float32]
    assert ours.match_lengths.dtype == np.int32
    assert ours.lists() == [drafted.tokens for drafted in expected]
    assert ours.probabilities.tolist() == [probability for drafted in expected for probability in drafted.probabilities]
    assert ours.sources.tolist() == [source for drafted in expected for source in drafted.sources]
    assert ours.match_lengths.tolist() == [drafted.match_length for drafted in expected]
