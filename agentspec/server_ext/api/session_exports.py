"""Read the bodies of imports into a session's records, and write exports from them: turns as token ids, in JSON."""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import numpy as np
from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from agentspec.cache.store import TurnRecord, decode, encode
from agentspec.errors import InvalidInputError, RecordError
from agentspec.json_lines import why_refused
from agentspec.protocol import MAX_IMPORT_TURNS
from agentspec.server_ext.api.session_texts import FormatVersion, SessionTexts, turns_of
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.vllm_adapter import served_model_key
from agentspec.server_ext.vllm_adapter.frontend.chats import tokenizer_of

_GIVE_EXPORT = "give what `agentspec sessions export` wrote"

_Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast()]  # one error says enough
_PromptTokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31 - 1)]], FailFast()]  # what SuffixCache takes


class ExportedTurn(BaseModel):
    """Hold a turn as JSON: a `TurnRecord` without its owner's fields. parent, block: 64 bits, in hexadecimal."""

    model_config = ConfigDict(extra="forbid", strict=True)

    writer: _Hash
    number: int = Field(ge=1, lt=2**63)
    kept: int = Field(ge=0, lt=2**32)
    parent: _Hash
    block: _Hash
    prompt: _PromptTokens
    response: _Tokens
    created: float = Field(ge=0, lt=1e12)
    weights: str | None = Field(default=None, max_length=256)


class ExportedSession(BaseModel):
    """Hold an exported session. log: key of the model and tokenizer that its tokens belong to."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: FormatVersion
    id: str
    log: str
    turns: Annotated[list[ExportedTurn], FailFast()]


def read_import(body: bytes | bytearray, engine: Any, session_id: str, identity: Identity) -> list[bytes]:
    """Return the records of an import, given its body. Raise 400, naming the first wrong field."""
    log = served_model_key(engine.vllm_config)
    session = _tokenised(_parse(body), engine, session_id, log)
    if session.log != log:
        raise _refused(
            "log: the session was exported from another model or tokenizer, whose tokens mean something else; import it"
            " at a server of that one, or give its messages or texts here"
        )
    return _import(session, identity, engine.vllm_config.model_config.get_vocab_size())


def _parse(body: bytes | bytearray) -> ExportedSession | SessionTexts:
    """Return the export or the texts in the body. Raise 400, naming the first wrong field."""
    try:
        # pydantic's own parser would copy a turn for each of its errors
        given = json.loads(body)
        _check_count(given)
        texts = [field for field in ("messages", "texts") if isinstance(given, dict) and field in given]
        if texts and "turns" in given:
            raise _refused(f"{texts[0]}: not beside turns; give them in a second call, which adds to the session")
        return (SessionTexts if texts else ExportedSession).model_validate(given)
    except RecursionError:
        raise _refused(f"body: nested too deeply; {_GIVE_EXPORT}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["loc"] == ("version",) and first["type"] != "missing":
            raise _refused("version: 1 expected; an export of another version needs a server that knows it") from None
        if not first["loc"]:
            raise _refused(f"body: a JSON object expected; {_GIVE_EXPORT}") from None
        remedy = f"; {_GIVE_EXPORT}" if first["type"] == "missing" else ""
        raise _refused(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}{remedy}") from None
    except ValueError as error:
        why = why_refused(error) or f"not JSON; {_GIVE_EXPORT}"
        raise _refused(f"body: {why}") from None


def _check_count(given: Any) -> None:
    """Raise 400 for more turns, texts or messages than an import may have."""
    for field in ("turns", "texts", "messages"):
        items = given.get(field) if isinstance(given, dict) else None
        if isinstance(items, list) and len(items) > MAX_IMPORT_TURNS:
            how = "send the others in further calls, which add to the session"
            if field == "messages":  # which are one conversation
                how = "give the newest ones"
            raise _refused(f"{field}: at most {MAX_IMPORT_TURNS} are taken at once, not {len(items)}; {how}")


def _tokenised(given: ExportedSession | SessionTexts, engine: Any, session_id: str, log: str) -> ExportedSession:
    """Return an export as it is, and texts as an export in the served model's tokens. Raise 400 if that fails."""
    if isinstance(given, ExportedSession):
        return given
    tokenizer = tokenizer_of(engine)
    if tokenizer is None:
        raise _refused("this server has no tokenizer (--skip-tokenizer-init): give token ids, in turns")
    try:
        turns = [ExportedTurn(**turn) for turn in turns_of(given, tokenizer)]
    except InvalidInputError as error:
        raise _refused(str(error)) from None
    return ExportedSession(version=1, id=session_id, log=log, turns=turns)


def write_export(session_id: str, log: str, of_engines: Sequence[Sequence[bytes]]) -> bytes | None:
    """Return a session as JSON, None if it has no turns. of_engines: its records, by engine; engines may share a store.

    Each turn becomes JSON by itself. A long session in one go would hold the interpreter's lock for seconds, for which
    the event loop, and so all callers, would wait.
    """
    turns: dict[tuple[str, int], bytes] = {}
    for payload in chain.from_iterable(of_engines):
        try:
            record = decode(payload)
        except RecordError:
            continue
        if isinstance(record, TurnRecord):
            turns[record.writer, record.number] = _exported(record).model_dump_json(exclude_none=True).encode()
    without_turns = ExportedSession(version=1, id=session_id, log=log, turns=[]).model_dump_json().encode()
    return without_turns.removesuffix(b"]}") + b",".join(turns.values()) + b"]}" if turns else None


def _exported(record: TurnRecord) -> ExportedTurn:
    return ExportedTurn(
        writer=record.writer,
        number=record.number,
        kept=record.kept,
        parent=f"{record.parent:016x}",
        block=f"{record.block:016x}",
        prompt=record.prompt_tail.tolist(),
        response=record.response.tolist(),
        created=record.created,
        weights=record.weights,
    )


def _import(session: ExportedSession, identity: Identity, vocabulary: int) -> list[bytes]:
    """Return the records of an exported session for a session of the caller."""
    payloads = []
    for i, turn in enumerate(session.turns):
        if max(turn.response, default=0) >= vocabulary:  # a prompt's ids may be higher: placeholders of images
            raise _refused(f"turns.{i}: a token id is not below {vocabulary}, the size of the model's vocabulary")
        if turn.kept == 0 and int(turn.parent, 16):
            raise _refused(f"turns.{i}.parent: 0 expected, because kept is 0: the turn continues no context")
        record = TurnRecord(
            writer=turn.writer,
            number=turn.number,
            session=identity.session or "",
            kept=turn.kept,
            parent=int(turn.parent, 16),
            block=int(turn.block, 16),
            prompt_tail=np.array(turn.prompt, np.int32),
            response=np.array(turn.response, np.int32),
            created=turn.created,
            tenant=identity.tenant,
            principal=identity.principal,
            session_name=identity.session_name,
            scope="session",
            weights=turn.weights,
            imported=True,
        )
        try:
            payloads.append(encode(record))
        except InvalidInputError as error:
            raise _refused(f"turns.{i}: {error}") from None
    return payloads


def _refused(why: str) -> HTTPException:
    return HTTPException(status_code=400, detail=why)
