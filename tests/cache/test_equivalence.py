"""The core against the oracle: random interleavings of every call must give equal answers.

AGENTSPEC_FUZZ_EXAMPLES sets the number of examples for a longer run.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentspec.cache import SCOPES, DraftPolicy, FinishedTurn, Scope
from tests.cache.streams import Pair, policies, tokens

EXAMPLES = int(os.environ.get("AGENTSPEC_FUZZ_EXAMPLES", "40"))

sessions = st.sampled_from([None, "a", "b", "1:ta"])
tenants = st.sampled_from([None, "t", "1:t"])
chances = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.9]))
groups = st.sampled_from([None, None, "g"])
scopes = st.sampled_from([*SCOPES, "tenant", "tenant"])


class Interleaving(RuleBasedStateMachine):
    """Requests start, decode, finish and vanish in any order, with drafts accepted in part, steps skipped, budgets
    that evict, sessions erased while they run, and turns restored."""

    @initialize(policy=policies, max_tokens=st.sampled_from([None, None, 120, 600]))
    def begin(self, policy: DraftPolicy, max_tokens: int | None) -> None:
        self.pair = Pair(policy, max_tokens)
        self.texts: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        self.turns: list[FinishedTurn] = []
        self.said: list[list[int]] = [[1, 2, 1]]
        self.count = 0

    def pick(self, data: st.DataObject) -> str:
        request: str = data.draw(st.sampled_from(sorted(self.texts)))
        return request

    def next_tokens(self, data: st.DataObject, request: str) -> list[int]:
        """Verified tokens: part of the draft, then a token of the target's own, or anything at all."""
        draft = self.drafts.get(request, [])
        accepted = draft[: data.draw(st.integers(0, len(draft)))]
        own: list[int] = data.draw(tokens.map(lambda new: new[:3]))
        return accepted + own

    @precondition(lambda self: len(self.texts) < 5)
    @rule(data=st.data(), session=sessions, tenant=tenants, group=groups, scope=scopes)
    def start(
        self, data: st.DataObject, session: str | None, tenant: str | None, group: str | None, scope: Scope
    ) -> None:
        base = data.draw(st.sampled_from(self.said))
        prompt = base[: data.draw(st.integers(0, len(base)))] + data.draw(tokens)
        self.count += 1
        request = f"r{self.count}"
        ends = data.draw(st.lists(st.integers(0, 2), max_size=1))
        self.pair.start(request, prompt, session, tenant, group, scope, ends)
        self.texts[request] = list(prompt)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), max_draft=st.sampled_from([0, 1, 5, 64]))
    def propose(self, data: st.DataObject, max_draft: int) -> None:
        request = self.pick(data)
        self.drafts[request] = self.pair.propose([request], max_draft)[0]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        request = self.pick(data)
        new = self.next_tokens(data, request)
        self.pair.extend(request, new)
        self.texts[request] += new
        if new:
            self.drafts.pop(request, None)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), max_draft=st.lists(st.sampled_from([0, 2, 32]), min_size=5, max_size=5))
    def step(self, data: st.DataObject, max_draft: list[int]) -> None:
        batch = data.draw(st.lists(st.sampled_from(sorted(self.texts)), min_size=1, unique=True))
        num_verified = [data.draw(st.integers(0, len(self.drafts.get(r, [])))) for r in batch]
        for request in batch:
            self.texts[request] += self.next_tokens(data, request)
        result = self.pair.step(batch, [self.texts[r] for r in batch], max_draft[: len(batch)], num_verified)
        self.drafts.update(zip(batch, result.lists(), strict=True))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), max_draft=st.sampled_from([0, 1, 7, 64]), cost=st.sampled_from([None, None, 0.0, 0.3]))
    def merge_drafts(self, data: st.DataObject, max_draft: int, cost: float | None) -> None:
        batch = data.draw(st.lists(st.sampled_from(sorted(self.texts)), min_size=1, max_size=4))
        given = [[(token, data.draw(chances)) for token in self.next_tokens(data, request)] for request in batch]
        result = self.pair.merge_drafts(batch, given, [max_draft] * len(batch), cost)
        self.drafts.update(zip(batch, result.lists(), strict=True))
        self.pair.check_candidates(batch[0])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), limit=st.sampled_from([None, None, 0, 3]))
    def finish(self, data: st.DataObject, limit: int | None) -> None:
        request = self.pick(data)
        turn = self.pair.finish(request, limit)
        self.said.append(self.texts.pop(request))
        self.drafts.pop(request, None)
        if turn is not None:
            self.turns.append(turn)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.pair.abort(request)
        del self.texts[request]
        self.drafts.pop(request, None)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.pair.restore(data.draw(st.sampled_from(self.turns)))

    @rule(session=sessions.filter(bool), tenant=tenants)
    def remove(self, session: str, tenant: str | None) -> None:
        self.pair.remove_session(tenant, session)

    @invariant()
    def stats_agree(self) -> None:
        self.pair.check_stats()


Interleaving.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestInterleaving = Interleaving.TestCase
