"""Read files of lines, also compressed by gzip; replace files as a whole, lock folders, find a model's weights."""

import errno
import gzip
import os
import stat
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from agentspec.errors import InvalidInputError

_GZIP = b"\x1f\x8b"
"""First bytes of a file that gzip compressed."""
_LOCK = ".lock"
"""File in a folder that its present writer has locked."""


def read_lines(path: Path, progress: Callable[[int], None] = lambda read: None) -> Iterator[bytes]:
    """Yield the lines of a file. One that gzip compressed is decompressed, whatever its name is.

    progress: called with the number of bytes read so far. Raises InvalidInputError for a file that cannot be read.
    """
    try:
        with path.open("rb") as raw:
            for line in decompressed(raw):
                if raw.seekable():  # a pipe has no position
                    progress(raw.tell())
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidInputError(f"{path}: cannot be read: {error}; compress it again") from error
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}; give a file of JSON lines") from error


def decompressed(raw: BufferedReader) -> BinaryIO:
    """Return a file to read from in place of one just opened: decompressed if gzip compressed it, else as it is."""
    return gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP else raw  # type: ignore[return-value]


def is_path(name: str) -> bool:
    """Return whether ``name`` can only be a path. OWNER/NAME may be a hub's repository, and s3://… is not a path."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or (name.count("/") > 1 and "://" not in name)


def weight_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and change times of a model's weight files, because training may change them in place."""
    return _files_of(folder, (".safetensors", ".bin"))


def text_files(path: Path) -> list[tuple[str, int, int]]:
    """Return the same of a model's tokenizer, chat template and config, or of a tokenizer's file."""
    return _files_of(path, (".json", ".jinja", ".model", ".txt"))


def _files_of(path: Path, suffixes: Collection[str]) -> list[tuple[str, int, int]]:
    files = [file for file in sorted(path.iterdir()) if file.suffix in suffixes] if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def expand_home(path: str | Path) -> Path:
    """Return a path with a home folder in place of ``~`` or ``~USER``. Raises OSError if there is no such folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise OSError(errno.ENOENT, "there is no such home folder", str(path)) from None


def resolved(path: Path) -> Path:
    """Return a path without links. Raises OSError for links that lead to each other."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
    return path.resolve()


def unfinished_copy(path: Path) -> Path:
    """Return the path of the new file that `replacing` writes. A killed process leaves it there."""
    target = resolved(path)
    return target.with_name(target.name + ".part")


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield the path of a new file, which replaces ``path`` when the block ends.

    If the block raises, as on a full disk, ``path`` is unchanged, the new file is removed, and an OSError names
    ``path``. If ``path`` is a link, the file that it names is replaced. sync: whether ``path`` is the whole old or the
    whole new file even after a power failure.
    """
    part = unfinished_copy(path)
    target = part.with_suffix("")  # without .part
    try:
        yield part
        if sync:
            with part.open("rb") as written:
                os.fsync(written.fileno())
        part.replace(target)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.errno and str(error.filename) in ("None", str(part)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def size_limit() -> int | None:
    """Return how many bytes a file of this process may have at most (``ulimit -f``); None where there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def size_remedy() -> str:
    """Return the end of an error about a file that cannot grow; "" where this process has no limit for files."""
    limit = size_limit()
    if limit is None:
        return ""
    return f"; no file of this process may have more than {limit:,} bytes (ulimit -f): raise that limit and restart"


def open_files_remedy() -> str:
    """Return why this process can open no file now, and what to do: it has as many open as it may; "" where it can."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"{error.strerror} (ulimit -n): raise that limit and restart"
    return ""


def takes_json_lines(path: Path) -> bool:
    """Return whether lines of JSON may be appended to a file, that is, whether it holds nothing else, such as a store.

    Files that are missing, empty or unreadable, and files that are not regular files, pass. Raises OSError for a path
    that cannot name a file.
    """
    with suppress(FileNotFoundError, PermissionError):
        if path.is_file():  # opening a pipe could wait
            with path.open("rb") as file:
                return file.read(1) in (b"", b"{", b"\n")
    return True


@contextmanager
def locked(folder: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Keep other processes that call this out of a folder during the block. A killed process loses its lock.

    busy: called if another process holds the lock. It may raise; if it returns, wait for the lock. There is no lock if
    the system has none, or for a folder in which no file can be made, because no process can write there.
    """
    path = folder / _LOCK
    file = _lock(path, busy)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                path.unlink()
            os.close(file)


def _lock(path: Path, busy: Callable[[], None]) -> int | None:
    """Lock a file for this process and return its descriptor; None where locks or files cannot be made."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS):
                return None
            raise
        try:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no forked process inherits it
            except (BlockingIOError, PermissionError):
                busy()
                fcntl.lockf(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:  # the process that held the lock removed the file; another may have made a new one
            pass
        except OSError:  # a file system without locks
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def create_private(path: Path) -> str | None:
    """Create a file that only its owner may read, and leave one that exists as it is. Raises OSError.

    Returns a warning about a file that others may read already; None if there is none.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    mode = path.stat().st_mode
    if os.name != "posix" or not stat.S_ISREG(mode) or not mode & 0o044:
        return None
    return f"{path}: others may read it (mode {stat.S_IMODE(mode):04o}), and it holds what was said: chmod 600 {path}"
