"""Saving and loading whole caches, and what a damaged file does."""

from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import DraftPolicy, Scope, SuffixCache
from agentspec.errors import SnapshotError

TEXT = list(range(100, 160))


def fill(cache: SuffixCache) -> None:
    for number in range(8):
        name = f"s{number}"
        group, tenant = "g" if number % 2 else None, "t" if number > 2 else None
        scope: Scope = "session" if number in (2, 6) else "tenant"
        cache.start("r", [1, 2, number], session=name, group=group, tenant=tenant, scope=scope)
        cache.extend("r", [token + 100 * number for token in TEXT])
        cache.propose(["r"], 8)
        cache.extend("r", [7, 8])
        cache.finish("r")


def answers(cache: SuffixCache) -> list[object]:
    """What it drafts for many contexts."""
    seen: list[object] = []
    for number in range(8):
        for tenant in (None, "t", "u"):
            cache.start("q", [1, 2, number], session=f"s{number}", group="g", tenant=tenant)
            cache.extend("q", [token + 100 * number for token in TEXT[10:14]])
            draft = cache.propose(["q"], 16)[0]
            seen.append((draft.token_ids.tolist(), draft.probabilities.tolist(), draft.source, draft.match_length))
            cache.abort("q")
    return seen


def test_a_loaded_cache_answers_the_same(tmp_path: Path) -> None:
    cache = SuffixCache()
    fill(cache)
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot")
    assert loaded.stats().tokens == cache.stats().tokens > 0
    assert loaded.stats().sessions == cache.stats().sessions
    assert answers(loaded) == answers(cache)


def test_a_loaded_cache_goes_on_and_can_be_saved_again(tmp_path: Path) -> None:
    cache = SuffixCache()
    fill(cache)
    for name in ("one", "two"):
        cache.save(tmp_path / name)
        cache = SuffixCache.load(tmp_path / name)
        cache.start("r", [1, 2, 3], session="new", tenant="t")
        cache.extend("r", [41, 42, 43, 44])
        cache.finish("r")
    cache.save(tmp_path / "one")  # over a file that may still be mapped
    assert len(answers(cache)) > 0
    cache.start("q", [], tenant="t")
    cache.extend("q", [41, 42, 43])
    assert cache.propose(["q"], 1)[0].token_ids.tolist() == [44]


def test_what_was_erased_is_not_saved(tmp_path: Path) -> None:
    cache = SuffixCache()
    cache.start("r", [], session="s", tenant="t")
    cache.extend("r", [0x5EC2E7 + n for n in range(40)])
    cache.finish("r")
    cache.save(tmp_path / "before")
    secret = (0x5EC2E7).to_bytes(4, "little")
    assert secret in (tmp_path / "before").read_bytes()
    cache.remove_session("t", "s")
    cache.save(tmp_path / "after")
    assert secret not in (tmp_path / "after").read_bytes()
    assert SuffixCache.load(tmp_path / "after").stats().tokens == 0


def test_another_policy_may_load_it(tmp_path: Path) -> None:
    cache = SuffixCache()
    fill(cache)
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot", policy=DraftPolicy.fixed())
    loaded.start("q", [], tenant="t")
    loaded.extend("q", [410, 411, 412])
    assert loaded.propose(["q"], 1)[0].token_ids.tolist() == [413]


@pytest.mark.parametrize("harm", ["empty", "cut", "flipped", "other", "missing"])
def test_a_damaged_file_is_refused(tmp_path: Path, harm: str) -> None:
    cache = SuffixCache()
    fill(cache)
    path = tmp_path / "snapshot"
    cache.save(path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "empty": b"",
        "cut": whole[: middle + 1],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :],
        "other": b"something else entirely " * 50,
    }
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged[harm])
    with pytest.raises(SnapshotError, match=str(path)):
        SuffixCache.load(path)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    cache = SuffixCache(policy=DraftPolicy(rerank=False))
    cache.start("r", [1, 2], session="s", tenant="t")
    cache.extend("r", [3, 4, 5])
    cache.finish("r")
    path = tmp_path / "snapshot"
    cache.save(path)
    whole = bytearray(path.read_bytes())
    step = max(len(whole) // 400, 1)
    for at in range(0, len(whole), step):
        whole[at] ^= 1
        path.write_bytes(whole)
        whole[at] ^= 1
        with pytest.raises(SnapshotError):
            SuffixCache.load(path)


def test_a_snapshot_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="nowhere"):
        SuffixCache().save(tmp_path / "nowhere" / "snapshot")


def test_what_eviction_gave_back_is_not_saved(tmp_path: Path) -> None:
    cache = SuffixCache(max_tokens=150_000)
    rng = np.random.default_rng(1)
    for _ in range(30):
        cache.start("r", [1, 2], tenant="t")
        cache.extend("r", rng.integers(0, 50_000, 20_000, np.int32))
        cache.finish("r")
        cache.catch_up()
    newest = rng.integers(0, 50_000, 20_000, np.int32)
    cache.start("r", [1, 2], tenant="t")
    cache.extend("r", newest)
    cache.finish("r")
    cache.catch_up()
    for name in ("one", "two"):
        cache.save(tmp_path / name)
        loaded = SuffixCache.load(tmp_path / name, max_tokens=150_000)
        assert loaded.stats().tokens == cache.stats().tokens
        assert (tmp_path / name).stat().st_size < 14 * cache.stats().tokens + 2_300_000
        for at in (100, 19_000):
            loaded.start("q", newest[:at], tenant="t")
            assert loaded.propose(["q"], 8, cost=0.0)[0].token_ids.tolist()[:4] == newest[at : at + 4].tolist()
            loaded.abort("q")
        cache = loaded
