"""Install a vLLM that has no CPU build: its own Python code, on the compiled kernels of another version's CPU build.

    python scripts/vllm_on_kernels.py vllm-0.33.0-...whl SITE_PACKAGES KERNELS

SITE_PACKAGES: where it is installed. KERNELS: the folder ``vllm`` of the other version. The wheel's own kernels, which
are for CUDA, are left out. All that agentspec replaces is Python code, so this shows whether agentspec works with a
version before it has a CPU build.
"""

import shutil
import sys
import zipfile
from pathlib import Path

wheel, site, kernels = map(Path, sys.argv[1:])
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(site, [name for name in archive.namelist() if not name.endswith(".so")])
for kernel in kernels.glob("*.so"):
    shutil.copy(kernel, site / "vllm")
# Without this vLLM takes a package of its name for the CUDA build, wherever it runs.
(site / "cpu.pth").write_text('import os; os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")\n')
