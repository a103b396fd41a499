"""Read the two kinds of records into sessions and turns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from agentspec.errors import InvalidInputError


class Token(NamedTuple):
    """Hold a token's text, None if it is not told, and the source that drafted it, None for the model itself."""

    text: str | None
    source: str | None


class Step(NamedTuple):
    """Hold one decode step: the tokens that it added, and the drafted ones that it rejected."""

    tokens: tuple[Token, ...]
    rejected: tuple[Token, ...]


@dataclass(slots=True)
class Turn:
    """Hold one reply, or the sums over several. Without figures of a server with the extension, `steps` is 0.

    seconds: duration of the call; None if it is not known. text: None in a record that holds no text. detail: its
    steps, if the record has them. without_steps, without_seconds: tokens of replies, in a sum, of which these are not
    known.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float | None = None
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    text: str | None = None
    detail: tuple[Step, ...] = ()
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
    """Hold the turns of one session, in order. parent: the session that started it."""

    name: str
    parent: str | None = None
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
    """Read a record. Raises InvalidInputError for a file that is none, naming the line, and OSError.

    The last line is left out if it was not written to its end, as when the program was killed.
    """
    sessions: dict[str, Session] = {}
    requests: dict[str, Turn] = {}
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                _add(json.loads(line), sessions, requests)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if sessions and not line.endswith(b"\n"):
                    break
                raise InvalidInputError(
                    f"{path}, line {number}: a record of AgentClient(record=…) or of the server's setting `record` is"
                    f" needed ({type(error).__name__}: {error})"
                ) from error
    if not sessions:
        raise InvalidInputError(f"{path}: the record is empty")
    return Run(list(sessions.values()))


def _add(line: dict[str, Any], sessions: dict[str, Session], requests: dict[str, Turn]) -> None:
    name = line["session"] or "without a session"
    session = sessions.setdefault(name, Session(name, line.get("parent")))
    if "request" in line:  # the server's: one line for each step
        turn = requests.get(line["request"])
        if turn is None:
            turn = requests[line["request"]] = Turn()
            session.turns.append(turn)
        turn.tokens += int(line["tokens"])
        turn.steps += 1
        if line["source"] is not None:
            turn.drafted[line["source"]] += int(line["drafted"])
            turn.accepted[line["source"]] += int(line["accepted"])
        return
    session.turns.append(
        Turn(
            tokens=int(line["tokens"] or 0),
            steps=int(line.get("steps") or 0),
            seconds=float(line["seconds"]),
            drafted=+Counter(line.get("drafted_by_source") or {}),
            accepted=+Counter(line.get("accepted_by_source") or {}),
            text=str(line["text"]),
            detail=tuple(Step(_tokens(tokens), _tokens(rejected)) for tokens, rejected in line.get("detail") or ()),
        )
    )


def _tokens(pairs: Iterable[Any]) -> tuple[Token, ...]:
    return tuple(Token(text, source) for text, source in pairs)
