"""Provide what the benchmarks on replay engines share: options, calls from the recordings, and the engines."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import arctic
import trace_files
from report import positive
from trace_files import VOCABULARY, records

from agentspec.errors import ConfigurationError
from agentspec.testing.replay import METHODS, Call, ModelShape, ReplayEngine, fitting_length


class Parser(argparse.ArgumentParser):
    """Print an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_options(parser: argparse.ArgumentParser, methods: Sequence[str], max_prompt: int) -> None:
    """Register the options that these benchmarks share; `methods` and `max_prompt` are defaults."""
    add = parser.add_argument
    trace_files.add_option(parser)
    add(
        "--max-prompt",
        type=positive,
        default=max_prompt,
        metavar="P",
        help="calls with a prompt of more tokens are skipped, and do not count towards --calls (%(default)s)",
    )
    add(
        "--methods",
        type=_methods,
        default=",".join(methods),
        metavar="A,B",
        help="of: none (plain vLLM), vllm (the same with vLLM's own choice of runner "
        "and scheduling), ngram (vLLM's own prompt lookup), suffix (vLLM's own, on ArcticInference's "
        "extension), agentspec (%(default)s)",
    )
    arctic.add_option(parser)
    add("--seed", type=int, default=0, help="of the random model's weights (%(default)s)")
    add("--json", action="store_true", help="print a JSON list, one object a method, instead of a table")


def add_recording(parser: argparse.ArgumentParser, workload: str | None = None) -> None:
    """Register `--traces`, `--workload` and `--json`. workload: default of `--workload`; None: it is required."""
    add = parser.add_argument
    trace_files.add_option(parser)
    what = "which recording" if workload is None else "recording with several samples a problem (%(default)s)"
    add("--workload", required=workload is None, default=workload, metavar="NAME", help=what)
    add("--json", action="store_true", help="print a JSON list of {figure, value, target, met}")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Register the sizes of the tiny random model."""
    add = parser.add_argument
    add("--hidden", type=positive, default=64, help="hidden size of the random model, a multiple of 32 (%(default)s)")
    add("--layers", type=positive, default=2, help="its layers (%(default)s)")


def short_calls(options: argparse.Namespace, workload: str) -> Iterator[Call]:
    """Yield the workload's calls, in file order, whose prompt has at most `--max-prompt` tokens.

    Calls without a response are left out. Raises ConfigurationError for a token beyond the models' vocabulary.
    """
    for record in records(options.traces, workload):
        prompt, response, group = (record[name] for name in ("prompt", "response", "group"))
        if len(prompt) > options.max_prompt or not len(response):
            continue
        largest = max(int(text.max()) for text in (prompt, response) if len(text))
        if largest >= VOCABULARY:
            raise ConfigurationError(f"{workload}: token id {largest}; the random models know {VOCABULARY:,} tokens")
        yield Call(
            session=f"{workload}-{record['session']}",
            prompt=prompt,
            response=response,
            group=None if group is None else f"{workload}-{group}",
        )


def no_short_calls(options: argparse.Namespace, workload: str) -> ConfigurationError:
    """Return the error of a workload of which `short_calls` yields nothing."""
    return ConfigurationError(f"--max-prompt {options.max_prompt}: no call of {workload} has a prompt that short")


def start_engines(
    options: argparse.Namespace,
    stack: ExitStack,
    calls: Sequence[Call],
    *,
    batch: int,
    max_draft: int | None = None,
    settings: Mapping[str, Any] | None = None,
    shape: ModelShape | None = None,
    kv_cache_bytes: int | None = None,
) -> dict[str, ReplayEngine]:
    """Start one engine for each of `--methods`, all with the same random model. `stack` closes them.

    `max_draft` (in tokens), agentspec's `settings` and `kv_cache_bytes` have their defaults if None; `shape` is then
    that of `add_sizes`.
    """
    paths = {"suffix": [arctic.build(options.peer_dir)]} if "suffix" in options.methods else {}
    shape = shape or ModelShape(VOCABULARY, options.hidden, options.layers, max(1, options.hidden // 32))
    return {
        method: stack.enter_context(
            ReplayEngine(
                method=method,
                shape=shape,
                max_model_len=fitting_length(calls, max_draft),
                max_batch=batch,
                max_draft=max_draft,
                settings=settings,
                seed=options.seed,
                kv_cache_bytes=kv_cache_bytes,
                module_paths=paths.get(method, ()),
            )
        )
        for method in options.methods
    }


def _methods(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown method {', '.join(unknown) or text!r}; known: {', '.join(METHODS)}")
    return list(dict.fromkeys(names))
