"""Write identities into requests in the API server, and let its HTTP routes ask the engines.

vLLM's ``session_id`` stops at the engine core, and headers and the API key stop at the HTTP routes. Only
``SamplingParams.extra_args`` reaches the worker, so the identity is written there.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from agentspec.server_ext.identity import SESSION_KEY, RequestTagger
from agentspec.server_ext.identity.callers import Callers, Presented, shows_admin_key
from agentspec.server_ext.identity.server_secrets import check_secrets, server_secret
from agentspec.server_ext.persistence.model_key import adapter_key
from agentspec.server_ext.settings import load_settings
from agentspec.server_ext.step import Int32
from agentspec.server_ext.vllm_adapter.speculative_config import uses_agentspec

logger = logging.getLogger("vllm.agentspec")

ROUTES = "/v1/agentspec"
"""Path under which agentspec's HTTP routes lie."""
BATCH = "/v1/chat/completions/batch"
"""Path of vLLM's route for several chats in one call."""
RPC_METHOD = "agentspec_rpc"
"""Name of the method on every worker that answers ``ask_engines``."""

_RPC_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_WAKE_SECONDS = 2.0
"""More than an engine waits to be told the length of a response (requests/running.py)."""
_CHILD_PREFIX = re.compile(r"^\d+_")
_ENGINE_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PART_NUMBER = re.compile(r"^(cmpl-.*)-\d+$|^(resp_.*)_\d+$", re.DOTALL)
_CHAT_NUMBER = re.compile(r"_\d+$")

_PRESENTED = "agentspec_presented"
_presented: ContextVar[Presented | None] = ContextVar(_PRESENTED, default=None)
"""Sender of the HTTP request that is being handled; None outside of HTTP."""

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


def api_request_id(engine_request_id: str, *, batch: bool = False) -> str:
    """Return the id under which the API returned an engine's request.

    The engine adds a random suffix to that id, the sample's number in front (n > 1), and a part's number behind (a
    completions request may hold several prompts, a response several turns with vLLM's own tools).

    batch: whether it is a chat of a call to `BATCH`. vLLM numbers these chats, too. Elsewhere a chat's own id may end
    in such a number, which is kept.
    """
    plain = _ENGINE_SUFFIX.sub("", _CHILD_PREFIX.sub("", engine_request_id))
    if batch:
        return _CHAT_NUMBER.sub("", plain)
    return _PART_NUMBER.sub(lambda found: found[1] or found[2], plain)


async def ask_engines(
    engine_client: Any, *question: Any, engines: Sequence[int] | None = None, seconds: float | None = None
) -> list[dict[str, Any]]:
    """Ask the workers of engines that draft (``worker_rpc``). Return the answers of those that know one.

    engine_client: vLLM's EngineClient. engines: numbers of the engines to ask; None: all. seconds: time limit; None: 5.
    Raises TimeoutError when that is over, and the engine's own errors.
    """
    core = engine_client.engine_core
    # With data parallelism vLLM's own collective_rpc returns the first engine's answers alone. The workers get no
    # time limit: vLLM would take an answer that comes after it for the answer of the next call.
    asked = [
        core._call_utility_async("collective_rpc", RPC_METHOD, None, question, None, engine=core.core_engines[number])
        for number in (engine_numbers(engine_client) if engines is None else engines)
    ]
    together = asyncio.gather(*asked)
    # The caller may be gone, or have given up, before the engines answer or end: asyncio must not log that as an error.
    together.add_done_callback(lambda done: done.cancelled() or done.exception())
    answers = await asyncio.wait_for(together, _RPC_SECONDS if seconds is None else seconds)
    return [answer for workers in answers for answer in workers if answer is not None]


@contextmanager
def refused_if_busy() -> Iterator[None]:
    """Answer an HTTP request with 503 where the block raises TimeoutError, as when it asks an engine."""
    from fastapi import HTTPException

    try:
        yield
    except TimeoutError:
        raise HTTPException(status_code=503, detail="an engine is busy and has not answered; try again") from None


async def ask_or_refuse(
    engine_client: Any, *question: Any, engines: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Ask engines for an HTTP route (``ask_engines``). Raise a 503 if one of them does not answer in time."""
    with refused_if_busy():
        return await ask_engines(engine_client, *question, engines=engines)


def engine_numbers(engine_client: Any) -> Sequence[int]:
    """Return the numbers of the engines of vLLM's EngineClient: several with data parallelism."""
    return range(len(engine_client.engine_core.core_engines))


def engine_of(app: Any) -> Any:
    """Return the EngineClient of vLLM's app; None if the engine does not draft with agentspec, or is not ready yet."""
    engine = getattr(app.state, "agentspec_engine", None)
    return engine if engine is not None and uses_agentspec(engine.vllm_config) else None


def path_of(scope: Any) -> str:
    """Return the path by which vLLM routes an HTTP request: without the prefix of a proxy (``--root-path``).

    The prefix is taken off only if the rest is empty or begins with a slash, so ``--root-path /`` takes nothing off.
    """
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return rest if rest.startswith("/") or not rest else path


def drafting_engine(request: Any) -> Any:
    """Return the EngineClient behind an HTTP request. Raise the 404 of a server that does not draft with agentspec."""
    from fastapi import HTTPException

    engine = engine_of(request.app)
    if engine is None:
        raise HTTPException(status_code=404, detail="this engine does not draft with agentspec")
    return engine


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


def tokenizer_of(engine_client: Any) -> Any:
    """Return the served model's tokenizer, or None where vLLM runs without one (``--skip-tokenizer-init``)."""
    try:
        return engine_client.get_tokenizer()
    except ValueError:
        return None


def templated(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages in the form in which vLLM's server gives them to a chat template.

    Text parts become one text, arguments of tool calls objects, and thoughts have the names of older templates, too.
    """
    return [_templated(dict(message)) for message in messages]


def _templated(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    texts = [part["text"] for part in content if _is_text(part)] if isinstance(content, list) else []
    if content is None or (texts and len(texts) == len(content)):
        message["content"] = "\n".join(texts)
    thoughts = message.get("reasoning", message.get("reasoning_content"))
    if thoughts is not None:
        message["reasoning"] = message["reasoning_content"] = thoughts
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_templated_call(call) for call in calls]
        if not calls:
            del message["tool_calls"]
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _templated_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, Mapping) else {}}}


def response_lengths_of(engine_client: Any) -> "ResponseLengths | None":
    """Return the object that tells the engines how long responses are; None where nothing does."""
    return getattr(getattr(engine_client, "output_processor", None), "agentspec", None)


def tagger_of(engine_client: Any) -> RequestTagger:
    """Return the object that finds out the identities of this server's requests."""
    tagger: RequestTagger = engine_client.input_processor.agentspec
    return tagger


def _sender(scope: Any, *, verified: bool | None = None) -> Presented:
    """Return the sender of an HTTP request. scope: ASGI's. verified: as for `Presented`."""
    return Presented(scope["headers"], verified=verified, batch=path_of(scope) == BATCH)


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
        )
        if SESSION_KEY not in params.extra_args and not _is_unicode(request.session_id):
            request.session_id = None  # vLLM would answer HTTP 500, because it cannot send it to its engine
    return request


def _is_unicode(text: str | None) -> bool:
    """Return whether UTF-8 can encode a text. It cannot encode lone surrogates, which JSON may hold."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        return False
    return True


class ResponseLengths:
    """Tell the engines how many tokens of a response its caller gets, where stop texts may end it.

    engine_client: vLLM's EngineClient.
    """

    def __init__(self, engine_client: Any) -> None:
        self._client = engine_client
        self._telling = set[asyncio.Task[Any]]()
        self._open: dict[str, Any] = {}  # detokenizers of responses that go on, by the engine's request ids
        self._looking = False
        self._waking = self._wakes_again = False

    def watch(self, responses: Mapping[str, Any]) -> None:
        """Watch responses that have got tokens, and tell the lengths of those that have ended.

        responses: vLLM's detokenizers, by the engine's request ids. When a caller goes, vLLM drops the request without
        more output, so look for dropped requests once a second. Otherwise an engine without work would wait for ever to
        be told how long such a response was, and keep nothing of it.
        """
        self._open.update(responses)
        running = self._client.output_processor.request_states
        ended = {name: text for name, text in self._open.items() if name not in running}
        if ended:
            self._open = {name: text for name, text in self._open.items() if name in running}
            self.tell({name: text.num_output_tokens() for name, text in ended.items()})
        if self._open and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = False
        self.watch({})

    def wake(self) -> None:
        """Ask the engines, two seconds later, to keep responses whose lengths are not known here.

        The callers of these had gone before any of their tokens arrived here. An engine waits a second for a length,
        but without work it does not notice that the second is over.
        """
        if self._waking:  # the call that is due may come too early for this response
            self._wakes_again = True
            return
        self._waking = True
        asyncio.get_running_loop().call_later(_WAKE_SECONDS, self._wake)

    def _wake(self) -> None:
        again, self._waking, self._wakes_again = self._wakes_again, False, False
        self.tell({})
        if again:
            self.wake()

    def tell(self, lengths: Mapping[str, int]) -> None:
        """Tell the engines how many tokens ended responses have, by the engine's request ids. Never waits or raises."""
        task = asyncio.get_running_loop().create_task(ask_engines(self._client, "lengths", dict(lengths)))
        self._telling.add(task)
        task.add_done_callback(self._told)

    async def told(self) -> None:
        """Wait until the engines know the lengths that were told so far, or did not answer in time."""
        if self._telling:
            await asyncio.wait(self._telling)

    def _told(self, task: "asyncio.Task[Any]") -> None:
        self._telling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("agentspec: the engines do not know where responses ended: %r", error)


def process_outputs(original: Callable[..., Any], processor: Any, outputs: Sequence[Any], *args: Any, **kw: Any) -> Any:
    """Tell the engines where responses with stop texts have ended. vLLM finds these texts here."""
    lengths: ResponseLengths | None = getattr(processor, "agentspec", None)
    if lengths is None:
        return original(processor, outputs, *args, **kw)
    watched, dropped = {}, False
    for output in outputs:
        state = processor.request_states.get(output.request_id)
        dropped = dropped or state is None
        if state is not None and getattr(state.detokenizer, "stop", None):
            watched[output.request_id] = state.detokenizer
    result = original(processor, outputs, *args, **kw)
    if watched:
        lengths.watch(watched)
    if dropped:
        lengths.wake()
    return result


def _adapter_name(lora_request: Any) -> str | None:
    return None if lora_request is None else adapter_key(lora_request.lora_name, lora_request.lora_path)
