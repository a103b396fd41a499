"""Carries who sent a request, and its session, from the API server to the worker.

vLLM's ``session_id`` ends in the engine core, and the API key in the middleware that checks it; only
``SamplingParams.extra_args`` reaches the worker. Everything here runs in the API server's process.
"""

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from agentspec.errors import InvalidSessionError
from agentspec.server_ext.identity import NO_KEY, principal_of, tag_request
from agentspec.server_ext.vllm_launch import PROPOSER_PATH

_PRINCIPAL = "agentspec_principal"
_principal: ContextVar[str | None] = ContextVar(_PRINCIPAL, default=None)
"""The principal of the HTTP request that is being handled; None where vLLM checks no keys."""


def carry_callers() -> None:
    """Wrap the middleware that checks API keys, and what makes engine requests. A second call does nothing."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
    from vllm.v1.engine.input_processor import InputProcessor

    if getattr(InputProcessor, "_agentspec_hooked", False):
        return
    AuthenticationMiddleware.__call__ = _wrap_authentication(AuthenticationMiddleware.__call__)
    InputProcessor.__init__ = _wrap_init(InputProcessor.__init__)
    InputProcessor.process_inputs = _wrap_inputs(InputProcessor.process_inputs)
    InputProcessor._agentspec_hooked = True


def uses_agentspec(vllm_config: Any) -> bool:
    """Return whether this engine drafts with agentspec."""
    spec = vllm_config.speculative_config
    return spec is not None and spec.method == "custom_class" and spec.model == PROPOSER_PATH


def _wrap_authentication(call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Remember the principal while a request is handled. vLLM installs the middleware only where it checks keys."""
    from starlette.datastructures import Headers

    @functools.wraps(call)
    async def __call__(self: Any, scope: Any, receive: Any, send: Any) -> None:
        principal = NO_KEY
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            if self.verify_token(headers):
                principal = principal_of(headers["Authorization"].partition(" ")[2])
        before = _principal.set(principal)
        try:
            await call(self, scope, receive, send)
        finally:
            _principal.reset(before)

    return __call__


def _wrap_init(init: Callable[..., None]) -> Callable[..., None]:
    """Take the principal along into the thread that prepares raw prompts, where context variables do not reach."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        in_thread = self.process_inputs_async

        def process_inputs_async(*args: Any, **kwargs: Any) -> Any:
            return in_thread(*args, **kwargs, **{_PRINCIPAL: _principal.get()})

        self.process_inputs_async = process_inputs_async

    return __init__


def _wrap_inputs(process: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(process)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import SamplingParams

        principal = kwargs.pop(_PRINCIPAL) if _PRINCIPAL in kwargs else _principal.get()
        request = process(self, *args, **kwargs)
        params = request.sampling_params
        if isinstance(params, SamplingParams) and uses_agentspec(self.vllm_config):
            try:
                params.extra_args = tag_request(
                    params.extra_args,
                    session_id=request.session_id,
                    principal=principal,
                    cache_salt=request.cache_salt,
                )
            except InvalidSessionError as error:  # vLLM answers 400 only to its own kind
                raise VLLMValidationError(str(error)) from error
        return request

    return process_inputs
