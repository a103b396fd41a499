"""Create files of private text that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def create_private(path: Path) -> str | None:
    """Create a file that only its owner may read, and leave one that exists as it is. Raises OSError.

    Returns a warning about a file that others may read already; None if there is none.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    mode = path.stat().st_mode
    if os.name != "posix" or not stat.S_ISREG(mode) or not mode & 0o044:
        return None
    return f"{path}: others may read it (mode {stat.S_IMODE(mode):04o}), and it holds what was said: chmod 600 {path}"
