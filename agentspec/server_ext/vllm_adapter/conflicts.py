"""Find options of an engine that exclude drafts, so that agentspec can name the remedy before vLLM loads the model.

vLLM refuses them beside a drafter on the host too, but at the end of a traceback, some not before the model is loaded.
"""

import os
from collections.abc import Mapping
from typing import Any

from agentspec.errors import ConfigurationError


def conflict(engine_args: Any, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why an engine with these arguments cannot draft with agentspec, and the remedy. None: it can."""
    if environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower() in ("1", "true"):
        return "VLLM_USE_V2_MODEL_RUNNER=1: agentspec drafts in vLLM's V1 model runner only; unset the variable"
    if getattr(engine_args, "async_scheduling", None):
        return (
            "--async-scheduling: agentspec drafts from the tokens of the step before, which asynchronous scheduling "
            "doesn't wait for; leave the option out"
        )
    if getattr(engine_args, "logits_processors", None):
        return (
            "--logits-processors: vLLM runs no custom logits processors with speculative decoding; leave the option "
            "out, or start plain 'vllm serve'"
        )
    return None


def schedule_synchronously(engine_args: Any) -> None:
    """Switch asynchronous scheduling off: the suffix indexes need each step's tokens before they draft.

    Raises ConfigurationError with the remedy where an option excludes drafts.
    """
    if (reason := conflict(engine_args)) is not None:
        raise ConfigurationError(reason)
    engine_args.async_scheduling = False
