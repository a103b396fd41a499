"""The tensor-parallel ranks around a draft model: the first decides, the others do their part of the work.

Trees and arbiter live on the first rank, a sharded model on all of them. In every step the first one therefore says
over the group's CPU connection which rows it asks about and which tokens it proposes, or that it asks nothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentspec.server_ext.fusion.draft_model import Int64


def tensor_parallel_group() -> Any:
    """vLLM's GroupCoordinator of the tensor-parallel ranks, or None where there is one alone."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group if group.world_size > 1 else None


class RankLink:
    """From the first rank to the others.

    cpu_group: the torch process group of the ranks, over CPU connections. first: global rank of the first of them.
    positions: n, tokens that the model drafts.
    """

    def __init__(self, cpu_group: Any, first: int, positions: int) -> None:
        self._group = cpu_group
        self._first = first
        self._positions = positions

    def tell(self, rows: Sequence[int], proposals: Int64) -> None:
        """On the first rank: what the model is asked in this step. ``proposals``: int64 [R, n]."""
        import torch

        self._broadcast(torch.tensor([len(rows)]))
        if rows:
            self._broadcast(torch.from_numpy(np.column_stack((np.asarray(rows, dtype=np.int64), proposals))))

    def hear(self) -> tuple[list[int], Int64]:
        """On the others: rows and proposals, as they were told."""
        import torch

        count = torch.zeros(1, dtype=torch.int64)
        self._broadcast(count)
        plan = torch.zeros((int(count), 1 + self._positions), dtype=torch.int64)
        if len(plan):
            self._broadcast(plan)
        told: Int64 = plan.numpy()
        return told[:, 0].tolist(), told[:, 1:]

    def _broadcast(self, tensor: Any) -> None:
        import torch

        torch.distributed.broadcast(tensor.contiguous(), src=self._first, group=self._group)
