"""Move finished turns to the store, and stored turns into the cache.

Only the background writer and loader touch the store. Everything here returns at once, except ``warm_up``, which is
called before the engine serves.
"""

import logging
import time
from collections import deque
from typing import Any

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.cache.store import BackgroundLoader, BackgroundWriter, Store, TurnRecord
from agentspec.server_ext.identity import Identity

logger = logging.getLogger(__name__)

_TOKENS_PER_STEP = 16_384
"""Most stored tokens that one decode step puts into the cache, so that a large load cannot stall it."""


class Persistence:
    """Move turns between an engine's cache and one namespace of the store. tenant: the operator's setting."""

    def __init__(self, store: Store, namespace: str, tenant: str | None, preload: int) -> None:
        self._tenant = tenant
        self._preload = preload
        self._store = store
        self._writer = BackgroundWriter(store, namespace)
        self._loader = BackgroundLoader(store, namespace)
        self._arrived: deque[TurnRecord] = deque()
        self._own: set[str] = set()  # sessions with turns finished here; older records would come out of order
        self._restored = 0
        self._refused = 0

    def save(self, turn: FinishedTurn) -> None:
        """Queue a finished turn for the store."""
        if turn.session is not None:
            self._own.add(turn.session)
        self._writer.put(
            TurnRecord(
                session=turn.session or "",
                kept=turn.kept,
                prompt_tail=turn.prompt_tail,
                response=turn.response,
                created=time.time(),
                group=turn.group,
                tenant=turn.tenant,
                scope=turn.scope,
            )
        )

    def request_session(self, cache: SuffixCache, identity: Identity) -> None:
        """Request the stored turns of a request's session unless the cache has them."""
        session = identity.session
        if session is None or identity.scope == "none" or session in self._own:
            return
        if not cache.has_session(identity.tenant, session):
            self._loader.request(session)

    def apply_loaded(self, cache: SuffixCache, budget: int = _TOKENS_PER_STEP) -> int:
        """Put loaded turns into the cache, at most about ``budget`` tokens. Return the number of turns."""
        for batch in self._loader.poll():
            self._arrived.extend(batch)
        count = 0
        while self._arrived and budget > 0:
            record = self._arrived.popleft()
            budget -= len(record.prompt_tail) + len(record.response)
            count += self._restore(cache, record)
        return count

    def warm_up(self, cache: SuffixCache, timeout: float) -> int:
        """Load the newest stored turns before serving, in at most ``timeout`` seconds. Return their number."""
        if self._preload == 0:
            return 0
        self._loader.preload(newest=self._preload)
        deadline = time.monotonic() + timeout
        count, pending = 0, True
        while pending and time.monotonic() < deadline:
            time.sleep(0.002)
            pending = self._loader.is_pending(None)  # look before polling, so that the poll returns all of it
            count += self.apply_loaded(cache, budget=1 << 62)
        if pending:
            logger.warning("agentspec: the store is slow or away; what it holds arrives while serving")
        cache.catch_up()
        return count

    def stats(self) -> dict[str, Any]:
        """Return the state of the writer and the loader, as JSON."""
        return {
            "writer": self._writer.stats().as_dict(),
            "loader": self._loader.stats().as_dict(),
            "restored": self._restored,
            "refused": self._refused,
        }

    def close(self) -> None:
        """Write the queued turns, then close the store."""
        self._writer.close()
        self._loader.close()
        self._store.close()

    def _restore(self, cache: SuffixCache, record: TurnRecord) -> int:
        session = record.session or None
        if session in self._own:
            return 0
        tenant, scope = record.tenant, record.scope
        if scope is None:  # older releases shared nothing without a named tenant
            tenant, scope = self._tenant, "session" if self._tenant is None else "tenant"
        try:
            cache.restore(
                FinishedTurn(
                    tenant=tenant,
                    session=session,
                    kept=record.kept,
                    prompt_tail=record.prompt_tail,
                    response=record.response,
                    group=record.group,
                    scope=scope,
                )
            )
        except Exception as error:  # e.g. a token that this model does not have
            self._refused += 1
            if self._refused == 1:
                logger.warning("agentspec: a stored turn cannot be used and is skipped: %s", error)
            return 0
        self._restored += 1
        return 1
