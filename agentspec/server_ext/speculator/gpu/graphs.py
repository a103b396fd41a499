"""The draft loop at a few fixed batch sizes, each recorded once as a CUDA graph and replayed while serving.

A loop is some twenty launches of a few microseconds each, which take longer to issue from Python than to run. A graph
issues them at once. It is bound to the shapes and the memory it was recorded with, so batches are padded to the next
recorded size and go through fixed buffers.
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
"""Batch sizes that are recorded. Each is at most half as large again as the one before, so that padding stays small."""

Loop = Callable[[Tensor, Tensor, Tensor], DraftedTokens]
"""hidden [B, H], tokens int64 [B], proposal int64 [B, n] -> what was drafted."""
Run = Callable[[], DraftedTokens]

_WARM_RUNS = 3
"""Runs before a recording, in which libraries choose their kernels and allocate their workspaces."""


class Recorder(Protocol):
    """Records what a run launches. Tests and machines without CUDA put other recorders in its place."""

    def prepare(self, run: Run) -> None:
        """Run it as often as it takes until it allocates and compiles nothing more."""

    def record(self, run: Run) -> Run:
        """Return a replay of the run, which reads the inputs that are in its buffers when it is called."""


class CudaRecorder:
    """Records CUDA graphs on a stream of its own; they share one pool of memory."""

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
        # Other threads (NCCL's watchdog) may call CUDA meanwhile: record only what this one launches.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()

        def replay() -> DraftedTokens:
            graph.replay()
            return result

        return replay


class PaddedLoop:
    """A loop at recorded batch sizes.

    loop: what to record. It may not synchronise, and must launch the same work whatever the values of its inputs are.
    buffers: its inputs, with as many rows as the largest size; every call goes through them.
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
        """Run every size as it will be recorded. Ranks that share a head talk to each other in this, and must do it
        together."""
        for size in reversed(self.sizes):
            self._recorder.prepare(self._run_of(size))

    def record(self) -> PaddedLoop:
        """Record every size, after `prepare`, and return the loop itself.

        Takes seconds, so it belongs to the start of a server. The largest size comes first: the smaller ones then
        live in the memory that it has taken.
        """
        for size in reversed(self.sizes):
            self._replays[size] = self._recorder.record(self._run_of(size))
        return self

    def size_for(self, batch: int) -> int | None:
        """Return the recorded size that takes so many rows; None: they are too many, or nothing is recorded."""
        place = bisect_left(self.sizes, batch)
        return self.sizes[place] if self._replays and place < len(self.sizes) else None

    def __call__(self, *inputs: Tensor) -> DraftedTokens:
        """Return the loop's result for at most as many rows as `size_for` takes. It holds until the next call."""
        batch = len(inputs[0])
        size = self.size_for(batch)
        if size is None:
            raise InvalidInputError(f"batch: {batch} rows, but only {sorted(self._replays)} are recorded")
        for buffer, given in zip(self._buffers, inputs, strict=True):
            buffer[:batch].copy_(given)
        # The rows behind still hold what earlier batches left there: drafted for as well, and not looked at.
        return DraftedTokens(*(field[:batch] for field in self._replays[size]()))

    def _run_of(self, size: int) -> Run:
        return lambda: self._loop(*(buffer[:size] for buffer in self._buffers))
