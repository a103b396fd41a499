"""Define the YAML file of ``agentspec train``, with ArcticTraining's names for the fields that it has too."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from agentspec.errors import ConfigurationError, first_line
from agentspec.files import expand_home
from agentspec.server_ext.settings import refuse_switch

Dimension = Annotated[
    int, BeforeValidator(lambda value: int(value) if isinstance(value, str) else value), Field(ge=1, le=2**20)
]
"""Width of a layer, from 1 to 2**20. Published recipes write it as a string."""


def _with_home(name: str) -> str:
    """Replace ``~`` by the home folder, as no shell does it in a file. Raises ValueError if this makes no path."""
    if not name:
        raise ValueError("is empty; write a path")
    if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"{name!r} holds a character that no path can have; write another one")
    try:
        return str(expand_home(name)) if name.startswith("~") else name
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}; write the folder out") from None


Name = Annotated[str, AfterValidator(_with_home)]
"""Path, or a hub id."""
File = Annotated[Path, BeforeValidator(lambda value: _with_home(value) if isinstance(value, str) else value)]

Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Refuse unknown fields: a misspelt one would train something else than was meant."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_switch(cls, values: Any) -> Any:
        for name in cls.model_fields.keys() & values if isinstance(values, dict) else ():
            refuse_switch(cls, name, values[name])
        return values


def _of_the_target(given: Any) -> Any:
    """Refuse what decides which model the target is, as its hidden states would be those of another one."""
    if not isinstance(given, dict):
        return given
    names = ("revision", "hf_overrides")
    for name in names:
        if given.get(name):
            raise ValueError(f"{name}: write it as model.{name}, with which the target is loaded, too")
    return {name: value for name, value in given.items() if name not in names}


class RecordsSource(Section):
    """Train on recorded calls in the format of ``agentspec simulate``."""

    type: Literal["records"]
    path: File
    tokenizer: Name | None = None
    """Tokenizer for records of text: a tokenizer.json, a model's folder or its name."""


class StoreSource(Section):
    """Train on sessions that ``agentspec serve`` stored for all callers of ``tenant``: without API keys, all."""

    type: Literal["store"]
    url: str
    tenant: str | None = None
    newest: int | None = Field(default=None, ge=1, lt=2**63)
    """Number of newest turns to read; None: all."""
    model_key: str | None = None
    """The server's setting ``model_key``, if it has one."""
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    """These two as the server has them, if it has them: they tell its log from others."""

    @model_validator(mode="before")
    @classmethod
    def _no_target(cls, values: Any) -> Any:
        return _of_the_target(values)


class PromptsSource(Section):
    """Train on the target's answers to prompts, in a file as ``read_problems`` takes it; ids may be left out."""

    type: Literal["prompts"]
    path: File
    max_tokens: int = Field(default=1024, ge=2, lt=2**31)
    temperature: float = Field(default=0.0, ge=0.0)
    engine: Annotated[dict[str, Any], AfterValidator(_of_the_target)] = {}
    """Keyword arguments of ``vllm.LLM``, but for those that ``Model.variant`` gives."""


Source = Annotated[RecordsSource | StoreSource | PromptsSource, Field(discriminator="type")]


class Model(Section):
    """Name the target and the shape of its speculator."""

    name_or_path: Name
    revision: str | None = None
    hf_overrides: dict[str, Any] = {}
    """These two as the target's server has them, if it has them."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Precision in which the target computes its hidden states, and in which they are cached."""
    method: Literal["sum_lstm", "sum_rnn"] = "sum_lstm"
    proj_dim: Dimension
    emb_dim: Dimension
    speculator_width: Dimension
    n_speculator_heads: int = Field(default=3, ge=1, le=16)
    speculator_tie_weights: bool = True
    speculator_scale_input: bool = True
    tie_lstm_embs: bool = True

    @property
    def variant(self) -> dict[str, Any]:
        """Return ``revision`` and ``hf_overrides`` for JSON, each only if it is given."""
        return self.model_dump(mode="json", include={"revision", "hf_overrides"}, exclude_defaults=True)

    @model_validator(mode="after")
    def _one_width(self) -> "Model":
        for field in ("proj_dim", "emb_dim"):
            if getattr(self, field) != self.speculator_width:
                raise ValueError(f"{field}: projection and embedding are summed; write speculator_width's value")
        return self


class Data(Section):
    """Choose the sessions to train on and the sessions held out for measuring."""

    sources: list[Source] = Field(min_length=1)
    eval_sources: list[Source] = []
    train_eval_split: tuple[float, float] = (0.95, 0.05)
    """Shares of the sessions to train on and to hold out; not used where there are ``eval_sources``."""
    cache_dir: File
    max_length: int = Field(default=32_768, ge=2)
    """Most tokens of a conversation. Later turns are left out whole, so every response keeps its real context."""

    @model_validator(mode="after")
    def _split_is_whole(self) -> "Data":
        train, held_out = self.train_eval_split
        if not (0.0 < train < 1.0 and abs(train + held_out - 1.0) < 1e-6):
            raise ValueError("train_eval_split: two shares above 0 that add up to 1 expected, such as [0.95, 0.05]")
        return self


class Scheduler(Section):
    """Schedule the learning rate: a linear rise, then a cosine down to zero."""

    name: Literal["cosine"] = "cosine"
    warmup_ratio: float = Field(default=0.05, ge=0.0, lt=1.0)


class Optimizer(Section):
    """Set up AdamW."""

    lr: float = Field(default=1e-3, gt=0.0, le=1e36)
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    weight_decay: float = Field(default=0.1, ge=0.0, le=1e36)


class Checkpoint(Section):
    """Choose where the speculator is written, and how often the run is saved so that it can be resumed."""

    output_dir: File
    save_every_n_steps: int = Field(default=200, ge=1)


class TrainingConfig(Section):
    """Describe one training run."""

    type: Literal["arctic-lstm-speculator", "arctic-mlp-speculator"] = "arctic-lstm-speculator"
    seed: int = Field(default=42, ge=0, lt=2**63)
    micro_batch_size: int = Field(default=8, ge=1, lt=2**31)
    """Pieces of responses in one forward pass, each of at most 256 positions."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, lt=2**31)
    train_iters: int = Field(ge=1, lt=2**31)
    loss: Literal["lk", "cross_entropy"] = "lk"
    model: Model
    data: Data
    scheduler: Scheduler = Scheduler()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint

    @model_validator(mode="after")
    def _type_fits_method(self) -> "TrainingConfig":
        lstm = self.type == "arctic-lstm-speculator"
        if lstm != (self.model.method == "sum_lstm"):
            other = "sum_lstm" if lstm else "sum_rnn"
            raise ValueError(f"model.method: {self.model.method} does not fit type {self.type}; write {other}")
        if lstm and not self.model.speculator_tie_weights:
            raise ValueError("model.speculator_tie_weights: the LSTM has one set of weights; write true")
        return self


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuse a mapping with a field twice, of which YAML's own loader takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{name.value} stands there twice", problem_mark=name.start_mark)
                seen.add(name.value)
        return node


def load_config(path: Path) -> TrainingConfig:
    """Read and check the YAML file. Relative paths in it start at the working directory.

    Raises ConfigurationError naming the file, the field and the remedy.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror}); give a training's YAML file") from None
    except yaml.MarkedYAMLError as error:  # its text has several lines
        place = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigurationError(f"{path}{place}: cannot be read as YAML: {error.problem}; mend it") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: a date that does not exist, say
        raise ConfigurationError(f"{path}: cannot be read as YAML: {first_line(error)}; mend it") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: a mapping of fields expected; docs/speculator.md shows one")
    try:
        return TrainingConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: " + "; ".join(map(_explain, error.errors(include_url=False)))) from None


def _explain(error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{field}: unknown field; leave it out"
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message
