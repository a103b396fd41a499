"""Run a training from data to report: compute hidden states, train, measure, and write the files."""

import gc
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentspec.errors import ConfigurationError
from agentspec.files import locked, replacing
from agentspec.server_ext.speculator import save_speculator
from agentspec.server_ext.speculator.checkpoint import other_weights, read_config
from agentspec.server_ext.speculator.config import MODEL_TYPE
from agentspec.train.config import PromptsSource, TrainingConfig
from agentspec.train.conversations import Conversation
from agentspec.train.corpus import Corpus, folder_of, gather, is_gathered, source_sizes
from agentspec.train.evaluate import PIECES_AT_ONCE, Acceptance, measure
from agentspec.train.files import make_folder, readable, writable
from agentspec.train.generate import answer_prompts
from agentspec.train.hidden_states import HiddenStates, Target, extract, fitting, target_shape
from agentspec.train.trainer import Trainer, checkpoint_file, of_another_run, speculator_config, started_run

REPORT = "report.json"
_LOG_SECONDS = 60.0


def train(config: TrainingConfig, console: Console) -> dict[str, Any]:
    """Run ``config`` to its end, going on where an earlier call was cut off. Return the content of ``report.json``.

    Writes the report and the speculator, which ``load_speculator`` and ArcticInference read, to
    ``checkpoint.output_dir``. Raises ConfigurationError and InvalidInputError that name the field and the remedy.
    """
    out = config.checkpoint.output_dir
    with _folder(out), locked(out, partial(_refuse_busy, out)):
        if (out / REPORT).exists():
            checkpoint_file(config).unlink(missing_ok=True)  # of a run that was killed at its very end
            raise ConfigurationError(f"checkpoint.output_dir: {out} holds a finished speculator; name another folder")
        if (out / "config.json").exists() and read_config(out).get("model_type") != MODEL_TYPE:
            raise ConfigurationError(
                f"checkpoint.output_dir: {out} holds another model, as its config.json says; name another"
            )
        if (weights := other_weights(out)) is not None:
            raise ConfigurationError(f"checkpoint.output_dir: {out} holds {weights.name} already; name another folder")
        return _train(config, out, console)


def _refuse_busy(out: Path) -> None:
    raise ConfigurationError(
        f"checkpoint.output_dir: another training writes into {out}; let it end, or name another folder"
    )


def _train(config: TrainingConfig, out: Path, console: Console) -> dict[str, Any]:
    with _Bars(console) as bars:
        run = _Run(config, bars)
        with run.cache():
            corpus = gather(config, run.folder, run.answer)
            head = run.prepare(corpus)
        with (
            HiddenStates(corpus.train, run.folder / "train") as data,
            HiddenStates(corpus.held_out, run.folder / "held-out") as held_out,
        ):
            shape = speculator_config(config.model, run.target)
            data_key = f"{run.folder.name} {corpus.digest()}"
            with fitting("model.speculator_width", "a smaller one, and the same proj_dim and emb_dim"):
                trainer = Trainer(config, shape, data, head, run.device, data_key, run.sizes)
                before, after = run.train(trainer, held_out)
    report = {
        "target": config.model.name_or_path,
        "device": run.device.type,
        "training": {**_size(corpus.train), "steps": trainer.step, "seconds": round(trainer.seconds, 1)},
        "held_out": {**_size(corpus.held_out), "untrained": before.as_dict(), "trained": after.as_dict()},
        "config": config.model_dump(mode="json", exclude={"data", "checkpoint"}),
    }
    with writable(out / "pytorch_model.bin"):
        save_speculator(trainer.speculator.to(run.target.dtype), out)
    with replacing(out / REPORT, sync=True) as part:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    trainer.forget()
    return report


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Make a folder before hours of training, so that its errors come now. If it stays empty, remove it again."""
    was_there = path.exists()
    make_folder(path, "checkpoint.output_dir")
    try:
        yield
    finally:
        if not was_there and not any(path.iterdir()):
            path.rmdir()


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield a list, to which Ctrl-C and SIGTERM add themselves. The second raises KeyboardInterrupt at once."""
    stops: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        if len(stops) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield stops
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Bars(Progress):
    """Show how far a training is: as bars in a terminal, elsewhere as a line a minute and one at each part's end."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._said = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        (task,) = (task for task in self.tasks if task.id == task_id)
        if self.console.is_terminal or not (task.finished or time.monotonic() - self._said >= _LOG_SECONDS):
            return
        self._said = time.monotonic()
        self.console.print(f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}", soft_wrap=True)


class _Run:
    """Hold the cache folder, the device and, while it is needed, the target of a run."""

    def __init__(self, config: TrainingConfig, bars: _Bars) -> None:
        self.config = config
        self.sizes, self.folder = self._data_of(config, bars)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.target = target_shape(config.model.name_or_path, **config.model.variant)
        self._bars = bars
        self._opened: Target | None = None

    @staticmethod
    def _data_of(config: TrainingConfig, bars: _Bars) -> tuple[list[int], Path]:
        """Return the sizes of the sources' files in bytes, and the folder that caches what is computed from them.

        A resumed run keeps the data that it gathered at its start, even if its files have grown. Raises
        ConfigurationError if they have changed.
        """
        now, started = source_sizes(config), started_run(config)
        if started is not None and started.sizes != now:
            folder = folder_of(config, started.sizes)
            if is_gathered(folder) and started.data_key.startswith(folder.name):
                how = "the sources have grown; this training goes on with what it gathered"
                bars.console.print(how, soft_wrap=True)
                return started.sizes, folder
        folder = folder_of(config, now)
        if started is not None and not started.data_key.startswith(folder.name):  # before hours of work on other data
            raise of_another_run(config)
        return now, folder

    @contextmanager
    def cache(self) -> Iterator[None]:
        """Lock the cache folder while it is filled. Wait while another training with the same folder fills it."""

        def wait() -> None:
            self._bars.console.print(
                f"waiting for another training, which fills {self.folder}", soft_wrap=True, markup=False
            )

        if not self.folder.exists():
            make_folder(self.folder, "data.cache_dir")
        with locked(self.folder, wait):
            yield

    def answer(self, source: PromptsSource, out: Path) -> None:
        """Answer a source's prompts with vLLM and write the calls to ``out``."""
        bar = self._bars.add_task("answers", total=None)
        answer_prompts(
            source,
            self.config.model,
            out,
            lambda done, total: self._bars.update(bar, completed=done, total=total),
        )

    def prepare(self, corpus: Corpus) -> Tensor | None:
        """Compute the missing hidden states. Return the target's head [V, H], or None if the loss does not need it."""
        for conversations, name in ((corpus.train, "train"), (corpus.held_out, "held-out")):
            self._extract(conversations, name)
        head = self._head() if self.config.loss == "lk" else None
        self._opened = None
        gc.collect()
        torch.cuda.empty_cache()
        return head

    def train(self, trainer: Trainer, held_out: HiddenStates) -> tuple[Acceptance, Acceptance]:
        """Train to the last step. Return the acceptance on the held-out sessions before and after.

        Raises KeyboardInterrupt at Ctrl-C or SIGTERM, once the step is done and saved; a second one doesn't wait.
        """
        at_once = min(PIECES_AT_ONCE, self.config.micro_batch_size)
        before = measure(trainer.speculator, held_out, at_once)
        if trainer.resume():
            self._bars.console.print(f"going on at step {trainer.step}")
        total, every = self.config.train_iters, self.config.checkpoint.save_every_n_steps
        bar = self._bars.add_task("training", total=total, completed=trainer.step)
        smooth, saved = 0.0, trainer.step or None  # the step of the checkpoint
        with _stop_signals() as stops:
            while trainer.step < total and not stops:
                loss = trainer.train_step()
                smooth = loss if smooth == 0.0 else 0.98 * smooth + 0.02 * loss
                self._bars.update(bar, completed=trainer.step, description=f"training, loss {smooth:.3f}")
                if trainer.step % every == 0 or trainer.step == total or stops:
                    trainer.save()
                    saved = trainer.step
            if stops:
                if saved != trainer.step:  # the signal came behind the question whether there was one
                    trainer.save()
                how = f"stopped at step {trainer.step} of {total}, which is saved; run the command again to go on"
                self._bars.console.print(how, soft_wrap=True)
                raise KeyboardInterrupt
        # Round the weights to the target's dtype, so that the acceptance is measured on the weights that are saved.
        trainer.speculator.to(self.target.dtype)
        trainer.check_weights()
        trainer.speculator.float()
        return before, measure(trainer.speculator, held_out, at_once)

    def _extract(self, conversations: list[Conversation], name: str) -> None:
        total = sum(len(conversation.tokens) for conversation in conversations)
        bar = self._bars.add_task(f"hidden states, {name}", total=total)
        extract(conversations, self.folder / name, self._open_target, lambda done: self._bars.advance(bar, done))

    def _open_target(self) -> Target:
        if self._opened is None:
            model = self.config.model
            self._opened = Target(model.name_or_path, model.dtype, self.device, **model.variant)
        return self._opened

    def _head(self) -> Tensor:
        file = self.folder / "head.safetensors"
        if not file.exists():
            weights = self._open_target().head()
            if weights is None:
                raise ConfigurationError(
                    f"loss: lk needs the target's distribution, and the logits of {self.config.model.name_or_path} "
                    "are more than its head applied to its hidden states; write cross_entropy"
                )
            with writable(file), replacing(file, sync=True) as partial:
                save_file({"head": weights.contiguous()}, partial)
        with readable(file):
            return load_file(file)["head"]


def _size(conversations: list[Conversation]) -> dict[str, int]:
    return {
        "sessions": len({conversation.session for conversation in conversations}),
        "responses": sum(len(conversation.responses) for conversation in conversations),
        "response_tokens": sum(conversation.response_tokens for conversation in conversations),
    }
