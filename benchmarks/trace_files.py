"""Read recorded traffic for the benchmarks: a folder with a load.py and NAME.tok.npz files (see README.md)."""

import argparse
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.arguments import MAX_VOCAB, as_tokens
from agentspec.errors import AgentSpecError, ConfigurationError
from agentspec.identifiers import check_session_id
from agentspec.simulate import Call

Tokens = NDArray[np.int32]

VOCABULARY = 131_072
"""Number of token ids in the traces' vocabulary, Mistral's 'tekken'."""

WORKLOADS = (
    "react_hotpot",
    "rollouts_codegen",
    "swe_gemini3",
    "refine_code_uniq",
    "refine_code_ldb",
    "chat_mtbench",
)
"""Names of the workloads that have targets."""

_STRIDE = 7_919


def add_option(parser: argparse.ArgumentParser) -> None:
    """Register `--traces`, shared by the scripts that read recordings."""
    parser.add_argument(
        "--traces", type=Path, required=True, metavar="DIR", help="folder with load.py and NAME.tok.npz files"
    )


def known(folder: Path) -> list[str]:
    """Return the names of the workloads in the folder."""
    return sorted(path.name.removesuffix(".tok.npz") for path in folder.glob("*.tok.npz"))


def records(folder: Path, workload: str) -> Iterator[dict[str, Any]]:
    """Yield the workload's records from load.py's `tokens`, with every field that README.md names.

    `prompt` and `response` are int32 arrays. `turn` is 0 and `group` None where a record has none.
    Raises ConfigurationError naming the option, or the record and its field, and where no record has a response.
    """
    loader, _ = _files(folder, workload)
    place = f"--traces {folder}: {workload}"
    tokens = 0
    for number, record in enumerate(_module(loader).tokens(workload), 1):
        try:
            checked = _checked(record)
        except KeyError as error:
            raise ConfigurationError(f"{place}, record {number}: has no field {error}") from None
        except AgentSpecError as error:
            raise ConfigurationError(f"{place}, record {number}: {error}") from None
        tokens += len(checked["response"])
        yield checked
    if not tokens:
        raise ConfigurationError(f"{place}: no record has a response")


def _files(folder: Path, workload: str) -> tuple[Path, Path]:
    """Return load.py and the workload's file. Raises ConfigurationError if one of them is not there."""
    loader, names = folder / "load.py", known(folder)
    if not loader.is_file():
        raise ConfigurationError(f"--traces {folder}: there is no load.py in it")
    if workload not in names:
        there = f"there are {', '.join(names)}" if names else "there is no .tok.npz in it"
        raise ConfigurationError(f"--traces {folder}: no workload {workload!r}; {there}")
    return loader, folder / f"{workload}.tok.npz"


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    check_session_id(str(record["session"]))
    group = record.get("group")
    if group is not None:
        check_session_id(str(group), "group")
    texts = {name: as_tokens(record[name], name, MAX_VOCAB) for name in ("prompt", "response")}
    return {"session": record["session"], "turn": record.get("turn", 0), "group": group, **texts}


def samples_by_problem(folder: Path, workload: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the samples of each problem: records with the same group that stand together, and have a response.

    Raises ConfigurationError as `records` does, and for a record without a group.
    """
    for group, samples in groupby(records(folder, workload), key=lambda record: record["group"]):
        if group is None:
            raise ConfigurationError(f"--workload {workload}: has a record without a group, which names its problem")
        said = [sample for sample in samples if len(sample["response"])]
        if said:
            yield said


def calls(folder: Path, workload: str, tenant: str | None = None) -> Iterator[Call]:
    """Yield the workload's calls for the simulation, under `tenant` or without one."""
    for line, record in enumerate(records(folder, workload), 1):
        yield Call(
            line=line,
            session=str(record["session"]),
            turn=record["turn"],
            group=None if record["group"] is None else str(record["group"]),
            tenant=tenant,
            prompt=record["prompt"],
            response=record["response"],
        )


def documents(folder: Path) -> Iterator[Tokens]:
    """Yield responses without end: those of all workloads, then again and again with other token ids.

    Renumbered text repeats itself as the recorded text does, but shares no text with it.
    """
    recorded = [record["response"] for name in WORKLOADS for record in records(folder, name)]
    shift = 0
    while True:
        for response in recorded:
            yield response if shift == 0 else ((response + shift) % VOCABULARY).astype(np.int32)
        shift += _STRIDE


def accepted_tokens(draft: Iterable[int], truth: Iterable[int]) -> int:
    """Return how many tokens of a draft, from the first on, are those that were recorded."""
    same = (token == right for token, right in zip(draft, truth, strict=False))
    return sum(1 for _ in takewhile(bool, same))


def fingerprint(folder: Path, workload: str) -> str:
    """Return a hash of load.py and a workload's file, by which to recognize counts of another version of them.

    Raises ConfigurationError if one of them is not there.
    """
    digests = (hashlib.sha256(file.read_bytes()).digest() for file in _files(folder, workload))
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


@cache
def _module(loader: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("agentspec_traces", loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
