"""Give each request its identity: principal, tenant, session, parent session, group, scope and weight version.

A request names its session by vLLM's own conventions (body ``session_id``, header ``X-Session-ID``, or
``vllm_xargs.session_id``) or by a header of its client (`agent_headers`). By ``vllm_xargs`` it names its parent session
(``parent_session_id``), its group (``group_id``) and the version of the weights that it runs on (``weight_version``).
It may narrow its scope (``agentspec_scope``), and say that it is the last of its session (``session_final``). It names
neither its principal nor its tenant: the API server finds those out (`callers`). ``cache_salt`` makes another
principal, and the LoRA adapter another tenant, as in vLLM's prefix cache.

The API server writes the identity into the request's ``extra_args`` and removes whatever the caller has put there under
its name (``RequestTagger``). The engine reads it (``identify``), and it goes into the stored records. An id that cannot
be used counts as none; it never fails a request.

Four words say whose a request and its texts are:

caller     who sent the request: the API key that vLLM checked, and what a gateway says. Its figures are told to it.
principal  the caller together with the request's ``cache_salt``. It owns sessions and groups.
tenant     whose requests draft from each other's answers: the one that the operator or a gateway named, or else the
           principal. A LoRA adapter sets a tenant apart, and so does a salt.
owner      in whose share of the memory a text counts when texts are evicted: the caller for sessions and groups, the
           named tenant for what its requests share. In the store the tenant's log counts for the named tenant or caller
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from agentspec.cache import SCOPES, Scope
from agentspec.errors import InvalidSessionError
from agentspec.identifiers import MAX_ID_LENGTH, check_session_id
from agentspec.protocol import FIGURES_HEADER, SESSION_HEADER
from agentspec.server_ext.identity.agent_headers import agent_session
from agentspec.server_ext.identity.callers import NOBODY, Callers, Presented

logger = logging.getLogger("vllm.agentspec")

SESSION_KEY = "session_id"
PARENT_KEY = "parent_session_id"
GROUP_KEY = "group_id"
WEIGHTS_KEY = "weight_version"
SCOPE_KEY = "agentspec_scope"
FINAL_KEY = "session_final"
IDENTITY_KEY = "agentspec_identity"
"""Key in ``extra_args`` of the identity that the API server found out."""
DETAIL_KEY = "agentspec_detailed"
"""Key in ``extra_args`` of a request that asked for the sources of its tokens."""
PREDICTION_KEY = "agentspec_prediction"
"""Key in ``extra_args`` of the tokens that a request expects as its response (``predictions``)."""
QUOTABLE_KEY = "agentspec_quotable"
"""Key in ``extra_args`` of the tokens that a response may quote (``quotes``), as the bytes of an int32 array."""
CALL_KEY = "agentspec_call"
"""Key in ``extra_args`` of the name that tells an API call from others with the same id (`Presented.call`)."""
LENGTH_KEY = "agentspec_length"
"""Key in ``extra_args`` of a request whose length the API server tells, because a stop text may end its response."""
BATCH_KEY = "agentspec_batch"
"""Key in ``extra_args`` of a request that is one of several of an API call (`Presented.batch`)."""

# Callers cannot set these.
_OUR_KEYS = (IDENTITY_KEY, DETAIL_KEY, PREDICTION_KEY, QUOTABLE_KEY, CALL_KEY, LENGTH_KEY, BATCH_KEY)
_TELLING_KEYS = frozenset((*_OUR_KEYS, SESSION_KEY, PARENT_KEY, GROUP_KEY))  # whose values are for no log
_ALL_CALLERS = "all callers"
_LOOKS_QUALIFIED = re.compile("[0-9a-f]{32}(/.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Identity:
    """Name the texts that a request drafts from and adds to, for the cache and the store.

    A key is a MAC of 32 hexadecimal digits over principal and name, so nobody can choose a name that is another
    principal's. None: the request has none. The API server sends the values to the engine in the order of the fields.
    """

    # The texts
    tenant: str | None = None
    """the tenant that shares its text; None is a tenant too: all requests without keys, salts and adapters"""
    session: str | None = None
    """key of the session"""
    group: str | None = None
    """key of the group"""
    scope: Scope = "tenant"
    """which of these texts it drafts from"""
    parent_session: str | None = None
    """key of the parent session"""
    final: bool = False
    """whether the session ends with this request, so that its indexes can go"""

    # Who sent it
    principal: str | None = None
    """owner of session and group, a MAC; None: all callers who cannot be told apart"""
    caller: str | None = None
    """the principal without ``cache_salt``, to which the figures of the request are told"""
    named_tenant: str | None = None
    """the tenant that the operator or a gateway named; None: neither did"""

    # What the caller said
    session_name: str | None = None
    """name of the session"""
    group_name: str | None = None
    """name of the group"""
    weight_version: str | None = None
    """version of the served weights"""
    ignored_ids: int = 0
    """how many ids could not be used"""

    @property
    def owner(self) -> str:
        """Return the owner of session and group for the eviction of texts: the caller, whatever its salts are."""
        return self.caller or _ALL_CALLERS

    @property
    def tenant_owner(self) -> str:
        """Return the owner of the tenant for eviction: the named tenant, which callers share, or else the caller."""
        return self.named_tenant or self.owner

    @property
    def log_owner(self) -> str:
        """Return the owner of the tenant's log in the store: the caller; "" for a named tenant, in the log's name."""
        return self.owner if self.named_tenant is None else ""


_KINDS = tuple(field.type if field.type in (int, bool) else str | None for field in fields(Identity))
"""Types of the values of an Identity, in order, to check what comes from the API server."""
_NONE_SHARED = Identity(scope="none", principal=NOBODY, caller=NOBODY)


class RequestTagger:
    """Write the identity of each request into its ``extra_args``. scope: the server's, which requests only narrow."""

    def __init__(self, callers: Callers, scope: Scope) -> None:
        self.callers = callers
        self._scope = scope
        self.tells_lengths = False
        """whether this process tells the engines how long responses are that stop texts may end"""
        self._told: set[str] = set()  # keys of which it was logged that a request's value cannot be used

    def tag(
        self,
        extra_args: Mapping[str, Any] | None,
        presented: Presented | None = None,
        *,
        session_id: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        may_stop: bool = False,
    ) -> dict[str, Any]:
        """Return ``extra_args`` with the request's identity. Never raises.

        session_id: from the body or vLLM's header; it overrides the one in ``extra_args``. adapter: the request's LoRA
        adapter. may_stop: whether a stop text may end the response.
        """
        tagged = {key: value for key, value in (extra_args or {}).items() if key not in _OUR_KEYS}
        if presented is not None:
            tagged |= _shown_by(presented)
        if may_stop and self.tells_lengths:
            tagged[LENGTH_KEY] = True
        if session_id is not None:
            tagged[SESSION_KEY] = session_id
        try:
            _read_headers(tagged, presented)
            identity = self.identity_of(tagged, presented, cache_salt=cache_salt, adapter=adapter)
        except Exception:
            logger.exception("agentspec: a request's identity cannot be found out; it drafts from its own text alone")
            identity = _NONE_SHARED
        if identity.ignored_ids:  # vLLM answers HTTP 500 for text that is no Unicode, such as a lone surrogate
            for key in _usable_ids(tagged)[1]:
                del tagged[key]
        tagged.pop(FINAL_KEY, None)  # the identity says it, and the key may hold such text, too
        tagged[IDENTITY_KEY] = list(astuple(identity))
        return tagged

    def identity_of(
        self,
        extra: Mapping[str, Any],
        presented: Presented | None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Identity:
        """Return the identity of a request with these ``extra_args``."""
        names, unusable = _usable_ids(extra)
        scope: Scope = "none" if SCOPE_KEY in unusable else extra.get(SCOPE_KEY, self._scope)
        for name in [name for name in unusable if name not in self._told]:  # the counter ignored_ids shows the others
            self._told.add(name)
            counts_as = "counts as none" if name == SCOPE_KEY else "is ignored"
            logger.warning("agentspec: %s of a request cannot be used and %s", name, counts_as)
        caller = self.callers.caller_of(presented)
        if caller.principal == NOBODY:
            return Identity(scope="none", principal=NOBODY, caller=NOBODY, ignored_ids=len(unusable))
        mac = self.callers.mac
        principal = caller.principal if cache_salt is None else mac("principal and salt", caller.principal, cache_salt)
        session_name, parent_name, group_name = (names.get(key) for key in (SESSION_KEY, PARENT_KEY, GROUP_KEY))
        return Identity(
            tenant=self._tenant(caller.tenant, principal, cache_salt, adapter),
            session=None if session_name is None else mac("session", principal, session_name),
            group=None if group_name is None else mac("group", principal, group_name),
            scope=max(self._scope, scope, key=SCOPES.index),
            parent_session=None if parent_name is None else mac("session", principal, parent_name),
            final=session_name is not None and extra.get(FINAL_KEY) in (True, "true"),
            principal=principal,
            caller=caller.principal,
            named_tenant=caller.tenant,
            session_name=session_name,
            group_name=group_name,
            weight_version=names.get(WEIGHTS_KEY),
            ignored_ids=len(unusable),
        )

    def _tenant(self, named: str | None, principal: str | None, salt: str | None, adapter: str | None) -> str | None:
        """Return the tenant: the named one or the principal itself, set apart for each pair of salt and adapter."""
        mac = self.callers.mac
        if named is None:
            return principal if adapter is None else f"{mac('adapter', adapter)}/{principal or ''}"
        if salt is None and adapter is None and not _LOOKS_QUALIFIED.fullmatch(named):
            return named
        apart = mac("apart", salt, adapter)
        whole = f"{apart}/{named}"
        return whole if len(whole) <= MAX_ID_LENGTH else f"{apart}/{mac('tenant name', named)}"


def identify(extra_args: Mapping[str, Any] | None) -> Identity:
    """Return the identity that ``RequestTagger`` wrote. A request without one shares nothing. Never raises."""
    values = (extra_args or {}).get(IDENTITY_KEY)
    if not isinstance(values, list | tuple) or len(values) != len(_KINDS):
        return _NONE_SHARED
    if not all(isinstance(value, kind) for value, kind in zip(values, _KINDS, strict=True)):
        return _NONE_SHARED
    identity = Identity(*values)
    return identity if identity.scope in SCOPES else _NONE_SHARED


def without_names(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``extra_args`` of a tagged request for a log: "..." in place of its caller's names, keys and texts."""
    return {key: "..." if key in _TELLING_KEYS else value for key, value in extra_args.items()}


def _shown_by(presented: Presented) -> dict[str, Any]:
    """Return the entries of ``extra_args`` that come from a request's HTTP call, except its identity."""
    shown: dict[str, Any] = {CALL_KEY: presented.call}
    if presented.batch:
        shown[BATCH_KEY] = True
    if presented.prediction:
        shown[PREDICTION_KEY] = list(presented.prediction)
    if presented.quotable:
        shown[QUOTABLE_KEY] = presented.quotable
    if presented.all(FIGURES_HEADER.lower())[:1] == ["detailed"]:
        shown[DETAIL_KEY] = True
    return shown


def _read_headers(extra: dict[str, Any], presented: Presented | None) -> None:
    """Enter what the client's headers say about the session, unless the request's body names another one."""
    found = agent_session(presented)
    if presented is None or found is None:
        return
    by_body, by_header = extra.get(SESSION_KEY), presented.all(SESSION_HEADER.lower())[:1]
    if by_body is not None and by_body not in (found.session, *_as_vllm_reads(by_header)):
        return
    extra[SESSION_KEY] = found.session
    if found.parent is not None:
        extra.setdefault(PARENT_KEY, found.parent)
    if found.final:
        extra[FINAL_KEY] = True


def _as_vllm_reads(ids: Sequence[str]) -> list[str]:
    """Return the forms in which vLLM may give these ids of its header: as they are, and misread as Latin-1."""
    return [read for name in ids for read in (name, name.encode().decode("latin-1"))]


def _usable_ids(extra: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the usable ids by key, and the keys of unusable ids and of an unknown scope."""
    usable: dict[str, str] = {}
    unusable = []
    for key in (SESSION_KEY, PARENT_KEY, GROUP_KEY, WEIGHTS_KEY):
        value = extra.get(key)
        if key == WEIGHTS_KEY and type(value) is int:  # training loops count their updates
            value = str(value)
        if value is not None:
            try:
                usable[key] = check_session_id(value, field=key)
            except InvalidSessionError:
                unusable.append(key)
    if SCOPE_KEY in extra and extra[SCOPE_KEY] not in SCOPES:
        unusable.append(SCOPE_KEY)
    return usable, unusable
