"""A short run on damaged snapshots; `python -m tests.cache.mutations` goes on for as long as wanted."""

from tests.cache import mutations


def test_damaged_snapshots_are_refused_or_harmless() -> None:
    loaded = mutations.run(0, 400)
    assert 40 < loaded < 360  # some damage must pass the checks, or nothing was tested
