"""Serve the extension's figures over HTTP. They lie under ``/v1``, so that vLLM's ``--api-key`` guards them.

``GET /v1/agentspec``                 version and whether drafting is on: how clients recognise the extension
``GET /v1/agentspec/stats``           counters, sizes of the cache, state of the store; one object for each engine
``GET /v1/agentspec/requests/{id}``   figures of one finished or running request, by the id in its response

A request with the header ``X-Agentspec-Figures`` gets its figures in the response (``response_figures``). Chat
completions take OpenAI's ``prediction`` (``predictions``); what a response quotes is drafted from the prompt in the
response's spelling (``quotes``). Figures of a request are told to its principal alone, and all figures to whoever has
the bearer key ``AGENTSPEC_ADMIN_KEY``.
"""

import logging
import os
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request

from agentspec import __version__
from agentspec.addresses import is_loopback
from agentspec.server_ext.api.path_ids import any_id
from agentspec.server_ext.api.prometheus import MetricsMiddleware
from agentspec.server_ext.api.request_bodies import BodyMiddleware
from agentspec.server_ext.api.response_figures import FiguresMiddleware, figures_of
from agentspec.server_ext.api.session_routes import router as session_router
from agentspec.server_ext.settings import load_settings
from agentspec.server_ext.vllm_adapter import uses_agentspec
from agentspec.server_ext.vllm_adapter.frontend.chats import tokenizer_of
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import (
    ask_or_refuse,
    drafting_engine,
    engine_of,
    refused_if_busy,
)
from agentspec.server_ext.vllm_adapter.frontend.senders import ROUTES, CallerMiddleware
from agentspec.server_ext.vllm_adapter.startup.speculative_config import what_drafts

logger = logging.getLogger("vllm.agentspec")
router = APIRouter(prefix=ROUTES)

_ACCESS_LOGGER = logging.getLogger("uvicorn.access")
_PATH = 2
"""Place of the path among the arguments of a line of uvicorn's: client, method, path, version, status."""
_SESSIONS = f"{ROUTES}/sessions"


class AgentSpecEndpoints:
    """Plug the endpoints into vLLM (entry point group ``vllm.endpoint_plugins``)."""

    name = "agentspec"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add routes, figures on ``/metrics``, and the middleware that reads requests and remembers their senders.

        From then on, vLLM's access log names no session.
        """
        app.include_router(router)
        app.include_router(session_router)
        app.add_middleware(MetricsMiddleware)
        app.add_middleware(FiguresMiddleware)
        app.add_middleware(BodyMiddleware)
        app.add_middleware(CallerMiddleware)
        _ACCESS_LOGGER.addFilter(_without_session)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Store the engine client for the routes, and log what drafts, and for whom."""
        state.agentspec_engine = engine_client
        state.agentspec_socket = getattr(args, "uds", None) is not None
        state.agentspec_loopback = is_loopback(args.host)
        if engine_client is not None and uses_agentspec(engine_client.vllm_config):
            config = engine_client.vllm_config
            tokenizer_of(engine_client)  # copies vLLM's now, because that holds up everything for half a second
            settings = load_settings(config.additional_config)
            has_keys = any(args.api_key or [os.environ.get("VLLM_API_KEY")])
            logger.info("agentspec: %s", what_drafts(config.speculative_config, settings, has_keys=has_keys))


def _without_session(record: logging.LogRecord) -> bool:
    """Cut a session's id and the query, which tell whose text it is, off a path that is logged. Return True."""
    if isinstance(record.args, tuple) and len(record.args) > _PATH:
        before, route, rest = str(record.args[_PATH]).partition(_SESSIONS)
        if rest[:1] in ("/", "?"):
            record.args = (*record.args[:_PATH], f"{before}{route}{rest[0]}…", *record.args[_PATH + 1 :])
    return True


@router.get("")
async def info(request: Request) -> dict[str, Any]:
    """Return the extension's version, and whether this engine drafts with it."""
    engine = engine_of(request.app)
    enabled = engine is not None and load_settings(engine.vllm_config.additional_config).enabled
    return {"agentspec": __version__, "drafting": enabled}


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """Return the counters since start: one entry for each engine core that drafts."""
    return {"engines": await ask_or_refuse(drafting_engine(request), "stats")}


@router.get("/requests/" + any_id("request_id"))
async def request_figures(request: Request, request_id: str) -> dict[str, Any]:
    """Return the figures of one request, or 404 if it is another principal's, unknown or forgotten."""
    with refused_if_busy():
        figures = await figures_of(drafting_engine(request), request_id)
    if figures is None:
        raise HTTPException(status_code=404, detail=f"no figures of request {request_id}")
    return figures
