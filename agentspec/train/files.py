"""Raise errors that name the file and the remedy where a training cannot read or write a file."""

import errno
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from agentspec.errors import ConfigurationError, InvalidInputError, first_line

UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError),
)
"""Errors of torch, safetensors and transformers for a damaged file."""


def make_folder(path: Path, field: str) -> None:
    """Make a folder. Raises ConfigurationError, which names the configuration's field, if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise ConfigurationError(f"{field}: the folder cannot be made ({why}); name another") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{field}: {path} cannot be written; name another folder")


@contextmanager
def readable(file: Path, remove: Path | None = None) -> Iterator[None]:
    """Raise InvalidInputError if the block finds the file damaged.

    remove: folder or file that the error says to remove, so that it is made again; None: the file itself.
    """
    try:
        yield
    except UNREADABLE as error:
        raise InvalidInputError(
            f"{file}: cannot be read ({first_line(error)}); remove {remove or file}, and run the command again"
        ) from error


@contextmanager
def writable(file: Path) -> Iterator[None]:
    """Raise OSError, which names the file, for errors of torch and safetensors while they write it.

    On a full disk their own errors speak of a position, and name no file.
    """
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        why = f"cannot be written ({first_line(error)}); make room on its disk, and run the command again to go on"
        raise OSError(errno.EIO, why, str(file)) from error
