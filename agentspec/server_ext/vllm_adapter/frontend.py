"""Tag requests with sender and session in the API server, and let its HTTP routes ask the engines.

vLLM's ``session_id`` does not get past the engine core, nor the API key past the middleware that checks it. Only
``SamplingParams.extra_args`` reaches the worker, so both are written there.
"""

import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from agentspec.errors import InvalidSessionError
from agentspec.server_ext.identity import NO_KEY, principal_of, tag_request
from agentspec.server_ext.vllm_adapter.launch import uses_agentspec

RPC_METHOD = "agentspec_rpc"
"""Name of the method on every worker that answers ``ask_engines``."""

_RPC_SECONDS = 5.0
_CHILD_PREFIX = re.compile(r"^\d+_")
_ENGINE_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PROMPT_NUMBER = re.compile(r"^(cmpl-.+)-\d+$")

_PRINCIPAL = "agentspec_principal"
_principal: ContextVar[str | None] = ContextVar(_PRINCIPAL, default=None)
"""Principal of the HTTP request that is being handled; None where vLLM checks no keys."""


def api_request_id(engine_request_id: str) -> str:
    """Return the id under which the API returned an engine's request.

    The engine adds a random suffix to that id, the sample's number in front (n > 1), and the prompt's number behind (a
    completions request may hold several prompts).
    """
    plain = _ENGINE_SUFFIX.sub("", _CHILD_PREFIX.sub("", engine_request_id))
    return _PROMPT_NUMBER.sub(r"\1", plain)


async def ask_engines(engine_client: Any, *question: str) -> list[dict[str, Any]]:
    """Ask all workers that draft for ``stats``, or for ``request`` with an id of the API. Return their answers.

    engine_client: vLLM's EngineClient. A worker that does not know the request gives no answer. Raises TimeoutError
    after 5 seconds, and the engine's own errors.
    """
    answers = await engine_client.collective_rpc(RPC_METHOD, timeout=_RPC_SECONDS, args=question)
    return [answer for answer in answers if answer is not None]


async def authenticate(
    original: Callable[..., Awaitable[None]], middleware: Any, scope: Any, receive: Any, send: Any
) -> None:
    """Remember the principal while a request is handled. vLLM installs the middleware only where it checks keys."""
    from starlette.datastructures import Headers

    principal = NO_KEY
    if scope["type"] in ("http", "websocket"):
        headers = Headers(scope=scope)
        if middleware.verify_token(headers):
            principal = principal_of(headers["Authorization"].partition(" ")[2])
    before = _principal.set(principal)
    try:
        await original(middleware, scope, receive, send)
    finally:
        _principal.reset(before)


def init_input_processor(original: Callable[..., None], processor: Any, *args: Any, **kwargs: Any) -> None:
    """Pass the principal to the thread that prepares raw prompts: context variables do not reach it."""
    original(processor, *args, **kwargs)
    in_thread = processor.process_inputs_async

    def process_inputs_async(*args: Any, **kwargs: Any) -> Any:
        return in_thread(*args, **kwargs, **{_PRINCIPAL: _principal.get()})

    processor.process_inputs_async = process_inputs_async


def process_inputs(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Write session and caller into the ``extra_args`` of an engine request."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    principal = kwargs.pop(_PRINCIPAL) if _PRINCIPAL in kwargs else _principal.get()
    request = original(processor, *args, **kwargs)
    params = request.sampling_params
    if isinstance(params, SamplingParams) and uses_agentspec(processor.vllm_config):
        try:
            params.extra_args = tag_request(
                params.extra_args,
                session_id=request.session_id,
                principal=principal,
                cache_salt=request.cache_salt,
            )
        except InvalidSessionError as error:  # vLLM answers 400 only for its own error
            raise VLLMValidationError(str(error)) from error
    return request
