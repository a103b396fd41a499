"""Read recorded traffic for the benchmarks: a folder with a load.py and NAME.tok.npz files (see README.md)."""

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
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


def known(folder: Path) -> list[str]:
    """Return the names of the workloads in the folder."""
    return sorted(path.name.removesuffix(".tok.npz") for path in folder.glob("*.tok.npz"))


def records(folder: Path, workload: str) -> Iterable[dict[str, Any]]:
    """Return the workload's records from load.py's `tokens`. Raises ConfigurationError naming the option."""
    loader = folder / "load.py"
    if not loader.is_file():
        raise ConfigurationError(f"--traces {folder}: there is no load.py in it")
    names = known(folder)
    if workload not in names:
        raise ConfigurationError(f"--workload {workload!r} is not in {folder}; there are: {', '.join(names)}")
    found: Iterable[dict[str, Any]] = _module(loader).tokens(workload)
    return found


def calls(folder: Path, workload: str, tenant: str | None = None) -> Iterator[Call]:
    """Yield the workload's calls for the simulation, under `tenant` or without one."""
    for line, record in enumerate(records(folder, workload), 1):
        yield Call(
            line=line,
            session=str(record["session"]),
            turn=record["turn"],
            group=str(record["group"]),
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


def fingerprint(folder: Path, workload: str) -> str:
    """Return a hash of a workload's file, by which to recognize counts of another version of it."""
    return hashlib.sha256((folder / f"{workload}.tok.npz").read_bytes()).hexdigest()[:16]


@cache
def _module(loader: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("agentspec_traces", loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
