"""One rank of a head that several share, over gloo: ``python -m tests.speculator.parallel_rank RANK SIZE FOLDER``.

Drafts with each of the cases and saves what it got as FOLDER/RANK.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as distributed

from agentspec.server_ext.speculator import DraftLoop
from agentspec.server_ext.speculator.parallel import Ranks
from tests.speculator.shapes import inputs, small

CASES = [
    {"kind": kind, "reduced": reduced, "fp8": fp8}
    for kind, reduced, fp8 in (
        ("lstm", False, False),
        ("lstm", True, False),
        ("mlp", True, False),
        ("lstm", True, True),
    )
]
ROWS = 5


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    results = []
    for case in CASES:
        speculator = small(str(case["kind"]), reduced=bool(case["reduced"]))
        loop = DraftLoop(speculator, parallel=Ranks.of(), fp8_head=bool(case["fp8"]))
        results.append((tuple(loop(*inputs(ROWS))), [len(head.weight) for head in speculator.heads]))
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
