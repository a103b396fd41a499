"""Tell erasures from before this process served from those that may concern its own requests."""

import logging
from collections.abc import Sequence

from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.cache.store.base import Store
from agentspec.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

_MOST_LOGS = 16_384
"""Most logs whose ends are held. In the others all erasures count as if they came later."""


class EarlierErasures:
    """Hold where the logs of a store ended before this process had its first request.

    What was erased up to there concerns none of its requests, so a session that is used again keeps its turns. Any
    thread may make any call.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends = dict[str, str]()  # by log
        self._serves = False

    def read(self, prefix: str) -> None:
        """Read the ends of all logs whose names begin with ``prefix``, until `stop` is called. Raises StoreError."""
        courtesy = Courtesy()
        for name in self._store.namespaces(prefix)[:_MOST_LOGS]:
            try:
                end = self._store.newest(name)
            except StoreUnavailableError:
                raise
            except StoreError as error:  # this log is at fault
                logger.debug("agentspec: the end of the log %s is not known: %s", name, error)
                continue
            if self._serves:  # what was erased meanwhile may concern a request
                return
            self._ends[name] = end
            courtesy.pause()

    def stop(self) -> None:
        """Note that this process serves from now on."""
        self._serves = True

    def without(self, namespace: str, sessions: Sequence[str]) -> Sequence[str]:
        """Return these erased sessions of a log without those that were last erased before this process served."""
        end = self._ends.get(namespace)
        if not (end and sessions) or self._store.history(namespace, end) == "lost":  # then its cursors begin anew
            return sessions
        later = self._store.tombstones(namespace, after=end)
        return [session for session in sessions if session in later]
