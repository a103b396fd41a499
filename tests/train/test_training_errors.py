"""Test that a training that cannot go on names the field and the remedy, and keeps what it has done."""

import errno
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig

from agentspec.cache.store import open_store
from agentspec.errors import ConfigurationError, InvalidInputError, SpeculatorError, StoreUnavailableError
from agentspec.server_ext.speculator import save_speculator
from agentspec.testing.server import free_port
from agentspec.train import corpus, evaluate, trainer
from agentspec.train.config import TrainingConfig
from agentspec.train.corpus import folder_of
from agentspec.train.hidden_states import Target
from agentspec.train.run import train
from tests.test_files import HOLDER
from tests.train.conftest import HIDDEN, VOCABULARY

QUIET = Console(quiet=True)


def test_a_tokenizer_that_is_not_there_is_named_by_its_field(settings: dict[str, Any], tmp_path: Path) -> None:
    """The error names the field, not an option of another command."""
    settings["data"]["sources"][0]["tokenizer"] = str(tmp_path / "none.json")
    with pytest.raises(ConfigurationError, match=r"^data\.sources: tokenizer .*none\.json: no such file"):
        train(TrainingConfig.model_validate(settings), QUIET)


def test_a_pipe_is_refused_as_it_cannot_be_read_twice(settings: dict[str, Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "calls")
    settings["data"]["sources"][0]["path"] = str(tmp_path / "calls")
    with pytest.raises(InvalidInputError, match=r"calls: is a pipe or a device, .*; give a file$"):
        train(TrainingConfig.model_validate(settings), QUIET)


def test_a_target_with_damaged_weights_is_named(settings: dict[str, Any], target: Path, tmp_path: Path) -> None:
    model = tmp_path / "damaged"
    shutil.copytree(target, model)
    os.truncate(model / "model.safetensors", 1_000)
    settings["model"]["name_or_path"] = str(model)
    with pytest.raises(ConfigurationError, match=r"^model\.name_or_path: .*damaged cannot be loaded \(.*header"):
        train(TrainingConfig.model_validate(settings), QUIET)


def test_a_model_that_writes_no_text_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path / "pictures")
    settings["model"]["name_or_path"] = str(tmp_path / "pictures")
    with pytest.raises(ConfigurationError, match=r"^model\.name_or_path: .*pictures cannot be loaded \(.*vocab_size"):
        train(TrainingConfig.model_validate(settings), QUIET)


def test_sessions_beyond_the_target_s_positions_are_named_with_the_length_to_write(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "short")
    settings["model"]["name_or_path"] = str(tmp_path / "short")
    with pytest.raises(InvalidInputError, match=r"session 's\d+': has \d+ tokens, .* write data.max_length: 64, which"):
        train(TrainingConfig.model_validate(settings), QUIET)
    settings["data"]["max_length"] = 64
    assert train(TrainingConfig.model_validate(settings), QUIET)["training"]["steps"] == settings["train_iters"]


def test_a_recipe_without_sessions_says_so(settings: dict[str, Any]) -> None:
    settings["data"]["max_length"] = 3
    out = Path(settings["checkpoint"]["output_dir"])
    with pytest.raises(ValueError, match=r"data\.sources: no session"):
        train(TrainingConfig.model_validate(settings), QUIET)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(ValueError, match=r"data\.sources: no session"):
        train(TrainingConfig.model_validate(settings), QUIET)
    assert out.exists()  # it was there before


def test_a_redis_that_is_away_is_named_once(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    settings["data"]["sources"] = [{"type": "store", "url": f"redis://127.0.0.1:{free_port()}/0"}]
    with pytest.raises(StoreUnavailableError, match="Connection refused"):
        train(TrainingConfig.model_validate(settings), QUIET)
    assert "secret" not in caplog.text


def test_a_store_in_memory_is_refused(settings: dict[str, Any]) -> None:
    settings["data"]["sources"] = [{"type": "store", "url": "memory://", "tenant": "acme"}]
    with pytest.raises(StoreUnavailableError, match=r"no other process can read .* start the server with"):
        train(TrainingConfig.model_validate(settings), QUIET)


def test_a_store_without_sessions_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "store" / "server.db"
    settings["data"]["sources"] = [{"type": "store", "url": f"sqlite:///{file}", "tenant": "acme"}]
    with pytest.raises(StoreUnavailableError, match=f"store {re.escape(str(file))}: no such file; "):
        train(TrainingConfig.model_validate(settings), QUIET)
    assert not file.parent.exists()
    open_store(f"sqlite:///{file}").close()
    with pytest.raises(
        InvalidInputError, match=r"data\.sources: no session .*; of a store, .*tenant.* as its server has"
    ):
        train(TrainingConfig.model_validate(settings), QUIET)


@pytest.mark.parametrize(("section", "field"), [("checkpoint", "output_dir"), ("data", "cache_dir")])
def test_a_folder_that_cannot_be_written_is_named_at_once(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, field: str
) -> None:
    """The error names its field at once, not after hours."""
    (tmp_path / "file").write_text("a note")
    settings[section][field] = str(tmp_path / "file" / "folder")
    with pytest.raises(ConfigurationError, match=rf"{section}\.{field}: the folder cannot be made .*; name another"):
        train(TrainingConfig.model_validate(settings), QUIET)
    folder = tmp_path / "read-only"
    settings[section][field] = str(folder)
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).startswith(str(folder)))
    with pytest.raises(ConfigurationError, match=rf"{field}: .* cannot be written; name another folder"):
        train(TrainingConfig.model_validate(settings), QUIET)


@pytest.mark.parametrize("updates", [1, 12])
def test_weights_that_are_not_finite_are_not_saved(settings: dict[str, Any], updates: int) -> None:
    """Loss and gradient are those of before the update."""
    settings |= {"train_iters": updates, "optimizer": {"lr": 1e36, "weight_decay": 1e36}}
    settings["checkpoint"]["save_every_n_steps"] = 1
    config = TrainingConfig.model_validate(settings)
    with pytest.raises(ConfigurationError, match=r"^optimizer: after update 1 the weights are not finite in float32"):
        train(config, QUIET)
    assert not config.checkpoint.output_dir.exists()


def test_a_file_of_something_else_in_the_place_of_the_checkpoint_is_named(settings: dict[str, Any]) -> None:
    config = TrainingConfig.model_validate(settings)
    config.checkpoint.output_dir.mkdir()
    torch.save([1, 2], config.checkpoint.output_dir / "training.pt")
    with pytest.raises(
        InvalidInputError, match=r"training\.pt: cannot be read \(no checkpoint of a training\); remove"
    ):
        train(config, QUIET)


def test_a_checkpoint_whose_pickle_is_damaged_is_named(settings: dict[str, Any]) -> None:
    """torch raises TypeErrors, AttributeErrors and AssertionErrors, too."""
    config = TrainingConfig.model_validate(settings)
    config.checkpoint.output_dir.mkdir()
    with zipfile.ZipFile(config.checkpoint.output_dir / "training.pt", "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.")
        file.writestr("archive/version", "3\n")
    with pytest.raises(InvalidInputError, match=r"training\.pt: cannot be read \(.*arguments.*\); remove"):
        train(config, QUIET)


def test_two_trainings_do_not_write_into_one_folder(settings: dict[str, Any], tmp_path: Path) -> None:
    """Otherwise both would write one training.pt, and one would fail because its training.pt.part is gone."""
    config = TrainingConfig.model_validate(settings)
    out, cache = config.checkpoint.output_dir, folder_of(config)
    for folder in (out, cache):
        folder.mkdir(parents=True)
    with (
        held(out),
        pytest.raises(ConfigurationError, match=rf"checkpoint\.output_dir: another .* {re.escape(str(out))};"),
    ):
        train(config, QUIET)
    with held(cache) as holder, Console(record=True, file=io.StringIO()) as console:
        threading.Timer(1, holder.kill).start()
        assert train(config, console)["training"]["steps"] == 12
    assert f"waiting for another training, which fills {cache}" in console.export_text()
    assert holder.poll() is not None and not [*out.glob(".*"), *cache.glob(".*")]


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds a folder's lock, and end it afterwards."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        yield holder
        holder.kill()


@pytest.mark.parametrize("full", ["train.safetensors", "training.pt", "pytorch_model.bin"])
def test_a_full_disk_is_named_with_the_file_and_the_run_goes_on(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """The error names the disk and the file, and is no traceback."""
    settings["train_iters"] = 2
    settings["checkpoint"]["save_every_n_steps"] = 1
    writers: dict[str, tuple[Any, str]] = {
        "train.safetensors": (corpus, "save_file"),
        "training.pt": (torch, "save"),
        "pytorch_model.bin": (torch, "save"),
    }
    place, name = writers[full]
    write = getattr(place, name)

    def write_on_full_disk(values: Any, path: Path, *more: Any) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if path.name.startswith(full) else soft, hard))
        try:
            write(values, path, *more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(place, name, write_on_full_disk)
    with pytest.raises(OSError, match=rf"cannot be written \(.*\); make room on its disk.*{full}"):
        train(TrainingConfig.model_validate(settings), QUIET)
    monkeypatch.setattr(place, name, write)
    assert train(TrainingConfig.model_validate(settings), QUIET)["training"]["steps"] == 2


@pytest.mark.parametrize("full", ["config.json", "report.json"])
def test_a_disk_that_is_full_at_the_end_leaves_no_half_of_a_file(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Otherwise the next run would take it for a finished speculator, or another model's, and refuse the folder."""
    settings["train_iters"] = 1
    write = Path.write_text

    def write_half(path: Path, text: str, **more: Any) -> int:
        if path.name.startswith(full):
            write(path, text[:9], **more)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_half)
        with pytest.raises(OSError, match="No space left"):
            train(TrainingConfig.model_validate(settings), QUIET)
    assert train(TrainingConfig.model_validate(settings), QUIET)["training"]["steps"] == 1


def test_another_model_is_not_written_over(settings: dict[str, Any], tmp_path: Path) -> None:
    copied = tmp_path / "target"
    shutil.copytree(settings["model"]["name_or_path"], copied)
    settings["checkpoint"]["output_dir"] = str(copied)
    before = (copied / "config.json").read_bytes()
    with pytest.raises(ConfigurationError, match=r"checkpoint\.output_dir: .* holds another model"):
        train(TrainingConfig.model_validate(settings), QUIET)
    assert (copied / "config.json").read_bytes() == before


def test_weights_that_would_be_read_in_place_of_the_trained_ones_are_named_at_once(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Published speculators are in safetensors, which come before the file that a training writes."""
    out = tmp_path / "published"
    out.mkdir()
    (out / "model.safetensors").write_text("")
    settings["checkpoint"]["output_dir"] = str(out)
    with pytest.raises(ConfigurationError, match=r"checkpoint\.output_dir: .* holds model\.safetensors already"):
        train(TrainingConfig.model_validate(settings), QUIET)
    with pytest.raises(SpeculatorError, match=r"holds model\.safetensors, which would be read in its place"):
        save_speculator(Any, out)  # type: ignore[arg-type]


@pytest.mark.parametrize("damaged", ["train.safetensors", "train/hidden-00000", "head.safetensors", "training.pt"])
def test_a_damaged_file_is_named_and_made_again_once_it_is_removed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    settings |= {"loss": "lk", "train_iters": 2}
    settings["checkpoint"]["save_every_n_steps"] = 1
    config = TrainingConfig.model_validate(settings)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "forget", lambda _: None)
        train(config, QUIET)
    (config.checkpoint.output_dir / "report.json").unlink()
    folders = folder_of(config), config.checkpoint.output_dir
    (file,) = [file for folder in folders for file in folder.glob(f"{damaged}*")]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InvalidInputError, match=f"{re.escape(str(file))}: cannot be read .*; remove ") as error:
        train(config, QUIET)
    named = Path(str(error.value).split("; remove ")[1].split(",")[0])
    assert named in file.parents or named == file
    shutil.rmtree(named) if named.is_dir() else named.unlink()
    assert train(config, QUIET)["training"]["steps"] == 2


@pytest.mark.parametrize("loss", ["cross_entropy", "lk"])
def test_a_training_that_diverges_ends_and_saves_nothing(settings: dict[str, Any], loss: str) -> None:
    settings |= {"loss": loss, "optimizer": {"lr": 1e30}}
    settings["checkpoint"]["save_every_n_steps"] = 5
    config = TrainingConfig.model_validate(settings)
    with pytest.raises(ConfigurationError, match=r"optimizer\.lr: update \d+ has a loss of .*: write a"):
        train(config, QUIET)
    assert not config.checkpoint.output_dir.exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((trainer, "lk"), r"^micro_batch_size: .*\(HIP out of memory\); write a smaller one, and more gradient_acc"),
        ((evaluate, "_is_right"), r"^micro_batch_size: .*\(HIP out of memory\); write a smaller one$"),
        ((trainer, "build_speculator"), r"^model\.speculator_width: .*; write a smaller one, and the same proj_dim"),
        ((torch.optim.AdamW, "step"), r"^model\.speculator_width: .*\(HIP out of memory\); write a smaller one, and "),
        ((trainer.Trainer, "check_weights"), r"^model\.speculator_width: .*\(HIP out of memory\); write a smaller "),
        ((Target, "hidden_states"), r"^data\.max_length: .*\(HIP out of memory\); write less than \d+, "),
    ],
)
def test_a_full_device_is_named_with_what_to_write_smaller(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], message: str
) -> None:
    def fail(*_: object) -> Any:
        raise torch.OutOfMemoryError("HIP out of memory\nTried to allocate")

    monkeypatch.setattr(*place, fail)
    with pytest.raises(ConfigurationError, match=message):
        train(TrainingConfig.model_validate(settings | {"loss": "lk"}), QUIET)


def test_a_split_that_leaves_a_side_empty_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    source = settings["data"]["sources"][0]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(Path(source["path"]).read_text().splitlines(keepends=True)[:3]))
    source["path"] = str(few)
    with pytest.raises(ValueError, match=r"data\.train_eval_split: of 1 conversations none is (held out|trained on)"):
        train(TrainingConfig.model_validate(settings), QUIET)
