"""The OpenAI client's own options, which both clients hand on untouched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

import openai


class ConnectionOptions(TypedDict, total=False):
    """See the OpenAI client for their meaning; options that are not listed here are handed on too."""

    organization: str | None
    project: str | None
    timeout: float | openai.Timeout | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None


class ClientOptions(ConnectionOptions, total=False):
    """Options of AgentClient."""

    http_client: openai.DefaultHttpxClient | None


class AsyncClientOptions(ConnectionOptions, total=False):
    """Options of AsyncAgentClient."""

    http_client: openai.DefaultAsyncHttpxClient | None


def credentials(base_url: str | None, api_key: str | None) -> dict[str, Any]:
    """base_url and api_key for the OpenAI client, which takes its environment variables where they are None.

    A server of one's own usually has no key, while the OpenAI client insists on one.
    """
    own_server = base_url is not None or bool(os.environ.get("OPENAI_BASE_URL"))
    if api_key is None and own_server and not os.environ.get("OPENAI_API_KEY"):
        api_key = "EMPTY"
    return {"base_url": base_url, "api_key": api_key}
