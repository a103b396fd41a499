"""Test waiting for new entries of logs on Redis, some of which cannot be read."""

from collections.abc import Sequence

import pytest

from agentspec.cache.store import RedisStore
from agentspec.cache.store.redis_client import RedisClient
from agentspec.cache.store.redis_layout import Layout
from agentspec.cache.store.redis_shard import Id
from agentspec.errors import StoreUnavailableError

from .test_redis_store import raw, server, store

__all__ = ["server", "store"]

pytestmark = pytest.mark.usefixtures("patience")


class Divided(Layout):
    """Lay logs out as on a Cluster: one node has the log "away", and does not answer."""

    def part(self, client: RedisClient, namespace: str) -> str:
        return "away" if namespace == "away" else "here"

    def ends(self, client: RedisClient, namespaces: Sequence[str]) -> dict[str, list[Id]]:
        if "away" in namespaces:
            raise StoreUnavailableError("this node does not answer")
        return super().ends(client, namespaces)


def test_a_log_that_is_refused_is_found_though_another_node_is_away(store: RedisStore) -> None:
    """Its reader gets the error, and then leaves the log alone."""
    store._waiting._layout = Divided("agentspec", 1)
    raw(store).set("{agentspec:refused}:3:log", "something else")
    assert store.wait({"refused": "", "away": ""}, 10) == ["refused"]
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        store.wait({"away": ""}, 10)
