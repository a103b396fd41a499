"""Remember who sends a request to the API server, and write the identity into the request.

vLLM's ``session_id`` stops at the engine core, and headers and the API key stop at the HTTP routes. Only
``SamplingParams.extra_args`` reaches the worker, so the identity is written there.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from typing import Any

from agentspec.protocol import ROUTE
from agentspec.server_ext.identity import IDENTITY_KEY, SESSION_KEY, RequestTagger, without_names
from agentspec.server_ext.identity.callers import Callers, Presented, shows_admin_key
from agentspec.server_ext.identity.server_secrets import check_secrets, server_secret
from agentspec.server_ext.persistence.model_key import adapter_key
from agentspec.server_ext.settings import load_settings
from agentspec.server_ext.step import Int32
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec

logger = logging.getLogger("vllm.agentspec")

ROUTES = f"/v1/{ROUTE}"
"""Path under which agentspec's HTTP routes lie."""
BATCH = "/v1/chat/completions/batch"
"""Path of vLLM's route for several chats in one call."""
_NUMBERED = (BATCH, "/v1/responses")
"""Paths of vLLM's routes that number the engine's requests behind ids that callers may choose."""
_PRESENTED = "agentspec_presented"
_presented: ContextVar[Presented | None] = ContextVar(_PRESENTED, default=None)
"""Sender of the HTTP request that is being handled; None outside of HTTP."""

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


def path_of(scope: Any) -> str:
    """Return the path by which vLLM routes an HTTP request: without the prefix of a proxy (``--root-path``).

    The prefix is taken off only if the rest is empty or begins with a slash, so ``--root-path /`` takes nothing off.
    """
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return rest if rest.startswith("/") or not rest else path


def presented() -> Presented | None:
    """Return the sender of the HTTP request that is being handled; None outside of HTTP."""
    return _presented.get()


@contextmanager
def drafting_from(prediction: Sequence[int], quotable: Int32) -> Iterator[None]:
    """Let the request that the block handles draft from two more texts, both token ids.

    prediction: the response that its caller expects. quotable: int32 [N], texts that the response may quote.
    """
    told = replace(_presented.get() or Presented(()), prediction=tuple(prediction), quotable=quotable.tobytes())
    with _presenting(told):
        yield


@contextmanager
def _presenting(sender: Presented) -> Iterator[None]:
    """Let ``presented`` return ``sender`` while the block runs."""
    before = _presented.set(sender)
    try:
        yield
    finally:
        _presented.reset(before)


def _sender(scope: Any, *, verified: bool | None = None) -> Presented:
    """Return the sender of an HTTP request. scope: ASGI's. verified: as for `Presented`."""
    return Presented(scope["headers"], verified=verified, batch=path_of(scope) in _NUMBERED)


class CallerMiddleware:
    """Remember the sender of a request while it is handled, on servers that check no keys."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request. Where vLLM checks keys, ``authenticate`` has remembered the sender already."""
        if scope["type"] not in ("http", "websocket") or _PRESENTED in scope:
            await self.app(scope, receive, send)
        else:
            await _handle(self.app, _sender(scope), scope, receive, send)


async def authenticate(original: Callable[..., Awaitable[None]], middleware: Any, scope: Any, *call: Any) -> None:
    """Remember the sender of a request, and let the administrator's key pass to agentspec's own routes.

    vLLM installs the middleware only where it checks keys.
    """
    if scope["type"] not in ("http", "websocket"):
        await original(middleware, scope, *call)
        return
    from starlette.datastructures import Headers

    path = path_of(scope)
    sender = _sender(scope, verified=bool(middleware.verify_token(Headers(scope=scope))))
    if not sender.verified and (path == ROUTES or path.startswith(f"{ROUTES}/")) and shows_admin_key(sender):
        await _handle(middleware.app, sender, scope, *call)
    else:
        await _handle(lambda *arguments: original(middleware, *arguments), sender, scope, *call)


async def _handle(app: ASGIApp, sender: Presented, scope: Any, *call: Any) -> None:
    # CallerMiddleware looks for this: the context variable may still have an earlier request's value on a connection.
    scope[_PRESENTED] = sender
    with _presenting(sender):
        await app(scope, *call)


def init_input_processor(original: Callable[..., None], processor: Any, *args: Any, **kwargs: Any) -> None:
    """Make the object that tells callers apart, and pass the sender on to the thread that prepares raw prompts."""
    original(processor, *args, **kwargs)
    if not uses_agentspec(processor.vllm_config):
        return
    settings = load_settings(processor.vllm_config.additional_config)
    check_secrets()  # report an unusable secret at start
    processor.agentspec = RequestTagger(Callers(settings, server_secret(settings)), settings.scope)
    in_thread = processor.process_inputs_async

    def process_inputs_async(*args: Any, **kwargs: Any) -> Any:  # context variables do not reach the thread
        return in_thread(*args, **kwargs, **{_PRESENTED: _presented.get()})

    processor.process_inputs_async = process_inputs_async


def process_inputs(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the identity into the ``extra_args`` of an engine request."""
    from vllm.sampling_params import SamplingParams

    sender = kwargs.pop(_PRESENTED) if _PRESENTED in kwargs else _presented.get()
    request = original(processor, *args, **kwargs)
    params = request.sampling_params
    if isinstance(params, SamplingParams) and uses_agentspec(processor.vllm_config):
        params.extra_args = processor.agentspec.tag(
            params.extra_args,
            sender,
            session_id=request.session_id,
            cache_salt=request.cache_salt,
            adapter=_adapter_name(request.lora_request),
            may_stop=bool(params.stop),
        )
        if SESSION_KEY not in params.extra_args and not _is_unicode(request.session_id):
            request.session_id = None  # vLLM would answer HTTP 500, because it cannot send it to its engine
    return request


def anon_repr(original: Callable[[Any], str], request: Any) -> str:
    """Describe a request without the identity of its caller and the texts that it drafts from.

    vLLM logs the description, which has no prompt either, when an engine ends with an error. request: NewRequestData.
    """
    params = request.sampling_params
    if IDENTITY_KEY in (getattr(params, "extra_args", None) or {}):
        hidden = copy(params)
        hidden.extra_args = without_names(params.extra_args)
        request = copy(request)
        request.sampling_params = hidden
    return original(request)


def _is_unicode(text: str | None) -> bool:
    """Return whether UTF-8 can encode a text. It cannot encode lone surrogates, which JSON may hold."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        return False
    return True


def _adapter_name(lora_request: Any) -> str | None:
    return None if lora_request is None else adapter_key(lora_request.lora_name, lora_request.lora_path)
