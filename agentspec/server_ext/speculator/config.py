"""Read a speculator's shape from config.json, in every published spelling.

There are two families of files. IBM's accelerators and Arctic's MLP write the target's hidden size as ``emb_dim`` and
the speculator's width as ``inner_dim`` (0: the hidden size). Arctic's LSTM project writes ``input_hidden_dim``, and
widths as strings, in which dots separate the layers of a deep ``sum_rnn``: ``"4096.4096"``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentspec.errors import SpeculatorError

Kind = Literal["mlp", "lstm"]

MODEL_TYPE = "mlp_speculator"
"""vLLM's name for all of them, in config.json."""
_MOST = {
    **dict.fromkeys(("hidden_size", "inner_size", "emb_size", "proj_size"), 2**20),
    **dict.fromkeys(("n_predict", "emb_layers", "proj_layers"), 128),
    "vocab_size": 2**31 - 1,
}
"""Highest value of each size. 128 is the longest draft that the engine verifies."""
METHODS: dict[str, Kind] = {"sum_rnn": "mlp", "sum_lstm": "lstm"}
"""The kind that each ``method`` of ArcticTraining makes."""
_ARCHITECTURES = {
    "MLPSpeculatorPreTrainedModel",
    "ArcticMLPSpeculatorPreTrainedModel",
    "MLPVariantSpeculatorPreTrainedModel",
    "ArcticLSTMSpeculatorPreTrainedModel",
}


@dataclass(frozen=True, slots=True)
class SpeculatorConfig:
    """Describe a speculator's shape. Raises SpeculatorError that names the field for an impossible shape."""

    kind: Kind
    hidden_size: int
    """H: width of the target's hidden state."""
    inner_size: int
    """I: width of the speculator's state, and of the head's input."""
    n_predict: int
    """n: tokens drafted, one position after the other."""
    vocab_size: int
    """V: the target's vocabulary."""
    emb_size: int = 0
    """Width of the token embedding; must equal the first inner layer's. 0: set to it."""
    proj_size: int = 0
    """Width of the projected state; must equal the first inner layer's. 0: set to it."""
    tie_weights: bool = True
    """True if all positions share one set of weights, except the first projection, which reads H. False for an MLP of
    one position, whose weights are the same either way: ArcticInference and vLLM refuse a tied one."""
    tie_lstm_embs: bool = True
    """LSTM: True if the four gates share one embedding."""
    scale_input: bool = False
    """True if the speculator first normalises the target's hidden state."""
    emb_layers: int = 1
    """MLP: number of layers of an embedding, including the table."""
    proj_layers: int = 1
    """MLP: number of layers of a projection."""
    inner_sizes: tuple[int, ...] = ()
    """MLP: widths of the layers after the sum, the last of them ``inner_size``; empty: one layer of ``inner_size``."""
    draft_vocab_size: int = 0
    """V': rows of a head that is reduced to a draft vocabulary; 0: the head has all V rows."""
    base_model: str = ""
    """Name of the target that the speculator was trained for, for messages and for other programs."""
    base_model_archs: tuple[str, ...] = ()
    """The target's ``architectures``; ArcticInference rejects a speculator without them."""

    def __post_init__(self) -> None:
        fill = object.__setattr__  # a frozen dataclass rejects plain assignment
        if not self.inner_sizes:
            fill(self, "inner_sizes", (self.inner_size,))
        for field in ("emb_size", "proj_size"):
            if getattr(self, field) == 0:
                fill(self, field, self.inner_sizes[0])
        if self.kind == "mlp" and self.n_predict == 1:
            fill(self, "tie_weights", False)
        self._check()

    @property
    def alpha(self) -> float:
        """Return the weight of the embedding in the sum: e/s with s = 0.5^(0.5/n), e = sqrt((1 - s^2) * D/2).

        With it the target's state still makes up half of the expected magnitude at the last position (Wertheimer et
        al., Accelerating Production LLMs with Combined Token/Embedding Speculators, arXiv:2404.19124).
        """
        state: float = 0.5 ** (0.5 / self.n_predict)
        return math.sqrt((1.0 - state * state) * self.inner_sizes[0] / 2.0) / state

    @property
    def head_rows(self) -> int:
        """Return the rows of a head: V' if it is reduced, else V."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def flat(self) -> bool:
        """Return whether every part has one layer; only some ``sum_rnn`` have more."""
        return self.emb_layers == self.proj_layers == len(self.inner_sizes) == 1

    def weights_at(self, k: int) -> int:
        """Return the index of the embedding, norm and head of position k."""
        return 0 if self.tie_weights else k

    def projection_at(self, k: int) -> int:
        """Return the index of the projection of position k. The first one, which reads H, is never shared."""
        return min(k, 1) if self.tie_weights else k

    def positions(self, wanted: int | None) -> int:
        """Return how many tokens to draft: ``wanted``; None: ``n_predict``. Raises SpeculatorError out of range."""
        if wanted is not None and not 1 <= wanted <= self.n_predict:
            raise SpeculatorError(
                f"num_speculative_tokens: 1 to {self.n_predict} with this speculator (its n_predict), got {wanted}"
            )
        return self.n_predict if wanted is None else wanted

    @property
    def weight_sets(self) -> int:
        """Return how many embeddings, norms and heads there are."""
        return 1 if self.tie_weights else self.n_predict

    @property
    def projections(self) -> int:
        """Return how many projections there are."""
        return min(self.n_predict, 2) if self.tie_weights else self.n_predict

    def input_size(self, projection: int) -> int:
        """Return the width that a projection reads: H for the first, I for the others."""
        return self.inner_size if projection else self.hidden_size

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SpeculatorConfig":
        """Read a checkpoint's config.json. Raises SpeculatorError that names the field and its allowed values."""
        architecture = _architecture(values)
        kind = _kind(values, architecture)
        if "input_hidden_dim" in values and "method" in values:
            hidden = _one(values, "input_hidden_dim")
            inner, emb, proj = (_sizes(values, name) for name in ("inner_dim", "emb_dim", "proj_dim"))
        else:
            hidden = _one(values, "emb_dim")
            inner = emb = proj = (_one(values, "inner_dim", 0) or hidden,)
        return cls(
            kind=kind,
            hidden_size=hidden,
            inner_size=inner[-1],
            n_predict=_one(values, "n_predict"),
            vocab_size=_one(values, "vocab_size"),
            emb_size=_equal(emb, "emb_dim"),
            proj_size=_equal(proj, "proj_dim"),
            tie_weights=_flag(values, "tie_weights"),
            tie_lstm_embs=_flag(values, "tie_lstm_embs"),
            scale_input=_flag(values, "scale_input"),
            emb_layers=len(emb),
            proj_layers=len(proj),
            inner_sizes=inner,
            draft_vocab_size=_one(values, "draft_vocab_size", 0),
            base_model=str(values.get("base_model_name_or_path") or ""),
            base_model_archs=_names(values, "base_model_archs"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a config.json that ArcticInference and ``from_json`` read (vLLM's model_type ``mlp_speculator``)."""
        deep = self.kind == "lstm" or not self.flat
        values: dict[str, Any] = {
            "architectures": [f"Arctic{'LSTM' if deep else 'MLP'}SpeculatorPreTrainedModel"],
            "model_type": MODEL_TYPE,
            "base_model_name_or_path": self.base_model,
            "base_model_archs": list(self.base_model_archs),
            "input_hidden_dim": self.hidden_size,
            "n_predict": self.n_predict,
            "n_candidates": self.n_predict,
            "top_k_tokens_per_head": [1] * self.n_predict,
            "tie_weights": self.tie_weights,
            "scale_input": self.scale_input,
            "vocab_size": self.vocab_size,
        }
        if deep:
            values["method"] = next(method for method, kind in METHODS.items() if kind == self.kind)
            values["tie_lstm_embs"] = self.tie_lstm_embs
            values["emb_dim"] = ".".join([str(self.emb_size)] * self.emb_layers)
            values["proj_dim"] = ".".join([str(self.proj_size)] * self.proj_layers)
            values["inner_dim"] = ".".join(map(str, self.inner_sizes))
        else:
            values["emb_dim"], values["inner_dim"] = self.hidden_size, self.inner_size
        if self.draft_vocab_size:
            values["draft_vocab_size"] = self.draft_vocab_size
        return values

    def _check(self) -> None:
        for field, most in _MOST.items():
            if not 1 <= getattr(self, field) <= most:
                raise SpeculatorError(f"{field}: 1 to {most} expected, got {getattr(self, field)}")
        layers, width = _MOST["emb_layers"], _MOST["inner_size"]
        if len(self.inner_sizes) > layers or not all(1 <= size <= width for size in self.inner_sizes):
            raise SpeculatorError(f"inner_dim: 1 to {layers} widths from 1 to {width} expected, got {self.inner_sizes}")
        first, last = self.inner_sizes[0], self.inner_sizes[-1]
        for field, expected in (("emb_size", first), ("proj_size", first), ("inner_size", last)):
            if (size := getattr(self, field)) != expected:
                raise SpeculatorError(
                    f"{field} ({field[:-4]}dim): {expected} expected, the inner layer's width, got {size}; "
                    "embedding and projection are summed and must have one width"
                )
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise SpeculatorError(f"draft_vocab_size: 0 to {self.vocab_size} (vocab_size), got {self.draft_vocab_size}")
        if self.kind == "lstm" and not (self.tie_weights and self.flat):
            raise SpeculatorError(
                "an LSTM speculator (sum_lstm) needs tie_weights: true, and one layer each, without dots in inner_dim, "
                "emb_dim and proj_dim"
            )


def _architecture(values: Mapping[str, Any]) -> str | None:
    names = _names(values, "architectures")
    if not names:
        return None
    if names[0] not in _ARCHITECTURES:
        raise SpeculatorError(
            f"architectures: {names[0]!r} is no speculator; known are {', '.join(sorted(_ARCHITECTURES))}"
        )
    return names[0]


def _names(values: Mapping[str, Any], field: str) -> tuple[str, ...]:
    given = values.get(field) or ()
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SpeculatorError(f"{field}: a list of names expected, got {given!r}")
    return tuple(names)


def _kind(values: Mapping[str, Any], architecture: str | None) -> Kind:
    """Return whether it is an MLP or an LSTM. Raises SpeculatorError for anything else."""
    method = values.get("method")
    if method is None:
        if architecture is None and values.get("model_type") != MODEL_TYPE:
            raise SpeculatorError(
                "config.json: neither architectures nor model_type say that it is a speculator; "
                "give the folder or hub id of an MLP or LSTM speculator"
            )
        return "mlp"
    if not isinstance(method, str) or method not in METHODS:
        raise SpeculatorError(f"method: {' or '.join(METHODS)} expected, got {method!r}")
    return METHODS[method]


def _sizes(values: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = values.get(field)
    try:
        return tuple(int(part) for part in str(value).split("."))
    except ValueError:
        raise SpeculatorError(f'{field}: a width, or several as in "4096.4096" expected, got {value!r}') from None


def _one(values: Mapping[str, Any], field: str, default: int | None = None) -> int:
    sizes = (default,) if default is not None and values.get(field) is None else _sizes(values, field)
    if len(sizes) != 1:
        raise SpeculatorError(f"{field}: one number expected, got {values.get(field)!r}")
    return sizes[0]


def _equal(sizes: tuple[int, ...], field: str) -> int:
    if len(set(sizes)) != 1:
        raise SpeculatorError(f"{field}: layers of one width expected, got {sizes}")
    return sizes[0]


def _flag(values: Mapping[str, Any], field: str) -> bool:
    value = values.get(field, False)
    if not isinstance(value, bool):
        raise SpeculatorError(f"{field}: true or false expected, got {value!r}")
    return value
