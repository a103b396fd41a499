"""What a core does: the compiled one (_native.Core) and the plain one (reference_core.ReferenceCore) are alike.

Slots are small integers that the façade gives to requests; session, group and tenant keys are strings that it composed
so that equal names of different tenants differ. Arguments were checked, but for those of `step`: what does not fit, a
core refuses by a TypeError or ValueError before anything has changed. A step's drafts travel as a tuple of arrays in
the order of StepDrafts' fields (None: there are none, and were none before), proposed ones without the last two,
candidates in the order of Candidate's fields after the depth.
"""

from typing import Protocol

from agentspec.cache.tokens import Rows
from agentspec.cache.types import Budget, Float32Array, Float64Array, Int32Array, UInt8Array
from agentspec.errors import ConfigurationError

DraftArrays = tuple[Int32Array, Int32Array, UInt8Array, Float32Array, Int32Array, Int32Array, Int32Array]
ProposedArrays = tuple[Int32Array, Int32Array, UInt8Array, Float32Array, Int32Array]
CandidateArrays = tuple[
    Int32Array, Int32Array, Float64Array, UInt8Array, UInt8Array, Int32Array, Int32Array, Float64Array
]
TurnArrays = tuple[int, Int32Array, Int32Array]
LimitNumbers = tuple[int, int, int, int, int, int]
"""Tokens and bytes that the process, a tenant and a session may hold; 0: no limit."""


class Core(Protocol):
    def start(
        self,
        slot: int,
        prompt: Int32Array,
        session: str | None,
        group: str | None,
        tenant: str | None,
        shared: bool,
        ends: Int32Array,
    ) -> None: ...
    def extend(self, slot: int, tokens: Int32Array) -> None: ...
    def propose(self, slots: Int32Array, room: Int32Array, cost: float) -> ProposedArrays: ...
    def offer(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        probabilities: Float64Array,
        lengths: Int32Array,
        room: Int32Array,
        cost: float,
    ) -> ProposedArrays: ...
    def step(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        rows: Rows,
        lengths: Rows,
        room: Rows,
        scheduled: Rows,
        cost: float,
    ) -> DraftArrays | None: ...
    def candidates(self, slot: int) -> CandidateArrays: ...
    def finish(self, slot: int, output_limit: int | None) -> TurnArrays | None: ...
    def abort(self, slot: int) -> None: ...
    def restore(
        self,
        session: str | None,
        group: str | None,
        tenant: str | None,
        shared: bool,
        kept: int,
        prompt_tail: Int32Array,
        response: Int32Array,
    ) -> None: ...
    def remove_session(self, session: str, tenant: str) -> None: ...
    def has_session(self, session: str) -> bool: ...
    def catch_up(self, budget: int) -> int: ...
    def resize(self, limits: LimitNumbers) -> None: ...
    def stats(self) -> tuple[int, int, int, int, int, int]: ...
    def save(self, path: str) -> None: ...
    def load(self, path: str) -> None: ...


def limit_numbers(
    max_tokens: int | None, max_bytes: int | None, per_tenant: Budget | None, per_session: Budget | None
) -> LimitNumbers:
    """Raises ConfigurationError, naming the budget, for anything but a positive integer or None (no limit)."""
    tenant, session = per_tenant or Budget(), per_session or Budget()
    names = (
        "max_tokens",
        "max_bytes",
        "per_tenant.tokens",
        "per_tenant.bytes",
        "per_session.tokens",
        "per_session.bytes",
    )
    values = (max_tokens, max_bytes, tenant.tokens, tenant.bytes, session.tokens, session.bytes)
    for name, value in zip(names, values, strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigurationError(f"{name}={value!r}: give a positive integer, or None for no limit")
    first, second, third, fourth, fifth, sixth = (value or 0 for value in values)
    return first, second, third, fourth, fifth, sixth
