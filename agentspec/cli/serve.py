"""``agentspec serve MODEL [any vllm serve option]``."""

import os
from typing import Annotated, Any

import typer

from agentspec.cache import Scope
from agentspec.cache.store import open_store
from agentspec.server_ext.settings import default_store
from agentspec.server_ext.vllm_adapter.launch import run_vllm, serve_arguments


def add_to(app: typer.Typer) -> None:
    """Register the command; what it does not know itself is an option of ``vllm serve``."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or path, as for vllm serve.")],
    store: Annotated[
        str | None,
        typer.Option(help="Where token logs live: sqlite:///path, redis://host:port/db or memory://."),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="Whose server this is: its API keys share answers. Without one, each key is on its own."),
    ] = None,
    scope: Annotated[
        Scope | None,
        typer.Option(help="What a request drafts from beside its own text (tenant: session, group and tenant)."),
    ] = None,
    max_draft: Annotated[
        int | None,
        typer.Option(help="Longest draft, in tokens (num_speculative_tokens); by default what the engine can verify."),
    ] = None,
    verify_cost: Annotated[
        float | None,
        typer.Option(help="Price of verifying one more token, as a share of a decode step; measured unless given."),
    ] = None,
    record: Annotated[str | None, typer.Option(help="Write the step-by-step record to this file (JSON lines).")] = None,
) -> None:
    """vllm serve with the extension switched on; takes every option of vllm serve."""
    settings: dict[str, Any] = {"tenant": tenant, "scope": scope, "verify_cost": verify_cost, "record": record}
    given = {name: value for name, value in settings.items() if value is not None}
    if store is not None:
        os.environ["AGENTSPEC_STORE"] = store  # not an argument of vLLM, which prints those, passwords and all
    arguments = serve_arguments(context.args, given, max_draft)
    open_store(os.environ.get("AGENTSPEC_STORE") or default_store()).close()  # an unusable store shows now
    run_vllm([model, *arguments])
