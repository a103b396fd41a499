"""Keep the names of sessions out of uvicorn's access log, which has the path of every call."""

import logging

from agentspec.server_ext.vllm_adapter.frontend import ROUTES

_SESSION = f"{ROUTES}/sessions/"
_LOGGER = logging.getLogger("uvicorn.access")
_PATH = 2
"""Place of the path among the arguments of uvicorn's line: client, method, path, version, status."""


def hide_sessions() -> None:
    """Log calls on a session without its id and query, which name whose text it is. Repeating the call is harmless."""
    _LOGGER.addFilter(_without_session)


def _without_session(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple) and len(record.args) > _PATH:
        before, route, _ = str(record.args[_PATH]).partition(_SESSION)
        if route:
            record.args = (*record.args[:_PATH], f"{before}{route}…", *record.args[_PATH + 1 :])
    return True
