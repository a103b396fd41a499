"""Define ``agentspec rollout``, which samples problems over several epochs and can be killed and run again."""

import importlib
import math
import operator
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from agentspec.cli.tables import print_table
from agentspec.errors import ConfigurationError
from agentspec.files import expand_home, resolved

if TYPE_CHECKING:
    from agentspec.rollout import EpochFigures, Journal, Plan, Problem, RolloutGenerator

_LOG_SECONDS = 60.0
"""Where a log takes the place of a terminal, progress is a line each so many seconds, and one at an epoch's end."""
_OTHER_FORMS = (".parquet", ".gz")
_COLUMNS = (TextColumn("{task.completed}/{task.total} {task.description}"), BarColumn(), TimeRemainingColumn())
"""Progress in a terminal. The count comes first, because a narrow one cuts the end of the line off."""


class Format(StrEnum):
    """List the values of `--format`."""

    TRL = "trl"
    VERL = "verl"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(rollout)


def rollout(
    problems: Annotated[
        Path,
        typer.Argument(
            help="File of problems, .jsonl (also .gz) or .parquet: id, prompt or messages, and any other fields."
        ),
    ],
    model: Annotated[str, typer.Option(help="Model name or path, as for vLLM.")],
    out: Annotated[
        Path, typer.Option(help="File for the samples, one JSON line each. A second run goes on with it.")
    ] = Path("rollouts.jsonl"),
    samples: Annotated[int, typer.Option(min=1, help="Answers to each problem in an epoch.")] = 8,
    epochs: Annotated[int, typer.Option(min=1, help="How many times to go through the problems.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="As for vLLM.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024,
    seed: Annotated[
        int | None, typer.Option(help="Makes a --plain rollout repeatable, at some cost in large batches.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="module:function(problem, sample) that returns a number, called in a thread.")
    ] = None,
    reward_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a sample gets an error in place of its reward.")
    ] = None,
    update_weights: Annotated[
        str | None,
        typer.Option(help="module:function(llm, epoch) that loads an epoch's weights and returns their version."),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(help="Also write each epoch in this trainer's format, into a folder beside the samples."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="URL of the store that keeps answers between runs, as for agentspec serve.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of these rollouts, where several share a store.")] = None,
    max_draft: Annotated[int | None, typer.Option(help="Longest draft, in tokens.")] = None,
    verify_cost: Annotated[
        float | None, typer.Option(help="Price of verifying one more token, as a share of a decode step.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Run vLLM without agentspec, as a baseline.")] = False,
    dtype: Annotated[str, typer.Option(help="As for vLLM.")] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="As for vLLM.")] = False,
    max_model_len: Annotated[int | None, typer.Option(help="As for vLLM.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="As for vLLM.")] = None,
    ray: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sample on this many Ray actors, each with its own engine. On several machines give a Redis --store.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="Further arguments of vllm.LLM, as a JSON object. Options of this command win over them."),
    ] = "{}",
) -> None:
    """Sample answers to problems over several epochs, with drafts from earlier answers.

    Each sample is written as it finishes. Run the command again after it was killed: it samples what is missing, and
    scores what has no reward.
    """
    from agentspec.rollout import OfflineEngine, Plan, RayEngine, RolloutGenerator, read_problems
    from agentspec.rollout.formats import folder_for, write_trl, write_verl
    from agentspec.rollout.plan import distribution
    from agentspec.server_ext.vllm_adapter.offline import Sampling, sampling_params
    from agentspec.server_ext.vllm_adapter.startup.launch import hand_on

    if reward_timeout is not None:
        _check_reward_timeout(reward_timeout, reward)
    plan = Plan(samples, epochs, temperature, top_p, max_tokens, seed)
    _check_out(out, problems)
    tasks = read_problems(problems)
    folder = None if format is None else folder_for(out, format.value)
    judge = None if reward is None else _function("--reward", reward)
    update = None if update_weights is None else _function("--update-weights", update_weights)
    hand_on(store=store, tenant=tenant)
    drafting = _given(verify_cost=verify_cost, max_draft=max_draft)
    options: dict[str, Any] = {"dtype": "auto", "enforce_eager": False} | _engine_options(engine, plain, drafting, ray)
    options |= _given(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    options |= _given(dtype=None if dtype == "auto" else dtype, enforce_eager=enforce_eager or None)
    if not plain:
        _check_record(out, options["additional_config"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends vLLM's processes, too, as Ctrl-C does
    sampling_params(Sampling(temperature, top_p, max_tokens))  # what vLLM refuses, before its start takes minutes
    with _opened(out) as journal:
        journal.check_sampling(distribution(model, plan))
        if len(journal) and isinstance(options.get("seed"), int):  # or the engine repeats samples of earlier runs
            options["seed"] = random.Random(f"{options['seed']} {len(journal)}").getrandbits(31)
        # slow, so only once the arguments are known to be good
        started = OfflineEngine.start(model, **options) if ray is None else RayEngine.start(model, ray, **options)
        generator = RolloutGenerator(
            started, journal, reward=judge, reward_seconds=reward_timeout, update_weights=update
        )

        def write_epoch(epoch: int) -> None:
            if folder is not None:
                write = write_trl if format is Format.TRL else write_verl
                write(generator.samples(epoch), folder, epoch, started.decode)

        try:
            table = _sample(generator, tasks, plan, write_epoch)
        except KeyboardInterrupt:
            _say_how_to_go_on(journal, out)
            raise
        started.close()
        print_table(table)


def _check_reward_timeout(seconds: float, reward: str | None) -> None:
    if reward is None:
        raise ConfigurationError("--reward-timeout has no effect without --reward: leave it out")
    if not 0 < seconds < math.inf:  # also refuses nan
        raise ConfigurationError(f"--reward-timeout {seconds:g}: seconds above 0 expected")


def _say_how_to_go_on(journal: "Journal", out: Path) -> None:
    """Print where an interrupted rollout's samples are. A reward may have changed the working directory."""
    moved = "" if journal.path == out.absolute() else f" with --out {journal.path}"
    found = f"{len(journal)} samples are in {journal.path if moved else out}; run the command again{moved} to go on"
    typer.echo(f"agentspec: interrupted: {found}", err=True)


def _sample(
    generator: "RolloutGenerator", tasks: Sequence["Problem"], plan: "Plan", write_epoch: Callable[[int], None]
) -> Table:
    """Sample all epochs, show how far they are, and return the table of their figures.

    write_epoch: called with the number of each epoch when it has ended.
    """
    table = _table()
    console = Console(stderr=True)
    with Progress(*_COLUMNS, console=console, disable=not console.is_terminal) as bars:
        shown = _Shown(bars, len(tasks) * plan.samples, plan.epochs)
        for figures in generator.run(tasks, plan, shown.sampled, shown.scored, shown.tokenised):
            shown.sampled(figures, complete=True)
            _add_row(table, figures)
            write_epoch(figures.epoch)
    return table


class _Shown:
    """Show how far a rollout is: as bars in a terminal, elsewhere as lines.

    per_epoch: samples of an epoch.
    """

    def __init__(self, bars: Progress, per_epoch: int, epochs: int) -> None:
        self._bars, self._per_epoch, self._total = bars, per_epoch, per_epoch * epochs
        self._epoch = bars.add_task("epoch 0", total=self._total)
        self._first: dict[str, TaskID] = {}  # what comes before the epochs, by its name
        self._said = time.monotonic()

    def sampled(self, figures: "EpochFigures", complete: bool = False) -> None:
        """Show an epoch's figures. complete: whether it has ended."""
        done = figures.epoch * self._per_epoch + figures.resumed + figures.finished
        self._bars.update(self._epoch, completed=done, description=_line(figures))
        self._say(f"{_line(figures)}, {done} of {self._total} samples", complete)

    def scored(self, scored: int, of: int) -> None:
        """Show how many of the samples of an earlier run that had no reward are scored."""
        self._show_first("samples without a reward scored", scored, of)
        self._say(f"{scored} of {of} samples without a reward scored", scored == of)

    def tokenised(self, tokenised: int, of: int) -> None:
        """Show how many of the problems' prompts are tokens by now, until all are."""
        self._show_first("prompts tokenised", tokenised, of, visible=tokenised < of)
        self._say(f"{tokenised} of {of} prompts tokenised", complete=False)

    def _show_first(self, what: str, done: int, of: int, visible: bool = True) -> None:
        if what not in self._first:
            self._first[what] = self._bars.add_task(what, total=of)
        self._bars.update(self._first[what], completed=done, visible=visible)

    def _say(self, line: str, complete: bool) -> None:
        if not self._bars.console.is_terminal and (complete or time.monotonic() - self._said >= _LOG_SECONDS):
            self._said = time.monotonic()
            typer.echo(line, err=True)


def _check_out(out: Path, problems: Path) -> None:
    """Raise ConfigurationError for a file that cannot hold the samples alone, as JSON lines."""
    if not out.exists():
        if out.suffix.lower() in _OTHER_FORMS:
            raise ConfigurationError(
                f"--out {out}: samples are written as JSON lines; name it .jsonl (--format trl writes parquet, too)"
            )
        return
    if problems.exists() and out.samefile(problems):
        raise ConfigurationError(f"--out {out}: holds the problems; give another file")
    for stream in (1, 2):
        try:
            shared = out.is_file() and os.path.samestat(out.stat(), os.fstat(stream))
        except OSError:  # that stream is closed
            continue
        if shared:
            raise ConfigurationError(f"--out {out}: what vLLM logs is written there, too; give a file of its own")


def _check_record(out: Path, additional: dict[str, Any]) -> None:
    """Raise ConfigurationError if the engine's record of its steps would be written into the file of the samples."""
    from agentspec.server_ext.settings import load_settings

    record = load_settings(additional).record
    if record is not None and resolved(expand_home(record)) == resolved(out):
        raise ConfigurationError(f"--out {out}: the setting record (AGENTSPEC_RECORD) names it, too; give another file")


def _opened(out: Path) -> "Journal":
    from agentspec.rollout import Journal

    try:
        return Journal(out)
    except OSError as error:
        why = error.strerror if error.filename in (None, str(out)) else f"{error.filename}: {error.strerror}"
        raise ConfigurationError(f"--out {out}: cannot be written ({why}); give another file") from error


def _engine_options(engine: str, plain: bool, settings: dict[str, Any], ray: int | None) -> dict[str, Any]:
    """Return --engine's options and those that make the engine draft, or with ``plain`` those of vLLM alone.

    With ``plain`` agentspec's options are checked all the same, so that a command can be run with it and without.
    settings: agentspec's settings that have an option of their own. ray: number of engines on Ray; None: on this
    machine.
    """
    from agentspec.rollout import rollout_options
    from agentspec.rollout.generator import PLAIN_OPTIONS
    from agentspec.server_ext.settings import json_object
    from agentspec.server_ext.vllm_adapter.startup.speculative_config import SWITCH

    given = json_object("--engine", engine)
    if "model" in given:
        raise ConfigurationError("--engine: the model is an option of its own, --model")
    additional = _object(given, "additional_config")
    drafting = _object(additional, "agentspec") | settings
    _check_settings(additional | {"agentspec": drafting}, here=ray is None)  # before vLLM is imported, which takes long
    method = _object(given, "speculative_config") or None
    options = rollout_options(speculative_config=method, **drafting)
    if plain:
        os.environ[SWITCH] = "0"
        own = {"additional_config": additional, "speculative_config": method}
        return PLAIN_OPTIONS | {name: value for name, value in own.items() if value} | given
    options["additional_config"] |= additional
    return options | given


def _check_settings(additional: dict[str, Any], here: bool) -> None:
    """Raise the error of a store or a file in the settings that the engine could not use.

    here: whether it runs on this machine; another one's files are not there to be checked.
    """
    from agentspec.cache.store.urls import is_sqlite
    from agentspec.server_ext.settings import load_settings, settle_store
    from agentspec.server_ext.vllm_adapter.startup.launch import check_files

    if here:
        check_files(settle_store(additional))
    elif not is_sqlite(load_settings(additional).store):
        settle_store(additional)


def _given(**options: Any) -> dict[str, Any]:
    """Return the options of the command that were given. They win over the same values in --engine, as with `serve`."""
    return {name: value for name, value in options.items() if value is not None}


def _object(options: dict[str, Any], name: str) -> dict[str, Any]:
    """Take a JSON object out of these options of --engine; an empty one if it is not there."""
    found = options.pop(name, None)
    if not isinstance(found, dict | None):
        raise ConfigurationError(f"--engine: {name} must be a JSON object, got {type(found).__name__}")
    return dict(found or {})


def _function(option: str, name: str) -> Callable[..., Any]:
    """Import ``module:function``, from the working directory, too."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigurationError(f"{option} {name}: give it as module:function")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        found = operator.attrgetter(function)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        remedy = ""
        if isinstance(error, ModuleNotFoundError) and module.endswith(".py"):
            remedy = f"; leave .py out: {module.removesuffix('.py')}:{function}"
        elif isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            remedy = "; modules are looked for in the working directory and in PYTHONPATH"
        raise ConfigurationError(f"{option} {name}: {error}{remedy}") from None
    except Exception as error:  # the module is the user's
        raise ConfigurationError(f"{option} {name}: {type(error).__name__}: {error}") from error
    except SystemExit as error:
        raise ConfigurationError(
            f"{option} {name}: {module} ends the program where it is imported (exit status {error.code}); put what only"
            ' a run of it needs behind if __name__ == "__main__":'
        ) from None
    if not callable(found):
        raise ConfigurationError(f"{option} {name}: is not a function")
    return found  # type: ignore[no-any-return]


def _speed(figures: "EpochFigures") -> str:
    speed = figures.tokens / figures.seconds if figures.seconds else 0.0
    return f"{speed:,.0f}"


def _line(figures: "EpochFigures") -> str:
    return f"epoch {figures.epoch}: {_speed(figures)} tokens/s, {figures.acceptance_rate:.0%} of drafts accepted"


def _table() -> Table:
    table = Table(title="rollout", box=box.SIMPLE_HEAD, collapse_padding=True)
    for column in ("epoch", "samples", "tokens", "steps", "tokens\na step", "drafts\naccepted", "tokens/s", "reward"):
        table.add_column(column, justify="right", no_wrap=column not in ("samples", "reward"), overflow="fold")
    return table


def _add_row(table: Table, figures: "EpochFigures") -> None:
    reward = "-" if figures.mean_reward is None else f"{figures.mean_reward:.3f}"
    if figures.reward_errors:
        reward += f" ({figures.reward_errors} failed)"
    table.add_row(
        str(figures.epoch),
        f"{figures.resumed + figures.finished}" + (f" ({figures.resumed} before)" if figures.resumed else ""),
        f"{figures.tokens:,}",
        f"{figures.steps:,}",
        f"{figures.tokens_per_step:.2f}",
        f"{figures.acceptance_rate:.2f}" if figures.drafted else "-",
        _speed(figures),
        reward,
    )
