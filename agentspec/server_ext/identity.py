"""Which tenant, session and group a request belongs to.

The session arrives by vLLM's own conventions (body ``session_id``, header ``X-Session-ID``, body
``vllm_xargs.session_id``), the group in the body alone (``vllm_xargs.group_id``, for which vLLM has no other place);
both reach the engine as entries of ``SamplingParams.extra_args``. The tenant is a setting of the server: nothing that
a caller writes into a request can choose it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentspec.cache.identifiers import check_session_id
from agentspec.errors import InvalidSessionError

SESSION_KEY = "session_id"
GROUP_KEY = "group_id"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose trees a request may read and feed. ``None`` means: none of that kind.

    A group joins sessions of one tenant; without a tenant sessions are private, and there is none.
    """

    tenant: str | None = None
    session: str | None = None
    group: str | None = None


def merge_session(extra_args: Mapping[str, Any] | None, session_id: str | None) -> dict[str, Any] | None:
    """Sampling ``extra_args`` with the session under its key; an id given by body or header wins.

    Returns None when there is nothing to carry. Raises InvalidSessionError for an id that is not printable, too
    long, or not a string.
    """
    merged = dict(extra_args or {})
    if session_id is not None:
        merged[SESSION_KEY] = session_id
    for key in (SESSION_KEY, GROUP_KEY):
        value = merged.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise InvalidSessionError(f"{key} must be a string, got {type(value).__name__}")
            check_session_id(value, field=key)
    return merged or None


def identify(extra_args: Mapping[str, Any] | None, tenant: str | None) -> Identity:
    """The identity that ``extra_args`` and the server's tenant give. Unusable ids give none, never an error."""
    try:
        checked = merge_session(extra_args, None) or {}
    except InvalidSessionError:
        checked = {}
    group = checked.get(GROUP_KEY) if tenant is not None else None
    return Identity(tenant=tenant, session=checked.get(SESSION_KEY), group=group)
