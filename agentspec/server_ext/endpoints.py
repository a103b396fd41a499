"""Serve the extension's figures over HTTP. They lie under ``/v1``, so that vLLM's ``--api-key`` guards them.

``GET /v1/agentspec``                 version and whether drafting is on: how clients recognise the extension
``GET /v1/agentspec/stats``           counters, sizes of the cache, state of the store; one object for each engine
``GET /v1/agentspec/requests/{id}``   figures of one finished or running request, by the id in its response
"""

import logging
import os
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request

from agentspec import __version__
from agentspec.server_ext.identity import who_shares
from agentspec.server_ext.prometheus import MetricsMiddleware
from agentspec.server_ext.settings import load_settings
from agentspec.server_ext.vllm_adapter import ask_engines, uses_agentspec

logger = logging.getLogger("vllm.agentspec")
router = APIRouter(prefix="/v1/agentspec")


class AgentSpecEndpoints:
    """Plug the endpoints into vLLM (entry point group ``vllm.endpoint_plugins``)."""

    name = "agentspec"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's app, and the figures to its ``/metrics``."""
        app.include_router(router)
        app.add_middleware(MetricsMiddleware)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Store the engine client for the routes, and log who shares text with whom."""
        state.agentspec_engine = engine_client
        if engine_client is not None and uses_agentspec(engine_client.vllm_config):
            settings = load_settings(engine_client.vllm_config.additional_config)
            keys = any(args.api_key or [os.environ.get("VLLM_API_KEY")])
            logger.info("agentspec: %s", who_shares(settings.tenant, settings.scope, keys=keys))


@router.get("")
async def info(request: Request) -> dict[str, Any]:
    """Return the extension's version, and whether this engine drafts with it."""
    engine = request.app.state.agentspec_engine
    return {"agentspec": __version__, "drafting": engine is not None and uses_agentspec(engine.vllm_config)}


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """Return the counters since start: one entry for each engine core that drafts."""
    return {"engines": await _ask(request, "stats")}


@router.get("/requests/{request_id}")
async def request_figures(request: Request, request_id: str) -> dict[str, Any]:
    """Return the figures of one request, or 404 if it is unknown or forgotten."""
    for answer in await _ask(request, "request", request_id):
        return answer
    raise HTTPException(status_code=404, detail=f"no figures of request {request_id}")


async def _ask(request: Request, *args: str) -> list[dict[str, Any]]:
    engine = request.app.state.agentspec_engine
    if engine is None or not uses_agentspec(engine.vllm_config):
        raise HTTPException(status_code=404, detail="this engine does not draft with agentspec")
    return await ask_engines(engine, *args)
