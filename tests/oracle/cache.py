"""Specify the calls on requests, sessions, groups and tenants. Implemented by csrc/cache.

`Oracle` has SuffixCache's calls, on plain lists and for arguments that are known to be good. It knows no clock, and it
saves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from agentspec.cache import SOURCES, Candidate, DraftPolicy, FinishedTurn, HistoryWindow, Scope
from agentspec.cache.policy import DEFAULT_COST, MAX_DRAFT
from agentspec.cache.types import HistoryUnit
from tests.oracle.arctic_suffix_rule import ArcticSuffixRule
from tests.oracle.drafting import Draft, DraftRequest, ExternalDraft, MatchState, SuffixDrafter
from tests.oracle.entries import CacheEntries, CacheEntry, Group, Key, Limits, Session, Tenant, work_on
from tests.oracle.index import BOUNDARY, OVERLAP, Match, SuffixIndex
from tests.oracle.scoring import Candidate as Proposed
from tests.oracle.scoring import Learned
from tests.oracle.session import BLOCK, Context, Turn

WORK_PER_STEP = 4096  # positions indexed in one step
OWN_PER_STEP = 32  # positions of each request's own text that are always indexed
LEARNED_CONTEXT = 512  # tokens of a prompt that drafts see, when learning from a stored turn
CHECKED = MAX_DRAFT + 1  # tokens at the end of a known text that a step compares with the engine's
PUBLIC, SIBLING = SOURCES.index("public"), SOURCES.index("sibling")
ASKED_SIBLINGS = 8  # running requests of a group that one of them looks into in each step
REQUEST_BITS = 12  # slots of the reranker of a request that shares nothing, as a power of two


@dataclass(slots=True)
class Drafted:
    """Hold a request's draft and, by source, how many tokens of its previous draft were accepted and verified."""

    tokens: list[int]
    probabilities: list[float]
    sources: list[int]
    match_length: int
    accepted: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    verified: list[int] = field(default_factory=lambda: [0] * len(SOURCES))


@dataclass(slots=True)
class Request:
    """Hold a running request. shared: it drafts from and adds to its tenant. own_group: its group is its own family."""

    session: Session | None
    group: Group | None
    tenant: Tenant | None
    learned: Learned
    prompt_length: int
    shared: bool
    own_group: bool
    index: SuffixIndex = field(default_factory=SuffixIndex)  # the whole text; only what the session lacks is findable
    sibling: "Request | None" = None  # another running request of its group, whose text it drafts from
    next_asked: int = 0  # place among the group's running requests of the one to look into next
    prediction: SuffixIndex = field(default_factory=SuffixIndex)  # what is expected, behind the end of the prompt
    state: MatchState = field(default_factory=MatchState)
    draft: Draft = field(default_factory=Draft)

    def for_drafter(self, public: SuffixIndex | None) -> DraftRequest:
        entries = [entry.index if entry and not entry.gone else None for entry in (self.session, self.group)]
        shared = [self.tenant.corpus.index, public] if self.tenant and self.shared else [None, None]
        sibling = self.sibling.index if self.sibling else None
        prediction = self.prediction if len(self.prediction) else None
        sources = [self.index, *entries, *shared, sibling, prediction]
        return DraftRequest(sources, self.index.text, self.state, self.draft, self.learned)

    def choose_sibling(self, running: Sequence["Request"]) -> None:
        """Choose the running request of its group whose text has the longest match of this one's end.

        It asks the present one and, in turn, others. Requests of an erased session take no part.
        """
        before, self.sibling = self.sibling, None
        members = [each for each in running if self.group and each.group is self.group]
        asked = [before] if before is not None and before.takes_part else []
        passed = 0
        if len(members) < 2 or not self.takes_part:
            members = asked = []
        while passed < len(members) and len(asked) < ASKED_SIBLINGS:
            member = members[(self.next_asked + passed) % len(members)]
            if member is not self and member is not before and member.takes_part:
                asked.append(member)
            passed += 1
        if members:
            self.next_asked = (self.next_asked + passed) % len(members)
        best = Match()
        for other in asked:
            match = other.index.look_up(self.index.text)
            if match.length > best.length:
                best, self.sibling, self.state.versions[SIBLING] = match, other, other.index.version
        self.state.matches[SIBLING] = best
        if self.sibling is not before and self.state.resume and self.state.resume.source == SIBLING:
            self.state.resume = None

    @property
    def takes_part(self) -> bool:
        return self.session is None or not self.session.gone

    def forget_sibling(self) -> None:
        self.sibling = None
        self.state.forget(SIBLING)

    def source_of(self, candidate: Proposed) -> int:
        """Return a candidate's source as users see it: the family of a root counts as the session."""
        return 1 if self.own_group and candidate.source == 2 else candidate.source

    def entries(self) -> list[CacheEntry]:
        return [entry for entry in (self.session, self.group) if entry is not None]

    def drafted(self) -> Drafted:
        taken = self.draft.taken
        probabilities = [float(np.float32(candidate.probability)) for candidate in taken]
        sources = [self.source_of(candidate) for candidate in taken]
        return Drafted([candidate.token for candidate in taken], probabilities, sources, self.draft.match_length)


class Oracle:
    def __init__(
        self,
        policy: DraftPolicy | None = None,
        limits: Limits | None = None,
        vocab_size: int = 2**31,
        history: HistoryWindow | None = None,
    ) -> None:
        self._policy = policy or DraftPolicy()
        self._drafter = ArcticSuffixRule(self._policy) if self._policy.arctic else SuffixDrafter(self._policy)
        self._vocab_size = vocab_size
        self._requests: dict[str, Request] = {}
        self._slots: list[str | None] = []  # running requests in the order in which catch_up visits them
        self._free: list[int] = []
        self._held = CacheEntries(self._policy, limits or Limits(), history)
        self._public: SuffixIndex | None = None

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        session: str | None = None,
        group: str | None = None,
        tenant: str | None = None,
        scope: Scope = "tenant",
        end_tokens: Sequence[int] = (),
        owner: str | None = None,
        tenant_owner: str | None = None,
        parent: str | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        of_tenant, of_session, of_group = self._names(session, group, tenant, scope, owner, tenant_owner, parent)
        for sharing in (of_group, of_tenant):
            if sharing and of_tenant:
                self._held.drop_outdated(sharing.corpus, of_tenant)
        shared = scope == "tenant"
        teacher = of_tenant if shared else of_session
        learned = self._held.learned(teacher) if teacher else Learned(self._policy, REQUEST_BITS)
        own_group = of_group is not None and of_group.key[0] == "family" and of_group.key[2] == session
        request = Request(of_session, of_group, of_tenant, learned, len(prompt), shared, own_group)
        if of_session:
            of_session.final = False
        for entry in request.entries():
            entry.running += 1
        if of_tenant:
            of_tenant.running += 1
        request.state.ends = frozenset(end_tokens)
        held = [self._as_held(token) for token in prompt]
        self._begin_text(request, held)
        if prediction:
            request.prediction.append(held[max(len(held) - self._drafter.kept_context, 0) :], findable=False)
            request.prediction.append(list(prediction))
        self._requests[request_id] = request
        if not self._free:
            self._free.append(len(self._slots))
            self._slots.append(None)
        self._slots[self._free.pop()] = request_id

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        request = self._requests[request_id]
        self._take(request, list(tokens), len(request.draft.taken))

    def propose(self, request_ids: Sequence[str], max_draft: Sequence[int], cost: float | None = None) -> list[Drafted]:
        requests = [self._requests[request_id] for request_id in request_ids]
        budget = WORK_PER_STEP
        for request in requests:
            budget = self._advance(request, budget)
        drafts = self._draft_all(requests, [True] * len(requests), max_draft, cost)
        self._held.work(budget)
        return drafts

    def step(
        self,
        request_ids: Sequence[str],
        texts: Sequence[Sequence[int]],
        max_draft: Sequence[int],
        num_verified: Sequence[int],
        cost: float | None = None,
        *,
        has_time: bool = True,
    ) -> list[Drafted]:
        """Take in what each request's text has gained, and draft. num_verified: draft tokens that were verified.

        has_time: False: what waits beside drafting goes on waiting.
        """
        budget = WORK_PER_STEP if has_time else 0
        requests, counts, sound = [], [], []
        for request_id, text, verified in zip(request_ids, texts, num_verified, strict=True):
            request = self._requests[request_id]
            self._rewind(request, list(text))
            fresh = list(text[len(request.index) :])
            illegal = (at for at, token in enumerate(fresh) if not 0 <= token < self._vocab_size)
            counts.append(self._take(request, fresh[: next(illegal, None)], verified))
            budget = self._advance(request, budget)
            requests.append(request)
            sound.append(len(request.index) == len(text))  # if not, a draft would not continue the engine's text
        drafts = self._draft_all(requests, sound, max_draft, cost)
        for drafted, (accepted, checked) in zip(drafts, counts, strict=True):
            drafted.accepted, drafted.verified = accepted, checked
        self._held.work(budget)
        return drafts

    def _draft_all(
        self, requests: Sequence[Request], sound: Sequence[bool], max_draft: Sequence[int], cost: float | None
    ) -> list[Drafted]:
        """Draft for requests whose new tokens are all known. sound: whether a draft continues the engine's text."""
        drafts = []
        for request, is_sound, most in zip(requests, sound, max_draft, strict=True):
            request.choose_sibling(list(self._requests.values()))
            self._draft(request, most if is_sound else 0, self._cost(cost), is_open=is_sound)
            drafts.append(request.drafted())
        return drafts

    def merge_drafts(
        self,
        request_ids: Sequence[str],
        offers: Sequence[ExternalDraft],
        max_draft: Sequence[int],
        cost: float | None = None,
    ) -> list[Drafted]:
        drafts = []
        for request_id, external, most in zip(request_ids, offers, max_draft, strict=True):
            request = self._requests[request_id]
            draft = Draft()
            if request.draft.open:
                draft = self._drafter.merge_draft(
                    request.for_drafter(self._public), external, self._limit(most), self._cost(cost)
                )
                draft.open = True
            request.draft = draft
            drafts.append(request.drafted())
        return drafts

    def candidates(self, request_id: str) -> list[list[Candidate]]:
        request = self._requests[request_id]
        positions = [
            [
                Candidate(
                    c.token, c.probability, SOURCES[request.source_of(c)], c.rank, c.match_length, c.count, c.share
                )
                for c in scored.candidates
            ]
            for scored in request.draft.path
        ]
        while positions and not positions[-1]:  # another drafter's tokens beside which nothing was proposed
            positions.pop()
        return positions

    def finish(self, request_id: str, output_limit: int | None = None, record: int = 0) -> Turn | None:
        request = self._requests[request_id]
        session, tenant = request.session, request.tenant
        if (not session and not request.shared) or (session and session.gone):
            self.abort(request_id)
            return None
        prompt = request.index.text[: request.prompt_length]
        response = request.index.text[request.prompt_length :][:output_limit]
        if session:
            known = session.turns.find(prompt)
            kept = known.length if known else 0
            contexts = Context().walk(prompt[:kept])
            turn = Turn(
                kept, contexts[kept].hash, contexts[kept // BLOCK * BLOCK].hash, prompt[kept:], response, record
            )
        else:
            turn = Turn(0, 0, 0, prompt[-OVERLAP:], response, record)
        key = session.key if session else None
        self._keep(session, request.group, tenant, key, request.shared, turn, "finished")
        self.abort(request_id)
        self._held.evict(tenant)
        return turn

    def abort(self, request_id: str) -> None:
        slot = self._slots.index(request_id)
        self._slots[slot] = None
        self._free.append(slot)
        request = self._requests.pop(request_id)
        self._forget_in_siblings(request)
        if request.tenant:
            request.tenant.running -= 1
        for entry in request.entries():
            entry.running -= 1
            self._held.forget_if_empty(entry)
        if request.session:
            self._held.free_if_final(request.session)

    def restore(self, stored: FinishedTurn, held_only: bool = False) -> None:
        shared = stored.scope == "tenant"
        names = (stored.session, stored.group, stored.tenant)
        if not held_only:
            tenant, session, group = self._names(*names, stored.scope, stored.owner, None, stored.family, stored=True)
        elif stored.scope == "none":
            return
        else:
            tenant, session, group = self._held.find_held(*names, shared, stored.family)
        tail = [self._as_held(token) for token in stored.prompt_tail.tolist()]
        response = stored.response.tolist()
        turn = Turn(stored.kept, stored.parent, stored.block, tail, response, stored.record)
        if session:
            turn = session.turns.find_parent(turn)
        key = session.key if session else None
        if tenant and stored.session is not None:
            key = ("session", tenant.name, stored.session)
        self._keep(session, group, tenant, key, shared, turn, "followed" if held_only else "stored")
        for entry in (session, group):
            if entry:
                self._held.forget_if_empty(entry)
        if tenant or not held_only:
            self._held.evict(tenant)

    def learn_from(self, turn: FinishedTurn) -> int:
        """Learn how drafts of a turn would have fared, and keep nothing of it."""
        if self._policy.arctic or turn.scope != "tenant" or not len(turn.response):
            return 0
        tenant, session, group = self._held.find_held(turn.session, turn.group, turn.tenant, True, turn.family)
        if tenant is None or tenant.corpus.holds(turn.record):
            return 0
        prompt = [self._as_held(token) for token in turn.prompt_tail.tolist()[-LEARNED_CONTEXT:]]
        learned = self._held.learned(tenant)
        request = Request(session, group, tenant, learned, len(prompt), True, own_group=False)
        request.state.begin = len(prompt)
        self._drafter.start(request.index, prompt, 0, 0)
        left = turn.response.tolist()
        while left:
            request.index.advance(len(request.index))
            self._draft(request, MAX_DRAFT, self._cost(None), is_open=True)
            right = common_prefix([candidate.token for candidate in request.draft.taken], left)
            self._take(request, left[: right + 1], MAX_DRAFT)
            left = left[right + 1 :]
        for entry in request.entries():
            self._held.forget_if_empty(entry)
        return len(turn.response)

    def needs_load(self, tenant: str | None, session: str | None, group: str | None, family: str | None) -> bool:
        entry = self._held.find(tenant, session, group, family)
        return entry is None or not entry.loaded

    def mark_loaded(self, tenant: str | None, session: str | None, group: str | None, family: str | None) -> None:
        entry = self._held.find(tenant, session, group, family)
        if entry is not None:
            entry.loaded = True

    def tenants(self) -> list[str | None]:
        return [tenant.name or None for tenant in sorted(self._held.tenants.values(), key=lambda tenant: tenant.used)]

    def forget_tenant(self, tenant: str | None) -> bool:
        return self._held.forget_tenant(tenant)

    def begin_period(self, unit: HistoryUnit) -> None:
        window = self._held.window
        self._held.periods += window is not None and window.unit == unit

    def publish(self, texts: Sequence[Sequence[int]]) -> None:
        """Replace the public corpus, from which all requests draft that share anything."""
        self._public = SuffixIndex()
        for text in texts:
            self._public.append_boundary()
            self._public.append([self._as_held(token) for token in text])
        self._public.advance(self._public.pending)
        for request in self._requests.values():
            request.state.forget(PUBLIC)
            request.draft.forget_tokens()

    def remove_session(self, tenant: str | None, session: str) -> None:
        self._held.remove_session(tenant, session)
        for request in self._requests.values():
            if request.tenant and request.tenant.name == (tenant or ""):
                request.draft.forget_tokens()  # which may quote the session
                request.forget_sibling()

    def free_session(self, tenant: str | None, session: str) -> None:
        self._held.free_session(tenant, session)

    def catch_up(self, budget: int) -> int:
        left = self._held.work(self._held.evict_tenants(budget))
        for request_id in self._slots:
            if request_id is not None:
                left -= self._requests[request_id].prediction.advance(left)
                left -= self._requests[request_id].index.advance(left)
        return budget - left

    def resize(self, limits: Limits) -> None:
        self._held.limits = limits
        self._held.evict(None)

    def reload(self) -> None:
        """Change what is held as saving and loading it would. No request may be running."""
        assert not self._requests
        self._slots, self._free = [], []
        self._held.reload()

    def stats(self) -> dict[str, int]:
        requests = self._requests.values()
        indexes = self._held.indexes() + [
            index for request in requests for index in (request.index, request.prediction)
        ]
        return {
            "tokens": self._held.size(None),
            "sessions": sum(isinstance(held, Session) and held.tokens > 0 for held in self._held.held.values()),
            "requests": len(self._requests),
            "tenants": len(self._held.tenants),
            "pending": sum(index.pending for index in indexes),
        }

    def _cost(self, cost: float | None) -> float:
        return next(price for price in (cost, self._policy.cost, DEFAULT_COST) if price is not None)

    def _names(
        self,
        session: str | None,
        group: str | None,
        tenant: str | None,
        scope: Scope,
        owner: str | None,
        tenant_owner: str | None,
        family: str | None,
        stored: bool = False,
    ) -> tuple[Tenant | None, Session | None, Group | None]:
        """Return the tenant, session and group that a request or turn of this scope draws on and adds to."""
        if scope == "none":
            return None, None, None
        of_tenant = self._held.tenant(tenant, tenant_owner)
        if stored and of_tenant.owner != of_tenant.name:
            owner = of_tenant.owner
        of_session = self._held.session(session, of_tenant, owner, stored, family) if session is not None else None
        named = group if scope == "tenant" else None
        of_group = self._held.group(named, session, of_tenant, owner, stored, family)
        return of_tenant, of_session, of_group

    def _advance(self, request: Request, budget: int) -> int:
        """Index and sweep the texts that the request drafts from. Return what is left of the budget."""
        budget -= request.prediction.advance(budget)
        request.index.advance(OWN_PER_STEP)
        budget -= request.index.advance(budget)
        for entry in request.entries():
            if not entry.gone:
                budget = work_on(entry, budget)
        return work_on(request.tenant.corpus, budget) if request.tenant else budget

    def _as_held(self, token: int) -> int:
        """Return the form in which a prompt's token is held: negative, and never drafted, beyond the vocabulary."""
        return token if token < self._vocab_size else -2 - token

    def _begin_text(self, request: Request, prompt: list[int]) -> None:
        """Put the prompt into a request's empty index."""
        request.prompt_length = request.state.begin = len(prompt)
        session = request.session
        begin, end = session.held_of(prompt) if session and not session.gone else (0, 0)
        self._drafter.start(request.index, prompt, begin, end)

    def _rewind(self, request: Request, row: list[int]) -> None:
        """Cut a request's text to what the engine's row still begins with, if the engine took back the rest.

        Compares the last CHECKED tokens to see whether it did: no step adds more.
        """
        text = request.index.text
        row = [self._as_held(token) for token in row[: len(text)]]
        if len(row) == len(text) and row[: len(text)][-CHECKED:] == text[-CHECKED:]:
            return
        self._forget_in_siblings(request)
        kept = text[: common_prefix(text, row)]
        prompt = kept[: request.prompt_length]
        request.index.clear()
        request.draft, request.state = Draft(), MatchState(ends=request.state.ends)
        self._begin_text(request, prompt)
        request.index.append(kept[len(prompt) :])

    def _forget_in_siblings(self, gone: Request) -> None:
        """Let no request draft from one whose text goes or changes."""
        for request in self._requests.values():
            if request.sibling is gone:
                request.forget_sibling()

    def _take(self, request: Request, tokens: list[int], num_verified: int) -> tuple[list[int], list[int]]:
        """Add verified tokens. Return by source how many draft tokens were accepted and verified."""
        accepted, verified = [0] * len(SOURCES), [0] * len(SOURCES)
        if not tokens:
            return accepted, verified
        checked = request.draft.taken[: max(num_verified, 0)]
        drafted = [candidate.token for candidate in checked]
        right = common_prefix(drafted, tokens)
        if BOUNDARY in drafted:  # they were forgotten; a step gives the accepted tokens and one more
            right = min(len(drafted), len(tokens) - 1)
        for depth, candidate in enumerate(checked):
            source = request.source_of(candidate)
            verified[source] += 1
            accepted[source] += depth < right
        self._drafter.learn(request.for_drafter(self._public), tokens)
        request.index.append(tokens)
        return accepted, verified

    def _limit(self, max_draft: int) -> int:
        return max(min(max_draft, self._policy.max_draft, MAX_DRAFT), 0)

    def _draft(self, request: Request, max_draft: int, cost: float, is_open: bool) -> None:
        request.draft = self._drafter.draft(request.for_drafter(self._public), self._limit(max_draft), cost)
        request.draft.open = is_open

    def _keep(
        self,
        session: Session | None,
        group: Group | None,
        tenant: Tenant | None,
        key: Key | None,
        shared: bool,
        turn: Turn,
        origin: Literal["finished", "stored", "followed"],
    ) -> None:
        """Add a turn to its session, group and tenant unless they hold its record. key: of its session, held or not.

        Group and tenant add a restored turn without a record only if it brings its session something new. A followed
        turn marks nothing as used.
        """
        wanted, context = True, []
        has_text = turn.prompt_tail or turn.response
        if session and has_text:
            context = session.turns.context_of(turn)
            if turn.record not in session.turns.records:
                is_new = session.turns.append(turn)
                wanted = is_new or turn.record != 0 or origin == "finished"
                self._held.trim(session)
        if turn.response and wanted:
            context = context + turn.prompt_tail
            context = context[max(len(context) - self._drafter.kept_context, 0) :]
            to_group = group if group and not group.gone and not group.corpus.holds(turn.record) else None
            to_tenant = tenant if tenant and shared and not tenant.corpus.holds(turn.record) else None
            if tenant and (to_group or to_tenant) and origin != "stored":
                tenant.written += len(turn.response)
            written = self._held.now(tenant) if tenant else 0
            if to_group:
                to_group.corpus.add(key, turn.record, context, turn.response, written)
                self._held.trim_family(to_group)
                if origin != "followed":
                    self._held.touch(to_group)
            if to_tenant:
                to_tenant.corpus.add(key, turn.record, context, turn.response, written)
                if origin != "followed":
                    to_tenant.used = self._held.next_tick()
        if session and has_text and origin != "followed":
            self._held.touch(session)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))
