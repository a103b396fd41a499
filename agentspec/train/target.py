"""The target model, as far as training needs it: its hidden states, and its head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentspec.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a speculator must know of its target. ``dtype``: that its weights are stored in."""

    hidden_size: int
    vocab_size: int
    architectures: tuple[str, ...]
    dtype: torch.dtype


def target_shape(name: str) -> TargetShape:
    """From the model's configuration alone. Raises ConfigurationError where there is none."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _unusable(name, error) from error
    text = config.get_text_config()
    return TargetShape(
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        architectures=tuple(config.architectures or ()),
        dtype=text.dtype or torch.float32,
    )


class Target:
    """The frozen target on one device, by transformers. Raises ConfigurationError where it cannot be loaded.

    dtype: "auto" or a torch dtype's name.
    """

    def __init__(self, name: str, dtype: str, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=kind)
        except (OSError, ValueError) as error:
            raise _unusable(name, error) from error
        self._model = model.to(device).eval()
        self._device = device
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    def hidden_states(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """After the final norm: [T, H] for each sequence, int64 [T]. One batch, padded behind, which a causal model
        never looks at."""
        ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(self._device)
        with torch.inference_mode():
            states = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return [state[: len(sequence)] for state, sequence in zip(states, sequences, strict=True)]

    def head(self) -> Tensor | None:
        """The head's weights [V, H], if the target's logits are nothing but the head applied to the hidden states."""
        probe = torch.arange(min(16, self.vocab_size), device=self._device)[None]
        module = self._model.get_output_embeddings()
        with torch.inference_mode():
            states = self._model.base_model(input_ids=probe, use_cache=False).last_hidden_state
            if module is None or states.shape[-1] != module.weight.shape[1]:
                return None
            logits = self._model(input_ids=probe, use_cache=False).logits.float()
            plain = (states @ module.weight.T).float()
        alike = torch.allclose(logits, plain, rtol=0.02, atol=0.02 * float(logits.abs().max()))
        return module.weight.detach().cpu() if alike else None


def _unusable(name: str, error: Exception) -> ConfigurationError:
    reason = str(error).strip().splitlines()[0]
    return ConfigurationError(
        f"model.name_or_path: {name} cannot be loaded ({reason}); give a model's folder or hub id"
    )
