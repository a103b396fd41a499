"""Serve the sessions of a caller over HTTP: list, export, import and erase them.

``GET /v1/agentspec/sessions``           the caller's sessions in the store, used last first (``?limit=100``); those
                                         behind them with ``?before=`` and what ``next`` says; with ``?prefix=`` those
                                         alone whose ids begin so
``GET /v1/agentspec/sessions/{id}``      exports one: its turns as token ids
``PUT /v1/agentspec/sessions/{id}``      imports one, in session scope: an export, or ``messages`` and ``texts``, which
                                         become tokens here; turns that it holds already change nothing, and with
                                         ``?only_new=true`` nothing is added to a session that exists
``DELETE /v1/agentspec/sessions/{id}``   erases one: 200 when no byte of it is left, 202 while another process still
                                         reads the database; repeat the call then

A caller sees sessions of its own principal. One that sends ``cache_salt`` with its requests gives it in the header
``X-Cache-Salt``. Sessions of others answer as if they didn't exist. The administrator sees all, by their keys.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response

from agentspec.addresses import names_loopback
from agentspec.identifiers import from_header
from agentspec.protocol import SALT_HEADER
from agentspec.server_ext.api.imports import Imports
from agentspec.server_ext.api.path_ids import any_id
from agentspec.server_ext.api.request_bodies import forget_quotable
from agentspec.server_ext.api.session_exports import read_import, write_export
from agentspec.server_ext.identity import SESSION_KEY, Identity
from agentspec.server_ext.identity.callers import NOBODY, Presented, shows_admin_key
from agentspec.server_ext.session_questions import (
    ApplyErasures,
    EraseSession,
    FindEnd,
    FindTenants,
    ImportRecords,
    ListSessions,
    ReadSession,
    SessionQuestion,
    packed,
)
from agentspec.server_ext.vllm_adapter import served_model_key
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import (
    ask_or_refuse,
    drafting_engine,
    engine_numbers,
    tagger_of,
)
from agentspec.server_ext.vllm_adapter.frontend.senders import ROUTES, presented


def _refuse_other_sites(request: Request) -> None:
    """Raise 403 for a web page of another site where all callers of this machine are one.

    A browser here sends the calls of any page to the loopback interface, and a server may allow all origins (CORS).
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    foreign = site == "cross-site" or (origin is not None and not _is_of_this_machine(origin))
    if not (foreign and request.app.state.agentspec_loopback):
        return
    sender = presented()
    caller = tagger_of(drafting_engine(request)).callers.caller_of(sender)
    if caller.principal is None and not shows_admin_key(sender):
        why = "all callers of this machine are one, so a web page of another site gets no sessions"
        raise HTTPException(status_code=403, detail=f"{why}: start the server with --api-key")


def _is_of_this_machine(origin: str) -> bool:
    """Return whether a page of this origin comes from this machine. An origin that cannot be read does not."""
    try:
        return names_loopback(urlsplit(origin).netloc)
    except ValueError:
        return False


router = APIRouter(prefix=f"{ROUTES}/sessions", dependencies=[Depends(_refuse_other_sites)])

_KEY = re.compile("[0-9a-f]{32}")
_LONGEST_LIST = 1_000
_WAIT_SECONDS = 20.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25

_imports = Imports()


class NoSessionError(HTTPException):
    """Tell the caller that it has no session of this id. As a string it has no id, because vLLM may log that."""

    def __init__(self, session_id: str) -> None:
        super().__init__(status_code=404, detail=f"no session {session_id!r}")

    def __str__(self) -> str:
        """Return the error's text in a traceback (``--log-error-stack``)."""
        return f"{self.status_code}: the caller has no such session"


@router.get("")
async def list_sessions(
    request: Request,
    limit: Annotated[int, Query(ge=0)] = 100,
    before: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    prefix: str | None = None,
) -> dict[str, Any]:
    """Return the caller's stored sessions: id, tokens, turns, bytes, when it was used last (epoch seconds), group.

    limit: how many, at most 1,000; there may be more if several were used at the same moment as the last of them.
    before: only sessions used before this time. The answer's ``next`` is the ``before`` for the sessions behind these;
    null: there are none. prefix: only sessions whose ids begin so.
    """
    engine = drafting_engine(request)
    asker = _asker(engine)
    identity, admin = asker.identity, asker.is_admin
    if identity.caller is None and not admin and not _comes_from_here(request):
        why = "all callers of this server are one, so it doesn't list their sessions"
        how = "start it with --api-key, or for this machine alone with --host 127.0.0.1 and call it by that address"
        raise HTTPException(status_code=403, detail=f"{why}: {how}")
    count = min(limit, _LONGEST_LIST)
    found: dict[str, dict[str, Any]] = {}
    wanted = ListSessions(identity.tenant, identity.principal, admin, count, before, prefix)
    for session in chain(*await _run(engine, identity, wanted)):
        # Engines with stores in their own memory may each have a part of a session. The part used last counts.
        if session["key"] not in found or session["used"] > found[session["key"]]["used"]:
            found[session["key"]] = session
    newest = sorted(found.values(), key=lambda session: -session["used"])
    last = newest[count - 1]["used"] if 0 < count <= len(newest) else None
    page = [session for session in newest if last is None or session["used"] >= last]
    shown = page if admin else [{name: session[name] for name in session if name != "key"} for session in page]
    return {"sessions": shown, "next": last}


@router.get("/" + any_id("session_id"))
async def export_session(request: Request, session_id: str) -> Response:
    """Return a session's turns, or 404 if the caller has no such session."""
    engine = drafting_engine(request)
    session, identity = _find_session(engine, session_id)
    payloads = await _run(engine, identity, ReadSession(session))
    log = await asyncio.to_thread(served_model_key, engine.vllm_config)
    body = await asyncio.to_thread(write_export, session_id, log, payloads)
    if body is None:
        raise NoSessionError(session_id)
    return Response(body, media_type="application/json")


@router.put("/" + any_id("session_id"))
async def import_session(request: Request, session_id: str, only_new: bool = False) -> dict[str, Any]:
    """Add an exported session's turns, or texts, to a session of the caller. only_new: unless the session exists."""
    engine = drafting_engine(request)
    session, identity = _find_session(engine, session_id, write=True)
    async with _imports.body_of(request, identity.caller) as body:
        payloads = await _imports.run(identity.caller, lambda: read_import(body, engine, session_id, identity))
        numbers, added = engine_numbers(engine), list[int]()
        several = len(numbers) > 1
        ends = chain(*await _run(engine, identity, FindEnd(identity.tenant))) if several else [None]
        for number, begun in zip(numbers, ends, strict=True):  # one by one, because they may share a store
            wanted = ImportRecords(session, identity.tenant, payloads, only_new, identity.log_owner, begun)
            if await request.is_disconnected():  # it may have erased the session since
                raise HTTPException(status_code=400, detail="the caller left, so nothing more is imported")
            added += chain(*await _run(engine, identity, wanted, engines=[number]))
    return {"id": session_id, "turns": len(payloads), "added": max(added)}


@router.delete("/" + any_id("session_id"))
async def erase_session(request: Request, session_id: str) -> JSONResponse:
    """Erase a session of the caller. A session that does not exist is erased already."""
    engine = drafting_engine(request)
    session, identity = _find_session(engine, session_id)
    tenants = {identity.tenant}.union(*await _run(engine, identity, FindTenants(session)))
    erased = await _run(engine, identity, EraseSession(session, list(tenants)))
    if len(erased) > 1:  # each engine has to read the others' tombstones before the session is used again
        await _run(engine, identity, ApplyErasures())
    forget_quotable(request.app.state, engine)
    complete = all(answer["complete"] for answer in erased)
    content = {"id": session_id, "records": sum(answer["records"] for answer in erased), "complete": complete}
    return JSONResponse(content, status_code=200 if complete else 202)


class _Asker(NamedTuple):
    """Hold the identity of a caller's requests, and whether the caller is the administrator."""

    identity: Identity
    is_admin: bool


def _asker(engine: Any) -> _Asker:
    """Return who asks. Raise 403 where that is not known."""
    sender = presented()
    asker = _Asker(tagger_of(engine).identity_of({}, sender, cache_salt=_salt(sender)), shows_admin_key(sender))
    if asker.identity.principal == NOBODY and not asker.is_admin:
        detail = "it is not known whose sessions you ask for: present one API key, and what your gateway adds, once"
        raise HTTPException(status_code=403, detail=detail)
    return asker


def _comes_from_here(request: Request) -> bool:
    """Return whether a program of this machine asks.

    A web page in a browser here can reach the loopback interface by a name of its own (DNS rebinding), so the name by
    which the server was called counts, too. A browser reaches no Unix socket.
    """
    state = request.app.state
    called = request.headers.get("host", "")
    return bool(state.agentspec_socket or (state.agentspec_loopback and names_loopback(called)))


def _find_session(engine: Any, session_id: str, *, write: bool = False) -> tuple[str, Identity]:
    """Return a session's key, and the identity of the caller's requests in it.

    The administrator names a session by its key, to read or erase it.
    """
    if _asker(engine).is_admin and not write and _KEY.fullmatch(session_id):
        return session_id, Identity(session=session_id)
    sender = presented()
    identity = tagger_of(engine).identity_of({SESSION_KEY: session_id}, sender, cache_salt=_salt(sender))
    if identity.principal == NOBODY:
        detail = "the administrator has no sessions: name one by its key to read or erase it"
        raise HTTPException(status_code=403, detail=detail)
    if identity.session is None:
        detail = "id: 1 to 256 characters without control characters and line ends expected"
        raise HTTPException(status_code=400, detail=detail)
    return identity.session, identity


def _salt(sender: Presented | None) -> str | None:
    return next(map(from_header, () if sender is None else sender.all(SALT_HEADER)), None)


async def _run(
    engine: Any, asker: Identity, question: SessionQuestion, engines: Sequence[int] | None = None
) -> list[Any]:
    """Ask engines a question and return their answers. engines: None: all. Raise 503 where the store is away.

    asker: its caller takes turns with others. Salts do not make a caller several.
    """
    job = uuid.uuid4().hex
    numbers = engine_numbers(engine) if engines is None else engines
    for number in numbers:
        await _ask(engine, number, "begin_session_job", job, asker.caller, *packed(question))
    # Poll all at once, because an engine that is not polled for some seconds takes the asker for gone.
    return await asyncio.gather(*(_value(engine, number, job) for number in numbers))


async def _value(engine: Any, number: int, job: str) -> Any:
    """Return the value of a job on one engine. Long values come in parts. Raise 503 if none comes for 20 s."""
    until, pause = time.monotonic() + _WAIT_SECONDS, _FIRST_PAUSE
    parts: list[Any] = []
    while True:
        answer = await _ask(engine, number, "poll_session_job", job)
        if "value" in answer:
            if not parts and not answer["more"]:
                return answer["value"]
            parts += answer["value"]
            if not answer["more"]:
                return parts
            until, pause = time.monotonic() + _WAIT_SECONDS, _FIRST_PAUSE
        elif time.monotonic() > until:
            raise HTTPException(status_code=503, detail="the store is slow; try again")
        else:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


async def _ask(engine: Any, number: int, *question: Any) -> dict[str, Any]:
    (answer,) = await ask_or_refuse(engine, *question, engines=[number])
    if "error" in answer:
        status = {"unavailable": 503, "invalid": 400}.get(answer["error"], 500)
        raise HTTPException(status_code=status, detail=answer["message"])
    return answer
