"""Read what edits.py has written: the load.py of its folder, for the other benchmarks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def tokens(name: str) -> Iterator[dict[str, Any]]:
    """Yield the calls of a workload: session, and prompt and response as int32 arrays."""
    arrays = dict(np.load(Path(__file__).parent / f"{name}.tok.npz"))
    prompts = np.split(arrays["prompt"], arrays["prompt_ends"][:-1])
    responses = np.split(arrays["response"], arrays["response_ends"][:-1])
    for session, prompt, response in zip(arrays["session"].tolist(), prompts, responses, strict=True):
        yield {"session": session, "prompt": prompt, "response": response}
