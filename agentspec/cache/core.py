"""Load the compiled core (csrc/), and export those of its functions that need no cache.

Importing this module raises ConfigurationError, with the remedy, where the core cannot be loaded.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agentspec.cache.arguments import MAX_VOCAB, TokenIds, as_tokens, check_below
from agentspec.cache.types import UInt64Array
from agentspec.errors import ConfigurationError, first_line

try:
    from agentspec.cache import _native as native
except ImportError as error:
    raise ConfigurationError(
        f"agentspec's compiled core cannot be loaded ({first_line(error)}): install a C++ compiler "
        "(Debian, Ubuntu: apt-get install g++ python3-dev) and reinstall agentspec"
    ) from error

__all__ = ["HASH_BLOCK", "PreparedSession", "context_hashes", "draft_value", "native", "without_clock"]

PreparedSession = native.PreparedSession
"""The indexes of a session that `SuffixCache.prepare` built and `SuffixCache.adopt` takes. bytes(): its memory."""

draft_value = native.draft_value
"""draft_value(expected, drafted, cost) returns the value of a draft; `_native.pyi` has the formula."""

HASH_BLOCK: int = native.HASH_BLOCK
"""Tokens in a block. A turn's `block` is the hash of its context up to the last boundary of a block."""


_without_clock = 0
_counting = threading.Lock()


@contextmanager
def without_clock() -> Iterator[None]:
    """Lift the time limits of all caches' calls in this process, so that a slow machine drafts what a fast one does.

    A step may then take long. Uses may overlap, in any threads.
    """
    global _without_clock
    with _counting:
        _without_clock += 1
        native.watch_clock(False)
    try:
        yield
    finally:
        with _counting:
            _without_clock -= 1
            native.watch_clock(_without_clock == 0)


def context_hashes(tokens: TokenIds, parent: int = 0, kept: int = 0) -> UInt64Array:
    """Return the hash of a context after each of its tokens, uint64 [n]. tokens: int32 [n] or a sequence of int.

    The context goes on behind `kept` tokens that hash to `parent`. A turn's `parent` and `block` are such hashes.
    Raises InvalidTokenError for an illegal token, and InvalidInputError for a parent or a length that cannot be.
    """
    check_below("parent", parent, 2**64)
    check_below("kept", kept, 2**32)
    return native.context_hashes(as_tokens(tokens, "tokens", MAX_VOCAB), parent, kept)
