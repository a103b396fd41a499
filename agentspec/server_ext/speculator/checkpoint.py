"""Speculators from checkpoints and back."""

import json
from pathlib import Path

import torch
from torch import Tensor

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator.base import Speculator
from agentspec.server_ext.speculator.config import SpeculatorConfig
from agentspec.server_ext.speculator.files import Tensors, find_folder, read_config, read_tensors
from agentspec.server_ext.speculator.layout import DRAFT_VOCABULARY, Names, layout, plain_name
from agentspec.server_ext.speculator.lstm import LSTMSpeculator
from agentspec.server_ext.speculator.mlp import MLPSpeculator


def build_speculator(config: SpeculatorConfig) -> Speculator:
    """A speculator with random weights, on torch's default device and in its default dtype."""
    return LSTMSpeculator(config) if config.kind == "lstm" else MLPSpeculator(config)


def load_speculator(
    path_or_hub_id: str | Path,
    *,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Speculator:
    """A published or saved speculator, ready to draft (eval mode, no gradients).

    hidden_size, vocab_size: the target's, to be checked. dtype: of all weights; None: as the head was saved.
    device: None: the CPU. Raises SpeculatorError that names the field, tensor or file and the remedy.
    """
    folder = find_folder(path_or_hub_id)
    try:
        config = SpeculatorConfig.from_json(read_config(folder))
    except SpeculatorError as error:
        raise SpeculatorError(f"speculator {path_or_hub_id}: {error}") from None
    check_target(config, hidden_size, vocab_size, name=str(path_or_hub_id))
    with torch.device("meta"):  # shapes alone: the weights come from the file
        speculator = build_speculator(config)
    shapes = {name: list(value.shape) for name, value in speculator.state_dict().items()}
    stored = {plain_name(name, config): read for name, read in read_tensors(folder).items()}
    names = layout(config)
    if dtype is None:
        dtype = _read(stored, names["heads.0.weight"][0], folder).dtype
    state = {}
    for parameter, parts in names.items():
        rows = shapes[parameter][0] // len(parts)
        tensors = [_fitting(stored, part, [rows, *shapes[parameter][1:]], folder) for part in parts]
        whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        state[parameter] = whole.to(device=device or "cpu", dtype=dtype, copy=True)
    if config.draft_vocab_size:
        state[DRAFT_VOCABULARY] = _vocabulary(stored, config, folder).to(device or "cpu", copy=True)
    speculator.load_state_dict(state, assign=True)
    speculator.eval().requires_grad_(False)
    return speculator


def check_target(
    config: SpeculatorConfig, hidden_size: int | None, vocab_size: int | None, *, name: str = "speculator"
) -> None:
    """Raise SpeculatorError unless the speculator reads the target's hidden states and writes its tokens."""
    made_for = f"it was trained for {config.base_model}" if config.base_model else "it was trained for another model"
    for field, own, target in (
        ("input_hidden_dim (emb_dim of an MLP)", config.hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
    ):
        if target is not None and own != target:
            raise SpeculatorError(
                f"{name}: {field} is {own}, but the target's is {target}; {made_for}: take one for your target, "
                "or train one with agentspec train"
            )


def save_speculator(speculator: Speculator, folder: str | Path) -> None:
    """Write config.json and pytorch_model.bin as ArcticInference and ``load_speculator`` read them.

    Tied weights are stored once under all their names. A reduced head goes with its ``draft_vocabulary`` (int64 [V']),
    which only ``load_speculator`` knows. Files that are there are replaced when the new ones are complete.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().cpu() for name, value in speculator.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for parameter, parts in layout(speculator.config).items():
        for part, rows in zip(parts, own[parameter].chunk(len(parts)), strict=True):
            tensors.update(dict.fromkeys(part, rows))
    if speculator.draft_vocabulary is not None:
        tensors[DRAFT_VOCABULARY] = own[DRAFT_VOCABULARY]
    dtype = str(own["heads.0.weight"].dtype).removeprefix("torch.")
    values = json.dumps({**speculator.config.to_json(), "torch_dtype": dtype}, indent=2)
    unfinished = folder / "pytorch_model.bin.unfinished"
    torch.save(tensors, unfinished)
    unfinished.replace(folder / "pytorch_model.bin")
    (folder / "config.json").write_text(values + "\n", encoding="utf-8")


def _read(stored: Tensors, names: Names, folder: Path) -> Tensor:
    for name in names:
        if name in stored:
            return stored[name]()
    raise SpeculatorError(
        f"{folder}: tensor {names[0]} is missing (the file has {', '.join(sorted(stored)[:8])}, …); "
        "config.json and weights are not of one speculator, or the download is incomplete"
    )


def _fitting(stored: Tensors, names: Names, shape: list[int], folder: Path) -> Tensor:
    tensor = _read(stored, names, folder)
    if list(tensor.shape) != shape:
        raise SpeculatorError(
            f"{folder}: tensor {names[0]} has shape {list(tensor.shape)}, by config.json it is {shape}; "
            "check vocab_size, n_predict and the sizes there"
        )
    return tensor


def _vocabulary(stored: Tensors, config: SpeculatorConfig, folder: Path) -> Tensor:
    tokens = _fitting(stored, (DRAFT_VOCABULARY,), [config.draft_vocab_size], folder).to(torch.int64)
    if tokens.unique().numel() != tokens.numel() or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise SpeculatorError(
            f"{folder}: tensor {DRAFT_VOCABULARY}: distinct tokens from 0 to {config.vocab_size - 1} expected; "
            "make it again with agentspec speculator prune"
        )
    return tokens
