"""Run the agent: ask for a function, run real unit tests on the answer, and ask again with what failed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentspec import Session, Speculation
from demo.tasks import Task, TestResult, extract_code, feedback, run_tests

MAX_TURNS = 5
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold one answer of the model. seconds: the whole call as the agent sees it, prefill included."""

    session: str
    number: int
    text: str
    tokens: int
    seconds: float
    results: Sequence[TestResult]
    speculation: Speculation | None

    @property
    def passed(self) -> bool:
        """Return whether every unit test passed."""
        return all(result.passed for result in self.results)


class Agent:
    """Work on one task in one session: call ``turn`` until ``done``."""

    def __init__(self, task: Task, session: Session) -> None:
        self.task = task
        self.turns: list[Turn] = []
        self._session = session
        self._message = task.request

    @property
    def done(self) -> bool:
        """Return whether all tests pass or the agent has given up."""
        return bool(self.turns) and (self.turns[-1].passed or len(self.turns) >= MAX_TURNS)

    def turn(self) -> Turn:
        """Ask, test the answer, and prepare the next message from what failed."""
        start = time.perf_counter()
        reply = self._session.chat(self._message, temperature=0.0, max_tokens=MAX_TOKENS)
        seconds = time.perf_counter() - start
        results = run_tests(self.task, extract_code(reply.text))
        turn = Turn(
            session=self._session.id,
            number=len(self.turns) + 1,
            text=reply.text,
            tokens=reply.usage.completion_tokens if reply.usage else 0,
            seconds=seconds,
            results=results,
            speculation=reply.speculation,
        )
        self.turns.append(turn)
        self._message = feedback(results)
        return turn
