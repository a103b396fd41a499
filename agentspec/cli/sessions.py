"""Define ``agentspec sessions``: list, show, export, import and erase a server's sessions, and convert an old store."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Column, Table
from rich.text import Text

from agentspec.cache.store import default_store_url, redact
from agentspec.cli.server import (
    DEFAULT_URL,
    HeaderOption,
    OverridesOption,
    RevisionOption,
    TokenizerOption,
    TokenizerRevisionOption,
    UrlOption,
    ask,
    reading,
    served_key,
    server_at,
    shown_time,
    write_private,
)
from agentspec.cli.tables import JsonOption, print_table
from agentspec.errors import AgentSpecError, InvalidInputError, StoreUnavailableError
from agentspec.identifiers import check_session_id, is_helper, prefix_of_helpers, to_path
from agentspec.protocol import IMPORT_PART_BYTES

_commands = typer.Typer(
    help="Sessions that a server keeps: list, show, export, import, erase; convert an old store.", no_args_is_help=True
)

_DASH = Path("-")
_ERASURE_SECONDS = 120.0
_ALL = 1 << 62
"""More sessions than any server lists."""
_LONG_SECONDS = 1800.0
"""Longest wait for an export, or for the ids that begin alike: nothing comes until all is read, at some 3,000 turns a
second on a core."""

SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]


def add_to(app: typer.Typer) -> None:
    """Register the group of commands."""
    app.add_typer(_commands, name="sessions")


@_commands.command("list")
def list_sessions(
    url: UrlOption = DEFAULT_URL,
    header: HeaderOption = None,
    limit: Annotated[int, typer.Option(min=1, help="How many to list, the most recently used first.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List the sessions of your API key."""
    with server_at(url, header) as server:
        listed = _newest(server, limit + 1)  # one more, to know whether there are others
    found = listed[:limit]
    if as_json:
        typer.echo(json.dumps({"sessions": found}))
        return
    table = Table(Column("session", overflow="fold"), "tokens", "turns", "bytes in the store", "last used", "group")
    with reading("sessions"):
        for session in found:
            numbers = [f"{session[name]:,}" for name in ("tokens", "turns", "bytes")]
            name = session["id"] or session.get("key", "")
            table.add_row(Text(name), *numbers, shown_time(session["used"]), Text(session["group"] or ""))
    # Ids are whole, for `show` and `delete`: on one line where another program reads them.
    print_table(table)
    if len(listed) > limit:
        typer.echo(f"the {limit:,} sessions used last; list more with --limit", err=True)


@_commands.command()
def show(session: SessionArgument, url: UrlOption = DEFAULT_URL, header: HeaderOption = None) -> None:
    """Show the turns of a session, without their text."""
    with server_at(url, header) as server:
        turns = ask(server, "GET", _path(session), "turns").json()["turns"]
    table = Table("turn", "time", "kept context tokens", "new prompt tokens", "response tokens", title=Text(session))
    with reading("turns"):
        for number, turn in enumerate(turns, 1):
            counts = (turn["kept"], len(turn["prompt"]), len(turn["response"]))
            table.add_row(str(number), shown_time(turn["created"]), *(f"{count:,}" for count in counts))
    print_table(table)


@_commands.command("export")
def export_session(
    session: SessionArgument,
    file: Annotated[Path, typer.Argument(help="File to write; - is the standard output.")],
    url: UrlOption = DEFAULT_URL,
    header: HeaderOption = None,
) -> None:
    """Write a session's turns to a file, as JSON with token ids."""
    with server_at(url, header, _LONG_SECONDS) as server:
        answer = ask(server, "GET", _path(session), "turns")
    if file == _DASH:
        sys.stdout.buffer.write(answer.content)
        return
    try:
        write_private(file, answer.content)
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from None
    typer.echo(f"written: {file}", err=not file.is_file())  # /dev/stdout is read by another program


@_commands.command("import")
def import_session(
    session: SessionArgument,
    file: Annotated[Path, typer.Argument(help="File that `export` wrote; - is the standard input.")],
    url: UrlOption = DEFAULT_URL,
    header: HeaderOption = None,
) -> None:
    """Add the turns in a file to a session of yours, which alone will draft from them."""
    added = turns = 0
    try:
        with server_at(url, header) as server:
            for part in _parts(_read(file)):
                answer = ask(server, "PUT", _path(session), "added", content=part).json()
                with reading("added"):
                    added, turns = added + answer["added"], turns + answer["turns"]
    except AgentSpecError as error:
        if turns:
            raise _error_of_whole(error, turns) from None
        raise
    typer.echo(f"{added} of {turns} turns added" + ("" if added == turns else "; the others were there"))


def _read(file: Path) -> bytes:
    if file == _DASH and sys.stdin is None:
        raise InvalidInputError("-: the standard input is closed; name a file")
    try:
        return sys.stdin.buffer.read() if file == _DASH else file.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from None


@_commands.command()
def delete(session: SessionArgument, url: UrlOption = DEFAULT_URL, header: HeaderOption = None) -> None:
    """Erase a session on the server, with those of its loops: suffix indexes, queues, store and step record.

    An agent keeps its own copy and would send it again: its `Session.clear()` erases both.
    """
    with server_at(url, header) as server, server_at(url, header, _LONG_SECONDS) as patient:
        records = _erased(server, session)
        try:
            begin_alike = _newest(patient, _ALL, prefix=prefix_of_helpers(session))
            helpers = [found["id"] for found in begin_alike if is_helper(str(found["id"]), session)]
        except (InvalidInputError, KeyError):  # this server lists no sessions
            helpers = []
        for helper in helpers:
            _erased(server, helper)
    if records == 0:  # a mistyped id, or turns that still waited for the store
        held = "nothing of it was in the store; 'agentspec sessions list' shows your sessions"
    else:
        held = f"{records:,} record{'' if records == 1 else 's'} of it in the store"
    loops = f"; and {len(helpers):,} session{'' if len(helpers) == 1 else 's'} of its loops" if helpers else ""
    typer.echo(f"erased: {session} ({held}){loops}")


@_commands.command()
def convert(
    store: Annotated[
        str | None,
        typer.Argument(metavar="STORE", help="URL of the store; by default AGENTSPEC_STORE, or the server's own."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The server's model. A client's store needs none.")] = None,
    tenant: Annotated[str | None, typer.Option(help="The server's tenant; as for agentspec serve.")] = None,
    tokenizer: TokenizerOption = None,
    tokenizer_revision: TokenizerRevisionOption = None,
    revision: RevisionOption = None,
    hf_overrides: OverridesOption = None,
    model_key: Annotated[str | None, typer.Option(help="Setting model_key, if the server will have it.")] = None,
) -> None:
    """Convert the store of an older release. Stop its servers before; give AGENTSPEC_SECRET if they will have one.

    Where servers of several models or tenants share the store, run it once for each.
    """
    from agentspec.cache.store.convert import OldLog, old_log_name  # need the core, as others don't
    from agentspec.cache.store.convert import convert as run

    url = store or os.environ.get("AGENTSPEC_STORE") or default_store_url("server.db")
    log = None
    if model is not None:
        key = served_key(
            model,
            tokenizer,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            hf_overrides=hf_overrides,
            given=model_key,
        )
        log = OldLog(old_log_name(model, tokenizer, tokenizer_revision, tenant), key)
    found = run(url, secret=os.environ.get("AGENTSPEC_SECRET") or None, tenant=tenant, log=log)
    typer.echo(f"converted: {found.converted:,} records of {redact(url)}")
    if log is not None:
        typer.echo(f"moved: {found.divided:,} turns to the logs of their tenants")
    elif found.converted:
        typer.echo("turns of a server are not used yet: run it again with --model, as the server has it")
    if found.unowned:
        typer.echo(f"left out: {found.unowned:,} of callers with API keys, whose sessions have other keys now")
    if found.damaged:
        typer.echo(f"left out: {found.damaged:,} damaged")
    if found.kept_as:
        typer.echo(f"the old data are still in {found.kept_as}; delete it when all is well")


def _erased(server: httpx.Client, session: str) -> int:
    """Erase a session, and return the number of its records in the store."""
    until = time.monotonic() + _ERASURE_SECONDS
    records = 0
    while True:
        answer = ask(server, "DELETE", _path(session), "complete")
        with reading("records"):
            records += int(answer.json()["records"])
        if answer.status_code != 202:
            return records
        if time.monotonic() > until:
            raise StoreUnavailableError(
                f"session {session!r}: erased, but another process still reads the database's old pages; run the "
                "command again when that process has ended"
            )
        time.sleep(1.0)


def _newest(server: httpx.Client, limit: int, **asked: Any) -> list[Any]:
    """Return the sessions used last. A server lists a limited number in one answer, and says where the next begins.

    asked: what else the server is asked for.
    """
    found: list[Any] = []
    while True:
        answer = ask(server, "GET", "sessions", "sessions", params={"limit": limit - len(found), **asked}).json()
        with reading("sessions"):
            found.extend(answer["sessions"])
        if len(found) >= limit or not answer["sessions"] or answer.get("next") is None:
            return found[:limit]
        asked["before"] = answer["next"]


def _parts(exported: bytes) -> list[bytes]:
    """Return an exported session as bodies of calls that import it: the turns of a long one go a few at a time."""
    if len(exported) <= IMPORT_PART_BYTES:
        return [exported]
    try:
        session = json.loads(exported)
        turns = [json.dumps(turn) for turn in session.pop("turns")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [exported]  # the server says what is wrong
    parts: list[list[str]] = []
    size = 0
    for turn in turns:
        if not parts or size + len(turn) > IMPORT_PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(turn)
        size += len(turn)
    others = "".join(f"{json.dumps(name)}: {json.dumps(value)}, " for name, value in session.items())
    return [f'{{{others}"turns": [{", ".join(part)}]}}'.encode() for part in parts] or [exported]


def _error_of_whole(error: AgentSpecError, imported: int) -> AgentSpecError:
    """Return a part's error with the number that its turn has in the file. imported: turns of the parts before."""
    why = re.sub(r"^turns\.(\d+)", lambda turn: f"turns.{imported + int(turn[1])}", str(error))
    return type(error)(
        f"{why}; the turns before turns.{imported} are imported: import the file again to add the others, or delete "
        "the session"
    )


def _path(session: str) -> str:
    return f"sessions/{to_path(check_session_id(session))}"
