"""Token streams that are hard on suffix trees, and a pair of caches that must always give the same answers."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from agentspec.cache import DraftPolicy, Drafts, FinishedTurn, Scope, StepDrafts, SuffixCache, native_available

if native_available():
    from agentspec.cache import _native

LARGEST = 2**31 - 1


def fibonacci(length: int, a: int = 0, b: int = 1) -> list[int]:
    """The Fibonacci word over two tokens: repeats everywhere, yet no period."""
    previous, current = [b], [a]
    while len(current) < length:
        previous, current = current, current + previous
    return current[:length]


tokens = st.one_of(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, LARGEST), max_size=12),
    st.lists(st.sampled_from([0, 1, LARGEST]), max_size=40),
    st.builds(lambda token, n: [token] * n, st.sampled_from([0, 5, LARGEST]), st.integers(0, 300)),
    st.builds(fibonacci, st.integers(0, 200), st.sampled_from([0, 7]), st.sampled_from([1, LARGEST])),
    st.builds(lambda part, n: part * n, st.lists(st.integers(0, 9), min_size=1, max_size=45), st.integers(1, 6)),
)
"""Runs of one token, Fibonacci words, repeats, small alphabets, the smallest and the largest token id."""

policies = st.builds(
    DraftPolicy,
    cost=st.sampled_from([0.0, 0.01, 0.05, 0.5]),
    max_draft=st.sampled_from([0, 1, 7, 32, 128]),
    min_match=st.sampled_from([1, 1, 3]),
    prior_weight=st.sampled_from([1.0, 8.0]),
    memory=st.sampled_from([3.0, 200.0]),
)


class Pair:
    """The compiled core and the reference side by side: every call goes to both, and every answer is compared."""

    def __init__(self, policy: DraftPolicy | None = None, max_tokens: int | None = None, **budgets: Any) -> None:
        _native.watch_clock(False)  # the reference knows no clock: answers may not depend on the machine's speed
        self.policy = policy
        self.native = SuffixCache(policy=policy, max_tokens=max_tokens, native=True, **budgets)
        self.plain = SuffixCache(policy=policy, max_tokens=max_tokens, native=False, **budgets)

    def start(
        self,
        request: str,
        prompt: Sequence[int],
        session: str | None,
        tenant: str | None,
        group: str | None = None,
        scope: Scope = "tenant",
        end_tokens: Sequence[int] = (),
    ) -> None:
        names: dict[str, Any] = {"session": session, "group": group, "tenant": tenant, "scope": scope}
        for cache in (self.native, self.plain):
            cache.start(request, prompt, **names, end_tokens=end_tokens)

    def extend(self, request: str, new: Sequence[int]) -> None:
        for cache in (self.native, self.plain):
            cache.extend(request, new)

    def propose(self, requests: Sequence[str], room: int | list[int]) -> list[list[int]]:
        ours, expected = self.native.propose(requests, room), self.plain.propose(requests, room)
        for draft, right in zip(ours, expected, strict=True):
            assert draft.token_ids.tolist() == right.token_ids.tolist()
            assert draft.probabilities.tolist() == right.probabilities.tolist()  # bit for bit
            assert draft.sources.tolist() == right.sources.tolist()
            assert (draft.match_length, draft.source) == (right.match_length, right.source)
        return [draft.token_ids.tolist() for draft in ours]

    def step(
        self,
        requests: Sequence[str],
        texts: Sequence[Sequence[int]],
        room: Sequence[int],
        scheduled: Sequence[int],
    ) -> StepDrafts:
        """A step whose engine array holds the texts in reverse order of rows, with rubbish behind them."""
        width = max(map(len, texts), default=0) + 2
        table = np.full((len(texts) + 1, width), -1, np.int32)
        rows = [len(texts) - 1 - i for i in range(len(texts))]
        for row, text in zip(rows, texts, strict=True):
            table[row, : len(text)] = text
        lengths = [len(text) for text in texts]
        ours = self.native.step(requests, table, rows, lengths, room, scheduled)
        expected = self.plain.step(requests, table, rows, lengths, room, scheduled)
        assert_same(ours, expected)
        return ours

    def offer(
        self,
        requests: Sequence[str],
        offers: Sequence[Sequence[tuple[int, float]]],
        room: Sequence[int],
        cost: float | None = None,
    ) -> Drafts:
        """Tokens with their chances, given to requests as one array with rubbish behind each row."""
        shape = (len(offers), max(map(len, offers), default=0) + 1)
        tokens, chances = np.full(shape, -1, np.int32), np.full(shape, np.nan)
        for row, given in enumerate(offers):
            for column, (token, chance) in enumerate(given):
                tokens[row, column], chances[row, column] = token, chance
        lengths = [len(given) for given in offers]
        ours = self.native.offer(requests, tokens, chances, lengths, room, cost=cost)
        assert_same(ours, self.plain.offer(requests, tokens, chances, lengths, room, cost=cost))
        return ours

    def finish(self, request: str, output_limit: int | None = None) -> FinishedTurn | None:
        ours = self.native.finish(request, output_limit=output_limit)
        expected = self.plain.finish(request, output_limit=output_limit)
        assert (ours is None) == (expected is None)
        if ours and expected:
            assert same_turn(ours, expected)
        return ours

    def abort(self, request: str) -> None:
        for cache in (self.native, self.plain):
            cache.abort(request)

    def restore(self, turn: FinishedTurn) -> None:
        for cache in (self.native, self.plain):
            cache.restore(turn)

    def remove_session(self, tenant: str | None, session: str) -> None:
        for cache in (self.native, self.plain):
            cache.remove_session(tenant, session)

    def check_candidates(self, request: str) -> None:
        assert self.native.candidates(request) == self.plain.candidates(request)

    def catch_up(self, budget: int) -> None:
        assert self.native.catch_up(budget) == self.plain.catch_up(budget)

    def resize(self, **limits: Any) -> None:
        for cache in (self.native, self.plain):
            cache.resize(**limits)

    def reload(self, folder: Path, **limits: Any) -> None:
        """Both are saved and go on as what was loaded."""
        self.native.save(folder / "native")
        self.plain.save(folder / "plain")
        self.native = SuffixCache.load(folder / "native", policy=self.policy, native=True, **limits)
        self.plain = SuffixCache.load(folder / "plain", policy=self.policy, native=False, **limits)

    def check_stats(self) -> None:
        ours, expected = self.native.stats(), self.plain.stats()
        for name in ("tokens", "sessions", "requests", "tenants", "pending"):
            assert getattr(ours, name) == getattr(expected, name), name


def assert_same(ours: Drafts, expected: Drafts) -> None:
    """Bit for bit."""
    for field in fields(expected):
        left, right = getattr(ours, field.name), getattr(expected, field.name)
        assert left.dtype == right.dtype and left.shape == right.shape, field.name
        assert left.tolist() == right.tolist(), field.name


def same_turn(a: FinishedTurn, b: FinishedTurn) -> bool:
    names = [(turn.tenant, turn.session, turn.group, turn.scope, turn.kept) for turn in (a, b)]
    return names[0] == names[1] and all(
        x.dtype == y.dtype and x.tolist() == y.tolist()
        for x, y in ((a.prompt_tail, b.prompt_tail), (a.response, b.response))
    )
