"""Entries of a store as records; what cannot be used is skipped, counted, and warned of once."""

import logging
from collections.abc import Iterator

from agentspec.cache.store.base import Entry, Store
from agentspec.cache.store.codec import decode
from agentspec.cache.store.records import Record
from agentspec.errors import CorruptRecordError, RecordError

logger = logging.getLogger(__name__)


class RecordReader:
    """Decodes entries. One damaged record costs itself and nothing else.

    ``damaged`` and ``unknown``: records skipped because of their bytes, and because of their version or kind.
    """

    def __init__(self) -> None:
        self.damaged = 0
        self.unknown = 0

    def read(
        self,
        store: Store,
        namespace: str,
        *,
        session: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[tuple[Entry, Record | None]]:
        """As Store.read, each entry with its record, or None where that cannot be used."""
        for entry in store.read(namespace, session=session, after=after, newest=newest):
            yield entry, self.decode(entry)

    def decode(self, entry: Entry) -> Record | None:
        """The entry's record, or None if it cannot be used. Never raises."""
        try:
            record = decode(entry.payload)
            if record.session != entry.session:
                raise CorruptRecordError("damaged record: it belongs to another session than its entry")
        except RecordError as error:
            self._skip(entry, error)
            return None
        return record

    def _skip(self, entry: Entry, error: RecordError) -> None:
        if isinstance(error, CorruptRecordError):
            first, self.damaged = self.damaged == 0, self.damaged + 1
        else:
            first, self.unknown = self.unknown == 0, self.unknown + 1
        if first:
            logger.warning(
                "agentspec: stored record %s is skipped: %s; further ones of the kind are only counted",
                entry.sequence,
                error,
            )
