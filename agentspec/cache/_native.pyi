"""Declare the compiled core (csrc/bindings.cpp). SuffixCache checks the arguments and documents the calls.

SuffixCache numbers its requests with small integers, the slots. A session's or group's key contains its tenant's name.
"""

from agentspec.cache.arguments import LimitNumbers, Rows
from agentspec.cache.policy import DraftPolicy
from agentspec.cache.types import Float32Array, Float64Array, Int32Array, UInt8Array, UInt64Array

# The fields of StepDrafts and of Drafts, in their order.
StepArrays = tuple[Int32Array, Int32Array, UInt8Array, Float32Array, Int32Array, Int32Array, Int32Array]
DraftArrays = tuple[Int32Array, Int32Array, UInt8Array, Float32Array, Int32Array]
# Each array holds one column: the position in the draft, then the fields of Candidate.
CandidateArrays = tuple[
    Int32Array, Int32Array, Float64Array, UInt8Array, UInt8Array, Int32Array, Int32Array, Float64Array
]

class PublicIndex:
    def __init__(self) -> None: ...
    # Adds a text and indexes it, without the GIL. Returns the bytes of all texts. Do not call it after Core.publish.
    def add(self, tokens: Int32Array) -> int: ...

class PreparedSession:
    """Hold the indexes of a session that is not in the cache yet. `SuffixCache.prepare` makes it."""

    @property
    def key(self) -> str: ...
    def add(
        self,
        own: bool,
        kept: int,
        parent: int,
        block: int,
        prompt_tail: Int32Array,
        response: Int32Array,
        record: int,
    ) -> None: ...
    def finish(self) -> None: ...
    def bytes(self) -> int: ...

class Core:
    # window: the history window's unit (1: weights, 2: epochs, 3: tokens) and its size; 0, 0 without one.
    def __init__(
        self, *, policy: DraftPolicy, limits: LimitNumbers, vocab_size: int, window: tuple[int, int]
    ) -> None: ...
    # Returns the key of the root session of the request's family, "" without a session.
    def start(
        self,
        slot: int,
        prompt: Int32Array,
        session: str | None,
        group: str | None,
        tenant: str | None,
        shared: bool,
        family: str | None,
        owner: str | None,
        tenant_owner: str | None,
        ends: Int32Array,
        prediction: Int32Array,
        quotable: Int32Array,
    ) -> str: ...
    def extend(self, slot: int, tokens: Int32Array) -> None: ...
    def propose(self, slots: Int32Array, max_draft: Int32Array, cost: float, work_seconds: float) -> DraftArrays: ...
    def merge_drafts(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        probabilities: Float64Array,
        lengths: Int32Array,
        max_draft: Int32Array,
        cost: float,
    ) -> DraftArrays: ...
    # Returns None if no request has a draft and none had one to verify.
    def step(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        rows: Rows,
        lengths: Rows,
        max_draft: Rows,
        num_verified: Rows,
        cost: float,
        work_seconds: float,
        most: int,
    ) -> StepArrays | None: ...
    def candidates(self, slot: int) -> CandidateArrays: ...
    # Returns kept, parent and block of the turn, the number of its tokens that belong to the prompt, and its tokens.
    def finish(
        self, slot: int, output_limit: int | None, record: int
    ) -> tuple[int, int, int, int, Int32Array] | None: ...
    def abort(self, slot: int) -> None: ...
    def learn_from(
        self,
        session: str | None,
        group: str | None,
        tenant: str | None,
        shared: bool,
        family: str | None,
        prompt_tail: Int32Array,
        response: Int32Array,
        record: int,
        cost: float,
    ) -> int: ...
    def restore(
        self,
        session: str | None,
        group: str | None,
        tenant: str | None,
        shared: bool,
        family: str | None,
        owner: str | None,
        kept: int,
        parent: int,
        block: int,
        prompt_tail: Int32Array,
        response: Int32Array,
        record: int,
        held_only: bool,
    ) -> None: ...
    def publish(self, index: PublicIndex) -> None: ...
    def count_public(self, bytes: int) -> None: ...
    def prepare(self, session: str) -> PreparedSession: ...
    def adopt(self, prepared: PreparedSession, tenant: str, family: str | None, owner: str | None) -> bool: ...
    def remove_session(self, session: str, tenant: str) -> None: ...
    def has_session(self, session: str) -> bool: ...
    def free_session(self, session: str) -> None: ...
    def needs_load(self, session: str | None, group: str | None, family: str | None, tenant: str) -> bool: ...
    def mark_loaded(self, session: str | None, group: str | None, family: str | None, tenant: str) -> None: ...
    def tenants(self) -> list[str]: ...
    def begin_period(self, unit: int) -> None: ...
    def forget_tenant(self, tenant: str) -> bool: ...
    def catch_up(self, budget: int, seconds: float) -> int: ...
    def index_until_closed(self) -> None: ...
    def close(self) -> None: ...
    def resize(self, limits: LimitNumbers) -> None: ...
    def stats(self) -> tuple[int, int, int, int, int, int, int, int]: ...
    def worked(self) -> int: ...
    # Adds up tokens, bytes, sessions, pending and leaving anew. Tests compare them with `stats`, which keeps sums.
    def recount(self) -> tuple[int, int, int, int, int]: ...
    # Returns False, and leaves the file alone, if a session was erased meanwhile.
    def save(self, path: str, identity: str, note: bytes) -> bool: ...
    def load(self, path: str, identity: str) -> bytes: ...

# Lets time limits end indexing and evicting early (the default), in the whole process. Tests and benchmarks switch them
# off so that their results do not depend on the machine's speed.
def watch_clock(watched: bool) -> None: ...

# Returns (1 + expected) / (1 + 1.3 * cost * drafted): the tokens that a step yields per unit of work. It is 1 without a
# draft. The core cuts and chooses all drafts by it. cost: price of verifying one more token, as a share of a step.
def draft_value(expected: float, drafted: int, cost: float) -> float: ...

# Tokens in a block of a context.
HASH_BLOCK: int

# Returns the hash of a context after each of `tokens`, which follow `kept` tokens that hash to `parent`.

def context_hashes(tokens: Int32Array, parent: int, kept: int) -> UInt64Array: ...
