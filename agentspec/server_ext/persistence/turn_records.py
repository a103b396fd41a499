"""Convert the cache's finished turns to records of the store, and back."""

import time

from agentspec.cache import FinishedTurn
from agentspec.cache.store import TurnRecord
from agentspec.server_ext.identity import Identity


def record_of(turn: FinishedTurn, identity: Identity) -> TurnRecord:
    """Return the record of a turn. identity: that of its request."""
    return TurnRecord(
        writer=turn.writer,
        number=turn.number,
        session=turn.session or "",
        kept=turn.kept,
        parent=turn.parent,
        block=turn.block,
        prompt_tail=turn.prompt_tail,
        response=turn.response,
        created=time.time(),
        tenant=turn.tenant,
        principal=identity.principal,
        parent_session=identity.parent_session,
        group=turn.group,
        session_name=identity.session_name,
        group_name=identity.group_name,
        scope=turn.scope,
        weights=identity.weight_version,
        family=turn.family,
        log_owner=identity.log_owner,
    )


def turn_of(record: TurnRecord, most: int | None = None) -> FinishedTurn:
    """Return the turn of a record, or of the first ``most`` tokens of its response."""
    return FinishedTurn(
        tenant=record.tenant,
        session=record.session or None,
        kept=record.kept,
        prompt_tail=record.prompt_tail,
        response=record.response[:most],
        group=record.group,
        scope=record.scope,
        parent=record.parent,
        block=record.block,
        writer=record.writer,
        number=record.number,
        owner=record.principal,
        family=record.family,
    )
