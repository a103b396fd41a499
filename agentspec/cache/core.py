"""What a core does: the compiled one (_native.Core) and the plain one (reference_core.ReferenceCore) are alike.

Slots are small integers that the façade gives to requests; session and tenant keys are strings that it composed so
that equal names of different tenants differ. Arguments were checked. A step's drafts travel as a tuple of arrays in
the order of StepDrafts' fields.
"""

from typing import Protocol

from agentspec.cache.types import Float32Array, Int32Array, UInt8Array

DraftArrays = tuple[Int32Array, Int32Array, UInt8Array, Float32Array, Int32Array, Int32Array, Int32Array]
TurnArrays = tuple[int, Int32Array, Int32Array]


class Core(Protocol):
    def start(self, slot: int, prompt: Int32Array, session: str | None, tenant: str | None) -> None: ...
    def extend(self, slot: int, tokens: Int32Array) -> None: ...
    def propose(self, slots: Int32Array, room: Int32Array) -> DraftArrays: ...
    def step(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        rows: Int32Array,
        lengths: Int32Array,
        room: Int32Array,
        scheduled: Int32Array,
    ) -> DraftArrays: ...
    def finish(self, slot: int, output_limit: int | None) -> TurnArrays | None: ...
    def abort(self, slot: int) -> None: ...
    def restore(
        self,
        session: str | None,
        tenant: str | None,
        kept: int,
        prompt_tail: Int32Array,
        response: Int32Array,
    ) -> None: ...
    def remove_session(self, session: str, tenant: str | None) -> None: ...
    def has_session(self, session: str) -> bool: ...
    def catch_up(self, budget: int) -> int: ...
    def stats(self) -> tuple[int, int, int, int, int, int]: ...
