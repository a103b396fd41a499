"""Specify the calls on requests, sessions, groups and tenants. Implemented by csrc/cache/cache and stored_turns.

`Oracle` has SuffixCache's calls, on plain lists and for arguments that are known to be good. It knows no clock, and it
saves nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from agentspec.cache import SOURCES, Candidate, DraftPolicy, FinishedTurn, HistoryWindow, Scope
from agentspec.cache.policy import DEFAULT_COST, MAX_DRAFT
from agentspec.cache.types import HistoryUnit
from tests.oracle.arctic_suffix_rule import ArcticSuffixRule
from tests.oracle.drafting import Draft, ExternalDraft, SuffixDrafter
from tests.oracle.entries import CacheEntries, Limits
from tests.oracle.index import SuffixIndex
from tests.oracle.kept import Group, Session, Tenant, work_on
from tests.oracle.names import Key, Names
from tests.oracle.request import PUBLIC, Drafted, Request, common_prefix
from tests.oracle.scoring import Learned
from tests.oracle.session import Turn

WORK_PER_STEP = 4096  # positions indexed in one step
OWN_PER_STEP = 32  # positions of each request's own text that are always indexed
LEARNED_CONTEXT = 512  # tokens of a prompt that drafts see, when learning from a stored turn
REQUEST_BITS = 12  # log2 of the reranker's slots, for a request that shares nothing


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
        quotable: Sequence[int] = (),
    ) -> None:
        names = replace(Names.of(scope, session, group, tenant, parent), owner=owner, tenant_owner=tenant_owner)
        of_tenant, of_session, of_group = self._held.entries_of(names)
        for sharing in (of_group, of_tenant):
            if sharing and of_tenant:
                self._held.drop_outdated(sharing.corpus, of_tenant)
        teacher = of_tenant if names.shared else of_session
        learned = self._held.learned(teacher) if teacher else Learned(self._policy, REQUEST_BITS)
        own_group = of_group is not None and of_group.key[0] == "family" and of_group.key[2] == session
        request = Request(of_session, of_group, of_tenant, learned, len(prompt), names.shared, own_group)
        if of_session:
            of_session.final = False
        for entry in request.entries():
            entry.running += 1
        if of_tenant:
            of_tenant.running += 1
        request.state.ends = frozenset(end_tokens)
        held = [self._as_held(token) for token in prompt]
        request.begin(self._drafter, held)
        if prediction:
            request.prediction.append(held[max(len(held) - self._drafter.kept_context, 0) :], findable=False)
            request.prediction.append(list(prediction))
        elif quotable:
            request.quotes = True
            request.prediction.append(list(quotable))
        self._requests[request_id] = request
        if not self._free:
            self._free.append(len(self._slots))
            self._slots.append(None)
        self._slots[self._free.pop()] = request_id

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        request = self._requests[request_id]
        request.take(self._drafter, self._public, list(tokens), len(request.draft.taken))

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

        has_time: if False, index only OWN_PER_STEP positions of each request; other indexing and sweeping waits.
        """
        budget = WORK_PER_STEP if has_time else 0
        requests, counts, sound = [], [], []
        for request_id, text, verified in zip(request_ids, texts, num_verified, strict=True):
            request = self._requests[request_id]
            self._rewind(request, text)
            fresh = list(text[len(request.index) :])
            illegal = (at for at, token in enumerate(fresh) if not 0 <= token < self._vocab_size)
            counts.append(request.take(self._drafter, self._public, fresh[: next(illegal, None)], verified))
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
        while positions and not positions[-1]:  # at another drafter's tokens, where no index proposed any
            positions.pop()
        return positions

    def finish(self, request_id: str, output_limit: int | None = None, record: int = 0) -> Turn | None:
        request = self._requests[request_id]
        session, tenant = request.session, request.tenant
        if (not session and not request.shared) or (session and session.gone):
            self.abort(request_id)
            return None
        turn = replace(request.turn(output_limit), record=record)
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
        names = Names.of(stored.scope, stored.session, stored.group, stored.tenant, stored.family)
        names = replace(names, owner=stored.owner, stored=True)
        tenant, session, group = self._held.find_held(names) if held_only else self._held.entries_of(names)
        if held_only and not (session or group or (tenant and names.shared)):
            return
        tail = [self._as_held(token) for token in stored.prompt_tail.tolist()]
        response = stored.response.tolist()
        turn = Turn(stored.kept, stored.parent, stored.block, tail, response, stored.record)
        if session:
            turn = session.turns.find_parent(turn)
        key = session.key if session else None
        if tenant and stored.session is not None:
            key = ("session", tenant.name, stored.session)
        self._keep(session, group, tenant, key, names.shared, turn, "followed" if held_only else "stored")
        for entry in (session, group):
            if entry:
                self._held.forget_if_empty(entry)
        self._held.evict(tenant)

    def learn_from(self, turn: FinishedTurn) -> int:
        """Learn from drafts of a turn's response, and keep nothing of it. Return its tokens; 0: nothing to learn."""
        if self._policy.arctic or turn.scope != "tenant" or not len(turn.response):
            return 0
        names = Names.of(turn.scope, turn.session, turn.group, turn.tenant, turn.family)
        tenant, session, group = self._held.find_held(names)
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
            request.take(self._drafter, self._public, left[: right + 1], MAX_DRAFT)
            left = left[right + 1 :]
        for entry in request.entries():
            self._held.forget_if_empty(entry)
        return len(turn.response)

    def needs_load(self, tenant: str | None, session: str | None, group: str | None, family: str | None) -> bool:
        entry = self._held.find(Names(session, group, tenant, family=family))
        return entry is None or not entry.loaded

    def mark_loaded(self, tenant: str | None, session: str | None, group: str | None, family: str | None) -> None:
        entry = self._held.find(Names(session, group, tenant, family=family))
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
                request.draft.forget_tokens()  # the draft may quote the session
                request.forget_sibling()

    def free_session(self, tenant: str | None, session: str) -> None:
        self._held.free_session(tenant, session)

    def catch_up(self, budget: int) -> int:
        left = self._held.work(self._held.evict_tenants(budget))
        for request_id in self._slots:
            if request_id is not None:
                for index in self._requests[request_id].in_order():
                    left -= index.advance(left)
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

    def _advance(self, request: Request, budget: int) -> int:
        """Index and sweep the texts that the request drafts from. Return what is left of the budget."""
        for index in request.in_order():
            if index is request.index:
                index.advance(OWN_PER_STEP)
            budget -= index.advance(budget)
        for entry in request.entries():
            if not entry.gone:
                budget = work_on(entry, budget)
        return work_on(request.tenant.corpus, budget) if request.tenant else budget

    def _as_held(self, token: int) -> int:
        """Return a prompt's token as it is held. One beyond the vocabulary is held as a negative, never drafted."""
        return token if token < self._vocab_size else -2 - token

    def _rewind(self, request: Request, text: Sequence[int]) -> None:
        """Cut a request's text to the prefix that the engine's row shares, if the engine took back tokens."""
        row = [self._as_held(token) for token in text[: len(request.index)]]
        if not request.goes_on_in(row):
            self._forget_in_siblings(request)
            request.rewind(self._drafter, row)

    def _forget_in_siblings(self, gone: Request) -> None:
        """Let no request draft from one whose text goes or changes."""
        for request in self._requests.values():
            if request.sibling is gone:
                request.forget_sibling()

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
        """Add a turn to its session, group and tenant unless they hold its record. key: its session's, held or not.

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
        if turn.response and wanted and tenant:
            context = context + turn.prompt_tail
            context = context[max(len(context) - self._drafter.kept_context, 0) :]
            sharing = [group if group and not group.gone else None, tenant if shared else None]
            adding = [each for each in sharing if each and not each.corpus.holds(turn.record)]
            if adding and origin != "stored":
                tenant.written += len(turn.response)
            for each in adding:
                each.corpus.add(key, turn.record, context, turn.response, self._held.now(tenant))
                if isinstance(each, Group):
                    self._held.trim_family(each)
                if origin != "followed":
                    self._held.touch(each)
        if session and has_text and origin != "followed":
            self._held.touch(session)
