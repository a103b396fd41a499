"""Draft for running requests from their own text, their sessions, their groups and their tenant.

    cache = SuffixCache(policy=DraftPolicy(cost=0.02))
    cache.start("r1", prompt, session="fix-42", tenant="acme")
    draft = cache.propose(["r1"], 16)[0]
    cache.extend("r1", verified)        # or cache.step(...) for a whole batch, once a decode step
    turn = cache.finish("r1")           # goes to the store; restore(turn) has the same effect in another process

SuffixCache checks arguments and passes them to the compiled core (csrc/), whose answers tests/oracle specifies. One
thread makes the calls for requests. Meanwhile other threads may call stats, tenants, prepare, has_session,
remove_session, free_session, forget_tenant, catch_up, index_until_closed, close, resize and save.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.core import PreparedSession, native
from agentspec.cache.names import UNNAMED_TENANT, Names, key_of, keys_to_load, name_in
from agentspec.cache.policy import DEFAULT_COST, MAX_DRAFT, DraftPolicy
from agentspec.cache.running import BatchHandle, RunningRequests
from agentspec.cache.tokens import (
    MAX_VOCAB,
    Rows,
    TokenIds,
    as_given,
    as_int32,
    as_offers,
    as_prompt,
    as_tokens,
    as_turn,
    limit_numbers,
)
from agentspec.cache.types import (
    DEFAULT_MAX_BYTES,
    HISTORY_UNITS,
    MAX_PREDICTION,
    SOURCES,
    Budget,
    CacheStats,
    Candidate,
    Draft,
    Drafts,
    FinishedTurn,
    HistoryWindow,
    Int32Array,
    PublicCorpus,
    Scope,
    StepDrafts,
    no_drafts,
    record_of,
)
from agentspec.errors import (
    ConfigurationError,
    InvalidInputError,
    SnapshotError,
)
from agentspec.identifiers import check_ids

DEFAULT_WORK_SECONDS = 0.0005
"""CPU time that a step may spend beside its drafting."""

_ALL = 2**62
_LONG = 1e6
_PUBLIC_BYTES = 14
"""Memory that a token of the public corpus is reckoned to take, before it is added."""
_SAVE_TRIES = 5
_UNITS = {unit: number for number, unit in enumerate(HISTORY_UNITS, 1)}
"""Numbers of the core for the units of a history window."""


class SuffixCache:
    """Hold the suffix indexes of running requests, sessions, groups and tenants, and draft from them.

    max_bytes: budget for all memory: texts, indexes, what was learned, sessions, groups, tenants and running requests
    (None: no limit). max_tokens: a further limit on the tokens that are kept of finished requests. per_tenant,
    per_session: budgets of a single tenant and session. The least recently used sessions and groups and the oldest part
    of a tenant's index are evicted first, but nothing of an owner (`start`) who holds less than half of what owners
    hold on average. Of what a running request drafts from, the older half goes where nothing else is left. A session
    over its own budget keeps its newest part, and so does its family. vocab_size: token ids must be below it (None:
    below 2**31). history: how long groups and tenants draft from a response, at most; older ones go when a request
    names their group or tenant, up to 256 each time (None: they stay). A session's own text stays, and stored turns
    count as written when they are restored. Raises ConfigurationError for a value out of range.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = DEFAULT_MAX_BYTES,
        per_tenant: Budget | None = None,
        per_session: Budget | None = None,
        policy: DraftPolicy | None = None,
        vocab_size: int | None = None,
        history: HistoryWindow | None = None,
    ) -> None:
        limits = limit_numbers(max_tokens, max_bytes, per_tenant, per_session)
        if vocab_size is not None and not 1 <= vocab_size <= MAX_VOCAB:
            raise ConfigurationError(f"vocab_size={vocab_size}: give a number from 1 to {MAX_VOCAB}, or None")
        self.policy = policy or DraftPolicy()
        self._vocab_size = vocab_size or MAX_VOCAB
        window = (_UNITS[history.unit], history.size) if history else (0, 0)
        self._core = native.Core(policy=self.policy, limits=limits, vocab_size=self._vocab_size, window=window)
        self._running = RunningRequests()
        self._public_bytes = 0  # of the public corpus
        self._one_slot: Int32Array = np.zeros(1, np.int32)  # arguments of a call for one request
        self._one_limit: Int32Array = np.zeros(1, np.int32)

    def start(
        self,
        request_id: str,
        prompt: TokenIds,
        *,
        session: str | None = None,
        group: str | None = None,
        tenant: str | None = None,
        scope: Scope = "tenant",
        end_tokens: TokenIds = (),
        owner: str | None = None,
        tenant_owner: str | None = None,
        parent: str | None = None,
        prediction: TokenIds = (),
    ) -> None:
        """Begin a request. prompt: int32 [P] or a sequence of int. Ids from vocab_size on, which models use as
        placeholders of images, are context like others and never drafted.

        session: the session whose earlier turns it drafts from. group: the problem that it works on; sessions of a
        group draft from each other's responses first. tenant: the tenant whose index it shares; all requests without
        one are one tenant. scope: "tenant" drafts from session, group and tenant and adds to them; "session" uses only
        the session and its family and ignores the group; "none" uses only the request's own text. parent: the session
        that started this one, if any. Sessions that descend from one root are a family, and draft from each other's
        responses unless they name a group. Once known, a session's family stays while the cache holds it.
        end_tokens: int32 [E], tokens that end the response; no draft goes on behind one (ArcticInference's rule
        ignores them). owner: whom session and group count for when memory is scarce, e.g. the caller; tenant_owner:
        whom the tenant does, e.g. the caller if it is one caller's. None: as before, at first the tenant itself.
        prediction: what its response is expected to be like, at most MAX_PREDICTION tokens; this request alone drafts
        from it, as source "prediction" (ArcticInference's rule ignores it).
        Raises InvalidTokenError, InvalidSessionError, InvalidInputError or DuplicateRequestError, and then changes
        nothing.
        """
        self._running.check_new(request_id)
        tokens = as_prompt(prompt, "prompt", self._vocab_size)
        check_ids(owner=owner, tenant_owner=tenant_owner)
        names = Names(session, group, tenant, scope, family=parent)
        ends = as_tokens(end_tokens, "end_tokens", MAX_VOCAB)
        expected = as_tokens(prediction, "prediction", self._vocab_size)
        if len(expected) > MAX_PREDICTION:
            raise InvalidInputError(f"prediction: {len(expected)} tokens; give at most {MAX_PREDICTION}")
        root = self._core.start(self._running.free_slot(), tokens, *names.keys(), owner, tenant_owner, ends, expected)
        family = name_in(tenant, root) if root else None
        self._running.add(request_id, replace(names, family=None if family == session else family))

    def family_of(self, request_id: str) -> str | None:
        """Return the root session of a running request's family; None if that is its own session, or it has none."""
        return self._running.get(request_id).names.family

    def batch(self, request_ids: Sequence[str]) -> BatchHandle:
        """Look up n running requests once, for many calls of `step`, `merge_drafts` and `propose`.

        Raises UnknownRequestError for a request that is not running.
        """
        return self._running.batch(request_ids)

    def propose(
        self, request_ids: BatchHandle | Sequence[str], max_draft: int | Sequence[int], *, cost: float | None = None
    ) -> list[Draft]:
        """Draft at most `max_draft` tokens (one number for all, or one each) for every request.

        cost: current price of verifying one more token, as a share of a decode step (None: the policy's).
        """
        if len(request_ids) == 1 and type(max_draft) is int:
            ids = request_ids.request_ids if isinstance(request_ids, BatchHandle) else request_ids
            return [self._propose_one(ids[0], max_draft, self._cost(cost))]
        slots = self._running.slots_of(request_ids)
        each = [max_draft] * len(slots) if isinstance(max_draft, (int, np.integer)) else max_draft
        limits = as_int32(each, "max_draft", len(slots))
        arrays = self._core.propose(slots, limits, self._cost(cost), DEFAULT_WORK_SECONDS)
        tokens, offsets, sources, probabilities, lengths = arrays
        parts = [slice(begin, end) for begin, end in pairwise(offsets.tolist())]
        return [
            Draft(tokens[part], probabilities[part], sources[part], int(length))
            for part, length in zip(parts, lengths, strict=True)
        ]

    def _propose_one(self, request_id: str, max_draft: int, cost: float) -> Draft:
        """Draft for one request, without building and slicing arrays."""
        self._one_slot[0] = self._running.get(request_id).slot
        self._one_limit[0] = max(min(max_draft, MAX_DRAFT), 0)
        tokens, _, sources, probabilities, lengths = self._core.propose(
            self._one_slot, self._one_limit, cost, DEFAULT_WORK_SECONDS
        )
        return Draft(tokens, probabilities, sources, int(lengths[0]))

    def merge_drafts(
        self,
        request_ids: BatchHandle | Sequence[str],
        tokens: NDArray[np.integer],
        probabilities: NDArray[np.floating],
        lengths: Rows,
        max_draft: Rows,
        *,
        cost: float | None = None,
    ) -> Drafts:
        """Merge another drafter's tokens into the current drafts of n requests, and return the resulting drafts.

        tokens: integers [n, L]; request i is offered the first lengths[i] of row i. probabilities: floats [n, L], the
        probability that each token is accepted if those before it are. max_draft: most tokens of each resulting draft.
        cost: current price of verifying one more token, as a share of a decode step (None: the policy's).
        The suffix indexes extend the offered tokens. The extended draft is cut to the length with the highest value,
        (1 + expected tokens) / (1 + cost * drafted), and replaces the current draft if its value is higher. A request
        may be offered tokens several times, in one call or in several. If the offered and the current draft begin
        with the same tokens, the offered probabilities replace the current ones there, and the current draft is cut
        again. Low probabilities can shorten or drop it, so base them on its `probabilities`.
        Under ArcticInference's rule the indexes do not extend offered tokens, and the rule's own draft is never cut.
        A request without a current draft gets none: it got tokens since, or its row in the last step was invalid.
        Raises UnknownRequestError, InvalidInputError or InvalidTokenError, and then changes nothing.
        """
        slots = self._running.slots_of(request_ids)
        length_of, max_draft_of = as_int32(lengths, "lengths", len(slots)), as_int32(max_draft, "max_draft", len(slots))
        given, chances = as_offers(tokens, probabilities, length_of, self._vocab_size)
        return Drafts(*self._core.merge_drafts(slots, given, chances, length_of, max_draft_of, self._cost(cost)))

    def candidates(self, request_id: str) -> list[list[Candidate]]:
        """Return the candidates scored for the request's last draft, one list for each position.

        The draft takes the most probable candidate of each position, unless its token was offered. The lists may
        reach further than the draft. Another drafter can `merge_drafts` the candidates that it prefers.
        """
        arrays = self._core.candidates(self._running.get(request_id).slot)
        depths: list[int] = arrays[0].tolist()
        positions: list[list[Candidate]] = [[] for _ in range(depths[-1] + 1 if depths else 0)]
        columns = [array.tolist() for array in arrays[1:]]
        for depth, token, probability, source, *figures in zip(depths, *columns, strict=True):
            positions[depth].append(Candidate(token, probability, SOURCES[source], *figures))
        return positions

    def extend(self, request_id: str, tokens: TokenIds) -> None:
        """Add verified tokens (accepted and bonus; int32 [n]) to a request, and learn how its last draft fared."""
        slot = self._running.get(request_id).slot
        self._core.extend(slot, as_tokens(tokens, "tokens", self._vocab_size))

    def step(
        self,
        request_ids: BatchHandle | Sequence[str],
        tokens: Int32Array,
        rows: Rows,
        lengths: Rows,
        max_draft: Rows,
        num_verified: Rows,
        *,
        cost: float | None = None,
        work_seconds: float = DEFAULT_WORK_SECONDS,
    ) -> StepDrafts:
        """Take one decode step of n requests in one call, without the GIL, reading the engine's tokens in place.

        tokens: int32 [R, L], C-contiguous; row rows[i] holds prompt and output of request i, lengths[i] valid tokens.
        The call adds the new tokens (steps may be skipped) and learns from them how the previous draft fared, of which
        only the first num_verified[i] tokens were verified. Then it drafts at most max_draft[i] tokens (0: none).
        rows, lengths, max_draft, num_verified: n integers each; int32 arrays are read in place, any others are copied.
        cost: current price of verifying one more token, as a share of a decode step (None: the policy's).
        work_seconds: CPU time of this thread for what waits beside drafting: indexing what start, finish and restore
        appended, removing what was evicted, giving memory back. The rest waits for later steps or `catch_up`. 32 new
        tokens of each request are indexed in any case.
        A row with an illegal token is used up to that token and gets no draft. Tokens that the engine took back are
        forgotten: the row no longer begins with them.
        Raises UnknownRequestError or InvalidInputError, and then changes nothing.
        """
        slots = self._running.slots_of(request_ids)
        price = self._cost(cost)
        try:
            arrays = self._core.step(slots, tokens, rows, lengths, max_draft, num_verified, price, work_seconds)
        except ValueError as error:  # the core rejects bad arguments before it changes anything
            raise InvalidInputError(str(error)) from None
        return no_drafts(len(slots)) if arrays is None else StepDrafts(*arrays)

    def finish(
        self, request_id: str, *, output_limit: int | None = None, name: tuple[str, int] | None = None
    ) -> FinishedTurn | None:
        """End a request and keep its response for its session and tenant; return the turn to store, or None.

        output_limit: keep only the first so many tokens of the response (engines may decode past a stop).
        name: writer and number under which the turn will be stored. While the cache holds it, `restore` ignores it.
        The call keeps nothing and returns None under scope "none", under scope "session" without a session, and if
        the session was removed meanwhile.
        """
        running = self._running.get(request_id)
        if output_limit is not None and output_limit < 0:
            raise InvalidInputError(f"output_limit={output_limit}: give a number of tokens, at least 0")
        names = running.names
        writer, number = name or ("", 0)
        turn = self._core.finish(running.slot, output_limit, record_of(writer, number) if writer else 0)
        self._running.release(request_id)
        if turn is None:
            return None
        kept, parent, block, count, tokens = turn
        tail, response = as_given(tokens[:count]), tokens[count:]
        of_session = (names.tenant, names.session, kept, tail, response, names.group, names.scope)
        return FinishedTurn(*of_session, parent, block, writer, number, family=names.family)

    def abort(self, request_id: str) -> None:
        """End a request and keep nothing of it."""
        self._core.abort(self._running.get(request_id).slot)
        self._running.release(request_id)

    def restore(self, turn: FinishedTurn, *, held_only: bool = False) -> None:
        """Add a stored turn to the indexes, as if it had run here. Restoring it again changes nothing.

        held_only: add it only to what the cache holds of its session, named group and tenant, and count none of them as
        used. A turn that another process has just stored is restored so: what is not held is loaded when a request
        names it.
        Session, group and tenant each add a named turn (`writer`, `number`) unless they hold it. The session adds a
        turn without a name as far as its text is new, and group and tenant if any of that was. Turns may come in any
        order. In order they take the least memory. Raises InvalidInputError, InvalidTokenError or InvalidSessionError
        for a turn that cannot be right, and then changes nothing.
        """
        names, (place, tail, response) = Names.of(turn), as_turn(turn, self._vocab_size)
        self._core.restore(*names.keys(), turn.owner, *place, tail, response, turn.record, held_only)

    def prepare(self, turns: Sequence[FinishedTurn]) -> PreparedSession:
        """Index stored turns of one session beside the cache, from which `adopt` takes them. No step waits for it.

        Any thread may call it. The turns are all that is known of the session, in order. Raises as `restore` does, and
        InvalidInputError unless they name one session of one tenant.
        """
        if len({(turn.tenant, turn.session) for turn in turns}) != 1 or turns[0].session is None:
            raise InvalidInputError("turns: give those of one session")
        key = key_of(turns[0].tenant, turns[0].session)
        assert key is not None
        prepared = self._core.prepare(key)
        for turn in turns:
            names, (place, tail, response) = Names.of(turn), as_turn(turn, self._vocab_size)
            if names.scope != "none":
                has_group = names.scope == "tenant" and names.group is not None
                prepared.add(not has_group and names.family is None, *place, tail, response, turn.record)
        prepared.finish()
        return prepared

    def adopt(self, prepared: PreparedSession, of: FinishedTurn) -> bool:
        """Put a prepared session into the cache, in place of what that holds of it. of: any of its turns.

        Afterwards `restore` its turns, which brings them to their groups and tenant. Returns False, and does nothing,
        if the cache holds turns of the session that were not prepared, or if the session's budget does not hold all of
        it: then restoring the turns does everything. A prepared session can be adopted once.
        """
        return self._core.adopt(prepared, of.tenant or UNNAMED_TENANT, key_of(of.tenant, of.family), of.owner)

    def learn_from(self, turn: FinishedTurn) -> int:
        """Learn from a turn of another process how its drafts would have fared here. Return the number of its tokens.

        What a replica learns by its own requests alone is a part of what all of them teach. Call this before `restore`,
        in any thread: it takes some microseconds a token, and holds steps up for less than a tenth of a millisecond at
        a time. It keeps nothing of the turn and returns 0 for one that is not of scope "tenant", whose tenant the cache
        does not know, or that it holds already. Raises InvalidTokenError or InvalidSessionError.
        """
        names, (_, tail, response) = Names.of(turn), as_turn(turn, self._vocab_size)
        return self._core.learn_from(*names.keys(), tail, response, turn.record, self._cost(None))

    def publish(self, texts: Iterable[TokenIds], *, max_bytes: int) -> PublicCorpus:
        """Let every request of scope "tenant" draft from these texts too, whatever its tenant, as source "public".

        texts: int32 arrays or sequences of int. max_bytes: most memory that they may take; texts beyond that are left
        out. The memory counts in the cache's budget. Nothing is ever added to the corpus or evicted from it, and
        snapshots leave it out; a second call replaces it. Any thread may call it while steps run. The texts are indexed
        in the calling thread, before any is drafted from. The fixed rule does not draft from them. Raises
        InvalidTokenError for an illegal token; then the corpus is as before.
        """
        index, taken, tokens, size, left_out = native.PublicIndex(), 0, 0, 0, 0
        try:
            for text in texts:
                if size + _PUBLIC_BYTES * len(text) > max_bytes:
                    left_out += 1
                    continue
                size = index.add(as_prompt(text, "text", self._vocab_size))
                taken, tokens = taken + 1, tokens + len(text)
                self._core.count_public(self._public_bytes + size)
        except BaseException:
            self._core.count_public(self._public_bytes)
            raise
        self._core.publish(index)
        self._public_bytes = size
        return PublicCorpus(taken, tokens, size, left_out)

    def remove_session(self, tenant: str | None, session: str) -> None:
        """Erase a session: its own text and its share of its tenant's index. Does nothing if it is unknown.

        Its running requests then draft from their own text alone and keep nothing when they finish.
        """
        check_ids(session=session, tenant=tenant)
        key = key_of(tenant, session)
        assert key is not None
        self._core.remove_session(key, tenant or UNNAMED_TENANT)

    def free_session(self, tenant: str | None, session: str) -> None:
        """Evict a session that its client has ended, as soon as none of its requests run.

        The family whose root it is goes too. What it said stays in its named group, its tenant's corpus and the family
        of its root. The next `start` in the session, if there is one after all, keeps it. Does nothing if the cache
        holds no such session.
        """
        check_ids(session=session, tenant=tenant)
        key = key_of(tenant, session)
        assert key is not None
        self._core.free_session(key)

    def has_session(self, tenant: str | None, session: str) -> bool:
        """Return whether the cache holds text of this session."""
        check_ids(session=session, tenant=tenant)
        key = key_of(tenant, session)
        assert key is not None
        return self._core.has_session(key)

    def needs_load(
        self,
        tenant: str | None,
        session: str | None = None,
        *,
        group: str | None = None,
        family: str | None = None,
    ) -> bool:
        """Return whether the store may hold turns of a session, named group or family that were not restored yet.

        family: its root session. Name one of them, or none for the tenant's corpus. That is so until `mark_loaded` says
        otherwise, and again when the session, the group, the family or all of the corpus was evicted.
        """
        return self._core.needs_load(*keys_to_load(tenant, session, group, family))

    def mark_loaded(
        self,
        tenant: str | None,
        session: str | None = None,
        *,
        group: str | None = None,
        family: str | None = None,
    ) -> None:
        """Note that all that the store holds of a session, named group, family or tenant's corpus was restored.

        Name as in `needs_load`. Does nothing where the cache holds neither text nor a running request of it.
        """
        self._core.mark_loaded(*keys_to_load(tenant, session, group, family))

    def tenants(self) -> list[str | None]:
        """Return the tenants that the cache knows, least recently used first. None: of requests that name none."""
        return [tenant or None for tenant in self._core.tenants()]

    def begin_weights(self) -> None:
        """Note that the model has new weights, for a history window in weights. Drafts stay correct without it."""
        self._core.begin_period(_UNITS["weights"])

    def begin_epoch(self) -> None:
        """Note that an epoch begins, for a history window in epochs."""
        self._core.begin_period(_UNITS["epochs"])

    def forget_tenant(self, tenant: str | None) -> bool:
        """Forget a tenant with its corpus, sessions and groups. Returns False where it has running requests: it stays.

        Steps may run meanwhile. The following ones give the memory back.
        """
        check_ids(tenant=tenant)
        return self._core.forget_tenant(tenant or UNNAMED_TENANT)

    def catch_up(self, budget: int | None = None, *, seconds: float | None = None) -> int:
        """Index pending text, evict what exceeds the budgets, remove evicted text and give its memory back.

        budget: about how many tokens to process. seconds: CPU time of this thread to spend. None: no limit. Returns the
        tokens processed, 0 when none are left. Each step does a little of this work. Call it while the engine is idle,
        with few `seconds`, because steps wait meanwhile; and after restoring many turns at start.
        """
        if budget is not None or seconds is not None:
            return self._core.catch_up(
                _ALL if budget is None else max(budget, 0), _LONG if seconds is None else seconds
            )
        total = 0
        while done := self._core.catch_up(_ALL, _LONG):
            total += done
        return total

    def index_until_closed(self) -> None:
        """Do the work of `catch_up` as soon as there is some, until `close` is called. It is for a thread of its own.

        Calls that an engine waits for go first: the work leaves the lock to them within some 50 microseconds. On Linux
        the thread gets the lowest priority.
        """
        self._core.index_until_closed()

    def close(self) -> None:
        """End `index_until_closed`. Everything else goes on working."""
        self._core.close()

    def resize(
        self,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = DEFAULT_MAX_BYTES,
        per_tenant: Budget | None = None,
        per_session: Budget | None = None,
    ) -> None:
        """Replace all budgets. Each of the following calls evicts a part of what exceeds them."""
        self._core.resize(limit_numbers(max_tokens, max_bytes, per_tenant, per_session))

    def save(self, path: str | Path, *, identity: str = "", note: bytes = b"") -> None:
        """Write sessions, groups, tenants and what was learned to a file, without running requests.

        Another thread may call it while steps run: it holds them up for less than half a millisecond at a time. It
        writes beside `path` and then renames, so the file is never incomplete, and only its owner can read it.
        identity: what the snapshot is good for, such as a model and a policy; loading compares it. note: given back by
        loading. Raises SnapshotError if the file cannot be written, or because sessions are erased all the time.
        """
        try:
            for _ in range(_SAVE_TRIES):
                if self._core.save(str(path), identity, note):
                    return
        except (OSError, RuntimeError) as error:
            raise SnapshotError(f"{path}: cannot save the snapshot: {error}") from error
        raise SnapshotError(f"{path}: cannot save the snapshot: sessions are being erased; try again later")

    def load_snapshot(self, path: str | Path, *, identity: str = "") -> bytes:
        """Load what was saved under the same identity into this cache, which must be new. Return the note.

        Another thread may call it. Raises SnapshotError, naming the fault, for a file that is damaged, of another
        version or identity, and if the cache is in use already.
        """
        try:
            return self._core.load(str(path), identity)
        except (OSError, RuntimeError, MemoryError) as error:
            raise SnapshotError(f"{path}: cannot load the snapshot: {error}") from error

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = DEFAULT_MAX_BYTES,
        per_tenant: Budget | None = None,
        per_session: Budget | None = None,
        policy: DraftPolicy | None = None,
        vocab_size: int | None = None,
        history: HistoryWindow | None = None,
    ) -> "SuffixCache":
        """Return a cache with the contents of a file from `save`.

        The other arguments are those of SuffixCache. If `policy` learns differently, what was learned is dropped. Under
        a `history` in another unit, what is loaded counts as written now.
        Raises SnapshotError as `load_snapshot` does.
        """
        cache = cls(
            max_tokens=max_tokens,
            max_bytes=max_bytes,
            per_tenant=per_tenant,
            per_session=per_session,
            policy=policy,
            vocab_size=vocab_size,
            history=history,
        )
        cache.load_snapshot(path)
        return cache

    def stats(self) -> CacheStats:
        """Return the current sizes."""
        return CacheStats(*self._core.stats())

    def worked_ns(self) -> int:
        """Return the CPU time that steps and `catch_up` have spent beside drafting so far, in nanoseconds."""
        return self._core.worked()

    def _cost(self, cost: float | None) -> float:
        if cost is None:
            return DEFAULT_COST if self.policy.cost is None else self.policy.cost
        if not 0.0 <= cost <= 10.0:
            raise InvalidInputError(f"cost={cost}: give a number from 0 to 10, or None")
        return cost
