"""Make samples for tests."""

from agentspec.rollout import Sample


def sample(number: int = 0, epoch: int = 0, **changes: object) -> Sample:
    return Sample("p", epoch, number, [1, 2], [3, 4], [-0.1, -0.2], "text", **changes)  # type: ignore[arg-type]
