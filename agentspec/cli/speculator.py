"""Define ``agentspec speculator``: show a draft model, and reduce its head to the tokens that a tenant uses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from agentspec.cache.store import LogNames, open_store, redact
from agentspec.cli.server import (
    OverridesOption,
    RevisionOption,
    TokenizerOption,
    TokenizerRevisionOption,
    served_key,
)
from agentspec.cli.tables import JsonOption, figures_table, print_table
from agentspec.errors import ConfigurationError
from agentspec.server_ext.identity.server_secrets import server_secret
from agentspec.server_ext.settings import Settings, load_settings

if TYPE_CHECKING:
    import torch

    from agentspec.server_ext.speculator import Speculator
    from agentspec.server_ext.speculator.vocabulary import TokenCounts

_commands = typer.Typer(help="Show a draft model, or reduce its head.", no_args_is_help=True)

SpeculatorArgument = Annotated[str, typer.Argument(metavar="SPECULATOR", help="Folder of a checkpoint, or a hub id.")]


def add_to(app: typer.Typer) -> None:
    """Register the group of commands."""
    app.add_typer(_commands, name="speculator")


@_commands.command()
def show(speculator: SpeculatorArgument, as_json: JsonOption = False) -> None:
    """Show what a checkpoint holds, and what a draft reads from memory."""
    with needing_packages("draft models need"):
        from agentspec.server_ext.speculator import load_speculator

    _print(speculator, _facts(load_speculator(speculator)), as_json)


@_commands.command()
def prune(
    speculator: SpeculatorArgument,
    out: Annotated[Path, typer.Argument(help="Folder for the reduced draft model.")],
    model: Annotated[str, typer.Option(help="Target model, as it was given to the server that filled the store.")],
    size: Annotated[int, typer.Option(help="Tokens to keep; best a multiple of 64.")] = 32_768,
    store: Annotated[str | None, typer.Option(help="Store URL; as for agentspec serve.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant whose sessions are counted; as for agentspec serve.")
    ] = None,
    tokenizer: TokenizerOption = None,
    tokenizer_revision: TokenizerRevisionOption = None,
    revision: RevisionOption = None,
    hf_overrides: OverridesOption = None,
    model_key: Annotated[str | None, typer.Option(help="Setting model_key, if the server has it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Keep only the head's rows of the tokens that occur most in the tenant's stored sessions."""
    with needing_packages("draft models need"):
        import torch

        from agentspec.server_ext.speculator import load_speculator, save_speculator
        from agentspec.server_ext.speculator.vocabulary import choose_vocabulary, prune_head, special_tokens
        from agentspec.train.files import writable

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out}: is there and not an empty folder; name another")
    options = (("store", store), ("tenant", tenant), ("model_key", model_key))
    given = {name: value for name, value in options if value is not None}
    settings = _settings(given)
    whole = load_speculator(speculator)
    tokenizer = tokenizer or model
    key = served_key(
        model,
        tokenizer,
        revision=revision,
        tokenizer_revision=tokenizer_revision,
        hf_overrides=hf_overrides,
        given=settings.model_key,
    )
    rest, held_out = _count(settings, key, f"model {model}, tokenizer {tokenizer}", whole.config.vocab_size)
    counts = rest + held_out
    special = special_tokens(model, tokenizer, revision=revision, tokenizer_revision=tokenizer_revision)
    always = {token for token in special if token < len(counts.responses)}
    keep, trial = (
        choose_vocabulary(torch.from_numpy(each.responses), torch.from_numpy(each.prompts), size, always)
        for each in (counts, rest)
    )
    reduced = prune_head(whole, keep)
    with writable(out / "pytorch_model.bin"):
        save_speculator(reduced, out)
    before, after = (_facts(each)["bytes_a_position"] for each in (whole, reduced))
    figures = {
        "tokens": int(counts.responses.sum()),
        "distinct_tokens": int((counts.responses > 0).sum()),
        "kept": len(keep),
        "special_kept": len(always),
        "coverage": _share(counts, keep),
        "held_out_coverage": _share(held_out, trial),
        "bytes_a_position_before": before,
        "bytes_a_position_after": after,
    }
    _print(str(out), figures, as_json)


@contextmanager
def needing_packages(what: str) -> Iterator[None]:
    """Raise ConfigurationError, which says what to install, where a package such as torch cannot be imported.

    what: subject and verb of the error.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"{what} more packages ({error}): pip install 'agentspec[train]'") from error


def _settings(given: dict[str, Any]) -> Settings:
    """Return the settings with store and tenant from the options, else the environment, else the defaults."""
    from_environment = load_settings({})
    return load_settings({"agentspec": {**from_environment.model_dump(include={"store", "tenant"}), **given}}, {})


def _count(settings: Settings, key: str, named: str, vocab_size: int) -> "tuple[TokenCounts, TokenCounts]":
    """Return how often each token was stored. key: the model's (`find_model_key`). named: the model, for an error."""
    from agentspec.server_ext.speculator.vocabulary import count_tokens

    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} turns read"), TimeElapsedColumn())
    opened = open_store(settings.store, must_exist=True)
    try:
        opened.ping()  # or the secret would be a temporary one, with a warning, before the error
        log = LogNames(key, server_secret(settings)).of(settings.tenant)
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=None)
            counts = count_tokens(opened, log, vocab_size, lambda turns: progress.update(task, completed=turns))
    finally:
        opened.close()
    if not any(each.responses.any() for each in counts):
        raise ConfigurationError(
            f"store {redact(settings.store)}: no stored turn of {named} and tenant {settings.tenant or '(none)'}; give "
            "--store, --model, --tokenizer, --tenant and, if the server has them, --revision, --tokenizer-revision, "
            "--hf-overrides, --model-key and AGENTSPEC_SECRET as the server has them (a server with API keys and no "
            "--tenant has a log for each key, which is not counted)"
        )
    return counts


def _share(counts: "TokenCounts", keep: "torch.Tensor") -> float | None:
    """Return the share of the generated tokens that are kept; None where no token was generated."""
    total = int(counts.responses.sum())
    return int(counts.responses[keep.numpy()].sum()) / total if total else None


def _facts(speculator: "Speculator") -> dict[str, Any]:
    config = speculator.config
    parameters = {name: value.numel() for name, value in speculator.named_parameters()}
    element = speculator.heads[0].weight.element_size()
    head = config.head_rows * config.inner_size * element
    last = f"projections.{config.projections - 1}."
    projection = sum(count for name, count in parameters.items() if name.startswith(last)) * element
    return {
        "kind": config.kind,
        "target": config.base_model or "not named",
        "hidden_size": config.hidden_size,
        "inner_size": config.inner_size,
        "n_predict": config.n_predict,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
        "dtype": str(speculator.heads[0].weight.dtype).removeprefix("torch."),
        "parameters": sum(parameters.values()),
        "head_bytes": head,
        "projection_bytes": projection,
        "bytes_a_position": head + projection,
    }


def _print(title: str, figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    print_table(figures_table(title, ((name.replace("_", " "), _shown(value)) for name, value in figures.items())))


def _shown(value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
