"""Stand in for a GPU's kernels and recorders: some work, and some are broken on purpose."""

from collections.abc import Callable

import torch
from torch import Tensor

from agentspec.server_ext.speculator import DraftedTokens
from agentspec.server_ext.speculator.gpu.graphs import Run
from agentspec.server_ext.speculator.selection import PLAIN, Operations


class DirectRecorder:
    """Record nothing: a replay is another run."""

    def prepare(self, run: Run) -> None:
        run()

    def record(self, run: Run) -> Run:
        return run


class StaleRecorder(DirectRecorder):
    """Replay the result of the recorded run, like a graph that reads other memory than its buffers."""

    def record(self, run: Run) -> Run:
        result = run()
        return lambda: result


class WrongRecorder(DirectRecorder):
    """Replay another result than the run's."""

    def record(self, run: Run) -> Run:
        def replay() -> DraftedTokens:
            result = run()
            return result._replace(top_probabilities=2.0 * result.top_probabilities)

        return replay


class FailingRecorder(DirectRecorder):
    """Raise in `prepare`, in `record` or in the replay."""

    def __init__(self, place: str) -> None:
        self._place = place

    def prepare(self, run: Run) -> None:
        self._fail("prepare")
        run()

    def record(self, run: Run) -> Run:
        self._fail("record")
        return self._replay

    def _replay(self) -> DraftedTokens:
        raise RuntimeError("replay is broken on purpose")

    def _fail(self, place: str) -> None:
        if place == self._place:
            raise RuntimeError(f"{place} is broken on purpose")


Choose = Callable[[Tensor, Tensor, Tensor | None], DraftedTokens]


def _changed(change: Callable[[DraftedTokens, Tensor], DraftedTokens]) -> Operations:
    """Return operations whose choice goes through ``change``, which gets the choice and the given tokens."""

    def choose(parts: Tensor, given: Tensor, vocabulary: Tensor | None) -> DraftedTokens:
        return change(PLAIN.choose(parts, given, vocabulary), given)

    return PLAIN._replace(choose=choose)


def _another_token(chosen: DraftedTokens, given: Tensor) -> DraftedTokens:
    other = torch.where(chosen.top > 0, chosen.top - 1, chosen.top + 1)
    return chosen._replace(top=other, tokens=torch.where(given < 0, other, given))


def _raise(*_: object) -> Tensor:
    raise RuntimeError("the kernel is broken on purpose\nwith details")


BROKEN = {
    "another token": _changed(_another_token),
    "no token": _changed(lambda chosen, given: chosen._replace(tokens=chosen.tokens + 10_000)),
    "twice the probability": _changed(lambda chosen, _: chosen._replace(probabilities=2 * chosen.probabilities)),
    "another top probability": _changed(
        lambda chosen, _: chosen._replace(top_probabilities=0.9 * chosen.top_probabilities)
    ),
    "not a number": _changed(lambda chosen, _: chosen._replace(probabilities=chosen.probabilities * torch.nan)),
    "ignores what is given": _changed(lambda chosen, _: chosen._replace(tokens=chosen.top)),
    "wrong in large batches": _changed(
        lambda chosen, given: chosen if len(given) <= 64 else _another_token(chosen, given)
    ),
    "wrong in one row": _changed(
        lambda chosen, given: DraftedTokens(
            *(torch.cat((a[:-1], b[-1:])) for a, b in zip(chosen, _another_token(chosen, given), strict=True))
        )
    ),
    "raises": PLAIN._replace(score=_raise),
    "cannot be built": PLAIN._replace(prepare=lambda speculator: _raise()),
}
