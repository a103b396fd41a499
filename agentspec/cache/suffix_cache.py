"""Draft for running requests from their own text, their sessions, their groups and their tenant.

    cache = SuffixCache(policy=DraftPolicy(cost=0.02))
    cache.start("r1", prompt, session="fix-42", tenant="acme")
    draft = cache.propose(["r1"], 16)[0]
    cache.extend("r1", verified)        # or cache.step(...) for a whole batch, once a decode step
    turn = cache.finish("r1")           # goes to the store; restore(turn) has the same effect in another process

SuffixCache checks arguments and passes them to the compiled core (csrc/), whose answers tests/oracle specifies. One
thread makes the calls for requests. Meanwhile any thread may call `resize` and the methods of KeptTurns, because the
core has a lock. If a function that you register with atexit waits for such a thread, import SuffixCache first:
otherwise the thread's calls never return once the process ends. A forked process needs a cache of its own: calls on one
that it inherits may never return, because a thread that only its parent has may hold the lock.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.arguments import (
    LARGEST_NUMBER,
    MAX_VOCAB,
    Rows,
    TokenIds,
    as_given,
    as_int32,
    as_offers,
    as_prompt,
    as_tokens,
    check_kind,
    is_number,
    is_text,
    limit_numbers,
)
from agentspec.cache.core import native
from agentspec.cache.kept_turns import KeptTurns
from agentspec.cache.names import Names, name_in
from agentspec.cache.policy import MAX_DRAFT, DraftPolicy
from agentspec.cache.running import BatchHandle, RequestSlots
from agentspec.cache.types import (
    DEFAULT_MAX_BYTES,
    MAX_QUOTABLE,
    SOURCES,
    UNIT_NUMBERS,
    Budget,
    Candidate,
    Draft,
    Drafts,
    FinishedTurn,
    HistoryWindow,
    Int32Array,
    Scope,
    StepDrafts,
    no_drafts,
    record_number,
)
from agentspec.errors import ConfigurationError, InvalidInputError
from agentspec.identifiers import check_ids
from agentspec.protocol import MAX_PREDICTION

DEFAULT_WORK_SECONDS = 0.0005
"""CPU time that a step may spend on work beside its drafting, in seconds."""


def _is_name(name: object) -> bool:
    """Return whether an object is the name of a turn in a store: a writer and a number."""
    return isinstance(name, tuple) and len(name) == 2 and is_text(name[0]) and is_number(name[1])


class CacheOptions(TypedDict, total=False):
    """Declare the options of SuffixCache, which explains them."""

    max_tokens: int | None
    max_bytes: int | None
    per_tenant: Budget | None
    per_session: Budget | None
    policy: DraftPolicy | None
    vocab_size: int | None
    history: HistoryWindow | None


class SuffixCache(KeptTurns):
    """Hold the suffix indexes of running requests, sessions, groups and tenants, and draft from them.

    max_bytes: budget for all memory, that of learned state and running requests included (None: no limit).
    max_tokens: a further limit on the tokens that are kept of finished requests.
    per_tenant, per_session: budgets of a single tenant and session. A session over its own budget keeps its newest
        part, and so does its family.
    policy: settings of the drafting rule (None: the defaults).
    vocab_size: token ids must be below it (None: below 2**31).
    history: how long groups and tenants draft from a response, at most (None: no limit).
    Raises ConfigurationError for a value out of range or of another type.

    The least recently used sessions and groups and the oldest part of a tenant's index are evicted first, but nothing
    of an owner (`start`) who holds less than half of what owners hold on average. If running requests draft from all
    sessions and groups that are left, one of these loses its older half. Responses older than `history` are dropped, up
    to 256 at a time, when a request names their group or tenant. A session's own text stays, and stored turns count as
    written when they are restored.

    A method that raises MemoryError leaves the cache empty. Requests that ran then raise IndexError, except in
    ``abort``, which ends them.
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
        check_kind("policy", policy, DraftPolicy)
        check_kind("history", history, HistoryWindow)
        if vocab_size is not None and not (is_number(vocab_size) and 1 <= vocab_size <= MAX_VOCAB):
            raise ConfigurationError(f"vocab_size={vocab_size!r}: give a number from 1 to {MAX_VOCAB}, or None")
        policy, vocab_size = policy or DraftPolicy(), vocab_size or MAX_VOCAB
        window = (UNIT_NUMBERS[history.unit], history.size) if history else (0, 0)
        core = native.Core(policy=policy, limits=limits, vocab_size=vocab_size, window=window)
        super().__init__(core, policy, vocab_size)
        self._running = RequestSlots()
        self._one_slot: Int32Array = np.zeros(1, np.int32)  # arguments of a call for one request
        self._one_limit: Int32Array = np.zeros(1, np.int32)

    @classmethod
    def load(cls, path: str | Path, **options: Unpack[CacheOptions]) -> "SuffixCache":
        """Return a cache with the contents of a file from `save`.

        options: those of SuffixCache. What a tenant's reranker learned is dropped if `max_bytes` gives it another size.
        Under a `history` in another unit, all that is loaded counts as written now.
        Raises SnapshotError as `load_snapshot` does, and ConfigurationError as SuffixCache does.
        """
        cache = cls(**options)
        cache.load_snapshot(path)
        return cache

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
        quotable: TokenIds = (),
    ) -> None:
        """Begin a request.

        prompt: int32 [P] or a sequence of int. Ids from vocab_size on, which models use as placeholders of images, are
            context, and never drafted.
        session: the session whose earlier turns it drafts from.
        group: the problem that it works on. Sessions of a group draft from each other's responses first.
        tenant: the tenant whose index it shares. All requests without one are one tenant.
        scope: which of these it drafts from and adds to (`Scope`).
        end_tokens: int32 [E], tokens that end the response. No draft goes on behind one.
        owner: for whom the session and group count when memory is scarce, such as the caller. None: a known session or
            group keeps its owner, a new one counts for the tenant.
        tenant_owner: for whom the tenant counts. None: as for owner.
        parent: the session that started this one, if any.
        prediction: at most MAX_PREDICTION tokens that the response is expected to resemble (source "prediction").
        quotable: at most MAX_QUOTABLE tokens that the response may quote anywhere, such as the prompt's text in another
        spelling (source "quote"). Ignored beside a prediction.
        Raises InvalidTokenError, InvalidSessionError, InvalidInputError or DuplicateRequestError, and then changes
        nothing.

        Sessions that descend from one root are a family. They draft from each other's responses unless they name a
        group. A session keeps its family while the cache holds it. No other request drafts from a prediction or
        quotable text. ArcticInference's rule ignores both, and end tokens.
        """
        self._running.check_new(request_id)
        tokens = as_prompt(prompt, "prompt", self._vocab_size)
        check_ids(owner=owner, tenant_owner=tenant_owner)
        names = Names(session, group, tenant, scope, family=parent)
        ends = as_tokens(end_tokens, "end_tokens", MAX_VOCAB)
        expected = as_tokens(prediction, "prediction", self._vocab_size)
        quoted = as_tokens(quotable, "quotable", self._vocab_size)
        for name, given, most in (("prediction", expected, MAX_PREDICTION), ("quotable", quoted, MAX_QUOTABLE)):
            if len(given) > most:
                raise InvalidInputError(f"{name}: {len(given)} tokens; give at most {most}")
        slot = self._running.take_slot()
        try:
            root = self._core.start(
                slot, tokens, names.for_core(), owner, tenant_owner, ends=ends, prediction=expected, quotable=quoted
            )
            family = name_in(tenant, root) if root else None
            if family == session:
                family = None
            self._running.add(request_id, slot, names if family == parent else replace(names, family=family))
        except BaseException:  # also an interrupt: the core may run the request already, which nobody could end later
            self._core.abort(slot)
            self._running.give_back(request_id, slot)
            raise

    def family_of(self, request_id: str) -> str | None:
        """Return the root session of a running request's family; None if that is its own session or it has none.

        Raises UnknownRequestError.
        """
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
        Raises UnknownRequestError or InvalidInputError.
        """
        if isinstance(request_ids, (BatchHandle, list, tuple)) and len(request_ids) == 1 and type(max_draft) is int:
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
        probability that each token is accepted if those before it are. max_draft: integers [n], most tokens of a draft
        that replaces the current one.
        cost: current price of verifying one more token, as a share of a decode step (None: the policy's).
        Raises UnknownRequestError, InvalidInputError or InvalidTokenError, and then changes nothing.

        The suffix indexes extend the offered tokens. The extended draft is cut to the length with the highest value
        (`draft_value`), and replaces the current draft if its value is higher. If both begin with the same tokens, the
        offered probabilities replace the current ones there, and the current draft is cut again. Low probabilities can
        shorten or drop it, so base them on its `probabilities`. A request may be offered tokens several times.
        A request gets no draft if it got tokens since `step` or `propose` last drafted for it, or if its row in that
        step was invalid. Under ArcticInference's rule the indexes do not extend offered tokens, and the rule's own
        draft is never cut.
        """
        slots = self._running.slots_of(request_ids)
        length_of, max_draft_of = as_int32(lengths, "lengths", len(slots)), as_int32(max_draft, "max_draft", len(slots))
        offers = as_offers(tokens, probabilities, length_of, self._vocab_size)
        return Drafts(*self._core.merge_drafts(slots, *offers, length_of, max_draft_of, self._cost(cost)))

    def candidates(self, request_id: str) -> list[list[Candidate]]:
        """Return the candidates scored for the request's last draft, one list for each position.

        The draft takes the most probable candidate of each position, unless its token was offered by another drafter.
        There may be more lists than the draft has tokens. Another drafter can `merge_drafts` the candidates that it
        prefers. Raises UnknownRequestError.
        """
        arrays = self._core.candidates(self._running.get(request_id).slot)
        depths: list[int] = arrays[0].tolist()
        positions: list[list[Candidate]] = [[] for _ in range(depths[-1] + 1 if depths else 0)]
        columns = [array.tolist() for array in arrays[1:]]
        for depth, token, probability, source, *figures in zip(depths, *columns, strict=True):
            positions[depth].append(Candidate(token, probability, SOURCES[source], *figures))
        return positions

    def extend(self, request_id: str, tokens: TokenIds) -> None:
        """Add verified tokens (accepted and bonus; int32 [n]) to a request, and learn how its last draft fared.

        Raises UnknownRequestError or InvalidTokenError.
        """
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
        most: int = MAX_DRAFT,
    ) -> StepDrafts:
        """Take one decode step of n requests in one call: add their new tokens, learn from these, then draft.

        tokens: int32 [R, L], C-contiguous: the engine's token array, which is read in place.
        rows, lengths: integers [n]. Row rows[i] holds prompt and output of request i, lengths[i] valid tokens.
        max_draft: integers [n], most tokens to draft for each request; 0: none.
        num_verified: integers [n], tokens of each previous draft that were verified, counted from its first.
        cost: current price of verifying one more token, as a share of a decode step (None: the policy's).
        work_seconds: CPU time of this thread for the work of `catch_up`. The rest waits for later steps.
        most: longest draft of any request, whatever its max_draft is.
        Raises UnknownRequestError or InvalidInputError, and then changes nothing.

        The call runs without the GIL, and adds the tokens of all requests before it drafts for any. Steps may be
        skipped. int32 arrays are read in place, others are copied. 32 new tokens of each request are indexed in any
        case. A row with an illegal token is used up to that token and gets no draft. If a row no longer begins with the
        known tokens, the engine took some back, and the call forgets these.
        """
        slots = self._running.slots_of(request_ids)
        price = self._cost(cost)
        try:
            arrays = self._core.step(slots, tokens, rows, lengths, max_draft, num_verified, price, work_seconds, most)
        except ValueError as error:  # the core rejects bad arguments before it changes anything
            raise InvalidInputError(str(error)) from None
        return no_drafts(len(slots)) if arrays is None else StepDrafts(*arrays)

    def finish(
        self, request_id: str, *, output_limit: int | None = None, name: tuple[str, int] | None = None
    ) -> FinishedTurn | None:
        """End a request and keep its response for its session and tenant; return the turn to store, or None.

        output_limit: tokens of the response to keep, the first ones (engines may decode past a stop).
        name: writer and number under which the turn will be stored. While the cache holds the turn, `restore` ignores
        a stored turn of this name.
        The call keeps nothing and returns None under scope "none", under scope "session" without a session, and if
        the session was removed meanwhile. Raises UnknownRequestError or InvalidInputError.
        """
        running = self._running.get(request_id)
        if output_limit is not None and not (is_number(output_limit) and output_limit >= 0):
            raise InvalidInputError(f"output_limit={output_limit!r}: give a number of tokens, at least 0")
        if name is not None and not _is_name(name):
            raise InvalidInputError(f"name={name!r}: give a writer and a number, or None")
        limit = None if output_limit is None else min(output_limit, LARGEST_NUMBER)
        names = running.names
        writer, number = name or ("", 0)
        turn = self._core.finish(running.slot, limit, record_number(writer, number) if writer else 0)
        self._running.release(request_id)
        if turn is None:
            return None
        kept, parent, block, count, tokens = turn
        return FinishedTurn(
            tenant=names.tenant,
            session=names.session,
            group=names.group,
            family=names.family,
            scope=names.scope,
            kept=kept,
            parent=parent,
            block=block,
            prompt_tail=as_given(tokens[:count]),
            response=tokens[count:],
            writer=writer,
            number=number,
        )

    def abort(self, request_id: str) -> None:
        """End a request and keep nothing of it. Raises UnknownRequestError."""
        self._core.abort(self._running.get(request_id).slot)
        self._running.release(request_id)

    def resize(
        self,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = DEFAULT_MAX_BYTES,
        per_tenant: Budget | None = None,
        per_session: Budget | None = None,
    ) -> None:
        """Replace all budgets. This and later calls each evict a part of what exceeds them.

        Raises ConfigurationError for a value out of range or of another type.
        """
        self._core.resize(limit_numbers(max_tokens, max_bytes, per_tenant, per_session))
