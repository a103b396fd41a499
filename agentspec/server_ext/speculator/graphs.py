"""The draft loop at a few fixed batch sizes, each recorded once as a CUDA graph and replayed while serving.

A loop is some twenty launches of a few microseconds each, which cost more to issue from Python than to run. A graph
issues them at once. It is bound to the shapes and the memory it was recorded with, so batches are padded to the next
recorded size and go through fixed buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentspec.errors import InvalidInputError
from agentspec.server_ext.speculator.selection import DraftedTokens

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Batch sizes that are recorded: steps of at most a half, so that little is computed for nothing."""

Loop = Callable[[Tensor, Tensor, Tensor], DraftedTokens]
"""hidden [B, H], tokens int64 [B], proposal int64 [B, n] -> what was drafted."""

_WARM_RUNS = 3
"""Runs ahead of a recording: libraries choose their kernels and allocate their workspaces in them, Triton compiles."""


class PaddedLoop:
    """A loop at recorded batch sizes. Where there is no CUDA it is padded the same way, and simply called.

    loop: what to record. It may not synchronise, and must launch the same whatever its input's values are.
    buffers: its inputs, with as many rows as the largest size; every call goes through them.
    """

    def __init__(self, loop: Loop, buffers: tuple[Tensor, Tensor, Tensor], sizes: Sequence[int] = SIZES) -> None:
        self._loop = loop
        self._buffers = buffers
        self._sizes = tuple(sizes)
        self._replays: dict[int, Callable[[], DraftedTokens]] = {}

    def size_for(self, batch: int) -> int | None:
        """The recorded size that takes so many rows; None: too many, or nothing was recorded."""
        place = bisect_left(self._sizes, batch)
        return self._sizes[place] if self._replays and place < len(self._sizes) else None

    def warm_up(self) -> None:
        """Record every size. Takes seconds, so it belongs to the start of a server; nothing is recorded later.

        The largest comes first: the smaller ones then live in the memory that it has taken.
        """
        pool = torch.cuda.graph_pool_handle() if self._buffers[0].is_cuda else None
        for size in reversed(self._sizes):
            self._replays[size] = self._eager(size) if pool is None else self._recorded(size, pool)

    def __call__(self, *inputs: Tensor) -> DraftedTokens:
        """The loop's result for at most as many rows as `size_for` takes; it holds until the next call."""
        batch = len(inputs[0])
        size = self.size_for(batch)
        if size is None:
            raise InvalidInputError(f"batch: {batch} rows, but only {sorted(self._replays)} are recorded")
        for buffer, given in zip(self._buffers, inputs, strict=True):
            buffer[:batch].copy_(given)
        # Rows behind still hold what earlier batches left there: drafted for as well, and not looked at.
        return DraftedTokens(*(field[:batch] for field in self._replays[size]()))

    def _eager(self, size: int) -> Callable[[], DraftedTokens]:
        return lambda: self._loop(*(buffer[:size] for buffer in self._buffers))

    def _recorded(self, size: int, pool: tuple[int, int]) -> Callable[[], DraftedTokens]:
        run = self._eager(size)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may call CUDA meanwhile; only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = run()

        def replay() -> DraftedTokens:
            graph.replay()
            return result

        return replay
