"""Read both kinds of records, a client's and a server's, into sessions and turns."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.draft_figures import DecodeStep, DraftedToken
from agentspec.errors import InvalidInputError
from agentspec.files import read_lines
from agentspec.json_lines import whole

_Named = tuple[str | None, str | None]
"""Identity of a session: its name, which several callers may use, and the server's key."""
_SHOWN_DIGITS = 8


@dataclass(slots=True)
class Turn:
    """Hold one reply, or the sums over several. Without figures of a server with the extension, `steps` is 0.

    seconds: duration of the call; None if it is not known.
    text: None in a record that holds no text.
    detail: its steps, if the record has them.
    without_steps, without_seconds: in a sum, the tokens of replies whose steps or seconds are not known.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float | None = None
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    text: str | None = None
    detail: tuple[DecodeStep, ...] = ()
    without_steps: int = 0
    without_seconds: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Return the mean tokens of a decode step; None if steps are not known."""
        return (self.tokens - self.without_steps) / self.steps if self.steps else None

    @property
    def speed(self) -> float | None:
        """Return the tokens per second of the call, prefill included; None if its duration is not known."""
        return (self.tokens - self.without_seconds) / self.seconds if self.seconds else None

    @property
    def acceptance(self) -> float | None:
        """Return the accepted share of the drafted tokens; None if nothing was drafted."""
        drafted = self.drafted.total()
        return self.accepted.total() / drafted if drafted else None


@dataclass(slots=True)
class Session:
    """Hold the turns of one session, in order. parent: the session that started it.

    key: the server's key of the session, which no other caller's session has; None in a client's record.
    """

    name: str
    parent: str | None = None
    key: str | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def total(self) -> Turn:
        """Return the sums over all turns."""
        return total(self.turns)


@dataclass(slots=True)
class Run:
    """Hold all sessions of a record, in the order in which they began."""

    sessions: list[Session]

    @property
    def total(self) -> Turn:
        """Return the sums over all turns."""
        return total(turn for session in self.sessions for turn in session.turns)


def total(turns: Iterable[Turn]) -> Turn:
    """Return the sums of turns."""
    result = Turn()
    for turn in turns:
        result.tokens += turn.tokens
        result.steps += turn.steps
        result.drafted += turn.drafted
        result.accepted += turn.accepted
        if not turn.steps:
            result.without_steps += turn.tokens
        if turn.seconds is None:
            result.without_seconds += turn.tokens
        else:
            result.seconds = (result.seconds or 0.0) + turn.seconds
    return result


def read_run(path: str | Path) -> Run:
    """Read a record, which gzip may have compressed.

    A line that was not written to its end, because the program was killed or the disk was full, is left out. The next
    run appends to the same file, so such a line may be in the file's middle, joined with the line behind it. Raises
    InvalidInputError, which names the line, for a file that is not a record.
    """
    sessions: dict[_Named, Session] = {}
    requests: dict[str, Turn] = {}
    broken: InvalidInputError | None = None
    for number, line in enumerate(read_lines(Path(path)), 1):
        if not line.strip():
            continue
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            broken = broken or _refused(path, number, error)
            continue
        try:
            _add(parsed, sessions, requests)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise _refused(path, number, error) from error
    if not sessions:
        raise broken or InvalidInputError(f"{path}: the record is empty")
    run = Run(list(sessions.values()))
    _tell_apart(run.sessions)
    return run


def _tell_apart(sessions: Sequence[Session]) -> None:
    """Add the beginning of a session's key to its name if another caller's session has the same name."""
    of_name = Counter(session.name for session in sessions)
    for session in sessions:
        if of_name[session.name] > 1 and session.key is not None:
            session.name = f"{session.name} ({session.key[:_SHOWN_DIGITS]})"


def _refused(path: str | Path, number: int, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"{path}, line {number}: a record of AgentClient(record=…) or of the server's setting `record` is needed"
        f" ({type(error).__name__}: {error})"
    )


def _add(line: dict[str, Any], sessions: dict[_Named, Session], requests: dict[str, Turn]) -> None:
    """Add a line's reply, or step, to its session. Raises any of Python's errors for a line of another form."""
    known = requests.get(line["request"]) if "request" in line else None
    turn = _step(line, known) if "request" in line else _reply(line)
    if known is not None:  # its lines may name its session differently, since an erasure blanks the names
        return
    name, key = _text(line, "session"), _text(line, "session_key")
    new = Session(name or "without a session", _text(line, "parent"), key)
    session = sessions.setdefault((name, key), new)
    session.turns.append(turn)
    if "request" in line:
        requests[line["request"]] = turn


def _step(line: dict[str, Any], turn: Turn | None) -> Turn:
    """Return the request's turn with this line's step added. The server writes one line for each step."""
    tokens, source = _count(line["tokens"]), _text(line, "source")
    drafted, accepted = (_count(line[name]) if source is not None else 0 for name in ("drafted", "accepted"))
    turn = turn or Turn()
    turn.tokens += tokens
    turn.steps += 1
    if source is not None:
        turn.drafted[source] += drafted
        turn.accepted[source] += accepted
    return turn


def _reply(line: dict[str, Any]) -> Turn:
    seconds = float(line["seconds"])
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds: {seconds} is no duration")
    return Turn(
        tokens=_count(line["tokens"]),
        steps=_count(line.get("steps")),
        seconds=None if line["tokens"] is None else seconds,  # without the number of tokens there is no speed
        drafted=_counts(line.get("drafted_by_source")),
        accepted=_counts(line.get("accepted_by_source")),
        text=_text(line, "text"),
        detail=tuple(DecodeStep(_tokens(tokens), _tokens(rejected)) for tokens, rejected in line.get("detail") or ()),
    )


def _text(line: dict[str, Any], name: str) -> str | None:
    value = line.get(name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: a text expected, got {value!r:.60}")
    return value


def _count(value: Any) -> int:
    value = whole(value)
    if value is not None and (type(value) is not int or not 0 <= value < 2**53):
        raise ValueError(f"a count expected, got {value!r:.60}")
    return value or 0


def _counts(by_source: dict[str, Any] | None) -> Counter[str]:
    return +Counter({source: _count(count) for source, count in (by_source or {}).items()})


def _tokens(pairs: Iterable[Any]) -> tuple[DraftedToken, ...]:
    tokens = tuple(DraftedToken(text, source) for text, source in pairs)
    if not all(isinstance(part, str | None) for token in tokens for part in token):
        raise TypeError("detail: pairs of a token's text and its source expected")
    return tokens
