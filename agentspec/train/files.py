"""Files that are there whole or not at all, so that a run that was cut off can trust what it finds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A path to write to; what was written there takes the place of ``file`` when the block is done."""
    partial = file.with_suffix(".part")
    yield partial
    partial.replace(file)
