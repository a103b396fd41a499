"""Check and convert callers' arguments before anything changes."""

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.types import Budget, FinishedTurn, Float64Array, Int32Array
from agentspec.errors import ConfigurationError, InvalidInputError, InvalidTokenError

TokenIds = NDArray[np.integer] | Sequence[int]
Rows = NDArray[np.integer] | Sequence[int]

MAX_VOCAB = 2**31
_INT32 = np.dtype(np.int32)
_NO_TOKENS = np.empty(0, np.int32)
LARGEST_NUMBER = 2**62
"""Largest number of tokens or bytes that the core is given. No cache holds so many."""

LimitNumbers = tuple[int, ...]
"""Six limits, in tokens and bytes: the process's two, a tenant's two, a session's two. 0: no limit."""


class CoreTurn(NamedTuple):
    """Hold a turn as the core takes it. The fields are those of FinishedTurn, the prompt in the form of `as_prompt`."""

    kept: int
    parent: int
    block: int
    prompt_tail: Int32Array
    response: Int32Array
    record: int


def is_number(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number: Python's or numpy's, and not a truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a string that UTF-8 can hold: one without half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_below(name: str, value: object, limit: int) -> None:
    """Raise InvalidInputError, naming the argument, unless the value is a whole number from 0 to ``limit`` - 1."""
    if not (is_number(value) and 0 <= value < limit):
        raise InvalidInputError(f"{name}={value!r}: give a number from 0 to {limit - 1}")


def check_text(name: str, value: object) -> None:
    """Raise InvalidInputError, naming the argument, unless the value is such a string."""
    if not is_text(value):
        raise InvalidInputError(f"{name}={value!r}: give a string that UTF-8 can hold")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise ConfigurationError, naming the argument, unless the value is None or a ``kind``."""
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"{name}={value!r}: give a {kind.__name__}, or None")


def limit_numbers(
    max_tokens: int | None, max_bytes: int | None, per_tenant: Budget | None, per_session: Budget | None
) -> LimitNumbers:
    """Return the budgets as the core's limit numbers.

    Raises ConfigurationError, naming the budget, for anything but a positive integer or None (no limit).
    """
    check_kind("per_tenant", per_tenant, Budget)
    check_kind("per_session", per_session, Budget)
    tenant, session = per_tenant or Budget(), per_session or Budget()
    limits = {
        "max_tokens": max_tokens,
        "max_bytes": max_bytes,
        "per_tenant.tokens": tenant.tokens,
        "per_tenant.bytes": tenant.bytes,
        "per_session.tokens": session.tokens,
        "per_session.bytes": session.bytes,
    }
    for name, value in limits.items():
        if value is not None and not (is_number(value) and 1 <= value <= LARGEST_NUMBER):
            raise ConfigurationError(
                f"{name}={value!r}: give an integer from 1 to {LARGEST_NUMBER}, or None for no limit"
            )
    return tuple(int(value or 0) for value in limits.values())


def as_tokens(values: TokenIds, name: str, vocab_size: int) -> Int32Array:
    """Return `values` as int32 [n], C-contiguous. Raises InvalidTokenError, naming the first illegal position."""
    if isinstance(values, tuple) and not values:
        return _NO_TOKENS
    if _is_plain(values, vocab_size):
        return np.ascontiguousarray(values)
    array = values if isinstance(values, np.ndarray) else _from_sequence(values, name)
    if array.ndim != 1:
        raise InvalidTokenError(f"{name}: token ids must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise InvalidTokenError(f"{name}: token ids must be integers, got dtype {array.dtype}")
    if len(array) and not _all_below(array, vocab_size):
        at = int(np.flatnonzero((array < 0) | (array >= vocab_size))[0])
        raise InvalidTokenError(f"{name}[{at}] is {int(array[at])}: token ids must be from 0 to {vocab_size - 1}")
    return np.ascontiguousarray(array, dtype=np.int32)


def as_prompt(values: TokenIds, name: str, vocab_size: int) -> Int32Array:
    """Return a prompt as the core holds it, int32 [n]: ids from vocab_size on, which are never drafted, become -2 - id.

    Raises InvalidTokenError, naming the first illegal position. Ids from 0 to 2**31 - 2 are legal, and 2**31 - 1 is if
    vocab_size is 2**31.
    """
    if _is_plain(values, vocab_size):
        return np.ascontiguousarray(values)
    tokens = as_tokens(values, name, vocab_size if vocab_size == MAX_VOCAB else MAX_VOCAB - 1)
    if vocab_size < MAX_VOCAB and len(tokens) and int(tokens.max()) >= vocab_size:
        return np.where(tokens < vocab_size, tokens, -2 - tokens).astype(np.int32)
    return tokens


def as_given(prompt: Int32Array) -> Int32Array:
    """Return a prompt from the core with its original ids: undo `as_prompt`."""
    if not len(prompt) or int(prompt.min()) >= 0:
        return prompt
    return np.where(prompt >= 0, prompt, -2 - prompt).astype(np.int32)


def as_turn(turn: FinishedTurn, vocab_size: int) -> CoreTurn:
    """Return a turn as the core takes it. Raises InvalidInputError or InvalidTokenError if it cannot be right."""
    check_below("kept", turn.kept, 2**32)
    check_below("parent", turn.parent, 2**64)
    check_below("block", turn.block, 2**64)
    if turn.kept == 0 != turn.parent:
        raise InvalidInputError(f"parent={turn.parent}: give 0 where kept is 0")
    check_text("writer", turn.writer)
    if not is_number(turn.number):
        raise InvalidInputError(f"number={turn.number!r}: give a number")
    tail = as_prompt(turn.prompt_tail, "prompt_tail", vocab_size)
    response = as_tokens(turn.response, "response", vocab_size)
    return CoreTurn(turn.kept, turn.parent, turn.block, tail, response, turn.record)


def _is_plain(values: TokenIds, vocab_size: int) -> TypeGuard[Int32Array]:
    """Return whether the core can take `values` as they are: int32 [n], n > 0, all legal. Quick: each start asks."""
    return (
        isinstance(values, np.ndarray)
        and values.dtype == _INT32
        and values.ndim == 1
        and len(values) > 0
        and _all_below(values, vocab_size)
    )


def _all_below(tokens: NDArray[np.integer], vocab_size: int) -> bool:
    """Return whether all tokens, of which there is at least one, are from 0 to vocab_size - 1."""
    if tokens.dtype == _INT32:
        return int(tokens.view(np.uint32).max()) < vocab_size  # reads a long prompt once: negative ids are >= 2**31
    return int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size


def _from_sequence(values: Sequence[int], name: str) -> NDArray[np.integer]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidTokenError(f"{name}: give an int32 array or a sequence of int, not {type(values).__name__}")
    for kind in set(map(type, values)):
        if kind is bool or not issubclass(kind, (int, np.integer)):
            at = next(i for i, value in enumerate(values) if type(value) is kind)
            raise InvalidTokenError(f"{name}[{at}] is {values[at]!r}: token ids must be integers")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        at = next(i for i, value in enumerate(values) if not -(2**63) <= int(value) < 2**63)
        raise InvalidTokenError(f"{name}[{at}] is {values[at]}: token ids must be below 2**31") from None


def as_int32(values: Rows, name: str, length: int) -> Int32Array:
    """Return `length` small numbers as int32 [length]. Raises InvalidInputError for anything else."""
    if (
        type(values) is np.ndarray
        and values.dtype == _INT32
        and values.shape == (length,)
        and values.flags.c_contiguous
    ):
        return cast(Int32Array, values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # rows of different lengths, or a type that numpy cannot read
        raise InvalidInputError(f"{name}: give one integer a request ({length}), got {type(values).__name__}") from None
    if array.shape != (length,) or (length and array.dtype.kind not in "iu"):
        raise InvalidInputError(f"{name}: give one integer a request ({length}), got {array.dtype} {array.shape}")
    if length and not (array.min() >= -MAX_VOCAB and array.max() < MAX_VOCAB):
        raise InvalidInputError(f"{name}: give integers of 32 bits")
    return np.ascontiguousarray(array, dtype=np.int32)


def as_offers(
    tokens: NDArray[np.integer], probabilities: NDArray[np.floating], lengths: Int32Array, vocab_size: int
) -> tuple[Int32Array, Float64Array]:
    """Return another drafter's tokens and their probabilities as int32 and float64 [n, L], both C-contiguous.

    Only the first lengths[i] of row i are checked. Raises InvalidInputError for a wrong shape or probability, and
    InvalidTokenError naming the first illegal token.
    """
    for name, array, kinds in (("tokens", tokens, "iu"), ("probabilities", probabilities, "f")):
        if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind not in kinds:
            what = "integers" if kinds == "iu" else "floats"
            raise InvalidInputError(f"{name}: give an array of {what} [requests, tokens], got {_form_of(array)}")
    if not len(tokens) == len(lengths) or tokens.shape != probabilities.shape:
        raise InvalidInputError(
            f"tokens, probabilities: give one row a request ({len(lengths)}) and one probability a token, got shapes "
            f"{tokens.shape} and {probabilities.shape}"
        )
    columns = tokens.shape[1]
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > columns):
        raise InvalidInputError(f"lengths: must be from 0 to {columns}, got {lengths.tolist()}")
    used = np.arange(columns) < lengths[:, None]
    illegal = used & ((tokens < 0) | (tokens >= vocab_size))
    if illegal.any():
        row, column = np.argwhere(illegal)[0].tolist()
        raise InvalidTokenError(
            f"tokens[{row}, {column}] is {int(tokens[row, column])}: token ids must be from 0 to {vocab_size - 1}"
        )
    illegal = used & ~((probabilities >= 0) & (probabilities <= 1))
    if illegal.any():
        row, column = np.argwhere(illegal)[0].tolist()
        raise InvalidInputError(f"probabilities[{row}, {column}] is {probabilities[row, column]}: give 0 to 1")
    return np.ascontiguousarray(tokens, np.int32), np.ascontiguousarray(probabilities, np.float64)


def _form_of(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
