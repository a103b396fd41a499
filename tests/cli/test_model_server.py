"""The command of servers that tests and the demo start, by what the machine has."""

import pytest

from agentspec.testing.server import CPU_OPTIONS, GPU_OPTIONS, ModelServer

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("gpu", [False, True])
def test_servers_that_share_a_gpu_take_a_small_part_of_its_memory(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for agentspec in (False, True):
        command = ModelServer("model", agentspec=agentspec, options=["--max-num-seqs", "2"])._command()
        given, other = (GPU_OPTIONS, CPU_OPTIONS) if gpu else (CPU_OPTIONS, GPU_OPTIONS)
        assert set(given) <= set(command) and not set(other) - set(given) & set(command)
        assert command[-2:] == ["--max-num-seqs", "2"]
