"""Run one rank of a shared head, over gloo: ``python -m tests.speculator.parallel_rank RANK SIZE FOLDER``.

It drafts in each of the cases and saves the drafts as FOLDER/RANK.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as distributed

from agentspec.server_ext.speculator import DraftLoop, Ranks
from agentspec.server_ext.speculator.gpu import Optimizations
from agentspec.server_ext.speculator.selection import PLAIN
from tests.speculator.shapes import inputs, small
from tests.speculator.stand_ins import BROKEN, DirectRecorder, FailingRecorder, WrongRecorder

CASES = [
    {"kind": kind, "reduced": reduced, "fp8": fp8, "kernels": kernels}
    for kind, reduced, fp8, kernels in (
        ("lstm", False, False, None),
        ("lstm", True, False, None),
        ("mlp", True, False, None),
        ("lstm", True, True, None),
        ("lstm", False, False, "right"),
        ("mlp", True, False, "right"),
        ("lstm", False, False, "wrong on rank 1"),
        ("lstm", True, False, "raising on rank 0"),
    )
]
ROWS = 5


def _stand_ins(kernels: str, rank: int) -> Optimizations:
    """Return kernels and a recorder that are broken on one rank or on none."""
    if kernels == f"wrong on rank {rank}":
        return Optimizations(lambda: BROKEN["another token"], WrongRecorder)
    if kernels == f"raising on rank {rank}":
        return Optimizations(lambda: BROKEN["raises"], lambda: FailingRecorder("record"))
    return Optimizations(lambda: PLAIN, DirectRecorder)


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    results = []
    for case in CASES:
        speculator = small(str(case["kind"]), reduced=bool(case["reduced"]))
        given = None if case["kernels"] is None else _stand_ins(str(case["kernels"]), rank)
        loop = DraftLoop(speculator, parallel=Ranks.of(), fp8_head=bool(case["fp8"]), optimizations=given)
        loop.warm_up()
        used = loop.uses_kernels, loop.uses_graphs
        results.append((tuple(loop(*inputs(ROWS))), [len(head.weight) for head in speculator.heads], used))
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
