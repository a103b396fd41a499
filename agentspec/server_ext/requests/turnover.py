"""Start and finish requests in the cache a few at a time, so that no step waits for all that begin and end with it.

Starts go first, because a request gets no drafts before its start. But a session's next turn starts after the turn
before was finished, unless that still awaits its length. Likewise, a request that goes on with streamed input, under
the same id, starts after its response so far was finished.

`_quota` says how much a step does in any case. It does more as long as the next start or finish is likely to end within
its time. If no request runs any more, all that waits is finished at once, because no step may follow.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil, floor

from agentspec.server_ext.step import Int32, NewRequest, RequestState, RunningMean, Step

_STARTS_SHARE, _OTHERS_SHARE = 1 / 2, 1 / 8
"""Shares of the starts that can be done now, and of the other waiting work, that a step does in any case."""
_USUAL_ITEMS = 32
"""Number of latest starts and finishes whose mean time says how long the next one is likely to take."""

Text = Callable[[], Sequence[int]]
"""Function that returns the token ids of a request's prompt and response."""


@dataclass(slots=True, eq=False)
class Beginning:
    """Hold a request to be started. text: returns its prompt and response, if it has ended meanwhile."""

    state: RequestState
    new: NewRequest
    text: Text | None = None

    @property
    def ended(self) -> bool:
        """Return whether the request has ended before its start."""
        return self.text is not None


@dataclass(slots=True, eq=False)
class Ending:
    """Hold a request to be finished.

    output_limit: tokens of the response that the engine returned; None: all. until: time (``time.monotonic``) until
    which it awaits ``reported_length``: how many of them the caller got.
    """

    state: RequestState
    output_limit: int | None
    until: float = 0.0

    def awaits_length(self) -> bool:
        """Return whether the API server may yet report how long its response was."""
        return self.state.response.reported_length is None and time.monotonic() < self.until


class Turnover:
    """Hold the requests that wait to be started or finished.

    start(state, new, prompt, response): starts a request in the cache. prompt: its tokens, [P]. response: the tokens
    that it has been given, if it has ended meanwhile. finish(state, output_limit): keeps a response.
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
        """Return how many starts and finishes wait."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """Return whether there is something to do now, other than to wait for the lengths of responses."""
        waiting = self._waiting
        return bool(waiting) and any(isinstance(item, Beginning) or not item.awaits_length() for item in waiting)

    def states(self) -> list[RequestState]:
        """Return the states of all waiting requests. Any thread may call it.

        A request that ended before its start appears twice.
        """
        return [item.state for item in list(self._waiting)]

    def starting(self) -> list[RequestState]:
        """Return the states of the requests that wait for their start and have not ended."""
        return [item.state for item in self._waiting if isinstance(item, Beginning) and not item.ended]

    def begin(self, state: RequestState, new: NewRequest) -> None:
        """Queue a request for its start. Until then ``state.awaits_start`` is true."""
        state.awaits_start = True
        self._waiting.append(Beginning(state, new))

    def end(self, state: RequestState, output_limit: int | None, text: Text | None, until: float = 0.0) -> None:
        """Queue a request for its end. Forget it if it still waits for its start and ``text`` is None.

        until: time (``time.monotonic``) until which it awaits ``state.response.reported_length``.
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
        again: bool = False,
        other_work: bool = False,
    ) -> None:
        """Start and finish as many requests as fit into ``seconds`` of this thread's CPU time, and at least `_quota`.

        started: requests that have just begun, whose prompts are valid. step: its rows hold the prompts of the other
        requests that wait for their start; a request without a row goes on waiting. again: whether an earlier call
        started requests in this step. other_work: whether the step also has stored turns that must be applied.
        """
        now = time.thread_time()
        until = now + seconds
        first, rest = self._in_order()
        starts, others = _quota(first, rest, again=again, other_work=other_work)
        done, quota = 0, starts + others
        fresh = set(map(id, started))
        for item in [*first[:starts], *rest[:others], *first[starts:], *rest[others:]]:
            if done >= quota and now + self._usual.value >= until:
                break
            prompt: Sequence[int] | Int32 | None = None
            if isinstance(item, Beginning) and not item.ended:
                prompt = item.new.prompt if id(item.new) in fresh else _prompt_in(step, item.state)
                if prompt is None:
                    continue
            self._do(item, prompt)
            done += 1
            before, now = now, time.thread_time()
            self._usual.add(now - before, _USUAL_ITEMS)

    def _in_order(self) -> tuple[list[Beginning | Ending], list[Beginning | Ending]]:
        """Return the starts that can be done now, and the other waiting work.

        A start must wait if an end of the same session or id was queued before it. Then it is among the other work.
        Ends that await their lengths are in neither.
        """
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

    def finish_all(self, *, unreported_too: bool = False) -> None:
        """Finish all requests that have ended, and drop the starts of those that have not and never will.

        unreported_too: finish even the requests that await the lengths of their responses.
        """
        for item in list(self._waiting):
            if isinstance(item, Ending) and item.awaits_length() and not unreported_too:
                continue
            if isinstance(item, Ending) or item.ended:
                self._do(item, None)
            else:
                self._waiting.remove(item)

    def _do(self, item: Beginning | Ending, prompt: Sequence[int] | Int32 | None) -> None:
        """Start or finish a request, and wait for it no more. prompt: of a request that starts without ``text``."""
        try:
            if isinstance(item, Ending):
                limits = (item.output_limit, item.state.response.reported_length)
                self._finish(item.state, min([limit for limit in limits if limit is not None], default=None))
                return
            item.state.awaits_start = False
            response: Sequence[int] = ()
            if item.text is not None:
                text = item.text()
                prompt, response = text[: item.state.response.prompt_length], text[item.state.response.prompt_length :]
            assert prompt is not None
            if not item.state.failed:
                self._start(item.state, item.new, prompt, response)
        finally:  # an erasure finds it there until it is done
            self._waiting.remove(item)


def _quota(
    first: Sequence[Beginning | Ending], rest: Sequence[Beginning | Ending], *, again: bool, other_work: bool
) -> tuple[int, int]:
    """Return how many items of ``first`` and of ``rest`` a step does even if its time is over.

    Of ``first`` half, rounded up: samples of one prompt often begin by the dozen, and each step that a request waits
    costs it a draft. If the step already started some before its forward pass, half of the others, rounded down.
    Of ``rest`` an eighth, once. It is rounded down if there are starts or other work, so that a few ends never hold
    these up but many cannot pile up.
    """
    if again:
        return floor(len(first) * _STARTS_SHARE), 0
    round_others = floor if first or other_work else ceil
    others = rest[: round_others(len(rest) * _OTHERS_SHARE)]
    if first:  # the end of a request has to wait for its start, which may be late in `first`
        others = list(takewhile(_awaits_no_start, others))
    return ceil(len(first) * _STARTS_SHARE), len(others)


def _prompt_in(step: Step | None, state: RequestState) -> Int32 | None:
    """Return a request's prompt, int32 [P], from its row in the step; None if it has no row."""
    if step is None:
        return None
    place = step.batch.places.get(state.request_id)
    return None if place is None else step.tokens[step.batch.rows[place], : state.response.prompt_length]


def _awaits_no_start(item: Beginning | Ending) -> bool:
    """Return whether an item can be done now: False for the end of a request that still waits for its start."""
    return isinstance(item, Beginning) or not item.state.awaits_start
