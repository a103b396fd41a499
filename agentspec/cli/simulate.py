"""Define ``agentspec simulate FILE.jsonl``, which measures drafting on recorded conversations without an engine."""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from agentspec.cache import DraftPolicy, Scope
from agentspec.cli.tables import JsonOption, figures_table, print_table
from agentspec.errors import ConfigurationError, InvalidInputError
from agentspec.identifiers import check_session_id
from agentspec.simulate import Figures, open_tokenizer, read_calls
from agentspec.simulate import simulate as replay

Options = Mapping[str, int | float | None]


class Rule(StrEnum):
    """List the values of `--rule`."""

    LEARNED = "learned"
    ARCTIC = "arctic"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(simulate)


def simulate(
    file: Annotated[Path, typer.Argument(help="Recorded calls, one JSON object a line; gzip may have compressed it.")],
    tenant: Annotated[str | None, typer.Option(help="Tenant of all calls, in place of the records' own.")] = None,
    scope: Annotated[
        Scope, typer.Option(help="What a call drafts from beside its own text (tenant: session, group and tenant).")
    ] = "tenant",
    verify_cost: Annotated[
        float | None, typer.Option(help="Price of verifying one more token, as a share of a decode step.")
    ] = None,
    max_draft: Annotated[int | None, typer.Option(help="Longest draft, in tokens.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For records of text: a tokenizer.json, a model's folder or its name.")
    ] = None,
    rule: Annotated[
        Rule, typer.Option(help="learned: as agentspec serve drafts; arctic: as ArcticInference drafts.")
    ] = Rule.LEARNED,
    max_depth: Annotated[int | None, typer.Option(help="arctic: most tokens of context and draft together.")] = None,
    max_spec_factor: Annotated[float | None, typer.Option(help="arctic: draft tokens for each matched token.")] = None,
    max_spec_offset: Annotated[float | None, typer.Option(help="arctic: draft tokens added to these.")] = None,
    min_token_prob: Annotated[float | None, typer.Option(help="arctic: lowest probability of a draft token.")] = None,
    prefill_steps: Annotated[
        bool,
        typer.Option(help="Count the step that computes a prompt, too: it gives the first token, without a draft."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Replay recorded conversations through the cache, with greedy verification against what was recorded.

    A line has "session", "prompt" and "response" as text, or "prompt_token_ids" and "response_token_ids".
    The prompt is all that the model saw, or with "continues": true what follows the session's last answer.
    "group" and "tenant" are optional. docs/sdk.md shows such a file.
    """
    from agentspec.cache import SuffixCache  # imported here: other commands need no compiled core

    arctic = {
        "max_depth": max_depth,
        "max_spec_factor": max_spec_factor,
        "max_spec_offset": max_spec_offset,
        "min_token_prob": min_token_prob,
    }
    policy = _policy(rule, {"max_draft": max_draft}, {"cost": verify_cost}, arctic)
    if tenant is not None:
        check_session_id(tenant, "tenant")
    encode = None if tokenizer is None else open_tokenizer(tokenizer)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(file.name), total=file.stat().st_size if file.is_file() else None)
        calls = read_calls(
            file,
            tokenizer=encode,
            tenant=tenant,
            progress=lambda done: progress.update(task, completed=done),
        )
        figures = replay(calls, SuffixCache(policy=policy), scope=scope, prefill_steps=prefill_steps)
    if not figures.tokens:
        raise InvalidInputError(f"{file}: no record with a response in it; give a file of JSON lines")
    if as_json:
        typer.echo(json.dumps(figures.as_dict(), indent=1))
    else:
        print_table(figures_table(file.name, _rows(figures)))


def _policy(rule: Rule, common: Options, learned: Options, arctic: Options) -> DraftPolicy:
    """Return the policy with the given options.

    Raises ConfigurationError for an option of the other rule, and for a value out of range.
    """
    own, other = (arctic, learned) if rule is Rule.ARCTIC else (learned, arctic)
    wrong = next((option for option, value in other.items() if value is not None), None)
    if wrong is not None:
        raise ConfigurationError(f"{_flag(wrong)} has no effect with --rule {rule.value}: leave one of them out")
    given: dict[str, Any] = {option: value for option, value in {**common, **own}.items() if value is not None}
    try:
        return DraftPolicy.fixed(**given) if rule is Rule.ARCTIC else DraftPolicy(**given)
    except ConfigurationError as error:
        option, _, remedy = str(error).partition("=")
        raise ConfigurationError(f"{_flag(option)}={remedy}") from None


def _flag(option: str) -> str:
    return "--verify-cost" if option == "cost" else f"--{option.replace('_', '-')}"


def _rows(figures: Figures) -> list[tuple[str, str]]:
    shares = {name: count for name, count in figures.accepted_by_source.items() if count}
    return [
        ("tokens", f"{figures.tokens:,}"),
        ("steps", f"{figures.steps:,}"),
        ("tokens a step", f"{figures.tokens_per_step:.3f}"),
        ("drafted", f"{figures.drafted:,}"),
        ("accepted", f"{figures.accepted:,} ({figures.acceptance_rate:.0%})"),
        *((f"  from {name}", f"{count:,} ({count / figures.accepted:.0%})") for name, count in shares.items()),
        ("propose, µs a call, p50 / p99", _pair(figures.propose.as_dict())),
        ("extend, µs a call, p50 / p99", _pair(figures.extend.as_dict())),
        ("bytes a token kept", f"{figures.bytes_per_token:.1f}"),
    ]


def _pair(times: dict[str, float]) -> str:
    return f"{times['p50']:.1f} / {times['p99']:.1f}"
