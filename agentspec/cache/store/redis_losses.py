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
from agentspec.cache.store.redis_shard import IDLE_SECONDS, START, WRITER_SECONDS, Appended, Id, RedisShard, ShardState

logger = logging.getLogger(__name__)

_REMEMBERED = 4096  # shards, and batches, that this process remembers to have had acknowledged
_NAMED = 20  # lost records that a line of the log names
_TELL_SECONDS = 60.0
"""Shortest time between two lines on one log: a server that evicts records may lose some with each append."""


@dataclass(slots=True)
class _Acknowledged:
    """Hold what the server acknowledged of this process in one shard.

    batch, last, at: number, last id and time of the last batch. records: how many in all. born, state: as in Appended.
    told_at: when lost records were logged last. untold: lost records that were not logged yet.
    """

    born: bytes
    state: ShardState
    batch: int = 0
    last: Id = START
    at: float = 0.0
    records: int = 0
    told_at: float = -math.inf
    untold: int = 0


class _Batch(NamedTuple):
    """Hold a batch that the server acknowledged: its shard's tag, number, milliseconds, and the records' names."""

    tag: str
    number: int
    at: int
    names: list[str]


class LossWatch:
    """Compare what a server has with what it has acknowledged to this process.

    A server that was restarted without persistence, or that failed over, has less. One thread at a time calls `note`;
    any may call `miss`.
    """

    def __init__(self) -> None:
        self.losses = Losses()
        self._counting = threading.Lock()
        self._acknowledged: OrderedDict[str, _Acknowledged] = OrderedDict()  # by tag
        self._batches: deque[_Batch] = deque(maxlen=_REMEMBERED)

    def note(self, namespace: str, shard: RedisShard, number: int, names: Sequence[str], answer: Appended) -> None:
        """Note the answer to an append. Count and log what the shard acknowledged before and has lost since.

        number: of the batch. names: of the batch's records.
        """
        held = self._acknowledged.pop(shard.tag, None)
        if held is None or time.monotonic() - held.at > IDLE_SECONDS:
            held = _Acknowledged(answer.born, answer.state)
        self._acknowledged[shard.tag] = held
        if len(self._acknowledged) > _REMEMBERED:
            self._acknowledged.popitem(last=False)
        if answer.born != held.born:
            self._name_lost(namespace, shard.tag, 0, held)
        elif answer.before < held.batch and not (answer.before == 0 and _rested(shard, held)):
            self._name_lost(namespace, shard.tag, answer.before, held)
        known = held.batch == answer.before == number  # it is sent again, because another shard did not answer
        held.batch, held.at, held.born, held.state = number, time.monotonic(), answer.born, answer.state
        held.last = (answer.first[0], answer.first[1] + len(names) - 1)
        if not known:
            held.records += len(names)
            self._batches.append(_Batch(shard.tag, number, answer.first[0], list(names)))

    def miss(self, count: int) -> None:
        """Count entries that are referred to, but which the server has evicted."""
        with self._counting:
            first = count > 0 and not self.losses.missing
            self.losses = replace(self.losses, missing=self.losses.missing + count)
        if first:
            logger.warning("agentspec: Redis evicts stored records; set its maxmemory-policy to noeviction")

    def _name_lost(self, namespace: str, tag: str, before: int, held: _Acknowledged) -> None:
        """Count and log the records that a shard had acknowledged behind batch ``before``, its last one.

        What retention or an erasure removed before is not lost. The age of the shard's oldest entry at the last append,
        and the number of entries then, tell it apart.
        """
        batches = [batch for batch in self._batches if batch.tag == tag and batch.number > before]
        oldest = math.inf if held.state.oldest is None else held.state.oldest
        lost = [name for batch in batches if batch.at >= oldest for name in batch.names]
        count, known = len(lost), sum(len(batch.names) for batch in batches)
        if before == 0 and count == known:  # all that are remembered were there, and maybe others
            count = held.records
        count = min(count, held.state.records)
        held.records -= held.records if before == 0 else known
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
    """Return whether the server forgot only the number of the last batch, after its time or by eviction."""
    return time.monotonic() - held.at > WRITER_SECONDS / 2 or shard.has(held.last)
