"""What is held for sessions, groups and tenants, and what leaves: budgets, erasure, snapshots. In plain Python."""

from pathlib import Path

from agentspec.cache.core import LimitNumbers
from agentspec.cache.policy import DraftPolicy
from agentspec.cache.reference import ReferenceIndex
from agentspec.cache.reference_drafter import SESSION_BITS, TENANT_BITS
from agentspec.cache.reference_judge import Learned
from agentspec.cache.reference_snapshot import read_snapshot, write_snapshot
from agentspec.cache.reference_state import Corpus, Group, Holding, Session, Tenant

EVERYTHING = 1 << 62
BYTES_OF_PLAIN = 60  # a token, roughly: plain Python does not say what its lists hold
EVICT_PER_CALL = 64  # sessions, groups or documents evicted in one call


class Holdings:
    def __init__(self, policy: DraftPolicy, limits: LimitNumbers) -> None:
        self.limits = limits  # tokens and bytes for the process, a tenant, a session; 0: no limit
        self._policy = policy
        self._tick = 0
        self._by_key: dict[str, Holding] = {}  # least recently used first
        self._tenants: dict[str, Tenant] = {}

    def next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def tenant(self, key: str | None) -> Tenant | None:
        if key is None:
            return None
        if key not in self._tenants:
            self._tenants[key] = Tenant()
        self._tenants[key].used = self.next_tick()
        return self._tenants[key]

    def session(self, key: str | None, tenant: Tenant | None) -> Session | None:
        if key is None:
            return None
        session = self._by_key.get("s" + key)
        if session is None:
            session = Session("s" + key, tenant)
        assert isinstance(session, Session)
        self.touch(session)
        return session

    def group(self, key: str | None, session: str | None, tenant: Tenant | None) -> Group | None:
        """A session that has no group is one of its own: its responses alone, apart from what its prompts quote, are
        better to draft from."""
        if tenant is None or (key is None and session is None):
            return None
        name = f"o{session}" if key is None else f"g{key}"
        group = self._by_key.get(name) or Group(name, tenant)
        assert isinstance(group, Group)
        self.touch(group)
        return group

    def learned(self, of: Tenant | Session | None) -> Learned | None:
        """What the tenant's requests learned, or those that keep to the session."""
        if of is not None and of.learned is None:
            of.learned = Learned(self._policy, TENANT_BITS if isinstance(of, Tenant) else SESSION_BITS)
        return None if of is None else of.learned

    def touch(self, holding: Holding) -> None:
        self._by_key.pop(holding.key, None)
        self._by_key[holding.key] = holding

    def has_session(self, key: str) -> bool:
        return "s" + key in self._by_key and self._by_key["s" + key].tokens > 0

    def forget_if_empty(self, holding: Holding) -> None:
        if not holding.gone and holding.running == 0 and holding.tokens == 0:
            self._drop(holding)

    def trim(self, session: Session) -> None:
        """A session over its budget goes on with the newest half of what it may hold."""
        most, most_bytes = self.limits[4:]
        if not _over((session.tokens, session.bytes), (most, most_bytes)):
            return
        tokens = session.tokens
        if most:
            tokens = min(tokens, most)
        if most_bytes:
            tokens = min(tokens, session.tokens * most_bytes // session.bytes)
        session.trim(tokens // 4)  # of the text, and as many of the last context

    def evict(self, tenant: Tenant | None) -> int:
        done = 0
        while (
            tenant and done < EVICT_PER_CALL and _over(self._size(tenant), self.limits[2:4]) and self._evict_one(tenant)
        ):
            done += 1
        while done < EVICT_PER_CALL and _over(self._size(None), self.limits[:2]) and self._evict_one(None):
            done += 1
        return done

    def remove_session(self, session: str, tenant: str) -> None:
        """Exact: afterwards no index holds what only this session said."""
        key = "s" + session
        if key in self._by_key:
            self._drop(self._by_key[key])
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None:
            return
        groups = [held for held in self._by_key.values() if isinstance(held, Group) and held.tenant is of_tenant]
        for corpus in (of_tenant.corpus, *(group.corpus for group in groups)):
            corpus.drop_session(key)
            while corpus.dropped:
                corpus.sweep(EVERYTHING)
        for group in groups:
            self.forget_if_empty(group)

    def catch_up(self, budget: int) -> int:
        left = budget
        left -= min(left, self.evict(None))
        for _, tenant in sorted(self._tenants.items()):
            left -= min(left, self.evict(tenant))
            left -= tenant.corpus.advance(left)
            left -= tenant.corpus.sweep(left)
        for holding in self._by_key.values():
            left -= holding.advance(left)
            left -= holding.sweep(left)
        return budget - left

    def stats(self, running: list[ReferenceIndex]) -> tuple[int, int, int, int, int, int]:
        indexes = [held.index for held in self._by_key.values()] + running
        indexes += [tenant.corpus.index for tenant in self._tenants.values()]
        sessions = [held for held in self._by_key.values() if isinstance(held, Session)]
        return (
            self._size(None)[0],
            BYTES_OF_PLAIN * sum(index.indexed + index.pending for index in indexes),
            sum(session.tokens > 0 for session in sessions),
            len(running),
            len(self._tenants),
            sum(index.pending for index in indexes),
        )

    def save(self, path: str, vocab_size: int) -> None:
        for tenant in self._tenants.values():
            _settle(tenant.corpus)
        for held in self._by_key.values():
            held.advance(EVERYTHING)
            if isinstance(held, Group):
                _settle(held.corpus)
        write_snapshot(Path(path), (vocab_size, self._tick, self._tenants, self._by_key))

    def load(self, path: str, vocab_size: int) -> None:
        saved, self._tick, self._tenants, self._by_key = read_snapshot(Path(path), self._policy)
        if saved > vocab_size:
            raise RuntimeError(
                f"it was saved with vocab_size={saved}, which is more than {vocab_size}: it belongs to another model"
            )

    def _size(self, tenant: Tenant | None) -> tuple[int, int]:
        """Tokens and bytes held for one tenant, or (None) altogether, as budgets count them."""
        held: list[Holding | Corpus] = [h for h in self._by_key.values() if tenant is None or h.tenant is tenant]
        held += [t.corpus for t in self._tenants.values() if tenant is None or t is tenant]
        return sum(part.tokens for part in held), sum(part.bytes for part in held)

    def _evict_one(self, only: Tenant | None) -> bool:
        """Makes some room, in one tenant or anywhere; returns whether there was anything to evict.

        Where global corpora are more than half of what is held, the oldest document of the tenant that was used
        least recently goes; otherwise the least recently used session or group. What a running request drafts from
        stays.
        """
        shared = [t for t in self._tenants.values() if t.corpus.documents and (only is None or t is only)]
        if not shared or 2 * sum(tenant.corpus.tokens for tenant in shared) <= self._size(only)[0]:
            for held in self._by_key.values():
                if held.running == 0 and held.tokens > 0 and (only is None or held.tenant is only):
                    self._drop(held)
                    return True
        if not shared:
            return False
        min(shared, key=lambda tenant: tenant.used).corpus.drop_oldest()
        return True

    def _drop(self, holding: Holding) -> None:
        holding.gone = True
        del self._by_key[holding.key]


def _over(size: tuple[int, int], limit: tuple[int, ...]) -> bool:
    return any(most and held > most for held, most in zip(size, limit, strict=True))


def _settle(corpus: Corpus) -> None:
    corpus.advance(EVERYTHING)
    while corpus.dropped:
        corpus.sweep(EVERYTHING)
