"""Record the draft loop as CUDA graphs at a few fixed batch sizes, and replay them while serving.

A loop is some twenty launches of a few microseconds each, which take longer to issue from Python than to run. A graph
issues them at once. It is tied to the shapes and the memory of its recording, so batches are padded to the next
recorded size and copied into fixed buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from agentspec.errors import InvalidInputError
from agentspec.server_ext.speculator.selection import DraftedTokens

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Batch sizes to record, close enough together that padding stays small."""

Loop = Callable[[Tensor, Tensor, Tensor], DraftedTokens]
"""hidden [B, H], tokens int64 [B], proposal int64 [B, n] -> what was drafted."""
Run = Callable[[], DraftedTokens]

_WARM_RUNS = 3
"""Runs before a recording, in which libraries choose their kernels and allocate their workspaces."""


class Recorder(Protocol):
    """Record the launches of a run. Tests and machines without CUDA use other recorders."""

    def prepare(self, run: Run) -> None:
        """Run until nothing is allocated or compiled any more."""

    def record(self, run: Run) -> Run:
        """Return a function that replays the run with the inputs then in its buffers."""


class CudaRecorder:
    """Record CUDA graphs on a separate stream; they share one pool of memory."""

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()
        self._pool: Any = torch.cuda.graph_pool_handle()

    def prepare(self, run: Run) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()

    def record(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may call CUDA meanwhile, so record only this thread's launches.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()

        def replay() -> DraftedTokens:
            graph.replay()
            return result

        return replay


class PaddedLoop:
    """Replay a loop at recorded batch sizes.

    loop: the loop to record. It must not synchronise, and must launch the same work for all values of its inputs.
    buffers: its inputs, with as many rows as the largest size; every call copies into them.
    """

    def __init__(
        self, loop: Loop, buffers: tuple[Tensor, Tensor, Tensor], recorder: Recorder, sizes: Sequence[int] = SIZES
    ) -> None:
        self.sizes = tuple(sizes)
        self._loop = loop
        self._buffers = buffers
        self._recorder = recorder
        self._replays: dict[int, Run] = {}

    def prepare(self) -> None:
        """Run every size before it is recorded.

        Ranks that share a head exchange data here, so all must call it together.
        """
        for size in reversed(self.sizes):
            self._recorder.prepare(self._run_of(size))

    def record(self) -> PaddedLoop:
        """Record every size, after `prepare`, and return the loop itself.

        This takes seconds, so call it when a server starts. The largest size comes first, so that the smaller ones
        use its memory.
        """
        for size in reversed(self.sizes):
            self._replays[size] = self._recorder.record(self._run_of(size))
        return self

    def size_for(self, batch: int) -> int | None:
        """Return the smallest recorded size for a number of rows; None if there is none."""
        place = bisect_left(self.sizes, batch)
        return self.sizes[place] if self._replays and place < len(self.sizes) else None

    def __call__(self, *inputs: Tensor) -> DraftedTokens:
        """Return the loop's result for at most the largest recorded size. It is valid until the next call."""
        batch = len(inputs[0])
        size = self.size_for(batch)
        if size is None:
            raise InvalidInputError(f"batch: {batch} rows, but only {sorted(self._replays)} are recorded")
        for buffer, given in zip(self._buffers, inputs, strict=True):
            buffer[:batch].copy_(given)
        # The rows behind still hold earlier batches. They are drafted for too, and the result is ignored.
        return DraftedTokens(*(field[:batch] for field in self._replays[size]()))

    def _run_of(self, size: int) -> Run:
        return lambda: self._loop(*(buffer[:size] for buffer in self._buffers))
