"""Start real vLLM servers on the small model, once for all tests of this folder."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentspec.cache.policy import DEFAULT_COST
from agentspec.testing.server import CPU_ENVIRONMENT, ModelServer
from tests.end_to_end.greedy import Answers, run_all
from tests.end_to_end.mixed_load import mixed_load

MODEL = Path(__file__).parents[2] / "demo" / "model"
DRAFTER = MODEL.parent / "drafter"
"""The speculator that was trained for MODEL."""

# Small limits, so that chunked prefill (64 tokens a step), preemption (few blocks) and the end of the context
# (max-model-len) all happen within a few requests.
OPTIONS = (
    *("--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"),
    *("--block-size", "32", "--num-gpu-blocks-override", "50", "--enable-prompt-tokens-details"),
)
PRICED = ("--verify-cost", str(DEFAULT_COST))
"""Fixes the price of a draft token, so that drafts do not depend on how busy the machine is."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def speculating(
    config: dict[str, Any], log: Path, *options: str, model: Path = MODEL, by_vllm: bool = False
) -> ModelServer:
    """Return a server with the extension, a store in memory, and a speculative config as users write it.

    by_vllm: start it by ``vllm serve``, where only the options switch the extension on.
    """
    return ModelServer(
        model,
        agentspec=not by_vllm,
        options=(*OPTIONS, "--speculative-config", json.dumps(config), *options),
        name="demo",
        log=log,
        environment={**ENVIRONMENT, "AGENTSPEC_STORE": "memory://", "VLLM_PLUGINS": "agentspec"},
    )


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the ``fast`` server's SQLite store."""
    return tmp_path_factory.mktemp("store") / "server.db"


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, database: Path
) -> Iterator[dict[str, ModelServer]]:
    """Start the servers that tests ask for, side by side. Their names are those of the fixtures below."""
    stores = {"plain": None, "fast": f"sqlite:///{database}", "priced": "memory://"}
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    logs = tmp_path_factory.mktemp("logs")
    found = {
        name: ModelServer(
            MODEL,
            agentspec=store is not None,
            options=(*OPTIONS, *PRICED) if name == "priced" else OPTIONS,
            name="demo",
            log=logs / f"{name}.log",
            environment=ENVIRONMENT if store is None else {**ENVIRONMENT, "AGENTSPEC_STORE": store},
        )
        for name, store in stores.items()
        if name in asked
    }
    try:
        for server in found.values():
            server.launch()
        for server in found.values():
            server.wait()
        yield found
    finally:
        for server in found.values():
            server.stop()


@pytest.fixture(scope="session")
def plain(servers: dict[str, ModelServer]) -> ModelServer:
    """Return the server that is vLLM without the extension."""
    return servers["plain"]


@pytest.fixture(scope="session")
def fast(servers: dict[str, ModelServer]) -> ModelServer:
    """Return the server with the extension, without options, on an SQLite store."""
    return servers["fast"]


@pytest.fixture(scope="session")
def priced(servers: dict[str, ModelServer]) -> ModelServer:
    """Return the server with the extension and a fixed price, on a store in memory."""
    return servers["priced"]


@pytest.fixture(scope="session")
def plain_answers(plain: ModelServer) -> Answers:
    """Return the greedy answers of vLLM without the extension to the mixed load."""
    return run_all(plain, mixed_load())


def run_script(name: str, *arguments: str, out: Path, in_process: bool = True) -> Any:
    """Run a script of this folder. Return the JSON in ``out``. in_process: vLLM's engine is in the script's process."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *arguments, str(out)],
        env={
            **os.environ,
            **CPU_ENVIRONMENT,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process)),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def other_weights(folder: Path) -> Path:
    """Make a copy of the demo's model in a new folder, with weights that say something else."""
    folder.mkdir()
    for file in MODEL.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: (value + 0.12 * value.float().std().nan_to_num() * torch.randn(value.shape, generator=generator)).to(
            value.dtype
        )
        for name, value in load_file(MODEL / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
