"""Ask the engines from the API server, whose process they are not in; and name requests as the API does."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from agentspec.server_ext.identity import RequestTagger
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec

RPC_METHOD = "agentspec_rpc"
"""Name of the method on every worker that answers ``ask_engines``."""

_RPC_SECONDS = 5.0
_CHILD_PREFIX = re.compile(r"^\d+_")
_ENGINE_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PART_NUMBER = re.compile(r"^((?:cmpl|decision|generative-scoring)-.*)-\d+$|^(resp_.*)_\d+$", re.DOTALL)
_NUMBER_OF_BATCH = re.compile(r"_\d+$")


async def ask_engines(
    engine_client: Any,
    *question: Any,
    engines: Sequence[int] | None = None,
    seconds: float | None = None,
    **named: Any,
) -> list[dict[str, Any]]:
    """Ask the workers of engines that draft (``worker_rpc``). Return the answers of those that know one.

    engine_client: vLLM's EngineClient. question, named: what ``worker_rpc`` takes. engines: numbers of the engines to
    ask; None: all. seconds: time limit; None: 5. Raises TimeoutError when that is over, and the engine's own errors.
    """
    core = engine_client.engine_core
    # With data parallelism vLLM's own collective_rpc returns the first engine's answers alone. The workers get no
    # time limit: vLLM would take an answer that comes after it for the answer of the next call.
    asked = [
        core._call_utility_async("collective_rpc", RPC_METHOD, None, question, named, engine=core.core_engines[number])
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


def engine_ranks(engine_client: Any) -> Sequence[int]:
    """Return the data-parallel ranks of these engines, as vLLM's own metrics name them.

    A server that knows the engines of its own node alone (hybrid or external load balancing) has later ranks than 0.
    """
    return [int.from_bytes(identity, "little") for identity in engine_client.engine_core.core_engines]


def engine_of(app: Any) -> Any:
    """Return the EngineClient of vLLM's app; None if the engine does not draft with agentspec, or is not ready yet."""
    engine = getattr(app.state, "agentspec_engine", None)
    return engine if engine is not None and uses_agentspec(engine.vllm_config) else None


def drafting_engine(request: Any) -> Any:
    """Return the EngineClient behind an HTTP request. Raise the 404 of a server that does not draft with agentspec."""
    from fastapi import HTTPException

    engine = engine_of(request.app)
    if engine is None:
        raise HTTPException(status_code=404, detail="this engine does not draft with agentspec")
    return engine


def tagger_of(engine_client: Any) -> RequestTagger:
    """Return the object that finds out the identities of this server's requests."""
    tagger: RequestTagger = engine_client.input_processor.agentspec
    return tagger


def api_request_id(engine_request_id: str, *, batch: bool = False) -> str:
    """Return the id under which the API returned an engine's request.

    The engine adds a random suffix to that id, the sample's number in front (n > 1), and a part's number behind (a
    completions request may hold several prompts, a decision several questions, a scoring several items, a response
    several turns with vLLM's own tools).

    batch: as for `Presented`. Elsewhere a chat's own id may end in such a number, which is kept.
    """
    plain = _ENGINE_SUFFIX.sub("", _CHILD_PREFIX.sub("", engine_request_id))
    if batch:
        return _NUMBER_OF_BATCH.sub("", plain)
    return _PART_NUMBER.sub(lambda found: found[1] or found[2], plain)
