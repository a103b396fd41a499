"""Remember the running requests of a cache: the core's slot of each, and the session, group and tenant of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentspec.cache.names import Names
from agentspec.cache.types import Int32Array
from agentspec.errors import DuplicateRequestError, InvalidInputError, UnknownRequestError


@dataclass(slots=True, eq=False)
class BatchHandle:
    """Remember the core's slots of several running requests, so that each call need not look them up.

    `SuffixCache.batch` makes a handle, which is valid while all of its requests run. When a request ends, another may
    get its slot. So after any end, the cache looks the handle's ids up again, and raises UnknownRequestError if one of
    them has ended. It does the same with a handle of another cache.
    """

    request_ids: tuple[str, ...]
    slots: Int32Array
    """[n], valid while the cache's epoch is `epoch`"""
    epoch: object

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """Hold the core's slot of a request, and the names of its session, group, tenant and family."""

    slot: int
    names: Names


class RequestSlots:
    """Hold the running requests by id, and give each a slot of the core, a small number that no other request has."""

    def __init__(self) -> None:
        self._by_id: dict[str, RunningRequest] = {}
        self._slots = 0  # given out so far
        self._free: list[int] = []  # an interrupt between two statements may lose a slot, but never gives one out twice
        self._epoch = object()  # replaced when a request ends, because another request may get its slot

    def check_new(self, request_id: str) -> None:
        """Raise DuplicateRequestError if a request of this id runs, and InvalidInputError if the id is no string."""
        if not isinstance(request_id, str):
            raise InvalidInputError(f"request_id={request_id!r}: give a string")
        if request_id in self._by_id:
            raise DuplicateRequestError(f"request_id {request_id!r} is already running: finish or abort it first")

    def take_slot(self) -> int:
        """Return a slot for a request that is about to start. Then `add` the request, or `give_back` the slot."""
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def add(self, request_id: str, slot: int, names: Names) -> None:
        """Add a request that has started in this slot."""
        self._by_id[request_id] = RunningRequest(slot, names)

    def give_back(self, request_id: str, slot: int) -> None:
        """Free the slot of a request that did not start."""
        self._by_id.pop(request_id, None)
        self._free.append(slot)

    def get(self, request_id: str) -> RunningRequest:
        """Return a request. Raises UnknownRequestError if it is not running."""
        running = self._by_id.get(request_id) if isinstance(request_id, str) else None
        if running is None:
            raise _unknown(request_id)
        return running

    def release(self, request_id: str) -> None:
        """Forget a request and free its slot."""
        self._epoch = object()
        self._free.append(self._by_id.pop(request_id).slot)

    def batch(self, request_ids: Sequence[str]) -> BatchHandle:
        """Return a handle of running requests.

        Raises UnknownRequestError, and InvalidInputError if ``request_ids`` is no sequence of ids.
        """
        try:
            ids = tuple(request_ids)
        except TypeError:
            raise _no_ids(request_ids) from None
        return BatchHandle(ids, self._look_up(ids), self._epoch)

    def slots_of(self, requests: BatchHandle | Sequence[str]) -> Int32Array:
        """Return the slots of running requests, int32 [n]. Raises as `batch` does."""
        if not isinstance(requests, BatchHandle):
            return self._look_up(requests)
        if requests.epoch is not self._epoch:
            requests.slots = self._look_up(requests.request_ids)
            requests.epoch = self._epoch
        return requests.slots

    def _look_up(self, request_ids: Sequence[str]) -> Int32Array:
        try:
            return np.array([self._by_id[request_id].slot for request_id in request_ids], np.int32)
        except KeyError as error:
            raise _unknown(error.args[0]) from None
        except TypeError:  # no sequence, or its items cannot be keys of a dictionary
            raise _no_ids(request_ids) from None


def _no_ids(given: object) -> InvalidInputError:
    return InvalidInputError(f"request_ids: give a sequence of ids, or a handle, not {given!r}")


def _unknown(request_id: str) -> UnknownRequestError:
    return UnknownRequestError(f"request_id {request_id!r} is not running: start it first")
