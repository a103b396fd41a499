"""A snapshot that this process may not write, because of `ulimit -f`: the error names the limit, and none is left."""

import resource
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.errors import SnapshotError


def test_a_limit_of_the_size_of_files_is_named(tmp_path: Path) -> None:
    cache = SuffixCache()
    cache.start("r", [1, 2], session="s")
    cache.extend("r", list(range(20_000)))
    cache.finish("r")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(SnapshotError, match=r"more than 10,000 bytes \(ulimit -f\): raise that limit and restart"):
            cache.save(tmp_path / "snapshot")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    cache.save(tmp_path / "snapshot")
