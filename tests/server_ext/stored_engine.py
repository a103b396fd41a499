"""Help the tests of persistence: a cache and its persistence on a store that fails as told."""

from collections.abc import Callable, Collection
from typing import Any

from agentspec.cache import SuffixCache
from agentspec.cache.store import RecordReader, Store, TurnRecord
from agentspec.cache.store.contexts import SessionContexts
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence, SessionHolder
from tests.store.flaky import store
from tests.store.helpers import LOGS, wait_until

__all__ = ["store"]

TENANT = "t"
NS = LOGS.of(TENANT)


class Holder(SessionHolder):
    """Call a function in the middle of each erasure."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def forget_drafts(self, session: str, tenants: Collection[str | None]) -> None:
        self._act()


class Engine:
    """Hold a cache and its persistence, as an engine's process does. Several may share a store."""

    def __init__(self, store: Store, **cache: Any) -> None:
        self.cache = SuffixCache(**cache)
        self.persistence = Persistence(self.cache, store, LOGS, preload=0)
        self.count = 0

    def start(
        self, prompt: list[int], session: str | None = "s", group: str | None = None, parent: str | None = None
    ) -> str:
        self.count += 1
        name = f"r{self.count}"
        identity = Identity(tenant=TENANT, session=session, group=group, session_name=session, principal="p")
        self.cache.start(name, prompt, session=session, group=group, tenant=TENANT, parent=parent)
        family = self.cache.family_of(name)
        self.persistence.request_load(identity, group=identity.group, family=family)
        return name

    def finish(self, name: str, response: list[int], session: str | None = "s") -> None:
        self.cache.extend(name, response)
        turn = self.cache.finish(name, name=self.persistence.next_name())
        assert turn is not None
        self.persistence.save(turn, Identity(tenant=TENANT, session=session, session_name=session, principal="p"))

    def say(self, prompt: list[int], response: list[int], session: str | None = "s", group: str | None = None) -> None:
        self.finish(self.start(prompt, session, group), response, session)

    def load(self) -> int:
        """Apply requested turns step by step until no more come. Return the number of turns."""
        count = 0

        def done() -> bool:
            nonlocal count
            stats = self.persistence.stats()["loader"]
            count += self.persistence.apply_loaded()
            idle = stats["pending"] == 0 and stats["ready_bytes"] == 0 and not self.persistence._turns.has_ready()
            return idle and not self.persistence._loader._untaken  # turns requested meanwhile are read again

        wait_until(done)
        self.cache.catch_up()
        return count

    def flush(self) -> None:
        assert self.persistence._writer.flush(60)

    def draft(self, name: str, wanted: int = 3) -> list[int]:
        self.cache.catch_up()
        found: list[int] = self.cache.propose([name], wanted, cost=0.0)[0].token_ids.tolist()
        return found


def text(start: int, count: int = 40) -> list[int]:
    return list(range(start, start + count))


def records(store: Store) -> list[TurnRecord]:
    return [record for _, record in RecordReader().read(store.read(NS)) if isinstance(record, TurnRecord)]


def prompts(store: Store) -> list[tuple[list[int], list[int]]]:
    """Return the whole prompts and responses of one session's turns, as training reads them."""
    contexts = SessionContexts()
    found = [(contexts.add(record), record.response) for record in records(store)]
    return [(prompt.tolist(), response.tolist()) for prompt, response in found if prompt is not None]
