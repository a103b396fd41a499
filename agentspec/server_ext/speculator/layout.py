"""Under which names the tensors of a speculator are published.

Tied weights stand in a file under one name for each position, or under one of them alone: all are written, the first
that is there is read. ArcticInference loads what is written.
"""

import re
from collections.abc import Iterable

from agentspec.server_ext.speculator.config import SpeculatorConfig

Names = tuple[str, ...]
"""Published names of one tensor, all for the same values."""
Layout = dict[str, tuple[Names, ...]]
"""For each parameter of ours the tensors that it is, one below the other (dimension 0); mostly there is one."""

GATES = ("forget", "input", "output", "cell")
DRAFT_VOCABULARY = "draft_vocabulary"
_FIRST_LAYER = re.compile(r"^(emb|proj|ln)\.(\d+)\.0\.(weight|bias)$")


def layout(config: SpeculatorConfig) -> Layout:
    """Every parameter of a speculator of this config, with its published names."""
    names = _lstm(config) if config.kind == "lstm" else _mlp(config)
    for at, positions in _shared(config, config.weight_sets):
        names[f"heads.{at}.weight"] = (tuple(f"head.{k}.weight" for k in positions),)
    return names


def plain_name(stored: str, config: SpeculatorConfig) -> str:
    """A name in a file as ``layout`` has it: without IBM's prefix, or a layer number where there is but one layer."""
    name = stored.removeprefix("speculator.")
    return _FIRST_LAYER.sub(r"\1.\2.\3", name) if config.kind == "mlp" and config.flat else name


def _lstm(config: SpeculatorConfig) -> Layout:
    embeddings = tuple(f"{gate}_emb.0.weight" for gate in GATES)
    names: Layout = {"embeddings.0.weight": (embeddings,)}
    if not config.tie_lstm_embs:
        names = {f"embeddings.{i}.weight": ((name,),) for i, name in enumerate(embeddings)}
    for k in range(config.projections):
        names[f"projections.{k}.weight"] = tuple((f"{gate}_proj.{k}.weight",) for gate in GATES)
    for norm in ("cell", "state"):
        for part in ("weight", "bias"):
            names[f"cell.{norm}_norm.{part}"] = ((f"{norm}_ln.0.{part}",),)
    return names


def _mlp(config: SpeculatorConfig) -> Layout:
    names: Layout = {}

    def add(ours: str, theirs: str, positions: Iterable[int], layer: int, part: str = "weight") -> None:
        middle = "" if config.flat else f".{layer}"
        names[f"{ours}.{part}"] = (tuple(f"{theirs}.{k}{middle}.{part}" for k in positions),)

    for at, positions in _shared(config, config.weight_sets):
        for layer, parts in _layers(config.emb_layers):
            for part in parts:
                add(f"embeddings.{at}.{layer}", "emb", positions, layer, part)
        for part in ("weight", "bias"):
            add(f"mixes.{at}.norm", "ln", positions, 0, part)
        for layer, parts in _layers(len(config.inner_sizes), first=2):  # GELU, Linear, LN, with ours one GELU later
            for part in parts:
                add(f"tails.{at}.{layer - 2}", "ln", positions, layer, part)
    for at, positions in _shared(config, config.projections):
        for layer, parts in _layers(config.proj_layers):
            for part in parts:
                add(f"projections.{at}.{layer}", "proj", positions, layer, part)
    return names


def _shared(config: SpeculatorConfig, sets: int) -> list[tuple[int, range]]:
    """For each of so many sets of weights the positions that use it; the last one serves the rest."""
    return [(at, range(at, config.n_predict if at == sets - 1 else at + 1)) for at in range(sets)]


def _layers(count: int, first: int = 0) -> list[tuple[int, Names]]:
    """Indices and parts of the modules with weights in a Sequential of Linear (or Embedding), [LN, GELU, Linear]…

    With ``first`` 2 of LN, [GELU, Linear, LN]… behind its first LN.
    """
    both = ("weight", "bias")
    if first:
        return [pair for i in range(count - 1) for pair in ((2 + 3 * i, ("weight",)), (3 + 3 * i, both))]
    return [(0, ("weight",))] + [
        pair for i in range(count - 1) for pair in ((1 + 3 * i, both), (3 + 3 * i, ("weight",)))
    ]
