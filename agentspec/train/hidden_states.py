"""Compute the hidden states of every response once, with the frozen target, and keep them on disk.

A response of R tokens gives R rows: row i is the hidden state after the final norm that produced its token i. So a
speculator starts from row i when token i is the newest, and the target's distribution of token i + 1 is its head
applied to row i + 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentspec.errors import ConfigurationError, InvalidInputError, first_line
from agentspec.files import replacing
from agentspec.train.conversations import Conversation
from agentspec.train.files import UNREADABLE, readable, writable

_SHARD_ROWS = 32_768
_FORWARD_TOKENS = 8_192
"""Most tokens of one forward pass, padding included, unless one conversation alone is longer."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Hold what a speculator needs to know of its target. ``dtype``: precision of the target's stored weights."""

    hidden_size: int
    vocab_size: int
    architectures: tuple[str, ...]
    dtype: torch.dtype


def target_shape(
    name: str, *, revision: str | None = None, hf_overrides: Mapping[str, Any] | None = None
) -> TargetShape:
    """Read the shape from the model's configuration, without its weights. Raises ConfigurationError without one.

    revision: on the hub. hf_overrides: values of the configuration, as ``vllm serve`` takes them.
    """
    config = _configuration(name, revision, hf_overrides or {})
    try:
        text = config.get_text_config()
        return TargetShape(
            hidden_size=int(text.hidden_size),
            vocab_size=int(text.vocab_size),
            architectures=tuple(config.architectures or ()),
            dtype=text.dtype or torch.float32,
        )
    except (AttributeError, TypeError) as error:  # a model that writes no text
        raise _unusable(name, error) from error


def _configuration(name: str, revision: str | None, overrides: Mapping[str, Any]) -> Any:
    """Return the model's configuration with other values, as vLLM makes it from these. Raises ConfigurationError."""
    from transformers import AutoConfig

    unknown: dict[str, Any] = {}
    try:
        config: Any = AutoConfig.from_pretrained(name, revision=revision)
        if overrides:
            stored, _ = config.get_config_dict(name, revision=revision)
            config, unknown = config.from_dict(stored, return_unused_kwargs=True, **overrides)
    except Exception as error:  # the libraries raise whatever they like
        raise _unusable(name, error) from error
    if left := sorted(unknown.keys() & overrides):
        raise ConfigurationError(
            f"model.hf_overrides: {left[0]} is no field of this model in transformers, which computes the hidden "
            "states; serve and train on a copy of the model whose config.json has what you need"
        )
    return config


@contextmanager
def fitting(field: str, remedy: str) -> Iterator[None]:
    """Raise ConfigurationError, which names the configuration's field, if the block fills the device's memory.

    remedy: value to write for the field.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        why = first_line(error)
        raise ConfigurationError(f"{field}: does not fit into the device's memory ({why}); write {remedy}") from error


class Target:
    """Load the frozen target with transformers, on one device. Raises ConfigurationError where it cannot be loaded.

    dtype: "auto" or a torch dtype's name. revision, hf_overrides: as for `target_shape`. max_length: most tokens of a
    conversation, for a model that learned a vector for each position; None for others.
    """

    def __init__(
        self,
        name: str,
        dtype: str,
        device: torch.device,
        *,
        revision: str | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        config = _configuration(name, revision, hf_overrides or {})
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name, revision=revision, config=config, dtype=kind, output_loading_info=True
            )
        except (*UNREADABLE, ImportError) as error:
            raise _unusable(name, error) from error
        model, report = loaded
        if lacking := sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):  # they would be random
            raise ConfigurationError(
                f"model.name_or_path {name}: {len(lacking)} of its weights are missing or of another shape, such as "
                f"{lacking[0]}; download it again, or name the whole model, not a part or a head of it"
            )
        with fitting("model.name_or_path", "a smaller model, or take a larger device"):
            self._model = model.to(device).eval()
        self._device = device
        text = model.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        rotary = any(hasattr(text, name) for name in ("rope_parameters", "rope_theta"))  # without a last position
        self.max_length: int | None = None if rotary else getattr(text, "max_position_embeddings", None)

    def hidden_states(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return the states after the final norm, [T, H] for each sequence, int64 [T].

        All sequences are one batch, padded at the end, which no earlier position of a causal model reads.
        """
        ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(self._device)
        with torch.inference_mode():
            states = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return [state[: len(sequence)] for state, sequence in zip(states, sequences, strict=True)]

    def head(self) -> Tensor | None:
        """Return the head's weights [V, H]; None if the head, applied to hidden states, does not give the logits."""
        probe = torch.arange(min(16, self.vocab_size), device=self._device)[None]
        module = self._model.get_output_embeddings()
        with torch.inference_mode():
            states = self._model.base_model(input_ids=probe, use_cache=False).last_hidden_state
            if module is None or states.shape[-1] != module.weight.shape[1]:
                return None
            if getattr(module, "bias", None) is not None:
                return None
            logits = self._model(input_ids=probe, use_cache=False).logits.float()
            plain = (states @ module.weight.T).float()
        alike = torch.allclose(logits, plain, rtol=0.02, atol=0.02 * float(logits.abs().max()))
        return module.weight.detach().cpu() if alike else None


@dataclass(frozen=True, slots=True)
class Response:
    """Locate a stored response of ``session``: rows ``start`` to ``start + length`` of its shard."""

    session: str
    shard: int
    start: int
    length: int


def plan(conversations: Sequence[Conversation]) -> list[list[int]]:
    """Return the indices of each shard's conversations, longest first, so that batches have little padding."""
    order = sorted(range(len(conversations)), key=lambda i: (-len(conversations[i].tokens), i))
    shards: list[list[int]] = []
    room = 0
    for i in order:
        if room <= 0:
            shards.append([])
            room = _SHARD_ROWS
        shards[-1].append(i)
        room -= conversations[i].response_tokens
    return shards


def extract(
    conversations: Sequence[Conversation],
    folder: Path,
    open_target: Callable[[], Target],
    progress: Callable[[int], None],
) -> None:
    """Write the shards that ``folder`` lacks. ``progress`` is called with each number of tokens computed or found.

    The target is loaded only if a shard is missing. A shard gets its name when it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target: Target | None = None
    for number, members in enumerate(plan(conversations)):
        file = _file(folder, number)
        chosen = [conversations[i] for i in members]
        if file.exists():
            progress(sum(len(conversation.tokens) for conversation in chosen))
            continue
        if target is None:
            target = open_target()
        _write(chosen, file, target, progress)


class HiddenStates:
    """Read the rows of all responses by mapping the shards. A context manager; ``close`` unmaps."""

    def __init__(self, conversations: Sequence[Conversation], folder: Path) -> None:
        self.responses: list[Response] = []
        self._opened = ExitStack()
        self._shards: list[tuple[Any, Any]] = []
        for number, members in enumerate(plan(conversations)):
            file = _file(folder, number)
            with readable(file):
                shard = self._opened.enter_context(safe_open(file, framework="pt"))
            self._shards.append((shard.get_slice("hidden"), shard.get_slice("tokens")))
            at = 0
            for conversation in (conversations[i] for i in members):
                for start, end in conversation.responses:
                    self.responses.append(Response(conversation.session, number, at, end - start))
                    at += end - start

    def rows(self, response: Response, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return hidden states [last - first, H] in the target's dtype, and tokens int64, of a response's rows."""
        hidden, tokens = self._shards[response.shard]
        span = slice(response.start + first, response.start + last)
        return hidden[span], tokens[span].long()

    def close(self) -> None:
        """Unmap the shards."""
        self._opened.close()

    def __enter__(self) -> "HiddenStates":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(conversations: Sequence[Conversation], file: Path, target: Target, progress: Callable[[int], None]) -> None:
    hidden: list[Tensor] = []
    tokens: list[Tensor] = []
    for batch in _batches(conversations):
        _check(batch, target)
        with fitting("data.max_length", f"less than {len(batch[0].tokens)}, the tokens of the longest conversation"):
            states = target.hidden_states([torch.from_numpy(conversation.tokens).long() for conversation in batch])
        for conversation, state in zip(batch, states, strict=True):
            for start, end in conversation.responses:
                hidden.append(state[start - 1 : end - 1].to("cpu", copy=True))  # a view would keep the whole batch
                tokens.append(torch.from_numpy(conversation.tokens[start:end].copy()))
        progress(sum(len(conversation.tokens) for conversation in batch))
    rows = {"hidden": torch.cat(hidden), "tokens": torch.cat(tokens)}
    with writable(file), replacing(file, sync=True) as partial:
        save_file(rows, partial)


def _batches(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    """Yield batches of conversations of similar length, as many as fit into one forward pass."""
    batch: list[Conversation] = []
    for conversation in conversations:
        if batch and (len(batch) + 1) * len(batch[0].tokens) > _FORWARD_TOKENS:  # the first one is the longest
            yield batch
            batch = []
        batch.append(conversation)
    if batch:
        yield batch


def _check(conversations: Sequence[Conversation], target: Target) -> None:
    """Raise InvalidInputError for a conversation that the target cannot read."""
    for conversation in conversations:
        length, highest = len(conversation.tokens), int(conversation.tokens.max())
        if target.max_length is not None and length > target.max_length:
            raise InvalidInputError(
                f"session {conversation.session!r}: has {length} tokens, and the target reads {target.max_length}; "
                f"write data.max_length: {target.max_length}, which leaves later turns out"
            )
        if highest >= target.vocab_size:
            raise InvalidInputError(
                f"session {conversation.session!r}: token {highest} is outside the target's vocabulary of "
                f"{target.vocab_size}; give data of this target's tokenizer"
            )


def _file(folder: Path, number: int) -> Path:
    return folder / f"hidden-{number:05d}.safetensors"


def _unusable(name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"model.name_or_path: {name} cannot be loaded ({first_line(error)}); give a model's folder or hub id"
    )
