"""Read JSON lines that users and their programs write: problems, prompts and recorded calls."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentspec.errors import InvalidInputError
from agentspec.files import read_lines

logger = logging.getLogger(__name__)


def read_objects(
    path: Path, progress: Callable[[int], None] = lambda read: None, *, growing: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank. gzip may have compressed the file.

    progress: called with the number of bytes read so far. growing: whether a program may still be writing the file.
    Then a last line that has no end yet is left out, with a warning. Raises InvalidInputError, which names the line.
    """
    found = False
    for number, line in enumerate(read_lines(path, progress), 1):
        if not line.strip():
            continue
        try:
            value = parse_line(line)
        except (ValueError, RecursionError) as error:
            if growing and found and not line.endswith(b"\n"):
                logger.warning("%s, line %d: has no end yet, and is left out", path, number)
                return
            why = f"not JSON in UTF-8 ({error}); write one JSON object a line"
            raise InvalidInputError(f"{path}, line {number}: {why_refused(error) or why}") from None
        if not isinstance(value, dict):
            raise InvalidInputError(
                f"{path}, line {number}: an object expected, got {type(value).__name__}; write one JSON object a line"
            )
        found = True
        yield number, value


class RepeatedFieldError(ValueError):
    """Raised for a JSON object that has a field twice, because JSON's readers would take the last one silently."""


def why_refused(error: Exception) -> str | None:
    """Return why JSON was refused although it is valid; None for an error of another kind.

    A field occurs twice, or Python refuses a whole number that is too long.
    """
    if isinstance(error, RepeatedFieldError):
        return str(error)
    if not isinstance(error, ValueError) or isinstance(error, UnicodeError | json.JSONDecodeError):
        return None
    limit = sys.get_int_max_str_digits()
    return f"a whole number has more than {limit:,} digits; write it as a text" if "digits" in str(error) else None


def whole(value: Any) -> Any:
    """Return a whole float as an integer, any other value unchanged. pandas writes 12.0 if other rows have no value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_line(line: bytes) -> Any:
    """Return the value of a line of JSON, which may begin with a byte order mark.

    Raises ValueError or RecursionError if it is not JSON, and RepeatedFieldError if it is an object that has a field
    twice. Objects within it may have one twice.
    """
    last: list[tuple[str, Any]] = []  # the fields of the object that ends last: the line's own

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal last
        last = pairs
        return dict(pairs)

    value = json.loads(line.decode("utf-8-sig", errors="surrogatepass"), object_pairs_hook=as_object)
    if isinstance(value, dict):
        object_of(last)
    return value


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these fields. Raises RepeatedFieldError."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedFieldError(f"the field {max(names, key=names.count)!r} stands there twice; give it once")
    return made
