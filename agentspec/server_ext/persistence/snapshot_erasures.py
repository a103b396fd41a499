"""Remove from a loaded snapshot what was erased in the store since it was saved."""

import logging
import time
from collections.abc import Mapping

from agentspec.cache import SuffixCache
from agentspec.cache.store import Follower, LogNames, Store
from agentspec.cache.store.background.follower import MAX_LOGS
from agentspec.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

FORGET_SECONDS = 0.05
"""Pause between two looks at whether a tenant has requests."""


class SnapshotErasures:
    """Remove from a cache that a snapshot was loaded into what other processes have erased meanwhile.

    follower: applies the erasures. outdated: the tenant to forget as soon as none of its requests runs, if there is
    one. Any thread may make the calls.
    """

    def __init__(self, cache: SuffixCache, store: Store, logs: LogNames, follower: Follower) -> None:
        self.outdated: frozenset[str | None] = frozenset()
        self._cache, self._store, self._logs, self._follower = cache, store, logs, follower
        # Tenants and their places: of the snapshot on the disk, and of the one that is being saved, or could not be.
        self._saved = dict[str | None, str | None]()
        self._saving = dict[str | None, str | None]()

    def places(self) -> dict[str, str]:
        """Return, for each log, the cursor up to which erasures are known, to be saved with a snapshot.

        Call it just before each save, and `note_saved` once that has succeeded.
        """
        places = self._follower.places()
        self._saving = self._tenants_at(places)
        return places

    def note_saved(self) -> None:
        """Note that the snapshot on the disk is now the one for which `places` was called last."""
        self._saved = self._saving

    def may_be_saved(self, tenant: str | None) -> bool:
        """Return whether a snapshot of this process may hold a session of a tenant that was erased since it was saved.

        Call it before the tenant's log is followed. Raises StoreError.
        """
        for saved in (self._saved, self._saving):  # the older one first: all that was erased since, was so for both
            if tenant in saved:
                place = saved[tenant]
                return place is None or bool(self._store.tombstones(self._logs.of(tenant), after=place))
        return False

    def catch_up(self, places: Mapping[str, str]) -> bool:
        """Remove what was erased since these places were saved. Return whether the cache held any of that.

        Call it before the cache is used. A session that was used again since its erasure is removed, too: the store has
        what was said since. Where the store does not tell what was erased, or retention may have removed a tombstone
        since, the tenant is forgotten: its log brings back what may be drafted from.
        """
        before = self._follower.stats().erased
        tenants = self._cache.tenants()
        told = set[str | None]()  # of whom all erasures are known now
        try:
            for tenant in reversed(tenants[-MAX_LOGS:]):
                if self._catch_up_of(tenant, places):
                    told.add(tenant)
        except StoreUnavailableError as error:
            _warn_of_unknown_erasures(error)
        self._saved = self._tenants_at(places)
        untold = [tenant for tenant in tenants if tenant not in told]
        if untold:
            what = "agentspec: saved suffix indexes of %d of %d tenants are not used"
            logger.warning(
                f"{what}, because the store does not tell all that was erased since", len(untold), len(tenants)
            )
        for tenant in untold:
            self._forget_tenant(tenant)
        return bool(untold) or self._follower.stats().erased > before

    def _catch_up_of(self, tenant: str | None, places: Mapping[str, str]) -> bool:
        """Remove what was erased of a tenant, and follow its log. Return whether the store told it all.

        Raises StoreUnavailableError.
        """
        log = self._logs.of(tenant)
        try:
            self._follower.catch_up(log, tenant, after=places.get(log))
            return log in places and self._store.history(log, places[log]) == "whole"
        except StoreUnavailableError:
            raise
        except Exception as error:  # a store may raise anything, and none of it says what was erased
            _warn_of_unknown_erasures(error)
            return False

    def _tenants_at(self, places: Mapping[str, str]) -> dict[str | None, str | None]:
        return {tenant: places.get(self._logs.of(tenant)) for tenant in self._cache.tenants()}

    def _forget_tenant(self, tenant: str | None) -> None:
        """Forget a tenant that may hold erased text. Where the start did not wait, its requests make way first."""
        while not self._cache.forget_tenant(tenant):
            self.outdated = frozenset([tenant])
            time.sleep(FORGET_SECONDS)
        self.outdated = frozenset()


def _warn_of_unknown_erasures(error: Exception) -> None:
    logger.warning("agentspec: saved suffix indexes are not used, what was erased is unknown: %s", error)
