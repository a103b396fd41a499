"""The files of a checkpoint: where they are, and their tensors by name, read when asked for."""

import json
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentspec.errors import SpeculatorError, first_line

Tensors = dict[str, Callable[[], Tensor]]


def find_folder(path_or_id: str | Path) -> Path:
    """The folder of a checkpoint: as given, or the local copy of a hub repository, downloaded where it is missing.

    Raises SpeculatorError with the remedy.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise SpeculatorError(f"speculator {path_or_id}: a file; give the folder with config.json and the weights")
    name = str(path_or_id)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise SpeculatorError(f"speculator {name}: no such folder; give one with config.json and weights, or a hub id")
    return _download(name)


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SpeculatorError(
            f"speculator {name}: no such folder, and a hub id needs the package huggingface_hub: "
            "pip install huggingface_hub, or give a folder"
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):  # the same weights are often there in both forms: take one
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.bin"]))
    except Exception as error:  # the hub's client raises whatever its transports do
        raise SpeculatorError(
            f"speculator {name}: no such folder, and it cannot be downloaded "
            f"({first_line(error)}); check the name and the network, or give a folder"
        ) from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint. Raises SpeculatorError."""
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpeculatorError(f"{file}: missing; give the folder of a speculator") from None
    except (OSError, ValueError) as error:
        raise SpeculatorError(f"{file}: cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise SpeculatorError(f"{file}: a JSON object expected")
    return values


def read_tensors(folder: Path) -> Tensors:
    """All tensors in the folder's weight files by their stored names; safetensors where there are any, else .bin.

    Nothing but tensors is unpickled. Raises SpeculatorError that names the file and the remedy.
    """
    read, index = _safetensors, folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        read, index = _bin, folder / "pytorch_model.bin.index.json"
        files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise SpeculatorError(f"{folder}: no weights; pytorch_model.bin or model.safetensors expected")
    if index.is_file():
        _check_shards(index)
    tensors: Tensors = {}
    for file in files:
        try:
            tensors.update(read(file))
        except SpeculatorError:
            raise
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise SpeculatorError(
                f"{file}: cannot be read ({first_line(error)}); "
                "it must hold tensors by name and nothing else: download or save it again"
            ) from error
    return tensors


def _check_shards(index: Path) -> None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SpeculatorError(f"{index}: not an index of weights ({error}); download it again") from error
    missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    if missing:
        raise SpeculatorError(f"{index}: {missing[0]} is missing, {len(missing)} of {len(shards)}; download them")


def _safetensors(file: Path) -> Tensors:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise SpeculatorError(f"{file}: needs the package safetensors: pip install safetensors") from error
    try:
        opened: Any = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118  # not a mapping


def _bin(file: Path) -> Tensors:
    mapped = zipfile.is_zipfile(file)  # files of torch before 1.6 are not, and cannot be mapped
    values = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise ValueError("not a dictionary of tensors")
    return {name: partial(values.__getitem__, name) for name in values}
