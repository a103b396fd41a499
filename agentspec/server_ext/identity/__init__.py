"""Find out who sent a request, and what it belongs to.

``callers``        who sent it: API keys, a gateway's headers, the file of keys
``server_secrets`` the secret of all MACs, and the administrator's key
``identity``       Identity: its principal, tenant, session, parent session, group, scope and weight version
``agent_headers``  the session in the headers that coding agents send by themselves
``prompt_groups``  in the engine: the group of requests that have the same prompt and name none
"""

from agentspec.server_ext.identity.identity import (
    BATCH_KEY,
    CALL_KEY,
    DETAIL_KEY,
    IDENTITY_KEY,
    LENGTH_KEY,
    PREDICTION_KEY,
    QUOTABLE_KEY,
    SESSION_KEY,
    Identity,
    RequestTagger,
    identify,
    without_names,
)

__all__ = [
    "BATCH_KEY",
    "CALL_KEY",
    "DETAIL_KEY",
    "IDENTITY_KEY",
    "LENGTH_KEY",
    "PREDICTION_KEY",
    "QUOTABLE_KEY",
    "SESSION_KEY",
    "Identity",
    "RequestTagger",
    "identify",
    "without_names",
]
