"""Make a draft loop fast on a GPU. The loop runs without any of this. FP8 alone may change what it drafts.

``fp8``         weights in 8 bits, for any device
``fused``       modules and functions that launch the Triton kernels of ``kernels``
``graphs``      the whole loop recorded as CUDA graphs
``self_check``  both compared with plain torch before they are used

`Optimizations` alone chooses kernels and graphs: the device offers them, and the self-check decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from agentspec.server_ext.speculator.gpu.graphs import CudaRecorder, Recorder
from agentspec.server_ext.speculator.selection import Operations


@dataclass(frozen=True, slots=True)
class Optimizations:
    """Hold what a draft loop tries to switch on when it warms up; None: it is not tried.

    kernels, recorder: return the operations and the recorder of graphs. ``DraftLoop.warm_up`` calls both and turns
    their errors into warnings. Tests and benchmarks pass their own.
    """

    kernels: Callable[[], Operations] | None = None
    recorder: Callable[[], Recorder] | None = None

    @classmethod
    def of(cls, device: torch.device) -> Optimizations:
        """Return the optimisations for a device: kernels and graphs on a CUDA device, neither elsewhere."""
        return cls(fused_kernels, CudaRecorder) if device.type == "cuda" else cls()


def fused_kernels() -> Operations:
    """Return the operations on Triton kernels. Raises ImportError if Triton is missing."""
    from agentspec.server_ext.speculator.gpu.fused import FUSED

    return FUSED
