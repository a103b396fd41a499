"""Keep finished turns in the suffix indexes of their sessions, groups and tenants."""

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from agentspec.cache.arguments import LARGEST_NUMBER, TokenIds, as_prompt, as_turn, check_text, is_number
from agentspec.cache.core import PreparedSession, native
from agentspec.cache.names import UNNAMED_TENANT, Names, key_of, names_to_load, session_key
from agentspec.cache.policy import DEFAULT_COST, DraftPolicy
from agentspec.cache.types import UNIT_NUMBERS, CacheStats, FinishedTurn, PublicCounts
from agentspec.errors import InvalidInputError, SnapshotError
from agentspec.files import size_remedy
from agentspec.identifiers import check_ids

_NUMBER_TYPES = (int, float, np.integer, np.floating)
_ANY_SECONDS = 1e6  # more than `catch_up` takes
_PUBLIC_BYTES = 20
"""Most memory that a token of the public corpus takes when it is added; on average it takes 11 bytes."""

_SAVE_TRIES = 5


def _file(path: str | Path) -> str:
    """Return the name of a file. Raises InvalidInputError for anything but a string or a path in UTF-8."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    check_text("path", name)
    return name


def _length(text: TokenIds) -> int:
    """Return the number of a text's tokens; 0 for an object without a length, which `as_prompt` refuses."""
    try:
        return len(text)
    except TypeError:
        return 0


class KeptTurns:
    """Keep the turns of finished requests: restore, index, evict, erase, save and load them.

    This is the part of SuffixCache that needs no running request.
    """

    def __init__(self, core: native.Core, policy: DraftPolicy, vocab_size: int) -> None:
        self.policy = policy
        self._core = core
        self._vocab_size = vocab_size
        self._public_bytes = 0  # memory of the public corpus

    def restore(self, turn: FinishedTurn, *, held_only: bool = False) -> None:
        """Add a stored turn to the indexes, as if it had run here. Restoring a named turn again changes nothing.

        held_only: add the turn only to those of its session, named group and tenant that the cache holds, and count
        none of them as used. Use it for a turn that another process has just stored: a session that the cache does not
        hold is loaded when a request names it.
        Session, group and tenant each add a named turn (`writer`, `number`) unless they hold it. Of a turn without a
        name, the session adds the part of the text that is new to it, and group and tenant add the turn if there is
        such a part; without a session that takes it, they add it each time. Turns may come in any order; in order they
        take the least memory. Raises InvalidInputError, InvalidTokenError or InvalidSessionError for a turn that cannot
        be right, and then changes nothing.
        """
        names, given = Names.of(turn), as_turn(turn, self._vocab_size)
        self._core.restore(names.for_core(), turn.owner, given, held_only=held_only)

    def prepare(self, turns: Sequence[FinishedTurn]) -> PreparedSession:
        """Index stored turns of one session beside the cache, for `adopt`. No step waits for it.

        turns: all known turns of the session, in order. Any thread may call it. Raises as `restore` does, and
        InvalidInputError unless the turns name one session of one tenant.
        """
        if not isinstance(turns, Sequence) or not all(isinstance(turn, FinishedTurn) for turn in turns):
            raise InvalidInputError("turns: give a sequence of FinishedTurn")
        if len({(turn.tenant, turn.session) for turn in turns}) != 1 or turns[0].session is None:
            raise InvalidInputError("turns: give those of one session")
        prepared = self._core.prepare(key_of(turns[0].tenant, turns[0].session))
        for turn in turns:
            names, given = Names.of(turn), as_turn(turn, self._vocab_size)
            if names.scope != "none":
                has_group = names.scope == "tenant" and names.group is not None
                prepared.add(given, own=not has_group and names.family is None)
        prepared.finish()
        return prepared

    def adopt(self, prepared: PreparedSession, of: FinishedTurn) -> bool:
        """Put a prepared session into the cache, in place of the session's text there. of: any of its turns.

        Afterwards `restore` its turns, which adds those with a name to their groups and tenant, and no others. Returns
        False, and does nothing, if the cache holds turns of the session or its family that were not prepared, if the
        session turns out to be in another session's family, or if the session's budget cannot hold all of it. Then
        `restore` adds the turns to the session, too. A prepared session can be adopted once. Raises InvalidInputError
        for another session's turn.
        """
        Names.of(of)
        if not isinstance(prepared, PreparedSession) or prepared.key != key_of(of.tenant, of.session):
            raise InvalidInputError("of: give a turn of the session that `prepare` prepared")
        family = key_of(of.tenant, of.family)
        return self._core.adopt(prepared, tenant=of.tenant or UNNAMED_TENANT, family=family, owner=of.owner)

    def learn_from(self, turn: FinishedTurn) -> int:
        """Learn how the drafts of another process's turn would have fared here. Return the tokens of its response.

        So every replica learns from the requests of all. Call this before `restore`, in any thread: it takes some
        microseconds a token, and holds steps up for less than a tenth of a millisecond at a time. It keeps nothing of
        the turn. It returns 0, and learns nothing, for a turn that is not of scope "tenant", that the tenant's corpus
        holds already, or whose tenant the cache does not know, and under ArcticInference's rule. Raises
        InvalidInputError, InvalidTokenError or InvalidSessionError.
        """
        names, given = Names.of(turn), as_turn(turn, self._vocab_size)
        return self._core.learn_from(names.for_core(), given, self._cost(None))

    def publish(self, texts: Iterable[TokenIds], *, max_bytes: int) -> PublicCounts:
        """Let every request of scope "tenant" draft from these texts too, whatever its tenant, as source "public".

        texts: int32 arrays or sequences of int. max_bytes: most memory that they may take; texts beyond that are left
        out. The memory counts in the cache's budget. Nothing is ever added to the corpus or evicted from it, and
        snapshots leave it out; a second call replaces it. Any thread may call it while steps run. The texts are indexed
        in the calling thread, before any is drafted from. ArcticInference's rule does not draft from them. Raises
        InvalidTokenError for an illegal token, and InvalidInputError if `max_bytes` is wrong or `texts` is not
        iterable; then the corpus is as before.
        """
        if not is_number(max_bytes) or max_bytes < 0:
            raise InvalidInputError(f"max_bytes={max_bytes!r}: give a number of bytes, at least 0")
        if not isinstance(texts, Iterable):
            raise InvalidInputError(f"texts: give an iterable of texts, not {type(texts).__name__}")
        index, taken, tokens, size, left_out = native.PublicIndex(), 0, 0, 0, 0
        try:
            for text in texts:
                if size + _PUBLIC_BYTES * _length(text) > max_bytes:
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
        return PublicCounts(taken, tokens, size, left_out)

    def remove_session(self, tenant: str | None, session: str) -> None:
        """Erase a session: its own text and its share of its tenant's index. Does nothing if it is unknown.

        Its running requests go on without its text, and keep nothing when they finish. If a snapshot is being put in
        place, the call waits for that: later, none is put there that holds the session.
        """
        self._core.remove_session(session_key(tenant, session), tenant or UNNAMED_TENANT)

    def free_session(self, tenant: str | None, session: str) -> None:
        """Evict a session that its client has ended, as soon as none of its requests run.

        If it is the root of a family of which no request runs then, the family is evicted, too. What it said stays in
        its named group, its tenant's corpus and the family of its root. A request that starts in the session before
        the eviction cancels it. Does nothing if the cache holds no such session.
        """
        self._core.free_session(session_key(tenant, session))

    def has_session(self, tenant: str | None, session: str) -> bool:
        """Return whether the cache holds text of this session."""
        return self._core.has_session(session_key(tenant, session))

    def needs_load(
        self,
        tenant: str | None,
        session: str | None = None,
        *,
        group: str | None = None,
        family: str | None = None,
    ) -> bool:
        """Return whether the store may hold turns of a session, named group or family that were not restored yet.

        family: its root session. Name one of them, or none for the tenant's corpus. Returns True until `mark_loaded`
        is called for it, and again after its eviction; for a corpus, after the eviction of all its text.
        """
        return self._core.needs_load(names_to_load(tenant, session, group, family))

    def mark_loaded(
        self,
        tenant: str | None,
        session: str | None = None,
        *,
        group: str | None = None,
        family: str | None = None,
    ) -> None:
        """Note that every stored turn of a session, named group, family or tenant's corpus was restored.

        Name it as for `needs_load`. Does nothing if the cache holds neither text nor a running request of it.
        """
        self._core.mark_loaded(names_to_load(tenant, session, group, family))

    def tenants(self) -> list[str | None]:
        """Return the known tenants, least recently used first. None: the tenant of requests without one."""
        return [tenant or None for tenant in self._core.tenants()]

    def begin_weights(self) -> None:
        """Note that the model has new weights, for a history window in weights. Drafts stay correct without it."""
        self._core.begin_period(UNIT_NUMBERS["weights"])

    def begin_epoch(self) -> None:
        """Note that an epoch begins, for a history window in epochs."""
        self._core.begin_period(UNIT_NUMBERS["epochs"])

    def forget_tenant(self, tenant: str | None) -> bool:
        """Forget a tenant with its corpus, sessions and groups. Returns False if requests of it run.

        Then the tenant stays, but without what was forgotten before such a request started. Steps may run meanwhile.
        Later steps give the memory back.
        """
        check_ids(tenant=tenant)
        return self._core.forget_tenant(tenant or UNNAMED_TENANT)

    def forget_tenants(self) -> bool:
        """Forget all tenants, whatever their names are. Returns False if some stay because requests of them run."""
        kept = [tenant for tenant in self._core.tenants() if not self._core.forget_tenant(tenant)]
        return not kept

    def catch_up(self, budget: int | None = None, *, seconds: float | None = None) -> int:
        """Index pending text, evict what exceeds the budgets, remove evicted text and give its memory back.

        budget: about how many tokens to process. seconds: CPU time of this thread to spend. None: no limit. Returns the
        tokens processed, 0 when none are left. Each step does a little of this work. Call it while the engine is idle,
        with few `seconds`, because steps wait meanwhile; and after restoring many turns at start. Raises
        InvalidInputError for a budget that is no number.
        """
        if budget is not None and not is_number(budget):
            raise InvalidInputError(f"budget={budget!r}: give a number of tokens, or None for no limit")
        if seconds is not None and not (isinstance(seconds, _NUMBER_TYPES) and seconds == seconds):  # not NaN
            raise InvalidInputError(f"seconds={seconds!r}: give a number, or None for no limit")
        if budget is not None or seconds is not None:
            tokens = LARGEST_NUMBER if budget is None else min(max(budget, 0), LARGEST_NUMBER)
            return self._core.catch_up(tokens, _ANY_SECONDS if seconds is None else min(seconds, _ANY_SECONDS))
        total = 0
        while done := self._core.catch_up(LARGEST_NUMBER, _ANY_SECONDS):
            total += done
        return total

    def index_until_closed(self) -> None:
        """Do the work of `catch_up` whenever some waits, until `close` is called. Call it in a thread of its own.

        Calls that an engine waits for go first: the thread releases the lock within some 50 microseconds. On Linux the
        thread gets the lowest priority.
        """
        self._core.index_until_closed()

    def close(self) -> None:
        """End `index_until_closed`. The cache can still be used."""
        self._core.close()

    def save(self, path: str | Path, *, identity: str = "", note: bytes = b"") -> None:
        """Write sessions, groups, tenants and their learned state to a file, without running requests.

        identity: names what the snapshot can be used with, such as a model and a policy; loading compares it. note:
        bytes for the caller, which loading returns.
        Another thread may call it while steps run: it holds them up for less than half a millisecond at a time. It
        writes beside `path` and then renames, so the file is never incomplete, and only its owner can read it. A
        process that is killed meanwhile leaves a file `path`.tmpXXXXXX, which may be deleted. Raises SnapshotError if
        the file cannot be written, or if sessions were erased during each of five attempts, and InvalidInputError for
        arguments of other types.
        """
        file = _file(path)
        check_text("identity", identity)
        if not isinstance(note, bytes):
            raise InvalidInputError(f"note={note!r:.60}: give bytes")
        try:
            for _ in range(_SAVE_TRIES):
                if self._core.save(file, identity, note):
                    return
        except (OSError, RuntimeError, MemoryError) as error:
            remedy = size_remedy() if os.strerror(errno.EFBIG) in str(error) else ""
            raise SnapshotError(f"{path}: cannot save the snapshot: {error}{remedy}") from error
        raise SnapshotError(f"{path}: cannot save the snapshot: sessions are being erased; try again later")

    def load_snapshot(self, path: str | Path, *, identity: str = "") -> bytes:
        """Load a file that was saved under the same identity into this cache, which must be new. Return the note.

        Another thread may call it. Raises SnapshotError, naming the fault, for a file that cannot be read, is damaged,
        or has another version or identity or a larger vocabulary, and if the cache is in use already; InvalidInputError
        for arguments of other types.
        """
        file = _file(path)
        check_text("identity", identity)
        try:
            return self._core.load(file, identity)
        except (OSError, RuntimeError, MemoryError) as error:
            raise SnapshotError(f"{path}: cannot load the snapshot: {error}") from error

    def stats(self) -> CacheStats:
        """Return the current sizes."""
        return CacheStats(*self._core.stats())

    def worked_ns(self) -> int:
        """Return the CPU time that steps and `catch_up` have spent beside drafting so far, in nanoseconds."""
        return self._core.worked()

    def _cost(self, cost: float | None) -> float:
        if cost is None:
            return DEFAULT_COST if self.policy.cost is None else self.policy.cost
        if not isinstance(cost, _NUMBER_TYPES) or not 0.0 <= cost <= 10.0:
            raise InvalidInputError(f"cost={cost!r}: give a number from 0 to 10, or None")
        return cost
