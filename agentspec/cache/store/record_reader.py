"""Read the records of a store, and skip those that cannot be used."""

import logging
from collections.abc import Iterable, Iterator

from agentspec.cache.store.base import Entry
from agentspec.cache.store.codec import decode
from agentspec.cache.store.records import Record
from agentspec.errors import CorruptRecordError, RecordError

logger = logging.getLogger(__name__)


class RecordReader:
    """Decode the entries of a store, and skip those that cannot be used.

    damaged: records skipped because their bytes are corrupt. unknown: records skipped because of their version or
    kind. The first of either kind is logged.
    """

    def __init__(self) -> None:
        self.damaged = 0
        self.unknown = 0

    def read(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Record | None]]:
        """Yield each entry with its record, or with None if the record cannot be used. entries: of ``Store.read``."""
        for entry in entries:
            yield entry, self._decode(entry)

    def _decode(self, entry: Entry) -> Record | None:
        try:
            record = decode(entry.payload)
            if record.session != entry.session:
                raise CorruptRecordError("damaged record: it belongs to another session than its entry")
        except RecordError as error:
            if isinstance(error, CorruptRecordError):
                first, self.damaged = self.damaged == 0, self.damaged + 1
            else:
                first, self.unknown = self.unknown == 0, self.unknown + 1
            if first:
                logger.warning(
                    "agentspec: stored record %s of session %r is skipped: %s; further ones are only counted",
                    entry.sequence,
                    entry.session,
                    error,
                )
            return None
        return record
