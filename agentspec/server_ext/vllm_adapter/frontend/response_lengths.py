"""Tell the engines how long responses are that stop texts may end. vLLM finds these texts in the API server."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentspec.server_ext.vllm_adapter.frontend.engine_calls import ask_engines
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec

logger = logging.getLogger("vllm.agentspec")

_LOOK_SECONDS = 1.0
_WAKE_SECONDS = 2.0
"""More than an engine waits to be told the length of a response (requests/running.py)."""


def response_lengths_of(engine_client: Any) -> "ResponseLengths | None":
    """Return the object that tells the engines how long responses are; None where nothing does."""
    return getattr(getattr(engine_client, "output_processor", None), "agentspec", None)


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


def init_client(original: Callable[..., None], client: Any, *args: Any, **kwargs: Any) -> None:
    """Let an AsyncLLM tell its engines how long responses are, whatever server or trainer made it."""
    original(client, *args, **kwargs)
    if uses_agentspec(client.vllm_config):
        client.output_processor.agentspec = ResponseLengths(client)
        client.input_processor.agentspec.tells_lengths = True


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
