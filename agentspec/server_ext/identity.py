"""Identify a request's tenant, group, session and scope.

A request names its session by vLLM's own conventions (body ``session_id``, header ``X-Session-ID``, or
``vllm_xargs.session_id``) and its group by ``vllm_xargs.group_id``. It may narrow its scope by
``vllm_xargs.agentspec_scope``. It cannot name its tenant and its principal. The tenant is the one that the operator
named, else the principal. The principal is the API key that vLLM checked. Without keys all callers are one principal,
as in vLLM's prefix cache. ``cache_salt`` and the LoRA adapter separate tenants further, again as in the prefix cache.

The API server writes the caller into the request's ``extra_args`` and overwrites the caller's own entry
(``tag_request``). The engine reads it (``identify``). A request without that entry, or without a key on a server that
checks keys, drafts from its own text alone.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentspec.cache import SCOPES, Scope
from agentspec.cache.identifiers import MAX_ID_LENGTH, check_session_id
from agentspec.cache.store import frame
from agentspec.errors import InvalidSessionError

SESSION_KEY = "session_id"
GROUP_KEY = "group_id"
SCOPE_KEY = "agentspec_scope"
CALLER_KEY = "agentspec_caller"
"""Key in ``extra_args`` of [principal, cache salt], each a digest or empty. A caller's own entry is removed."""

NO_KEY = "?"
"""Principal of a caller without a key on a server that checks keys; vLLM does not check all paths."""

_DIGEST = "[0-9a-f]{32}"
_LOOKS_QUALIFIED = re.compile(f"{_DIGEST}/")
_NOBODY = "0" * 32


@dataclass(frozen=True, slots=True)
class Identity:
    """Name the texts that a request drafts from and adds to, for the cache and the store.

    tenant: the tenant that shares its text. None is a tenant too: all requests without keys, salts and adapters.
    session, group: names that are unique within the server; None: the request has none. scope: which of these texts
    it uses. session_name: the session as its caller named it.
    """

    tenant: str | None = None
    session: str | None = None
    group: str | None = None
    scope: Scope = "tenant"
    session_name: str | None = None


def principal_of(api_key: str) -> str:
    """Return an API key's principal: a digest, so that the key itself is neither passed on nor stored."""
    return _digest("key", api_key)


def tag_request(
    extra_args: Mapping[str, Any] | None,
    *,
    session_id: str | None = None,
    principal: str | None = None,
    cache_salt: str | None = None,
) -> dict[str, Any]:
    """Return a request's ``extra_args`` with its session and its caller.

    session_id: from body or header; it overrides the one in ``extra_args``. principal: from ``principal_of``.
    Raises InvalidSessionError for an unusable id or scope.
    """
    tagged = {key: value for key, value in (extra_args or {}).items() if key != CALLER_KEY}
    if session_id is not None:
        tagged[SESSION_KEY] = session_id
    _check(tagged)
    tagged[CALLER_KEY] = [principal or "", "" if cache_salt is None else _digest("salt", cache_salt)]
    return tagged


def identify(
    extra_args: Mapping[str, Any] | None,
    *,
    tenant: str | None = None,
    scope: Scope = "tenant",
    adapter: str | None = None,
) -> Identity:
    """Return the identity of a request that ``tag_request`` has seen.

    tenant, scope: the server's settings. adapter: the request's LoRA adapter. The narrower of the server's and the
    request's scope applies. Unusable ids count as none, an unusable scope or caller as scope "none". Never raises.
    """
    extra = dict(extra_args or {})
    asked = extra.get(SCOPE_KEY, scope)
    if asked not in SCOPES:
        asked = "none"
    try:
        _check({key: extra.get(key) for key in (SESSION_KEY, GROUP_KEY)})
    except InvalidSessionError:
        extra[SESSION_KEY] = extra[GROUP_KEY] = None
    principal, salt = _caller(extra.get(CALLER_KEY))
    if principal == NO_KEY:
        asked = "none"
    apart = _joined(salt or None, adapter)
    owner = _joined(principal or None, apart)
    session = extra.get(SESSION_KEY)
    return Identity(
        tenant=owner if tenant is None else _qualified(apart, tenant),
        session=_qualified(owner, session),
        group=_qualified(owner, extra.get(GROUP_KEY)),
        scope=max(scope, asked, key=SCOPES.index),
        session_name=session,
    )


def who_shares(tenant: str | None, scope: Scope, *, keys: bool) -> str:
    """Return a log line for the operator that says who drafts from whose text. keys: whether vLLM checks API keys."""
    if scope == "none":
        return "each request drafts from its own text alone (scope none)"
    if scope == "session":
        whose = "of its API key" if keys else "whoever names it; --api-key separates callers"
        return f"each session drafts from itself alone (scope session), {whose}"
    if tenant is not None:
        who = (
            "API keys share answers, not sessions" if keys else "shared by all callers; --api-key keeps sessions apart"
        )
        return f"drafts from tenant {tenant!r}: {who}"
    return "each API key shares with itself alone" if keys else "shared by all callers; --api-key separates them"


def _check(extra: Mapping[str, Any]) -> None:
    for key in (SESSION_KEY, GROUP_KEY):
        value = extra.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise InvalidSessionError(f"{key} must be a string, got {type(value).__name__}")
            check_session_id(value, field=key)
    asked = extra.get(SCOPE_KEY, SCOPES[0])
    if asked not in SCOPES:
        raise InvalidSessionError(f"{SCOPE_KEY} must be one of {', '.join(SCOPES)}, got {asked!r}")


def _caller(tag: object) -> tuple[str, str]:
    """Return the principal and the salt of a tag; NO_KEY if ``tag_request`` did not write it."""
    if isinstance(tag, list | tuple) and len(tag) == 2 and all(isinstance(part, str) for part in tag):
        return tag[0], tag[1]
    return NO_KEY, ""


def _joined(*parts: str | None) -> str | None:
    """Return one digest for several parts, or None if there are none."""
    return None if all(part is None for part in parts) else _digest(*parts)


def _qualified(owner: str | None, name: str | None) -> str | None:
    """Return a name that includes its owner, so that no other owner's name can equal it."""
    if name is None:
        return None
    if owner is None:
        if not _LOOKS_QUALIFIED.match(name):
            return name
        owner = _NOBODY
    whole = f"{owner}/{name}"
    return whole if len(whole) <= MAX_ID_LENGTH else f"{owner}/{_digest(name)}"


def _digest(*parts: str | None) -> str:
    return hashlib.blake2b(frame(parts), digest_size=16, person=b"agentspec-caller").hexdigest()
