"""Specify which tenants, sessions and groups are kept, and what leaves: budgets, eviction, erasure.

Implemented by csrc/cache/entries, eviction and fair_order. Not specified here: budgets in bytes, which count measured
memory. They evict in the same order, and evict tenants too whose memory beside their texts is large.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from agentspec.cache import Budget, DraftPolicy, HistoryWindow
from tests.oracle.corpus import Corpus
from tests.oracle.index import SuffixIndex
from tests.oracle.kept import CacheEntry, Group, Session, Tenant, work_on
from tests.oracle.names import Key, Names
from tests.oracle.scoring import Learned

GENERATIONS = 16  # ancestors of a session that are searched for its family's root
EVICT_PER_CALL = 64  # sessions, groups or documents evicted in one call
ENTRY_WEIGHT = 64  # tokens that a session or group weighs on top of its own
NO_LIMIT = Budget()

TENANT_BITS, SESSION_BITS = 18, 14  # log2 of the reranker's slots


def heavy(parts: Iterable[tuple[str, int]]) -> set[str]:
    """Return the owners who hold at least about half of what owners hold on average, compared by powers of two."""
    weights: Counter[str] = Counter()
    for owner, weight in parts:
        weights[owner] += weight
    return {name for name, weight in weights.items() if len(weights) << weight.bit_length() > weights.total()}


@dataclass(slots=True)
class Limits:
    process: Budget = NO_LIMIT
    tenant: Budget = NO_LIMIT
    session: Budget = NO_LIMIT


class CacheEntries:
    """Hold all sessions, groups and tenants, and evict what exceeds the budgets."""

    def __init__(self, policy: DraftPolicy, limits: Limits, window: HistoryWindow | None) -> None:
        self.limits = limits
        self.window = window
        self.periods = 0  # weights or epochs that began so far, whichever the window counts
        self.held: dict[Key, CacheEntry] = {}  # least recently used first
        self.tenants: dict[str, Tenant] = {}
        self._policy = policy
        self._tick = 0

    def now(self, tenant: Tenant) -> int:
        """Return the time by the window's clock."""
        return tenant.written if self.window is not None and self.window.unit == "tokens" else self.periods

    def drop_outdated(self, corpus: Corpus, tenant: Tenant) -> None:
        """Drop some of the responses that are older than the window."""
        if self.window is not None:
            corpus.drop_before(self.now(tenant) + 1 - self.window.size)

    def entries_of(self, names: Names) -> tuple[Tenant | None, Session | None, Group | None]:
        """Return the tenant, session and group that a request or turn names, created if need be and marked as used."""
        if names.tenant is None:
            return None, None, None
        tenant = self.tenants.setdefault(names.tenant, Tenant(names.tenant, owner=names.tenant))
        self.touch(tenant)
        tenant.owner = tenant.owner if names.tenant_owner is None else names.tenant_owner
        if names.stored and tenant.owner != tenant.name:
            names = replace(names, owner=tenant.owner)
        return tenant, self._session(names, tenant), self._group(names, tenant)

    def _session(self, names: Names, tenant: Tenant) -> Session | None:
        if names.session is None:
            return None
        session = self._entry(("session", tenant.name, names.session), Session, tenant, names)
        assert isinstance(session, Session)
        root = self._root_of(names, tenant)
        if root != names.session:
            session.family = root
        return session

    def _root_of(self, names: Names, tenant: Tenant) -> str:
        """Return the root of the family of the named session."""
        assert names.session is not None
        root = self._above(names.session, tenant) or names.family or names.session
        for _ in range(GENERATIONS):
            root = self._above(root, tenant) or root
        return root

    def _above(self, name: str, tenant: Tenant) -> str | None:
        session = self.held.get(("session", tenant.name, name))
        return session.family if isinstance(session, Session) else None

    def _group(self, names: Names, tenant: Tenant) -> Group | None:
        """Return the named group, or else the session's family. Both hold responses, not prompts."""
        key = self._group_key(names, tenant)
        group = None if key is None else self._entry(key, Group, tenant, names)
        assert group is None or isinstance(group, Group)
        if group is not None and group.key != ("family", tenant.name, names.session):
            group.of_several = True
        return group

    def _group_key(self, names: Names, tenant: Tenant) -> Key | None:
        if names.shared and names.group is not None:
            return "group", tenant.name, names.group
        return None if names.session is None else ("family", tenant.name, self._root_of(names, tenant))

    def _entry(self, key: Key, kind: "type[CacheEntry]", tenant: Tenant, names: Names) -> "CacheEntry":
        entry = self.held.get(key)
        if entry is None:
            entry = kind(key, tenant, owner=tenant.name if names.owner is None else names.owner)
        elif names.owner is not None and not names.stored:
            entry.owner = names.owner
        self.touch(entry)
        return entry

    def find(self, names: Names) -> CacheEntry | Tenant | None:
        """Return the named session, group, family or, where none of these is named, tenant."""
        tenant = names.tenant or ""
        if names.session is not None:
            return self.held.get(("session", tenant, names.session))
        if names.group is not None:
            return self.held.get(("group", tenant, names.group))
        if names.family is not None:
            return self.held.get(("family", tenant, names.family))
        return self.tenants.get(tenant)

    def find_held(self, names: Names) -> tuple[Tenant | None, Session | None, Group | None]:
        """Return the held entries that a turn names, and mark none as used. A held session's family is created."""
        tenant = None if names.tenant is None else self.tenants.get(names.tenant)
        if tenant is None:
            return None, None, None
        session = None if names.session is None else self.held.get(("session", tenant.name, names.session))
        assert session is None or isinstance(session, Session)
        key = self._group_key(names, tenant)
        group = None if key is None else self.held.get(key)
        if group is None and session is not None and key is not None and key[0] == "family":
            group = self._group(replace(names, owner=session.owner, stored=True), tenant)
        assert group is None or isinstance(group, Group)
        if group is not None and group.key != ("family", tenant.name, names.session):
            group.of_several = True
        return tenant, session, group

    def forget_tenant(self, name: str | None) -> bool:
        """Forget a tenant with all that it holds. Return False if requests run: then it stays."""
        tenant = self.tenants.get(name or "")
        if tenant is None:
            return True
        if tenant.running:
            return False
        for entry in [entry for entry in self.held.values() if entry.tenant is tenant]:
            self._drop(entry)
        del self.tenants[tenant.name]
        return True

    def learned(self, of: Tenant | Session) -> Learned:
        """Return what the tenant's requests learned, or the session's requests that share nothing."""
        if of.learned is None:
            of.learned = Learned(self._policy, TENANT_BITS if isinstance(of, Tenant) else SESSION_BITS)
        return of.learned

    def touch(self, entry: CacheEntry | Tenant) -> None:
        """Mark an entry as used."""
        if isinstance(entry, Tenant):
            self._tick += 1
            entry.used = self._tick
        else:
            self.held.pop(entry.key, None)
            self.held[entry.key] = entry

    def forget_if_empty(self, entry: CacheEntry) -> None:
        if not entry.gone and entry.running == 0 and entry.tokens == 0:
            self._drop(entry)

    def trim(self, session: Session) -> None:
        """Cut a session that is over its budget to at most half of the tokens it may hold, keeping its newest."""
        most = self.limits.session.tokens
        if most and session.tokens > most:
            session.turns.trim(most // 2)

    def trim_family(self, group: Group) -> None:
        """Drop the oldest responses of a family that holds more than a session may."""
        most = self.limits.session.tokens
        while group.key[0] == "family" and most and group.tokens > most:
            group.corpus.drop_oldest()

    def evict(self, tenant: Tenant | None) -> int:
        """Evict until the tenant and the process are within budget, at most EVICT_PER_CALL. Return how many."""
        done = 0
        if tenant is not None:
            while done < EVICT_PER_CALL and self._over(tenant, self.limits.tenant.tokens) and self._evict_one(tenant):
                done += 1
        while done < EVICT_PER_CALL and self._over(None, self.limits.process.tokens) and self._evict_one(None):
            done += 1
        return done

    def remove_session(self, tenant: str | None, name: str) -> None:
        """Erase a session. Afterwards no index holds what only this session said."""
        key: Key = ("session", tenant or "", name)
        if key in self.held:
            self._drop(self.held[key])
        of_tenant = self.tenants.get(tenant or "")
        if of_tenant is None:
            return
        groups = [held for held in self.held.values() if isinstance(held, Group) and held.tenant is of_tenant]
        groups = [held for held in groups if held.of_several or held.key[::2] == ("family", name)]
        for corpus in (of_tenant.corpus, *(group.corpus for group in groups)):
            corpus.drop_session(key)
        for group in groups:
            self.forget_if_empty(group)

    def free_session(self, tenant: str | None, name: str) -> None:
        """Evict a session, and the family that it is the root of, as soon as none of its requests runs."""
        session = self.held.get(("session", tenant or "", name))
        if isinstance(session, Session):
            session.final = True
            self.free_if_final(session)

    def free_if_final(self, session: Session) -> None:
        if not session.final or session.gone or session.running:
            return
        _, tenant, name = session.key
        family = self.held.get(("family", tenant, name))
        if family is not None and not family.running:
            self._drop(family)
        self._drop(session)

    def evict_tenants(self, budget: int) -> int:
        """Evict what exceeds the tenants' own budgets. Return what is left of the budget."""
        for _, tenant in sorted(self.tenants.items()):
            if self._over(tenant, self.limits.tenant.tokens):
                budget -= min(budget, self.evict(tenant))
        return budget

    def work(self, budget: int) -> int:
        """Evict, index and sweep as far as the budget allows; what was used last comes first. Return what is left."""
        if self._over(None, self.limits.process.tokens):
            budget -= min(budget, self.evict(None))
        for entry in reversed(list(self.held.values())):
            budget = work_on(entry, budget)
        for tenant in sorted(self.tenants.values(), key=lambda tenant: -tenant.used):
            budget = work_on(tenant.corpus, budget)
        return budget

    def reload(self) -> None:
        """Mark nothing as restored from the store, as saving and loading do: the store may hold more by then."""
        for entry in (*self.held.values(), *self.tenants.values()):
            entry.loaded = False
            if isinstance(entry, Group) and entry.key[0] == "family":
                root = ("session", *entry.key[1:])
                held = (*entry.corpus.documents, *entry.corpus.dropped)
                entry.of_several = any(document.session != root for document in held)

    def size(self, tenant: Tenant | None) -> int:
        """Return the tokens held for one tenant, or (None) altogether, as budgets count them."""
        held: list[CacheEntry | Corpus] = [h for h in self.held.values() if tenant is None or h.tenant is tenant]
        held += [t.corpus for t in self.tenants.values() if tenant is None or t is tenant]
        return sum(part.tokens for part in held)

    def indexes(self) -> list[SuffixIndex]:
        return [held.index for held in self.held.values()] + [tenant.corpus.index for tenant in self.tenants.values()]

    def _evict_one(self, only: Tenant | None) -> bool:
        """Evict one entry or document, of tenant `only` or of any. Return whether there was anything to evict.

        If tenants' corpora are more than half of what is held, drop the oldest document of the least recently used
        tenant. Otherwise drop the least recently used session or group that no running request drafts from. Where
        only others are left, drop the older half of the least recently used one. If `only` is None, spare owners who
        hold little.
        """
        shared = [t for t in self.tenants.values() if t.corpus.documents and (only is None or t is only)]
        entries = [h for h in self.held.values() if h.tokens > 0 and (only is None or h.tenant is only)]
        few = 2 * sum(tenant.corpus.tokens for tenant in shared) <= self.size(only)
        if only is None:
            rich = heavy((t.owner, t.corpus.tokens) for t in shared)
            shared = [tenant for tenant in shared if tenant.owner in rich]
            rich = heavy((h.owner, h.tokens + ENTRY_WEIGHT) for h in entries)
            entries = [held for held in entries if held.owner in rich]
        if not shared or few:
            for held in entries:
                if held.running == 0:
                    self._drop(held)
                    self._load_again(held)
                    return True
        if shared:
            idlest = min(shared, key=lambda tenant: tenant.used)
            idlest.corpus.drop_oldest()
            idlest.loaded = idlest.loaded and bool(idlest.corpus.documents)
        elif entries:
            oldest = entries[0]
            if isinstance(oldest, Session):
                oldest.turns.trim(oldest.tokens // 2)
            else:
                oldest.corpus.drop_older_half()
                if not oldest.corpus.documents:
                    self._load_again(oldest)
        return bool(shared or entries)

    def _over(self, tenant: Tenant | None, most: int | None) -> bool:
        return most is not None and self.size(tenant) > most

    def _load_again(self, entry: CacheEntry) -> None:
        """Mark an emptied entry as not loaded: the store may hold more of it. A family is loaded with its root."""
        entry.loaded = False
        kind, of_tenant, name = entry.key
        if kind == "family" and ("session", of_tenant, name) in self.held:
            self.held["session", of_tenant, name].loaded = False

    def _drop(self, entry: CacheEntry) -> None:
        entry.gone = True
        del self.held[entry.key]
