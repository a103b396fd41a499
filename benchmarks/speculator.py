"""Measure a draft loop's time, and compare it with the time that reading its weights takes on the same device.

    python benchmarks/speculator.py [--shape llama-3.1-8b] [--json]    # a GPU with torch and triton; nothing else
    python benchmarks/speculator.py --shape small                      # anywhere

The speculator is an LSTM with n = 3, tied weights, scaled input and random weights in published shapes. The floor is
the bytes of all weights that a loop reads, divided by the measured bandwidth of a large copy (bytes read and written).
Times are medians, by events on the device.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a checkout, without installing

from agentspec.server_ext.speculator import DraftLoop, LSTMSpeculator, Speculator, SpeculatorConfig
from agentspec.server_ext.speculator.gpu import Optimizations, fused_kernels
from agentspec.server_ext.speculator.gpu.graphs import CudaRecorder

POSITIONS = 3
BATCHES = (1, 8, 32)
TARGET = 1.4
"""Largest allowed time, as a multiple of the floor: batch 1, graphs and kernels on, on an H100."""

SHAPES = {  # hidden size of the target, inner size, vocabulary size
    "llama-3.1-8b": (4096, 4096, 128256),
    "llama-3.1-70b": (8192, 4096, 128256),
    "qwen2.5-32b": (5120, 5120, 152064),
    "small": (256, 256, 2048),
}
PRECISIONS = {"bf16": (False, False), "fp8 head": (True, False), "fp8": (True, True)}
"""Each precision's pair: head in FP8, projections in FP8."""


@dataclass(frozen=True, slots=True)
class Row:
    """Hold one variant's times. ratio: ms over floor_ms; met: None where no target applies to the row or device."""

    shape: str
    precision: str
    batch: int
    graphs: bool
    kernels: bool
    ms: float
    ms_a_token: float
    bytes_read: int
    floor_ms: float
    ratio: float
    target: float | None
    met: bool | None


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    provenance = _provenance(device)
    bandwidth = _bandwidth(device)
    provenance["copy_gb_a_second"] = round(bandwidth / 1e9, 1)
    print(f"{provenance['device']}: a copy moves {bandwidth / 1e9:,.0f} GB/s", file=sys.stderr)
    rows = []
    for row in _rows(options.shape, device, bandwidth, options.repeats):
        print(_line(row), file=sys.stderr, flush=True)
        rows.append(row)
    if options.json:
        print(json.dumps({"provenance": provenance, "rows": [_rounded(row) for row in rows]}, indent=1))
    else:
        print("\n".join([json.dumps(provenance), _HEADING, *map(_line, rows)]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", action="append", choices=sorted(SHAPES), help="one or more; all but small unless given"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs of each variant (50)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    options.shape = options.shape or [name for name in SHAPES if name != "small"]
    return options


def _rows(shapes: Iterable[str], device: torch.device, bandwidth: float, repeats: int) -> Iterator[Row]:
    on_gpu = device.type == "cuda"
    with_kernels = on_gpu or os.environ.get("TRITON_INTERPRET") == "1"
    for shape in shapes:
        for precision, (head, projections) in PRECISIONS.items():
            for kernels in (False, True) if with_kernels else (False,):
                for graphs in (False, True) if on_gpu else (False,):
                    loop = DraftLoop(
                        _speculator(shape, device),
                        fp8_head=head,
                        fp8_projections=projections,
                        optimizations=Optimizations(
                            fused_kernels if kernels else None, CudaRecorder if graphs else None
                        ),
                    )
                    loop.warm_up()
                    yield from _measured(loop, shape, precision, bandwidth, repeats)


def _measured(loop: DraftLoop, shape: str, precision: str, bandwidth: float, repeats: int) -> Iterator[Row]:
    """Yield a loop's times at each batch size, with the kernels and graphs that passed its self-check."""
    device = next(loop.speculator.parameters()).device
    for batch in BATCHES:
        hidden, tokens, _ = loop.inputs(batch)
        hidden.normal_()
        tokens.random_(0, loop.speculator.config.vocab_size)
        ms = _milliseconds(lambda: loop(hidden, tokens), device, repeats)  # noqa: B023  # called at once
        read = bytes_read(loop.speculator, batch)
        floor = 1e3 * read / bandwidth
        ratio = ms / floor
        aimed = loop.uses_graphs and loop.uses_kernels and batch == 1
        judged = aimed and "H100" in torch.cuda.get_device_name(device)
        yield Row(
            shape, precision, batch, loop.uses_graphs, loop.uses_kernels, ms, ms / POSITIONS, read, floor, ratio,
            TARGET if aimed else None, ratio <= TARGET if judged else None,
        )  # fmt: skip


def bytes_read(speculator: Speculator, batch: int) -> int:
    """Return the bytes of weights that one loop reads: at each position a projection, the norms, a head, and each
    row's embeddings."""
    config = speculator.config
    total = 0
    for k in range(config.n_predict):
        parts = [
            speculator.projections[config.projection_at(k)],
            speculator.heads[config.weights_at(k)],
            speculator.cell,
        ]
        total += sum(tensor.nbytes for part in parts for tensor in _tensors(part))
        total += sum(batch * embedding.weight[0].nbytes for embedding in speculator.embeddings)
    return total


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _speculator(shape: str, device: torch.device) -> Speculator:
    hidden, inner, vocabulary = SHAPES[shape]
    config = SpeculatorConfig("lstm", hidden, inner, POSITIONS, vocabulary, scale_input=True)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            speculator = LSTMSpeculator(config)
    finally:
        torch.set_default_dtype(usual)
    speculator.eval().requires_grad_(False)
    return speculator


def _bandwidth(device: torch.device) -> float:
    """Return the bytes a second, read and written, of a copy much larger than any cache."""
    size = 2**31 if device.type == "cuda" else 2**27
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2e3 * size / _milliseconds(lambda: target.copy_(source), device, 20)


def _milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median duration of `repeats` calls, in milliseconds."""
    for _ in range(5):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begin = perf_counter()
            call()
            times.append(1e3 * (perf_counter() - begin))
        return median(times)
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    torch.cuda.synchronize(device)
    for begin_event, end_event in zip(begins, ends, strict=True):
        begin_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize(device)
    return float(median(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)))


def _provenance(device: torch.device) -> dict[str, object]:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    on_gpu = device.type == "cuda"
    return {
        "benchmark": "speculator",
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "triton": version,
        "python": platform.python_version(),
    }


_HEADING = (
    f"{'shape':14} {'precision':9} {'batch':>5} {'graphs':>6} {'kernels':>7} "
    f"{'ms':>9} {'ms/token':>9} {'MB read':>8} {'floor ms':>9} {'ratio':>6}  target"
)


def _line(row: Row) -> str:
    target = (
        "" if row.target is None else f"{row.target:g} { ({True: 'met', False: 'not met', None: 'open'}[row.met]) }"
    )
    return (
        f"{row.shape:14} {row.precision:9} {row.batch:5} {row.graphs!s:>6} {row.kernels!s:>7} {row.ms:9.4f} "
        f"{row.ms_a_token:9.4f} {row.bytes_read / 1e6:8.1f} {row.floor_ms:9.4f} {row.ratio:6.2f}  {target}"
    )


def _rounded(row: Row) -> dict[str, object]:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in asdict(row).items()}


if __name__ == "__main__":
    main()
