"""Generate training text: whole agent sessions that the demo's agent would have with a perfect model."""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo.tasks import Plan, UnitTest, feedback, make_plan, reference_result, solution_path

SYSTEM_PROMPTS = (
    "You are a careful Python programmer.",
    "You write small Python functions.",
    "You are a helpful assistant.",
)


@dataclass(frozen=True)
class Message:
    """Hold one chat message. ``learn`` marks the replies that the model is trained to write."""

    role: str
    content: str
    learn: bool = False


def session(seed: int) -> list[Message]:
    """Return a whole session for one task: a first answer, then one fix per failing test."""
    rng = random.Random(f"session {seed}")
    plan, tests = make_plan(seed)
    path = solution_path(plan, tests) or []
    messages = _system(rng)
    messages.append(Message("user", plan.request))
    opening = ""
    for done in path:
        messages.append(Message("assistant", _reply(opening, plan.code(done)), learn=True))
        if done == path[-1]:
            break
        messages.append(Message("user", _report(plan, tests, done)))
        opening = _fix_opening(plan, tests, done)
        if rng.random() < 0.05:  # repeat the answer unchanged, so that the model learns to fix it later
            messages.append(Message("assistant", _reply(opening, plan.code(done))))
            messages.append(Message("user", _report(plan, tests, done)))
    return messages


def first_turns(seed: int, replies: int) -> list[Message]:
    """Return the start of a session, up to the given number of replies: short sequences for early training."""
    messages = session(seed)
    ends = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return messages[: ends[min(replies, len(ends)) - 1] + 1]


def copying(seed: int) -> list[Message]:
    """Return a session that repeats a function unchanged, to teach copying from the context before anything else."""
    rng = random.Random(f"copying {seed}")
    plan, tests = make_plan(seed)
    path = solution_path(plan, tests) or []
    code = f"```python\n{plan.code(rng.choice(path))}\n```"
    return [
        *_system(rng),
        Message("user", f"Repeat this function:\n{code}"),
        Message("assistant", code, learn=True),
    ]


def _system(rng: random.Random) -> list[Message]:
    return [Message("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.3 else []


def _reply(opening: str, code: str) -> str:
    return f"{opening}```python\n{code}\n```"


def _report(plan: Plan, tests: tuple[UnitTest, ...], done: frozenset[int]) -> str:
    return feedback([reference_result(plan, done, test) for test in tests])


def _fix_opening(plan: Plan, tests: tuple[UnitTest, ...], done: frozenset[int]) -> str:
    first = next(test for test in tests if not reference_result(plan, done, test).passed)
    return f"Fix {first.name}: {first.rule}.\n"
