"""SuffixCache: what to draft from, for running requests, their sessions and their tenant.

    cache = SuffixCache(policy=DraftPolicy(cost=0.02))
    cache.start("r1", prompt, session="fix-42", tenant="acme")
    draft = cache.propose(["r1"], 16)[0]
    cache.extend("r1", verified)        # or cache.step(...) for a whole batch, once a decode step
    turn = cache.finish("r1")           # goes to the store; restore(turn) has the same effect in another process

Checks arguments and hands them to a core: the compiled one, or plain Python where that is not built. The answers are
the same. Use one cache from one thread.
"""

import importlib.util
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.core import Core
from agentspec.cache.identifiers import check_session_id
from agentspec.cache.policy import DraftPolicy
from agentspec.cache.reference_core import ReferenceCore
from agentspec.cache.tokens import MAX_VOCAB, TokenIds, as_int32, as_tokens, check_table
from agentspec.cache.types import CacheStats, Draft, FinishedTurn, Int32Array, StepDrafts
from agentspec.errors import (
    ConfigurationError,
    DuplicateRequestError,
    InvalidInputError,
    UnknownRequestError,
)

Rows = NDArray[np.integer] | Sequence[int]


class SuffixCache:
    """Suffix trees of running requests, sessions and tenants, and the drafts from them.

    max_tokens: budget for what is kept of finished requests (None: no limit); least recently used sessions and the
    older part of global trees go first, running requests never. vocab_size: token ids must be below it (None:
    below 2**31). native: True needs the compiled core, False takes plain Python, None the compiled one if it is there.
    Raises ConfigurationError for a value out of range.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        policy: DraftPolicy | None = None,
        vocab_size: int | None = None,
        native: bool | None = None,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ConfigurationError(f"max_tokens={max_tokens}: give a positive number of tokens, or None")
        if vocab_size is not None and not 1 <= vocab_size <= MAX_VOCAB:
            raise ConfigurationError(f"vocab_size={vocab_size}: give a number from 1 to {MAX_VOCAB}, or None")
        self.policy = policy or DraftPolicy()
        self._vocab_size = vocab_size or MAX_VOCAB
        self._core, self._native = _make_core(self.policy, max_tokens or 0, self._vocab_size, native)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._names: dict[str, tuple[str | None, str | None]] = {}  # session and tenant of each running request

    def start(
        self,
        request_id: str,
        prompt: TokenIds,
        *,
        session: str | None = None,
        group: str | None = None,
        tenant: str | None = None,
    ) -> None:
        """Begins a request. prompt: int32 [P] or a sequence of int. `group` is checked and not used yet.

        Raises InvalidTokenError, InvalidSessionError or DuplicateRequestError; then nothing has changed.
        """
        if request_id in self._slots:
            raise DuplicateRequestError(f"request_id {request_id!r} is already running: finish or abort it first")
        tokens = as_tokens(prompt, "prompt", self._vocab_size)
        _check_ids(session=session, group=group, tenant=tenant)
        slot = self._free.pop() if self._free else len(self._slots)
        self._core.start(slot, tokens, _session_key(tenant, session), tenant)
        self._slots[request_id] = slot
        self._names[request_id] = (session, tenant)

    def propose(self, request_ids: Sequence[str], max_draft: int | Sequence[int]) -> list[Draft]:
        """Drafts at most `max_draft` tokens (one number for all, or one each) for every request."""
        slots = self._slots_of(request_ids)
        room = [max_draft] * len(slots) if isinstance(max_draft, (int, np.integer)) else max_draft
        arrays = self._core.propose(slots, as_int32(room, "max_draft", len(slots)))
        tokens, offsets, sources, probabilities, lengths = arrays[:5]
        parts = [slice(begin, end) for begin, end in pairwise(offsets.tolist())]
        return [
            Draft(tokens[part], probabilities[part], sources[part], int(length))
            for part, length in zip(parts, lengths, strict=True)
        ]

    def extend(self, request_id: str, tokens: TokenIds) -> None:
        """Adds verified tokens (accepted and bonus; int32 [n]), which also judge the last proposed draft."""
        slot = self._slot(request_id)
        self._core.extend(slot, as_tokens(tokens, "tokens", self._vocab_size))

    def step(
        self,
        request_ids: Sequence[str],
        tokens: Int32Array,
        rows: Rows,
        lengths: Rows,
        room: Rows,
        scheduled: Rows,
    ) -> StepDrafts:
        """One decode step of n requests in one call, without the GIL, reading the engine's tokens in place.

        tokens: int32 [R, L], C-contiguous; row rows[i] holds prompt and output of request i, lengths[i] of them
        valid. What is new there is taken in (steps may be skipped), judges the previous draft, of which only the
        first scheduled[i] tokens were verified, and then at most room[i] tokens are drafted (0: none).
        A row with an illegal token, or shorter than what is known, is used up to there and gets no draft.
        Raises UnknownRequestError or InvalidInputError; then nothing has changed.
        """
        slots = self._slots_of(request_ids)
        count = len(slots)
        row_of, length_of = as_int32(rows, "rows", count), as_int32(lengths, "lengths", count)
        check_table(tokens, row_of, length_of)
        room_of, scheduled_of = as_int32(room, "room", count), as_int32(scheduled, "scheduled", count)
        return StepDrafts(*self._core.step(slots, tokens, row_of, length_of, room_of, scheduled_of))

    def finish(self, request_id: str, *, output_limit: int | None = None) -> FinishedTurn | None:
        """Ends a request and keeps its response for its session and tenant; returns what to store, if anything.

        output_limit: keep only the first so many tokens of the response (engines may decode past a stop).
        None is returned where there is neither session nor tenant, or where the session was removed meanwhile.
        """
        slot = self._slot(request_id)
        if output_limit is not None and output_limit < 0:
            raise InvalidInputError(f"output_limit={output_limit}: give a number of tokens, at least 0")
        session, tenant = self._names[request_id]
        turn = self._core.finish(slot, output_limit)
        self._release(request_id)
        return None if turn is None else FinishedTurn(tenant, session, *turn)

    def abort(self, request_id: str) -> None:
        """Forgets a request; nothing of it is kept."""
        self._core.abort(self._slot(request_id))
        self._release(request_id)

    def restore(self, turn: FinishedTurn) -> None:
        """Takes in a stored turn: the same effect as that turn having run here. Order matters within a session."""
        _check_ids(session=turn.session, tenant=turn.tenant)
        if turn.kept < 0:
            raise InvalidInputError(f"kept={turn.kept}: give a number of tokens, at least 0")
        tail = as_tokens(turn.prompt_tail, "prompt_tail", self._vocab_size)
        response = as_tokens(turn.response, "response", self._vocab_size)
        self._core.restore(_session_key(turn.tenant, turn.session), turn.tenant, turn.kept, tail, response)

    def remove_session(self, tenant: str | None, session: str) -> None:
        """Erases a session: its own text and what it gave to the tenant's global tree. No error if it is unknown.

        Requests of it that still run go on, drafting from their own text, and keep nothing when they finish.
        """
        _check_ids(session=session, tenant=tenant)
        key = _session_key(tenant, session)
        assert key is not None
        self._core.remove_session(key, tenant)

    def has_session(self, tenant: str | None, session: str) -> bool:
        """Whether text of this session is held."""
        _check_ids(session=session, tenant=tenant)
        key = _session_key(tenant, session)
        assert key is not None
        return self._core.has_session(key)

    def catch_up(self, budget: int | None = None) -> int:
        """Indexes at most `budget` tokens that are held but pending (None: all); returns how many.

        Steps do this little by little by themselves; after restoring much at start, this does it at once.
        """
        return self._core.catch_up(2**62 if budget is None else max(budget, 0))

    def stats(self) -> CacheStats:
        return CacheStats(*self._core.stats(), native=self._native)

    def _slot(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            raise UnknownRequestError(f"request_id {request_id!r} is not running: start it first")
        return slot

    def _slots_of(self, request_ids: Sequence[str]) -> Int32Array:
        try:
            return np.array([self._slots[request_id] for request_id in request_ids], np.int32)
        except KeyError as error:
            raise UnknownRequestError(f"request_id {error.args[0]!r} is not running: start it first") from None

    def _release(self, request_id: str) -> None:
        self._free.append(self._slots.pop(request_id))
        del self._names[request_id]


def native_available() -> bool:
    """Whether the compiled core was built and can be loaded."""
    return importlib.util.find_spec("agentspec.cache._native") is not None


def _make_core(policy: DraftPolicy, max_tokens: int, vocab_size: int, native: bool | None) -> tuple[Core, bool]:
    if native is False or (native is None and not native_available()):
        return ReferenceCore(policy, max_tokens, vocab_size), False
    if not native_available():
        raise ConfigurationError(
            "native=True: the compiled core is not installed; install a C++ compiler and reinstall agentspec, "
            "or leave `native` out"
        )
    from agentspec.cache import _native

    core = _native.Core(
        cost=policy.cost,
        max_draft=policy.max_draft,
        min_match=policy.min_match,
        prior_weight=policy.prior_weight,
        memory=policy.memory,
        priors=policy.priors(),
        max_tokens=max_tokens,
        vocab_size=vocab_size,
    )
    return core, True


def _check_ids(**ids: str | None) -> None:
    for name, value in ids.items():
        if value is not None:
            check_session_id(value, name)


def _session_key(tenant: str | None, session: str | None) -> str | None:
    """Names a session so that no two pairs of tenant and session share a key; the tenant's length frames it."""
    if session is None:
        return None
    return f"-{session}" if tenant is None else f"{len(tenant)}:{tenant}{session}"
