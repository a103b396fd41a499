"""Write an epoch of a rollout in a trainer's format: TRL's parquet of completions, verl's JSON lines."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agentspec.errors import ConfigurationError
from agentspec.files import replacing
from agentspec.rollout.samples import Sample, as_text

_LEAST_DEVIATION = 1e-4


def folder_for(out: Path, format: str) -> Path:
    """Return the folder of a rollout's epochs in a trainer's format ("trl" or "verl"), beside the file of its samples.

    Raises ConfigurationError if the folder cannot be written, and for "trl" if pyarrow is not installed.
    """
    name = out.stem if out.suffix == ".jsonl" else out.name  # with `stem`, run.1 and run.2 would have one folder
    folder = out.absolute().with_name(f"{name}.{format}")  # absolute: a reward may change the working directory
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"--format {format} writes into the folder {folder}, which is a file; move it away")
    place = folder if folder.exists() else folder.parent
    if place.exists() and not os.access(place, os.W_OK | os.X_OK):
        why = f"{place} cannot be written"
        raise ConfigurationError(f"--format {format} writes into the folder {folder}, and {why}; give another --out")
    if format == "trl" and find_spec("pyarrow") is None:
        raise ConfigurationError("--format trl writes parquet: pip install pyarrow")
    return folder


def write_trl(samples: Sequence[Sample], folder: Path, epoch: int, decode: Callable[[list[int]], str]) -> Path:
    """Write ``completions_{epoch}.parquet`` with step, prompt, completion, reward and advantage, as TRL logs them.

    decode: function from token ids to text. Needs pyarrow.
    """
    import pyarrow
    from pyarrow import parquet

    ordered = _ordered(samples)
    table = pyarrow.table(
        {
            "step": [epoch] * len(ordered),
            "prompt": [decode(sample.prompt_ids) for sample in ordered],
            "completion": [sample.text for sample in ordered],
            # With their type, because an epoch without any reward would have columns of another type than the rest.
            "reward": pyarrow.array([sample.reward for sample in ordered], pyarrow.float64()),
            "advantage": pyarrow.array(advantages(ordered), pyarrow.float64()),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"completions_{epoch:05d}.parquet"
    with replacing(path) as part:
        parquet.write_table(table, part)
    return path


def write_verl(samples: Sequence[Sample], folder: Path, epoch: int, decode: Callable[[list[int]], str]) -> Path:
    """Write ``{epoch}.jsonl`` with input, output, gts, score and step, as verl dumps rollouts.

    gts: the problem's ``reward_model.ground_truth`` if its file was verl's, else its ``answer``. decode: function from
    token ids to text.
    """
    lines = []
    for sample in _ordered(samples):
        line = {"input": decode(sample.prompt_ids), "output": sample.text, "gts": _ground_truth(sample.fields)}
        lines.append(as_text({**line, "score": sample.reward, "step": epoch}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{epoch}.jsonl"
    with replacing(path) as part:
        part.write_text("".join(lines), encoding="utf-8", errors="replace")
    return path


def for_rollout_func(samples: Iterable[Sample]) -> dict[str, list[Any]]:
    """Return samples as TRL's ``rollout_func`` does: prompt_ids, completion_ids and logprobs, one list a sample."""
    ordered = list(samples)
    return {
        name: [getattr(sample, name) for sample in ordered] for name in ("prompt_ids", "completion_ids", "logprobs")
    }


def advantages(samples: Sequence[Sample]) -> list[float | None]:
    """Return the samples' advantages in their groups: (r - mean) / (deviation + 1e-4).

    GRPO, arXiv 2402.03300, 4.1.2; deviation and constant as in TRL. None for a sample without a reward. The samples of
    one prompt of one problem are a group.
    """
    groups = [(sample.id, tuple(sample.prompt_ids)) for sample in samples]
    rewards: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for group, sample in zip(groups, samples, strict=True):
        if sample.reward is not None:
            rewards.setdefault(group, []).append(sample.reward)
    scale = {
        name: (fmean(values), (stdev(values) if len(values) > 1 else 0.0) + _LEAST_DEVIATION)
        for name, values in rewards.items()
    }
    return [
        None if sample.reward is None else (sample.reward - scale[group][0]) / scale[group][1]
        for group, sample in zip(groups, samples, strict=True)
    ]


def _ordered(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (sample.id, sample.sample))


def _ground_truth(fields: Mapping[str, Any]) -> Any:
    model = fields.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else fields.get("answer")
