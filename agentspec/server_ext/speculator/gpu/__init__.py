"""What makes a draft loop fast on a GPU. None of it changes what is drafted, and none of it is needed to draft.

``fp8``         weights in 8 bits, for any device
``fused``       modules and functions that launch the Triton kernels of ``kernels``
``graphs``      the whole loop recorded as CUDA graphs
``self_check``  both compared with plain torch before they are used

`Optimizations` is the one place where kernels and graphs are chosen: the device offers them, the self-check decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from agentspec.server_ext.speculator.gpu.graphs import CudaRecorder, Recorder
from agentspec.server_ext.speculator.selection import Operations


@dataclass(frozen=True, slots=True)
class Optimizations:
    """What a draft loop tries to switch on when it warms up; None: it does without.

    Both are called in ``DraftLoop.warm_up``, and what they raise costs a warning. Tests and benchmarks give their own.
    """

    kernels: Callable[[], Operations] | None = None
    recorder: Callable[[], Recorder] | None = None

    @classmethod
    def of(cls, device: torch.device) -> Optimizations:
        """Return what a device offers: kernels and graphs on a CUDA device, neither elsewhere."""
        return cls(fused_kernels, CudaRecorder) if device.type == "cuda" else cls()


def fused_kernels() -> Operations:
    """Return the operations on Triton kernels. Raises ImportError where Triton is missing."""
    from agentspec.server_ext.speculator.gpu.fused import FUSED

    return FUSED
