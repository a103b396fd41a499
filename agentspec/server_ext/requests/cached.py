"""Start requests in the suffix cache, keep what they said, and send it to the store."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from agentspec.server_ext.figures.metrics import Metrics
from agentspec.server_ext.identity.prompt_groups import PromptGroups
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.step import Int32, NewRequest, RequestState

logger = logging.getLogger(__name__)

_LEAST_KEPT = 2
"""Shortest response that is kept, in tokens. Beam search makes a request of one token for each step and beam."""


class CachedRequests:
    """Start and finish an engine's requests in its cache. No call raises.

    groups: finds the group of a request that names none.
    """

    def __init__(self, persistence: Persistence, metrics: Metrics, groups: PromptGroups) -> None:
        self._cache, self._persistence = persistence.cache, persistence
        self._metrics, self._groups = metrics, groups

    def start(
        self, state: RequestState, new: NewRequest, prompt: Sequence[int] | Int32, response: Sequence[int]
    ) -> None:
        """Start a request, and load what the store has for it. response: the tokens it was given, if it has ended.

        Sets ``state.failed`` if it cannot start.
        """
        identity = new.identity
        if state.identity.session != identity.session:  # the session was erased: draft from the request's own text
            identity = replace(identity, session=None, scope="none")
        begun = False
        try:
            group = self._groups.group_of(identity, prompt)
            self._cache.start(
                new.request_id,
                prompt,
                session=identity.session,
                group=group,
                tenant=identity.tenant,
                scope=identity.scope,
                end_tokens=new.end_tokens,
                owner=identity.owner,
                tenant_owner=identity.tenant_owner,
                prediction=new.prediction,
                quotable=new.quotable,
                parent=identity.parent_session,
            )
            begun = True
            if identity.session is not None and state.identity.session is None:  # another thread has just erased it
                self._cache.remove_session(identity.tenant, identity.session)
            if len(response):
                self._cache.extend(new.request_id, response)
        except Exception as error:  # the other requests must get their drafts even if this one cannot start
            self._metrics.count_error("start", error)
            state.failed = True
            if begun:  # otherwise the id may be another request's
                self.drop(new.request_id)
            return
        state.started = True
        self._metrics.counters["started"] += 1
        if identity.ignored_ids:
            self._metrics.counters["ignored_ids"] += identity.ignored_ids
        try:
            family = self._cache.family_of(new.request_id)
            self._persistence.request_load(identity, group=group, family=family)
        except Exception as error:  # it drafts from what the cache holds
            self._metrics.count_error("load", error)

    def keep(self, state: RequestState, output_limit: int | None) -> None:
        """Keep a response, unless it is too short, and send the turn to the store.

        output_limit: tokens of the response that the engine returned; None: all.
        """
        identity = state.identity
        if state.started:
            self._metrics.counters["finished"] += 1
        if not state.failed:
            if output_limit is not None and output_limit < _LEAST_KEPT:
                self.drop(state.request_id)
            else:
                self._store(state, output_limit)
        if identity.final and identity.session is not None:
            self._metrics.counters["sessions_ended"] += 1
            try:
                self._cache.free_session(identity.tenant, identity.session)
            except Exception as error:
                self._metrics.count_error("finish", error)

    def drop(self, request_id: str) -> None:
        """Remove a request and keep nothing of it."""
        try:
            self._cache.abort(request_id)
        except Exception:
            logger.debug("agentspec: could not forget %s", request_id, exc_info=True)

    def _store(self, state: RequestState, output_limit: int | None) -> None:
        """Keep a response in the cache, and queue its turn for the store."""
        try:
            name = self._persistence.next_name()
            turn = self._cache.finish(state.request_id, output_limit=output_limit, name=name)
            if turn is not None and turn.session == state.identity.session:  # unless it has just been erased
                self._persistence.save(turn, state.identity)
        except Exception as error:
            self._metrics.count_error("finish", error)
            self.drop(state.request_id)
