"""A short run of the fuzzer; `python -m tests.cache.fuzz` goes on for as long as wanted."""

import os
from pathlib import Path

import pytest

from tests.cache.fuzz import Fuzzer

WORLDS = int(os.environ.get("AGENTSPEC_FUZZ_EXAMPLES", "16"))


@pytest.mark.parametrize("seed", range(WORLDS))
def test_core_and_oracle_agree(seed: int, tmp_path: Path) -> None:
    fuzzer = Fuzzer(10_000_019 + seed, tmp_path)
    fuzzer.run(600)
    fuzzer.reload()
    fuzzer.run(200)
    assert fuzzer.done["propose"] > 0
