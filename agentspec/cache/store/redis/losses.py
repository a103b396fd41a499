"""Notice when a Redis has lost records that it had acknowledged to this process, and log it."""

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentspec.cache.store.base import Losses
from agentspec.cache.store.redis.shard import IDLE_SECONDS, START, WRITER_SECONDS, Appended, Id, RedisShard

logger = logging.getLogger(__name__)

_REMEMBERED = 4096  # most shards, and most batches, whose acknowledgement this process remembers
_NAMED = 20  # most lost records that a warning names
_TELL_SECONDS = 60.0
"""Shortest time between two warnings on one shard: a server that evicts records may lose some with each append."""


@dataclass(slots=True)
class _Acknowledged:
    """Hold what the server acknowledged to this process in one shard.

    answer: the last one. batch, last, at: number, last id and time of its batch. records: how many in all. told_at:
    time of the last warning about lost records. untold: lost records that no warning has counted yet.
    """

    answer: Appended
    batch: int = 0
    last: Id = START
    at: float = 0.0
    records: int = 0
    told_at: float = -math.inf
    untold: int = 0


class _Batch(NamedTuple):
    """Hold a batch that the server acknowledged: its shard's tag, its number, its time in ms, its records' names."""

    tag: str
    number: int
    at: int
    names: list[str]


class LossWatch:
    """Compare the records that a server has with those that it acknowledged to this process.

    A server that was restarted without persistence, or that failed over, has fewer. One thread at a time calls `note`;
    any may call `miss`.
    """

    def __init__(self) -> None:
        self.losses = Losses()
        self._counting = threading.Lock()
        self._acknowledged: OrderedDict[str, _Acknowledged] = OrderedDict()  # by tag
        self._batches: deque[_Batch] = deque(maxlen=_REMEMBERED)

    def note(self, namespace: str, shard: RedisShard, number: int, names: Sequence[str], answer: Appended) -> None:
        """Note the answer to an append. Count and log the records that the shard acknowledged before and has lost.

        number: the batch's number. names: the names of its records.
        """
        held = self._acknowledged.pop(shard.tag, None)
        if held is None or time.monotonic() - held.at > IDLE_SECONDS:
            held = _Acknowledged(answer)
        self._acknowledged[shard.tag] = held
        if len(self._acknowledged) > _REMEMBERED:
            self._acknowledged.popitem(last=False)
        if answer.born != held.answer.born:
            self._name_lost(namespace, shard.tag, 0, held)
        elif answer.before < held.batch and not (answer.before == 0 and _rested(shard, held)):
            self._name_lost(namespace, shard.tag, answer.before, held)
        known = held.batch == answer.before == number  # the batch was sent again, because another shard did not answer
        held.answer, held.batch, held.at = answer, number, time.monotonic()
        held.last = (answer.first[0], answer.first[1] + len(names) - 1)
        if not known:
            held.records += len(names)
            self._batches.append(_Batch(shard.tag, number, answer.first[0], list(names)))

    def miss(self, count: int) -> None:
        """Count entries that the server has evicted although others refer to them."""
        with self._counting:
            first = count > 0 and not self.losses.missing
            self.losses = replace(self.losses, missing=self.losses.missing + count)
        if first:
            logger.warning(
                "agentspec: Redis lacks stored records that its logs name: if it evicts them, set its maxmemory-policy"
                " to noeviction; they also expire if no server runs for longer than retention_days"
            )

    def _name_lost(self, namespace: str, tag: str, before: int, held: _Acknowledged) -> None:
        """Count and log the lost records of a shard: those acknowledged behind batch ``before``, the last that it has.

        Records that retention or an erasure had removed are not lost. The age of the shard's oldest entry at the last
        append, and its number of entries then, show how many these are.
        """
        batches = [batch for batch in self._batches if batch.tag == tag and batch.number > before]
        state = held.answer.state
        oldest = math.inf if state.oldest is None else state.oldest
        lost = [name for batch in batches if batch.at >= oldest for name in batch.names]
        count, known = len(lost), sum(len(batch.names) for batch in batches)
        if before == 0 and count == known:  # all remembered records were there, and perhaps older ones
            count = held.records
        count = min(count, state.records)
        held.records = 0 if before == 0 else held.records - known
        self._batches = deque((one for one in self._batches if one.tag != tag or one.number <= before), _REMEMBERED)
        with self._counting:
            self.losses = replace(self.losses, lost=self.losses.lost + count)
        held.untold += count
        now = time.monotonic()
        if now - held.told_at < _TELL_SECONDS:
            return
        names = ", ".join(filter(None, lost[-_NAMED:])) or "without names"
        again = "; if it evicts them, set its maxmemory-policy to noeviction" if math.isfinite(held.told_at) else ""
        logger.warning(
            "agentspec: the store has lost %d records that it had acknowledged, of log %s; the last are %s%s",
            *(held.untold, namespace, names, again),
        )
        held.told_at, held.untold = now, 0


def _rested(shard: RedisShard, held: _Acknowledged) -> bool:
    """Return whether the server forgot only the last batch's number, because it expired or was evicted."""
    return time.monotonic() - held.at > WRITER_SECONDS / 2 or shard.has(held.last)
