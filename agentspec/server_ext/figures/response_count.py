"""Count what each step adds to a response, up to the response's end."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentspec.server_ext.figures.metrics import RequestFigures

_LATEST_STEPS = 4
"""Latest steps that are remembered, because the engine may take as many before it hears of a stop text."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Describe a repetition that ends a response of at least ``least`` tokens.

    times: how often the same tokens must follow each other. shortest, longest: bounds of their number.
    """

    shortest: int
    longest: int
    times: int
    least: int = 0

    def end_of(self, response: Sequence[int] | NDArray[np.int32], first: int) -> int | None:
        """Return the length of the response, more than ``first``, at which it ends; None if it does not end.

        However long the response is, no token before the longest repetition that ends behind ``first`` is read.
        """
        begin = max(first - self.longest * self.times, 0)
        tail = np.asarray(response[begin:]).tolist()
        for length in range(max(first + 1, self.least), begin + len(tail) + 1):
            for size in range(self.shortest, min(self.longest, length // self.times) + 1):
                last = length - begin - 1
                before = last - size
                # Compare single tokens, because most patterns differ in their last ones. Slices would take seconds of
                # a step where a caller asks for patterns of thousands of tokens.
                repeated = range(size * (self.times - 1))
                if tail[last] == tail[before] and all(tail[last - i] == tail[before - i] for i in repeated):
                    return length
        return None


@dataclass(slots=True, eq=False)
class ResponseCount:
    """Count the steps and tokens of a response in the figures of its request.

    The engine verifies tokens behind the end of a response, too: an accepted draft may contain the end, and the engine
    goes on until the API server reports a stop text. The figures leave these tokens out.
    """

    figures: RequestFigures
    """the request's, which count all its samples together"""
    prompt_length: int
    """tokens before the response"""
    end_tokens: frozenset[int] = frozenset()
    """tokens that end the response"""
    repetition: Repetition | None = None
    """repetition that also ends it"""
    length: int = 0
    """tokens of the response at the latest step that the figures count, those behind its end included"""
    behind_end: int = 0
    """tokens of ``length`` that the figures leave out"""
    reported_length: int | None = None
    """tokens that the caller got; None: the API server has not reported it"""
    latest_accepted: deque[tuple[int, list[int]]] = field(default_factory=lambda: deque(maxlen=_LATEST_STEPS))
    """the latest steps with accepted tokens: ``length`` before each, and its accepted tokens by source"""

    def add_plain_steps(self, steps: int) -> None:
        """Add steps without drafts. Each of them gave one token."""
        self.figures.tokens += steps if self.reported_length is None else 0
        self.figures.steps += steps
        self.length += steps

    def add_step(
        self, tokens: NDArray[np.int32], row: int, length: int, accepted: int, by_source: list[int]
    ) -> tuple[int, int]:
        """Add a step. Return how many of its tokens, and of its accepted tokens, are not behind the end.

        The first number is negative where the engine has taken tokens back, because a load of the KV cache has failed.

        tokens: [R, L] the engine's token array. row: the request's row. length: tokens of its prompt and response now.
        by_source: its accepted tokens, which the figures count already; reduced, here and in `end_at`, to those that
        are not behind the end.
        """
        begin = self.prompt_length + self.length
        added = gained = length - begin
        if self.reported_length is not None:
            added = 0
        elif gained > 1:  # an accepted draft may contain the end, and a token was sampled behind it
            if self.end_tokens:
                new = tokens[row, begin:length].tolist()
                if not self.end_tokens.isdisjoint(new):
                    added = next(place for place, token in enumerate(new, 1) if token in self.end_tokens)
            if self.repetition is not None:
                end = self.repetition.end_of(tokens[row, self.prompt_length : begin + added], self.length)
                added = added if end is None else end - self.length
        if added < 0:
            self.figures.take_back(-added)
        else:
            self.figures.tokens += added
        self.figures.steps += 1
        if accepted > added:
            self.figures.cut_accepted(by_source, added)
            accepted = max(added, 0)
        if accepted:
            self.latest_accepted.append((self.length, by_source))
        self.length += gained
        self.behind_end += gained - added
        return added, accepted

    def end_at(self, reported_length: int) -> int:
        """Take the tokens behind the reported end out of the figures. Return how many they counted."""
        self.reported_length = reported_length
        for before, accepted in self.latest_accepted:
            self.figures.cut_accepted(accepted, reported_length - before)
        behind = max(self.length - self.behind_end - reported_length, 0)
        self.figures.take_back(behind)
        return behind
