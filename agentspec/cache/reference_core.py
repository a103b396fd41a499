"""Requests, sessions and tenants in plain Python: the specification of csrc/cache.cpp, and the fallback."""

import numpy as np

from agentspec.cache.core import DraftArrays, TurnArrays
from agentspec.cache.policy import DraftPolicy
from agentspec.cache.reference import ReferenceIndex
from agentspec.cache.reference_drafter import DraftPath, Odds, draft, learn
from agentspec.cache.reference_state import OVERLAP, Request, Session, Tenant, common_prefix
from agentspec.cache.types import SOURCES, Int32Array

INDEX_PER_REQUEST = 4096  # pending tokens indexed for one request and source a call
INDEX_PER_CALL = 16384  # and in one call altogether


class ReferenceCore:
    def __init__(self, policy: DraftPolicy, max_tokens: int, vocab_size: int) -> None:
        self._policy = policy
        self._max_tokens = max_tokens  # 0: no limit
        self._vocab_size = vocab_size
        self._tick = 0
        self._requests: dict[int, Request] = {}
        self._sessions: dict[str, Session] = {}  # least recently used first
        self._tenants: dict[str, Tenant] = {}

    def start(self, slot: int, prompt: Int32Array, session: str | None, tenant: str | None) -> None:
        of_tenant = None if tenant is None else self._tenant(tenant)
        of_session = None if session is None else self._session(session, own_odds=tenant is None)
        shared = of_tenant.odds if of_tenant else of_session.odds if of_session else None
        request = Request(of_session, of_tenant, shared or Odds(self._policy), len(prompt))
        text = prompt.tolist()
        kept = 0
        if of_session:
            of_session.running += 1
            kept = common_prefix(text, of_session.last)
        request.index.append(text[:kept], findable=False)
        request.index.append(text[kept:])
        self._requests[slot] = request
        self._advance(request, INDEX_PER_CALL)

    def extend(self, slot: int, tokens: Int32Array) -> None:
        request = self._requests[slot]
        self._take(request, tokens.tolist(), request.draft.drafted)

    def propose(self, slots: Int32Array, room: Int32Array) -> DraftArrays:
        budget = INDEX_PER_CALL
        drafts = _Drafts()
        for slot, free in zip(slots.tolist(), room.tolist(), strict=True):
            request = self._requests[slot]
            budget = self._advance(request, budget)
            self._draft(request, free)
            drafts.add(request.draft, ([0] * len(SOURCES), [0] * len(SOURCES)))
        return drafts.arrays()

    def step(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        rows: Int32Array,
        lengths: Int32Array,
        room: Int32Array,
        scheduled: Int32Array,
    ) -> DraftArrays:
        budget = INDEX_PER_CALL
        drafts = _Drafts()
        for i, slot in enumerate(slots.tolist()):
            request = self._requests[slot]
            fresh = tokens[rows[i], len(request.index) : lengths[i]].tolist()
            illegal = (at for at, token in enumerate(fresh) if not 0 <= token < self._vocab_size)
            counts = self._take(request, fresh[: next(illegal, None)], int(scheduled[i]))
            budget = self._advance(request, budget)
            # Otherwise a draft would continue another text than the engine's.
            sound = len(request.index) == lengths[i]
            self._draft(request, int(room[i]) if sound else 0)
            drafts.add(request.draft, counts)
        return drafts.arrays()

    def finish(self, slot: int, output_limit: int | None) -> TurnArrays | None:
        request = self._requests[slot]
        session, tenant = request.session, request.tenant
        if (not session and not tenant) or (session and session.erased):
            self.abort(slot)
            return None
        prompt = request.index.text[: request.prompt_length]
        response = request.index.text[request.prompt_length :][:output_limit]
        kept = common_prefix(prompt, session.last) if session else 0
        tail = prompt[kept:] if session else prompt[-OVERLAP:]
        self._keep(session, tenant, kept, tail, response)
        self.abort(slot)
        self._evict()
        return kept, np.array(tail, np.int32), np.array(response, np.int32)

    def abort(self, slot: int) -> None:
        session = self._requests.pop(slot).session
        if session:
            session.running -= 1
            self._forget_if_empty(session)

    def restore(
        self,
        session: str | None,
        tenant: str | None,
        kept: int,
        prompt_tail: Int32Array,
        response: Int32Array,
    ) -> None:
        of_tenant = None if tenant is None else self._tenant(tenant)
        of_session = None if session is None else self._session(session, own_odds=tenant is None)
        if of_session is None or kept > len(of_session.last):
            kept = 0  # what the turn continued is no longer there
        self._keep(of_session, of_tenant, kept, prompt_tail.tolist(), response.tolist())
        if of_session:
            self._forget_if_empty(of_session)
        self._evict()

    def remove_session(self, session: str, tenant: str | None) -> None:
        gone = self._sessions.pop(session, None)
        if gone:
            gone.erased = True
        of_tenant = None if tenant is None else self._tenants.get(tenant)
        if of_tenant and any(document.session == session for document in of_tenant.documents):
            of_tenant.rebuild(lambda document: document.session != session)

    def has_session(self, session: str) -> bool:
        return session in self._sessions and self._sessions[session].tokens > 0

    def catch_up(self, budget: int) -> int:
        left = budget
        for index in self._indexes():
            left -= index.advance(left)
        return budget - left

    def stats(self) -> tuple[int, int, int, int, int, int]:
        size = 4 + 8 * 7  # a rough figure a token: plain Python does not say what its dicts hold
        return (
            self._kept_tokens(),
            size * sum(len(index) for index in self._indexes()),
            sum(session.tokens > 0 for session in self._sessions.values()),
            len(self._requests),
            len(self._tenants),
            sum(index.pending for index in self._indexes()),
        )

    def _indexes(self) -> list[ReferenceIndex]:
        return [
            *(session.index for session in self._sessions.values()),
            *(tenant.index for tenant in self._tenants.values()),
            *(request.index for request in self._requests.values()),
        ]

    def _session(self, key: str, own_odds: bool) -> Session:
        session = self._sessions.get(key) or Session(key, Odds(self._policy) if own_odds else None)
        self._touch(session)
        return session

    def _touch(self, session: Session) -> None:
        self._sessions.pop(session.key, None)
        self._sessions[session.key] = session

    def _tenant(self, key: str) -> Tenant:
        tenant = self._tenants.setdefault(key, Tenant(Odds(self._policy)))
        self._tick += 1
        tenant.used = self._tick
        return tenant

    def _forget_if_empty(self, session: Session) -> None:
        if not session.erased and session.running == 0 and session.tokens == 0:
            del self._sessions[session.key]

    def _advance(self, request: Request, budget: int) -> int:
        session, tenant = request.session, request.tenant
        for index in (request.index, session.index if session else None, tenant.index if tenant else None):
            if index is not None:
                budget -= index.advance(min(budget, INDEX_PER_REQUEST))
        return budget

    def _take(self, request: Request, tokens: list[int], scheduled: int) -> tuple[list[int], list[int]]:
        """Adds verified tokens, the first of which answer the draft; returns accepted and verified by source."""
        accepted, drafted = [0] * len(SOURCES), [0] * len(SOURCES)
        if not tokens:
            return accepted, drafted
        path = request.draft
        judged = path.taken[: min(path.drafted, max(scheduled, 0))]
        right = common_prefix([candidate.token for candidate in judged], tokens)
        for depth, candidate in enumerate(judged):
            drafted[candidate.source] += 1
            accepted[candidate.source] += depth < right
        learn(path, tokens, request.odds)
        request.index.append(tokens)
        request.draft = DraftPath()
        return accepted, drafted

    def _draft(self, request: Request, room: int) -> None:
        request.draft = draft(self._policy, request.odds, request.sources(), request.index.text, room)

    def _keep(
        self,
        session: Session | None,
        tenant: Tenant | None,
        kept: int,
        prompt_tail: list[int],
        response: list[int],
    ) -> None:
        if tenant and response:
            before = session.last[:kept][-OVERLAP:] if session else []
            tenant.add(session.key if session else None, before + prompt_tail, response)
            self._tick += 1
            tenant.used = self._tick
            tenant.index.advance(INDEX_PER_REQUEST)
        if session and (prompt_tail or response):
            session.append_turn(kept, prompt_tail, response)
            self._touch(session)
            session.index.advance(INDEX_PER_REQUEST)

    def _kept_tokens(self) -> int:
        return sum(s.tokens for s in self._sessions.values()) + sum(len(t.index) for t in self._tenants.values())

    def _evict(self) -> None:
        """Makes room: a global tree that fills more than half of the budget loses its older half; otherwise the
        session that was used least recently goes. Sessions with running requests stay."""
        while self._max_tokens and self._kept_tokens() > self._max_tokens:
            idle = [s for s in self._sessions.values() if s.running == 0 and s.tokens > 0]
            shared = [t for t in self._tenants.values() if len(t.index)]
            if idle and 2 * sum(len(t.index) for t in shared) <= self._max_tokens:
                del self._sessions[idle[0].key]
            elif shared:
                oldest = min(shared, key=lambda tenant: tenant.used)
                half = len(oldest.index) - len(oldest.index) // 2
                oldest.rebuild(lambda document, half=half: document.begin >= half)  # type: ignore[misc]
            else:
                return


class _Drafts:
    """Collects a step's drafts into flat arrays."""

    def __init__(self) -> None:
        self._paths: list[DraftPath] = []
        self._counts: list[tuple[list[int], list[int]]] = []

    def add(self, path: DraftPath, counts: tuple[list[int], list[int]]) -> None:
        self._paths.append(path)
        self._counts.append(counts)

    def arrays(self) -> DraftArrays:
        taken = [candidate for path in self._paths for candidate in path.taken[: path.drafted]]
        shape = (len(self._paths), len(SOURCES))
        return (
            np.array([candidate.token for candidate in taken], np.int32),
            np.cumsum([0, *(path.drafted for path in self._paths)], dtype=np.int32),
            np.array([candidate.source for candidate in taken], np.uint8),
            np.array([candidate.probability for candidate in taken], np.float32),
            np.array([path.match_length for path in self._paths], np.int32),
            np.array([accepted for accepted, _ in self._counts], np.int32).reshape(shape),
            np.array([drafted for _, drafted in self._counts], np.int32).reshape(shape),
        )
