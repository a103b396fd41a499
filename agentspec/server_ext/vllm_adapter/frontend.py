"""Request ids of vLLM's API, and the way from the HTTP routes to the engines."""

import re
from typing import Any

from agentspec.server_ext.vllm_adapter.rpc import RPC_METHOD

_RPC_SECONDS = 5.0
_CHILD_PREFIX = re.compile(r"^\d+_")
_ENGINE_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PROMPT_NUMBER = re.compile(r"^(cmpl-.+)-\d+$")


def api_request_id(engine_request_id: str) -> str:
    """Return the id that the API returned for an engine's request.

    The engine puts a random suffix behind it, a sample's number in front (n > 1), and a prompt's number behind (a
    completions request may hold several prompts).
    """
    plain = _ENGINE_SUFFIX.sub("", _CHILD_PREFIX.sub("", engine_request_id))
    return _PROMPT_NUMBER.sub(r"\1", plain)


async def ask_engines(engine_client: Any, *question: str) -> list[dict[str, Any]]:
    """Return the answers of all workers that draft: to ``stats``, or to ``request`` with an id of the API.

    engine_client: vLLM's EngineClient. A worker that does not know the request has no answer. Raises TimeoutError
    after 5 seconds, and what the engine raises.
    """
    answers = await engine_client.collective_rpc(RPC_METHOD, timeout=_RPC_SECONDS, args=question)
    return [answer for answer in answers if answer is not None]
