"""The calls on requests, sessions, groups and tenants in plain Python: the specification of csrc/cache.cpp and
csrc/eviction.cpp, and the fallback."""

import numpy as np

from agentspec.cache.core import CandidateArrays, DraftArrays, LimitNumbers, ProposedArrays, TurnArrays
from agentspec.cache.policy import DraftPolicy
from agentspec.cache.reference_drafter import REQUEST_BITS, DraftPath, Given, draft, learn, take_offer
from agentspec.cache.reference_fixed import draft_fixed
from agentspec.cache.reference_holdings import Holdings
from agentspec.cache.reference_judge import Learned
from agentspec.cache.reference_scoring import Candidate
from agentspec.cache.reference_state import OVERLAP, Group, Request, Session, Tenant, common_prefix
from agentspec.cache.tokens import Rows, as_step
from agentspec.cache.types import SOURCES, Float64Array, Int32Array

INDEX_PER_CALL = 1024  # places indexed in one call


class ReferenceCore:
    def __init__(self, policy: DraftPolicy, limits: LimitNumbers, vocab_size: int) -> None:
        self._policy = policy
        self._vocab_size = vocab_size
        self._requests: dict[int, Request] = {}
        self._held = Holdings(policy, limits)

    def start(
        self,
        slot: int,
        prompt: Int32Array,
        session: str | None,
        group: str | None,
        tenant: str | None,
        shared: bool,
        ends: Int32Array,
    ) -> None:
        of_tenant = self._held.tenant(tenant)
        of_session = self._held.session(session, of_tenant)
        of_group = self._held.group(group, session, of_tenant) if shared else None
        learned = self._held.learned(of_tenant if shared else of_session) or Learned(self._policy, REQUEST_BITS)
        request = Request(of_session, of_group, of_tenant, learned, len(prompt), shared, own_group=group is None)
        for holding in request.holdings():
            holding.running += 1
        request.state.begin = len(prompt)
        request.state.ends = frozenset(ends.tolist())
        text = prompt.tolist()
        # The fixed rule drafts from the request's own text, all of it and at once, and not from its session's.
        fixed = self._policy.rule is not None
        kept = common_prefix(text, of_session.last) if of_session and not fixed else 0
        request.index.append(text[:kept], findable=False)
        request.index.append(text[kept:])
        if fixed:
            request.index.advance(len(text))
        self._requests[slot] = request
        self._advance(request, INDEX_PER_CALL)

    def extend(self, slot: int, tokens: Int32Array) -> None:
        request = self._requests[slot]
        self._take(request, tokens.tolist(), len(request.draft.taken))

    def propose(self, slots: Int32Array, room: Int32Array, cost: float) -> ProposedArrays:
        budget = INDEX_PER_CALL
        drafts = _Drafts()
        for slot, free in zip(slots.tolist(), room.tolist(), strict=True):
            request = self._requests[slot]
            budget -= self._advance(request, budget)
            self._draft(request, free, cost)
            request.draft.open = True
            drafts.add(request)
        return drafts.arrays()[:5]

    def offer(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        probabilities: Float64Array,
        lengths: Int32Array,
        room: Int32Array,
        cost: float,
    ) -> ProposedArrays:
        drafts = _Drafts()
        for i, slot in enumerate(slots.tolist()):
            request = self._requests[slot]
            given = list(zip(tokens[i].tolist(), probabilities[i].tolist(), strict=True))[: lengths[i]]
            request.draft = self._offered(request, given, int(room[i]), cost)
            drafts.add(request)
        return drafts.arrays()[:5]

    def step(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        rows: Rows,
        lengths: Rows,
        room: Rows,
        scheduled: Rows,
        cost: float,
    ) -> DraftArrays:
        row_of, length_of, room_of, verified = as_step(len(slots), tokens, rows, lengths, room, scheduled)
        budget = INDEX_PER_CALL
        drafts = _Drafts()
        for i, slot in enumerate(slots.tolist()):
            request = self._requests[slot]
            fresh = tokens[row_of[i], len(request.index) : length_of[i]].tolist()
            illegal = (at for at, token in enumerate(fresh) if not 0 <= token < self._vocab_size)
            counts = self._take(request, fresh[: next(illegal, None)], int(verified[i]))
            budget -= self._advance(request, budget)
            # Otherwise a draft would continue another text than the engine's.
            sound = len(request.index) == length_of[i]
            self._draft(request, int(room_of[i]) if sound else 0, cost)
            request.draft.open = sound
            drafts.add(request, counts)
        return drafts.arrays()

    def candidates(self, slot: int) -> CandidateArrays:
        rows = [
            (depth, candidate)
            for depth, scored in enumerate(self._requests[slot].draft.path)
            for candidate in scored.candidates
        ]
        of = [candidate for _, candidate in rows]
        return (
            np.array([depth for depth, _ in rows], np.int32),
            np.array([candidate.token for candidate in of], np.int32),
            np.array([candidate.probability for candidate in of], np.float64),
            np.array([self._requests[slot].source_of(candidate) for candidate in of], np.uint8),
            np.array([candidate.rank for candidate in of], np.uint8),
            np.array([candidate.match_length for candidate in of], np.int32),
            np.array([candidate.count for candidate in of], np.int32),
            np.array([candidate.share for candidate in of], np.float64),
        )

    def finish(self, slot: int, output_limit: int | None) -> TurnArrays | None:
        request = self._requests[slot]
        session, tenant = request.session, request.tenant
        if (not session and not request.shared) or (session and session.gone):
            self.abort(slot)
            return None
        prompt = request.index.text[: request.prompt_length]
        response = request.index.text[request.prompt_length :][:output_limit]
        kept = common_prefix(prompt, session.last) if session else 0
        tail = prompt[kept:] if session else prompt[-OVERLAP:]
        self._keep(session, request.group, tenant, request.shared, kept, tail, response)
        self.abort(slot)
        self._held.evict(tenant)
        return kept, np.array(tail, np.int32), np.array(response, np.int32)

    def abort(self, slot: int) -> None:
        for holding in self._requests.pop(slot).holdings():
            holding.running -= 1
            self._held.forget_if_empty(holding)

    def restore(
        self,
        session: str | None,
        group: str | None,
        tenant: str | None,
        shared: bool,
        kept: int,
        prompt_tail: Int32Array,
        response: Int32Array,
    ) -> None:
        of_tenant = self._held.tenant(tenant)
        of_session = self._held.session(session, of_tenant)
        of_group = self._held.group(group, session, of_tenant) if shared else None
        if of_session is None or kept > len(of_session.last):
            kept = 0  # what the turn continued is no longer there
        self._keep(of_session, of_group, of_tenant, shared, kept, prompt_tail.tolist(), response.tolist())
        for holding in (of_session, of_group):
            if holding:
                self._held.forget_if_empty(holding)
        self._held.evict(of_tenant)

    def remove_session(self, session: str, tenant: str) -> None:
        self._held.remove_session(session, tenant)

    def has_session(self, session: str) -> bool:
        return self._held.has_session(session)

    def catch_up(self, budget: int) -> int:
        left = budget - self._held.catch_up(budget)
        for _, request in sorted(self._requests.items()):
            left -= request.index.advance(left)
        return budget - left

    def resize(self, limits: LimitNumbers) -> None:
        self._held.limits = limits
        self._held.evict(None)

    def stats(self) -> tuple[int, int, int, int, int, int]:
        return self._held.stats([request.index for request in self._requests.values()])

    def save(self, path: str) -> None:
        self._held.save(path, self._vocab_size)

    def load(self, path: str) -> None:
        self._held.load(path, self._vocab_size)

    def _advance(self, request: Request, budget: int) -> int:
        left = budget
        left -= request.index.advance(left)
        for holding in request.holdings():
            if not holding.gone:
                left -= holding.advance(left)
                left -= holding.sweep(left)
        if request.tenant:
            left -= request.tenant.corpus.advance(left)
            left -= request.tenant.corpus.sweep(left)
        return budget - left

    def _take(self, request: Request, tokens: list[int], scheduled: int) -> tuple[list[int], list[int]]:
        """Adds verified tokens, the first of which answer the draft; returns accepted and verified by source."""
        accepted, drafted = [0] * len(SOURCES), [0] * len(SOURCES)
        if not tokens:
            return accepted, drafted
        path = request.draft
        judged = path.taken[: max(scheduled, 0)]
        right = common_prefix([candidate.token for candidate in judged], tokens)
        for depth, candidate in enumerate(judged):
            source = request.source_of(candidate)
            drafted[source] += 1
            accepted[source] += depth < right
        learn(self._policy, request.sources(), tokens, request.state, path, request.learned)
        request.index.append(tokens)
        return accepted, drafted

    def _draft(self, request: Request, room: int, cost: float) -> None:
        policy, sources, text = self._policy, request.sources(), request.index.text
        if policy.rule is None:
            request.draft = draft(policy, request.learned, sources, text, room, cost, request.state)
            return
        fixed = draft_fixed(
            policy.rule, sources[0], sources[3], text, request.prompt_length, min(room, policy.max_draft)
        )
        request.draft = DraftPath(match_length=fixed.length if fixed.tokens else 0)
        request.draft.taken = [
            Candidate(token, 3 if fixed.source else 0, 0, fixed.length + depth, 0, probability, probability, 0)
            for depth, (token, probability) in enumerate(zip(fixed.tokens, fixed.probabilities, strict=True))
        ]

    def _offered(self, request: Request, given: Given, room: int, cost: float) -> DraftPath:
        if not request.draft.open:
            return DraftPath()
        sources, text, state = request.sources(), request.index.text, request.state
        draft = take_offer(self._policy, request.learned, sources, text, given, room, cost, state, request.draft)
        draft.open = True
        return draft

    def _keep(
        self,
        session: Session | None,
        group: Group | None,
        tenant: Tenant | None,
        shared: bool,
        kept: int,
        prompt_tail: list[int],
        response: list[int],
    ) -> None:
        budget = INDEX_PER_CALL
        if tenant and shared and response:
            context = (session.last[:kept][-OVERLAP:] if session else []) + prompt_tail
            if self._policy.rule is not None:
                context = []  # the fixed rule's text holds responses alone
            key = session.key if session else None
            tenant.corpus.add(key, context, response)
            tenant.used = self._held.next_tick()
            if group and not group.gone:
                group.corpus.add(key, context, response)
                self._held.touch(group)
                budget -= group.advance(budget)
            budget -= tenant.corpus.advance(budget)
        if session and (prompt_tail or response):
            session.append(kept, prompt_tail, response)
            self._held.trim(session)
            self._held.touch(session)
            session.advance(budget)


_UNJUDGED = ([0] * len(SOURCES), [0] * len(SOURCES))


class _Drafts:
    """Collects a step's drafts into flat arrays."""

    def __init__(self) -> None:
        self._taken: list[list[tuple[int, int, float]]] = []
        self._lengths: list[int] = []
        self._counts: list[tuple[list[int], list[int]]] = []

    def add(self, request: Request, counts: tuple[list[int], list[int]] = _UNJUDGED) -> None:
        taken = request.draft.taken
        self._taken.append([(c.token, request.source_of(c), c.probability) for c in taken])
        self._lengths.append(request.draft.match_length)
        self._counts.append(counts)

    def arrays(self) -> DraftArrays:
        taken = [candidate for draft in self._taken for candidate in draft]
        shape = (len(self._taken), len(SOURCES))
        return (
            np.array([token for token, _, _ in taken], np.int32),
            np.cumsum([0, *map(len, self._taken)], dtype=np.int32),
            np.array([source for _, source, _ in taken], np.uint8),
            np.array([probability for _, _, probability in taken], np.float32),
            np.array(self._lengths, np.int32),
            np.array([accepted for accepted, _ in self._counts], np.int32).reshape(shape),
            np.array([drafted for _, drafted in self._counts], np.int32).reshape(shape),
        )
