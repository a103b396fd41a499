"""Load and save checkpoints of speculators, and map published tensor names to agentspec's.

A published file has tied weights under one name for each position, or under one name alone. ``save_speculator``
writes all names, because ArcticInference needs them all; ``load_speculator`` reads the first one that exists.
"""

import json
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentspec.errors import SpeculatorError, first_line
from agentspec.files import expand_home, is_path, replacing
from agentspec.server_ext.speculator.config import SpeculatorConfig
from agentspec.server_ext.speculator.models import Speculator, build_speculator

Tensors = dict[str, Callable[[], Tensor]]
"""Stored tensors by name, as functions that read them."""
Names = tuple[str, ...]
"""Published names of one tensor."""
Layout = dict[str, tuple[Names, ...]]
"""Published tensors of each parameter, stacked along dimension 0. Most parameters have one."""

DRAFT_VOCABULARY = "draft_vocabulary"
_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GATES = ("forget", "input", "output", "cell")
_FIRST_LAYER = re.compile(r"^(emb|proj|ln)\.(\d+)\.0\.(weight|bias)$")


def load_speculator(
    path_or_hub_id: str | Path,
    *,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Speculator:
    """Load a published or saved speculator, ready to draft (eval mode, no gradients).

    hidden_size, vocab_size: the target's sizes to check; None: no check. dtype: data type of all weights; None: that of
    the stored head. device: None: the CPU. Raises SpeculatorError that names field, tensor or file, and the remedy.
    """
    folder, config, stored = _open(path_or_hub_id, hidden_size, vocab_size)
    with torch.device("meta"):  # only the shapes are needed, because the weights come from the file
        speculator = build_speculator(config)
    shapes = {name: list(value.shape) for name, value in speculator.state_dict().items()}
    names = _layout(config)
    if dtype is None:
        head = _read(stored, names["heads.0.weight"][0], folder)
        dtype = head.dtype if head.dtype in _WEIGHTS else torch.float32  # a quantized head is refused below
    state = {}
    for parameter, parts in names.items():
        rows = shapes[parameter][0] // len(parts)
        tensors = [_fitting(stored, part, [rows, *shapes[parameter][1:]], folder, dtype) for part in parts]
        whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        state[parameter] = whole.to(device=device or "cpu", dtype=dtype, copy=True)
    if config.draft_vocab_size:
        state[DRAFT_VOCABULARY] = _vocabulary(stored, config, folder).to(device or "cpu", copy=True)
    speculator.load_state_dict(state, assign=True)
    speculator.eval().requires_grad_(False)
    return speculator


def check_speculator(
    path_or_hub_id: str | Path, *, hidden_size: int, vocab_size: int, tokens: int | None = None
) -> None:
    """Check sizes, files and names without reading weights. Raises SpeculatorError as ``load_speculator`` does.

    tokens: how many tokens it is to draft, which must be no more than it was trained for; None: as many.
    """
    folder, config, stored = _open(path_or_hub_id, hidden_size, vocab_size)
    config.positions(tokens)
    wanted = [names for parts in _layout(config).values() for names in parts]
    if config.draft_vocab_size:
        wanted.append((DRAFT_VOCABULARY,))
    for names in wanted:
        _find(stored, names, folder)


def drafted_tokens(path_or_hub_id: str | Path) -> int:
    """Return how many tokens a speculator was trained to draft. Raises SpeculatorError without a readable config."""
    return SpeculatorConfig.from_json(read_config(find_folder(path_or_hub_id))).n_predict


def save_speculator(speculator: Speculator, folder: str | Path) -> None:
    """Write config.json and pytorch_model.bin for ArcticInference and ``load_speculator``.

    Tied weights are stored once under all their names. A reduced head is stored with its ``draft_vocabulary``
    (int64 [V']), which only ``load_speculator`` reads. Existing files are replaced once the new ones are complete.
    Raises SpeculatorError for a folder with weights that would be read in place of these.
    """
    folder = Path(folder)
    if (weights := other_weights(folder)) is not None:
        raise SpeculatorError(f"{folder}: holds {weights.name}, which would be read in its place; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().cpu() for name, value in speculator.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for parameter, parts in _layout(speculator.config).items():
        for part, rows in zip(parts, own[parameter].chunk(len(parts)), strict=True):
            tensors.update(dict.fromkeys(part, rows))
    if speculator.draft_vocabulary is not None:
        tensors[DRAFT_VOCABULARY] = own[DRAFT_VOCABULARY]
    dtype = str(own["heads.0.weight"].dtype).removeprefix("torch.")
    values = json.dumps({**speculator.config.to_json(), "torch_dtype": dtype}, indent=2)
    with replacing(folder / "pytorch_model.bin", sync=True) as file:
        torch.save(tensors, file)
    with replacing(folder / "config.json", sync=True) as file:
        file.write_text(values + "\n", encoding="utf-8")


def other_weights(folder: Path) -> Path | None:
    """Return a file in a folder that is read in place of the one that ``save_speculator`` writes; None without one."""
    return next(folder.glob("*.safetensors"), None)


def find_folder(path_or_id: str | Path) -> Path:
    """Return a checkpoint's folder: the given one, or the local copy of a hub repository, downloaded if missing.

    Raises SpeculatorError with the remedy.
    """
    try:
        folder = expand_home(path_or_id)
    except OSError as error:
        raise SpeculatorError(f"speculator {path_or_id}: {error.strerror}; write the folder out") from None
    try:
        if folder.is_dir():
            return folder
        is_file = folder.exists()
    except OSError as error:  # the name is too long
        raise SpeculatorError(f"speculator {path_or_id}: {error.strerror}; give another folder, or a hub id") from None
    if is_file:
        raise SpeculatorError(f"speculator {path_or_id}: a file; give the folder with config.json and the weights")
    name = str(path_or_id)
    if is_path(name) or name.count("/") != 1:
        raise SpeculatorError(f"speculator {name}: no such folder; give one with config.json and weights, or a hub id")
    return _download(name)


def read_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json. Raises SpeculatorError."""
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpeculatorError(f"{file}: missing; give the folder of a speculator") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpeculatorError(f"{file}: cannot be read ({error}); download or save it again") from error
    if not isinstance(values, dict):
        raise SpeculatorError(f"{file}: a JSON object expected")
    return values


def _open(
    path_or_hub_id: str | Path, hidden_size: int | None, vocab_size: int | None
) -> tuple[Path, SpeculatorConfig, Tensors]:
    """Return a checkpoint's folder, config and tensors by their names in `_layout`, checked against the target."""
    folder = find_folder(path_or_hub_id)
    try:
        config = SpeculatorConfig.from_json(read_config(folder))
    except SpeculatorError as error:
        raise SpeculatorError(f"speculator {path_or_hub_id}: {error}") from None
    _check_target(config, hidden_size, vocab_size, name=str(path_or_hub_id))
    return folder, config, {_plain_name(name, config): read for name, read in _read_tensors(folder).items()}


def _check_target(config: SpeculatorConfig, hidden_size: int | None, vocab_size: int | None, name: str) -> None:
    """Raise SpeculatorError unless the speculator reads the target's hidden states and writes its tokens."""
    made_for = f"it was trained for {config.base_model or 'another model'}"
    for field, own, target in (
        ("input_hidden_dim (emb_dim of an MLP)", config.hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
    ):
        if target is not None and own != target:
            raise SpeculatorError(
                f"{name}: {field} is {own}, but the target's is {target}; {made_for}: take one for your target, "
                "or train one with agentspec train"
            )


def _download(name: str) -> Path:
    """Return the local copy of a hub repository, without weights that it holds twice. Raises SpeculatorError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SpeculatorError(
            f"speculator {name}: no such folder, and a hub id needs the package huggingface_hub: "
            "pip install huggingface_hub, or give a folder"
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):  # many repositories hold the weights in both formats
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.bin"]))
    except Exception as error:  # the hub's client raises whatever its transports do
        raise SpeculatorError(
            f"speculator {name}: no such folder, and it cannot be downloaded "
            f"({first_line(error)}); check the name and the network, or give a folder"
        ) from error
    return folder


def _read_tensors(folder: Path) -> Tensors:
    """Return the tensors of all weight files by their stored names, from safetensors if there are any, else from .bin.

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
        except Exception as error:  # torch raises whatever a damaged pickle leads to
            raise SpeculatorError(
                f"{file}: cannot be read ({first_line(error)}); "
                "it must hold tensors by name and nothing else: download or save it again"
            ) from error
    return tensors


def _check_shards(index: Path) -> None:
    """Raise SpeculatorError if a file that the index names is missing."""
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    except Exception as error:  # it may hold anything
        raise SpeculatorError(f"{index}: not an index of weights ({error}); download it again") from error
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
    mapped = zipfile.is_zipfile(file)  # torch before 1.6 wrote another format, which cannot be mapped
    values = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(values, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in values.items()):
        raise ValueError("not a dictionary of tensors by name")
    return {name: partial(values.__getitem__, name) for name in values}


def _find(stored: Tensors, names: Names, folder: Path) -> Callable[[], Tensor]:
    for name in names:
        if name in stored:
            return stored[name]
    raise SpeculatorError(
        f"{folder}: tensor {names[0]} is missing (the file has {', '.join(sorted(stored)[:8])}, …); "
        "config.json and weights are not of one speculator, or the download is incomplete"
    )


def _read(stored: Tensors, names: Names, folder: Path) -> Tensor:
    """Return a dense tensor. Raises SpeculatorError if there is none of these names, or if it cannot be read."""
    read = _find(stored, names, folder)
    try:
        tensor = read()
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            raise ValueError("it is sparse, nested or without values")
    except Exception as error:  # safetensors, and torch for a damaged file, raise many kinds
        raise SpeculatorError(
            f"{folder}: tensor {names[0]} cannot be read ({first_line(error)}); download it again, or save it as a "
            "dense tensor of 16 or 32 bits"
        ) from error
    return tensor


def _fitting(stored: Tensors, names: Names, shape: list[int], folder: Path, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape in this dtype.

    Raises SpeculatorError for another shape, and for weights that are quantized, NaN or infinite.
    """
    tensor = _read(stored, names, folder)
    is_weight = dtype != torch.int64
    if is_weight and tensor.dtype not in _WEIGHTS:
        raise SpeculatorError(
            f"{folder}: tensor {names[0]} is {str(tensor.dtype).removeprefix('torch.')}; 16 or 32 bits expected: take "
            "the checkpoint as it was before it was quantized (speculator_fp8 makes FP8 of it)"
        )
    tensor = tensor.to(dtype)
    if list(tensor.shape) != shape:
        raise SpeculatorError(
            f"{folder}: tensor {names[0]} has shape {list(tensor.shape)}, by config.json it is {shape}; "
            "check vocab_size, n_predict and the sizes there"
        )
    if is_weight and not all(bound.isfinite() for bound in tensor.aminmax()):
        raise SpeculatorError(
            f"{folder}: tensor {names[0]} has numbers that are not finite in {str(dtype).removeprefix('torch.')}; "
            "download or train it again, or give a wider dtype (speculator_dtype) if the file's numbers need one"
        )
    return tensor


def _vocabulary(stored: Tensors, config: SpeculatorConfig, folder: Path) -> Tensor:
    """Return the draft vocabulary, int64 [V']. Raises SpeculatorError."""
    tokens = _fitting(stored, (DRAFT_VOCABULARY,), [config.draft_vocab_size], folder, torch.int64)
    if tokens.unique().numel() != tokens.numel() or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise SpeculatorError(
            f"{folder}: tensor {DRAFT_VOCABULARY}: distinct tokens from 0 to {config.vocab_size - 1} expected; "
            "make it again with agentspec speculator prune"
        )
    return tokens


def _plain_name(stored: str, config: SpeculatorConfig) -> str:
    """Return a stored name in the form of `_layout`: without IBM's prefix, and without the number of a single layer."""
    name = stored.removeprefix("speculator.")
    return _FIRST_LAYER.sub(r"\1.\2.\3", name) if config.kind == "mlp" and config.flat else name


def _layout(config: SpeculatorConfig) -> Layout:
    """Return the published names of every parameter of a speculator with this config."""
    names = {"mlp": _mlp_layout, "lstm": _lstm_layout}[config.kind](config)
    for at, positions in _shared(config, config.weight_sets):
        names[f"heads.{at}.weight"] = (tuple(f"head.{k}.weight" for k in positions),)
    return names


def _lstm_layout(config: SpeculatorConfig) -> Layout:
    embeddings = tuple(f"{gate}_emb.0.weight" for gate in _GATES)
    names: Layout = {"embeddings.0.weight": (embeddings,)}
    if not config.tie_lstm_embs:
        names = {f"embeddings.{i}.weight": ((name,),) for i, name in enumerate(embeddings)}
    for k in range(config.projections):
        names[f"projections.{k}.weight"] = tuple((f"{gate}_proj.{k}.weight",) for gate in _GATES)
    for norm in ("cell", "state"):
        for part in ("weight", "bias"):
            names[f"cell.{norm}_norm.{part}"] = ((f"{norm}_ln.0.{part}",),)
    return names


def _mlp_layout(config: SpeculatorConfig) -> Layout:
    """Return the names of an MLP's tensors. With several layers they number all modules, GELUs included."""
    names: Layout = {}

    def add(ours: str, theirs: str, positions: range, module: int, *parts: str) -> None:
        number = "" if config.flat else f".{module}"
        for part in parts:
            names[f"{ours}.{part}"] = (tuple(f"{theirs}.{k}{number}.{part}" for k in positions),)

    def add_stack(ours: str, theirs: str, positions: range, layers: int) -> None:
        add(f"{ours}.0", theirs, positions, 0, "weight")
        for module in range(1, 3 * layers - 2, 3):  # norm, GELU, linear
            add(f"{ours}.{module}", theirs, positions, module, "weight", "bias")
            add(f"{ours}.{module + 2}", theirs, positions, module + 2, "weight")

    for at, positions in _shared(config, config.weight_sets):
        add_stack(f"embeddings.{at}", "emb", positions, config.emb_layers)
        add(f"mixes.{at}.norm", "ln", positions, 0, "weight", "bias")
        for module in range(0, 3 * len(config.inner_sizes) - 3, 3):  # GELU, linear, norm; the tail has no first GELU
            add(f"tails.{at}.{module}", "ln", positions, module + 2, "weight")
            add(f"tails.{at}.{module + 1}", "ln", positions, module + 3, "weight", "bias")
    for at, positions in _shared(config, config.projections):
        add_stack(f"projections.{at}", "proj", positions, config.proj_layers)
    return names


def _shared(config: SpeculatorConfig, sets: int) -> list[tuple[int, range]]:
    """Return the index of each set of weights and the positions that use it; the last set serves all others."""
    return [(at, range(at, config.n_predict if at == sets - 1 else at + 1)) for at in range(sets)]
