"""Keep the secret under which servers name what they store on a Redis, and restore it if the Redis loses it.

prefix:secret      the store's own secret, for servers without AGENTSPEC_SECRET
prefix:secret-id   id of the secret that the latest server to start has: its own, or the store's
"""

import logging
import secrets

from agentspec.cache.store.redis.client import RedisClient

logger = logging.getLogger(__name__)


class RedisSecret:
    """Read, make and restore the store's secret, and the id of the secret in use. prefix: of the store's keys."""

    def __init__(self, client: RedisClient, prefix: str) -> None:
        self._client = client
        self._key, self._id_key = f"{prefix}:secret", f"{prefix}:secret-id"
        self._kept: bytes | None = None  # the store's secret, if this process uses it
        self._id: str | None = None  # of the secret that this process uses

    def inherit(self, other: "RedisSecret") -> None:
        """Restore the secret and the id that another object of this process restores."""
        self._kept, self._id = other._kept, other._id

    def get(self) -> bytes:
        """Return the store's secret. A store without one gets a new one."""
        return self._get_or(secrets.token_bytes(32))

    def keep(self, secret: bytes) -> None:
        """Restore this secret from now on, if the store loses its own."""
        self._kept = secret

    def swap_id(self, secret_id: str) -> str | None:
        """Set the id of the secret in use, and return the one before; None: there was none. Restore it from now on."""
        self._id = secret_id
        before: bytes | None = self._client.command("GET", self._id_key)
        if before != secret_id.encode():  # a full server refuses to set what is there
            self._client.command("SET", self._id_key, secret_id)
        return None if before is None else before.decode()

    def restore(self) -> None:
        """Give the store what it has lost of these, for example by FLUSHALL."""
        if self._kept is not None and self._get_or(self._kept) != self._kept:
            self._kept = None  # so that this is logged once
            logger.warning(
                "agentspec: the store has another secret than this server, as where it was emptied and another server"
                " started: servers that start from now on find nothing that this one stores; restart it, or give all"
                " servers one AGENTSPEC_SECRET"
            )
        if self._id is not None and self._client.command("GET", self._id_key) is None:
            self._client.command("SET", self._id_key, self._id, "NX")

    def _get_or(self, own: bytes) -> bytes:
        if self._client.command("GET", self._key) is None:  # a full server refuses SET NX even if the key exists
            self._client.command("SET", self._key, own, "NX")
        held: bytes | None = self._client.command("GET", self._key)
        return own if held is None else held  # a failover may lose it at once; `restore` puts it back
