"""Start and finish requests in the cache a few at a time, so that no step waits for all that begin and end with it.

Requests that begin go first, because they get no drafts until then: a step starts half of them. Where it could start
some in front of its forward pass, it starts half of the rest behind it, but no single one. A session's next turn starts
after the one before was finished, and so does a request whose input goes on, under the same id. A step does an eighth
of what else waits, once: rounded down where requests begin or stored turns have to be applied, so that a few ends never
hold these up, but many cannot pile up either. It does more as long as the next is likely to end within its time. Where
no request is left for whose steps the rest could wait, all is done at once.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from agentspec.server_ext.step import Int32, NewRequest, RequestState, RunningMean, Step

_STARTED, _FINISHED = 2, 8
"""A step starts at least 1 / _STARTED of the requests that begin, and does at least 1 / _FINISHED of the rest.

Siblings often begin by the dozen. Each step that one waits costs the tokens that a draft would have brought it.
"""
_USUAL_ITEMS = 32
"""Number of latest starts and finishes whose mean time says how long the next one is likely to take."""

Text = Callable[[], Sequence[int]]
"""Returns a request's prompt and response, in tokens."""


@dataclass(slots=True, eq=False)
class Beginning:
    """Hold a request to be started. text: returns its prompt and response, if it has ended meanwhile."""

    state: RequestState
    new: NewRequest
    text: Text | None = None


@dataclass(slots=True, eq=False)
class Ending:
    """Hold a request to be finished.

    output_limit: tokens of the response that the engine returned. until: time (``time.monotonic``) until which it waits
    to be told how many of them the caller got.
    """

    state: RequestState
    output_limit: int | None
    until: float = 0.0

    def awaits_length(self) -> bool:
        """Return whether it waits to be told how long its response was."""
        return self.state.told_length is None and time.monotonic() < self.until


class Turnover:
    """Hold the requests that wait to be started or finished.

    start(state, new, prompt, response): starts a request in the cache. prompt: its tokens, [P]. response: the tokens
    that it has been given, if it has ended meanwhile. finish(state, output_limit): keeps a response. Neither raises.
    """

    def __init__(
        self,
        start: Callable[[RequestState, NewRequest, Sequence[int] | Int32, Sequence[int]], None],
        finish: Callable[[RequestState, int | None], None],
    ) -> None:
        self._start = start
        self._finish = finish
        self._waiting: deque[Beginning | Ending] = deque()
        self._usual = RunningMean()  # CPU time of a start or a finish, in seconds

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """Return whether there is something to do now: more than to wait for lengths of responses."""
        waiting = self._waiting
        return bool(waiting) and any(isinstance(item, Beginning) or not item.awaits_length() for item in waiting)

    def states(self) -> list[RequestState]:
        """Return the state of each request that waits; twice for one that ended before its start. For any thread."""
        return [item.state for item in list(self._waiting)]

    def starting(self) -> list[RequestState]:
        """Return the states of the requests that wait for their start and have not ended."""
        return [item.state for item in self._waiting if isinstance(item, Beginning) and item.text is None]

    def begin(self, state: RequestState, new: NewRequest) -> None:
        """Let a request wait for its start. Until then ``state.awaits_start`` is true."""
        state.awaits_start = True
        self._waiting.append(Beginning(state, new))

    def end(self, state: RequestState, output_limit: int | None, text: Text | None, until: float = 0.0) -> None:
        """Let a request wait for its end. Forget it if it still waits for its start and ``text`` is None.

        until: time until which it waits for ``state.told_length``.
        """
        if state.awaits_start:
            place = next(i for i, item in enumerate(self._waiting) if item.state is state)
            beginning = self._waiting[place]
            if text is None or not isinstance(beginning, Beginning):
                del self._waiting[place]
                return
            beginning.text = text
        self._waiting.append(Ending(state, output_limit, until))

    def ending(self, request_id: str) -> RequestState | None:
        """Return the state of a request that waits for its end; None if there is none."""
        found = (item.state for item in self._waiting if isinstance(item, Ending))
        return next((state for state in found if state.request_id == request_id), None)

    def advance(
        self,
        seconds: float,
        started: Sequence[NewRequest] = (),
        step: Step | None = None,
        *,
        begun: bool = False,
        few_ends: bool = False,
    ) -> None:
        """Start and finish as many requests as fit into so much CPU time of this thread, and the least part anyway.

        started: requests that have just begun, whose prompts are valid. step: its rows hold the prompts of the others
        that wait for their start. A request that has no row stays. begun: whether a call has started requests in this
        step already. few_ends: whether the step has other work that has to be done.
        """
        now = time.thread_time()
        until = now + seconds
        first, rest = self._in_order()
        starts, others = _least(first, rest, begun=begun, few_ends=few_ends)
        done, least = 0, starts + others
        fresh = set(map(id, started))
        for item in [*first[:starts], *rest[:others], *first[starts:], *rest[others:]]:
            if done >= least and now + self._usual.value >= until:
                break
            prompt: Sequence[int] | Int32 | None = None
            if isinstance(item, Beginning) and item.text is None:
                prompt = item.new.prompt if id(item.new) in fresh else _prompt_in(step, item.state)
                if prompt is None:
                    continue
            self._do(item, prompt)
            self._waiting.remove(item)  # an erasure finds it there until it is done
            done += 1
            before, now = now, time.thread_time()
            self._usual.add(now - before, _USUAL_ITEMS)

    def _in_order(self) -> tuple[list[Beginning | Ending], list[Beginning | Ending]]:
        """Return the requests that begin, unless one of their session or id has to end before, and all others."""
        first: list[Beginning | Ending] = []
        rest: list[Beginning | Ending] = []
        sessions, ids = set[str | None](), set[str]()
        for item in self._waiting:
            session, request_id = item.state.identity.session, item.state.request_id
            if isinstance(item, Ending):
                if not item.awaits_length():
                    rest.append(item)
                    sessions.add(session)
                    ids.add(request_id)
            else:
                behind = request_id in ids or (session is not None and session in sessions)
                (rest if behind else first).append(item)
        return first, rest

    def finish_all(self, *, untold: bool = False) -> None:
        """Finish all requests that have ended. Those that wait for their start have all ended, too, or never will.

        untold: even those that wait to be told the lengths of their responses.
        """
        for item in list(self._waiting):
            if isinstance(item, Ending) and item.awaits_length() and not untold:
                continue
            if isinstance(item, Ending) or item.text is not None:
                self._do(item, None)
            self._waiting.remove(item)  # an erasure finds it there until it is done

    def _do(self, item: Beginning | Ending, prompt: Sequence[int] | Int32 | None) -> None:
        """Start or finish a request. prompt: of one that starts without a text of its own."""
        if isinstance(item, Ending):
            lengths = [length for length in (item.output_limit, item.state.told_length) if length is not None]
            self._finish(item.state, min(lengths, default=None))
            return
        response: Sequence[int] = ()
        if item.text is not None:
            text = item.text()
            prompt, response = text[: item.state.prompt_length], text[item.state.prompt_length :]
        assert prompt is not None
        item.state.awaits_start = False
        if not item.state.failed:
            self._start(item.state, item.new, prompt, response)


def _least(
    first: Sequence[Beginning | Ending], rest: Sequence[Beginning | Ending], *, begun: bool, few_ends: bool
) -> tuple[int, int]:
    """Return how many of those that begin, and of the rest, a step does even if its time is over."""
    if begun:
        return len(first) // _STARTED, 0
    starts = -(-len(first) // _STARTED)
    others = len(rest) // _FINISHED if first or few_ends else -(-len(rest) // _FINISHED)
    if first:  # the end of a request has to wait for its start, which may be late in `first`
        others = len(list(takewhile(_awaits_no_start, rest[:others])))
    return starts, others


def _prompt_in(step: Step | None, state: RequestState) -> Int32 | None:
    """Return a request's prompt, from its row in the step; None if it has none."""
    if step is None:
        return None
    place = step.batch.places.get(state.request_id)
    return None if place is None else step.tokens[step.batch.rows[place], : state.prompt_length]


def _awaits_no_start(item: Beginning | Ending) -> bool:
    """Return False for the end of a request that still waits for its start."""
    return isinstance(item, Beginning) or not item.state.awaits_start
