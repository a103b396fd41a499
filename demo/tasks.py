"""Make small coding tasks with real unit tests, for the demo's agent loop.

A task asks for one Python function whose names come from a large set of word pairs, so an answer can only get them
right by copying them from the conversation. The request does not name the edge cases: the agent learns them from
failing tests and asks for a corrected function, turn by turn.

Seeds below ``FIRST_HELD_OUT_SEED`` are for training. Tasks from other seeds use identifiers that no training task
contains.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from demo.task_kinds import (
    FAMILIES,
    FIRST_WORDS,
    LITERAL_WORDS,
    NAMINGS,
    OPENINGS,
    RULES,
    SECOND_WORDS,
    STUB,
    Family,
)

FIRST_HELD_OUT_SEED = 1_000_000


@dataclass(frozen=True)
class UnitTest:
    """Hold one test: ``call`` must evaluate to ``expected`` (both Python source); ``rule`` says why."""

    name: str
    call: str
    expected: str
    rule: str


@dataclass(frozen=True)
class Task:
    """Hold the agent's request and the tests of the answer."""

    name: str
    request: str
    tests: tuple[UnitTest, ...]


@dataclass(frozen=True)
class TestResult:
    """Hold the outcome of one unit test; ``message`` is empty when it passed."""

    __test__ = False  # keeps pytest from collecting this class

    name: str
    passed: bool
    message: str


@dataclass(frozen=True)
class Plan:
    """Hold all choices behind one task, from which its text, tests and reference code follow."""

    family: Family
    names: dict[str, str]  # by letter: f, a, p, r, e
    summary: str
    request: str
    rules: tuple[tuple[int, dict[str, str]], ...]  # index into RULES and its values, in test order
    _compiled: dict[frozenset[int], Any] = field(default_factory=dict, compare=False, repr=False)

    def code(self, done: frozenset[int]) -> str:
        """Return the function with the given edge cases (indices of rules) handled."""
        slots: dict[str, list[str]] = {"before": [], "loop": [], "after": []}
        for index, values in sorted(self.rules, key=lambda rule: rule[0]):
            if index in done:
                rule = RULES[index]
                slots[rule.slot] += [line.format(**values) for line in rule.lines]
        steps = [line.format(**self.names) for line in self.family.steps]
        start = self.family.start.format(**self.names)
        body = [f'"""{self.summary}"""', *slots["before"], f"{self.names['r']} = {start}"]
        body += [f"for {self.names['e']} in {self.names['a']}:"]
        body += ["    " + line for line in (*slots["loop"], *steps)]
        body += [*slots["after"], f"return {self.names['r']}"]
        head = f"def {self.names['f']}({self.names['a']}, {self.names['p']}):"
        return "\n".join([head, *("    " + line for line in body)])

    def outcome(self, done: frozenset[int], arguments: str) -> str:
        """Return the outcome of the reference code with these edge cases. It is trusted, so it runs in this process."""
        if done not in self._compiled:
            scope: dict[str, Any] = {}
            exec(self.code(done), scope)
            self._compiled[done] = scope
        return _evaluate(f"{self.names['f']}({arguments})", self._compiled[done])


def _evaluate(call: str, scope: dict[str, Any]) -> str:
    try:
        return "returned " + repr(eval(call, scope))
    except Exception as error:
        return "raised " + type(error).__name__


def _pick_names(rng: random.Random, held_out: bool) -> dict[str, str]:
    """Return five names with distinct words. One word pair in five is kept for held-out tasks."""
    firsts = rng.sample(range(len(FIRST_WORDS)), 5)
    names: dict[str, str] = {}
    used: set[int] = set()
    for role, first in zip("fapre", firsts, strict=True):
        free = (j for j in range(len(SECOND_WORDS)) if j not in used)
        seconds = [j for j in free if ((first + j) % 5 == 0) == held_out]
        second = rng.choice(seconds)
        used.add(second)
        names[role] = f"{FIRST_WORDS[first]}_{SECOND_WORDS[second]}"
    return names


def _literal(rng: random.Random, kind: str) -> str:
    return repr(rng.choice(LITERAL_WORDS)) if kind == "str" else str(rng.randint(2, 9))


def _values(rng: random.Random, index: int, family: Family, names: dict[str, str]) -> dict[str, str]:
    """Return random numbers and words to fill into one rule."""
    value = str(rng.randint(10, 99))
    small = (RULES[index].slot == "after" and family.result == "list") or family.element == "str"
    return names | {
        "d": _literal(rng, family.param),
        "v": f"[{value}]" if family.result == "list" else value,
        "k": str(rng.randint(2, 5) if small else rng.randint(10, 50)),
    }


def _arguments(rng: random.Random, index: int | None, family: Family) -> str:
    """Return random arguments of a call, made likely to touch the given rule."""
    name = "" if index is None else RULES[index].names[0]
    fixed = {"none_input": "None", "empty_input": "[]"}
    param = "None" if name == "no_second" else _literal(rng, family.param)
    if name in fixed:
        return f"{fixed[name]}, {param}"
    entries = [_entry(rng, family.element) for _ in range(rng.randint(1, 3))]
    if name in ("many_results", "upper_limit"):
        entries += [_entry(rng, family.element) for _ in range(3)]
    if name == "repeats":
        entries.append(rng.choice(entries))
    special = {
        "none_entry": "None",
        "text_entry": "'oak'",
        "number_entry": str(rng.randint(2, 9)),
        "spaces": "' ink '",
        "upper_case": "'TEA'",
        "negative": str(-rng.randint(2, 9)),
        "large_value": str(rng.randint(60, 99)),
    }
    if name in special:
        entries.insert(rng.randrange(len(entries) + 1), special[name])
    return f"[{', '.join(entries)}], {param}"


def _entry(rng: random.Random, kind: str) -> str:
    return repr(rng.choice(LITERAL_WORDS)) if kind == "str" else str(rng.randint(1, 30))


def _find_call(rng: random.Random, plan: Plan, index: int | None) -> str | None:
    """Return arguments for which this rule alone decides the outcome. index None: no rule decides it."""
    everything = frozenset(i for i, _ in plan.rules)
    own = frozenset() if index is None else frozenset({index})
    for _ in range(30):
        arguments = _arguments(rng, index, plan.family)
        goal = plan.outcome(everything, arguments)
        if goal.startswith("raised") or plan.outcome(own, arguments) != goal:
            continue
        if index is None or goal not in (
            plan.outcome(frozenset(), arguments),
            plan.outcome(everything - own, arguments),
        ):
            return arguments
    return None


def _make_test(plan: Plan, name: str, rule: str, arguments: str) -> UnitTest:
    everything = frozenset(i for i, _ in plan.rules)
    expected = plan.outcome(everything, arguments).removeprefix("returned ")
    return UnitTest(name, f"{plan.names['f']}({arguments})", expected, rule)


def _make_tests(rng: random.Random, plan: Plan) -> tuple[UnitTest, ...] | None:
    """Return a basic test and one test per rule, or None where some rule cannot be told apart."""
    basic = _find_call(rng, plan, None)
    if basic is None:
        return None
    tests = [_make_test(plan, "basic", "the plain case", basic)]
    for index, values in plan.rules:
        arguments = _find_call(rng, plan, index)
        if arguments is None:
            return None
        style = rng.randrange(2)
        tests.append(_make_test(plan, RULES[index].names[style], RULES[index].texts[style].format(**values), arguments))
    return tuple(tests)


def solution_path(plan: Plan, tests: Sequence[UnitTest]) -> list[frozenset[int]] | None:
    """Return the rules handled in each answer if every turn adds the first failing test's rule."""
    path = [frozenset[int]()]
    while True:
        failing = [test for test in tests if not reference_result(plan, path[-1], test).passed]
        if not failing:
            return path
        position = list(tests).index(failing[0])
        if position == 0 or plan.rules[position - 1][0] in path[-1]:
            return None
        path.append(path[-1] | {plan.rules[position - 1][0]})


def reference_result(plan: Plan, done: frozenset[int], test: UnitTest) -> TestResult:
    """Run one test on the reference code, without a subprocess."""
    arguments = test.call[len(plan.names["f"]) + 1 : -1]
    return _result(test, plan.outcome(done, arguments))


def _result(test: UnitTest, outcome: str) -> TestResult:
    passed = outcome == f"returned {test.expected}"
    message = f"{test.rule}.\n{test.call} {outcome[:120]}, expected {test.expected}."
    return TestResult(test.name, passed, "" if passed else message)


def make_plan(seed: int) -> tuple[Plan, tuple[UnitTest, ...]]:
    """Return the plan and the tests of a seed's task, with which a training script can make the reference answers."""
    rng = random.Random(f"task {seed}")
    while True:
        names = _pick_names(rng, held_out=seed >= FIRST_HELD_OUT_SEED)
        family = rng.choice(FAMILIES)
        fitting = [index for index, rule in enumerate(RULES) if rule.needs in family.kinds()]
        chosen = rng.sample(fitting, rng.choice((2, 2, 3, 3, 4)))
        summary = rng.choice(family.summaries).format(**names)
        parts = (rng.choice(OPENINGS), STUB, rng.choice(NAMINGS))
        request = "\n".join(part.format(**names, summary=summary) for part in parts)
        rules = tuple((index, _values(rng, index, family, names)) for index in chosen)
        plan = Plan(family, names, summary, request, rules)
        tests = _make_tests(rng, plan)
        path = None if tests is None else solution_path(plan, tests)
        if tests is not None and path is not None and len(path) > 2:
            return plan, tests


def make_task(seed: int) -> Task:
    """Return the task of a seed. The same seed gives the same task everywhere."""
    plan, tests = make_plan(seed)
    return Task(plan.names["f"], plan.request, tests)


# Run the model's code in its own interpreter: it may loop, exit or print.
_RUNNER = """
import contextlib, io, json, resource, sys
job = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"] + 1))
outcomes, scope, broken = [], {}, None
with contextlib.redirect_stdout(io.StringIO()):
    try:
        exec(job["code"], scope)
    except BaseException as error:
        broken = "raised " + type(error).__name__
    for call in job["calls"]:
        try:
            outcomes.append(broken or "returned " + repr(eval(call, scope)))
        except BaseException as error:
            outcomes.append("raised " + type(error).__name__)
print(json.dumps(outcomes))
"""


def run_tests(task: Task, code: str, seconds: int = 5) -> list[TestResult]:
    """Run the task's tests on the code in a separate, isolated Python process.

    seconds: of CPU time, so that a busy machine does not change the results. Code that waits for ever gets more.
    """
    job = json.dumps({"code": code, "calls": [test.call for test in task.tests], "seconds": seconds})
    command = [sys.executable, "-I", "-c", _RUNNER]
    try:
        done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=20 * seconds)
        timed_out = done.returncode == -signal.SIGXCPU
    except subprocess.TimeoutExpired:
        timed_out = True
    try:
        outcomes = ["timed out"] * len(task.tests) if timed_out else json.loads(done.stdout)
    except json.JSONDecodeError:
        outcomes = ["ended early"] * len(task.tests)
    return [_result(test, outcome) for test, outcome in zip(task.tests, outcomes, strict=True)]


def feedback(results: Sequence[TestResult]) -> str:
    """Return the user's next message after a test run."""
    failed = [result for result in results if not result.passed]
    if not failed:
        return f"All {len(results)} tests pass."
    first, *others = failed
    text = f"{len(failed)} of {len(results)} tests fail. Fix {first.name}: {first.message}"
    return text + (f"\nAlso failing: {', '.join(other.name for other in others)}." if others else "")


def extract_code(reply_text: str) -> str:
    """Return the code of the first fenced block, up to the end if the fence is open; without one, the whole text."""
    _, fence, rest = reply_text.partition("```")
    if not fence:
        return reply_text
    first_line, _, code = rest.partition("\n")
    body = code if first_line.strip() in ("", "python", "py") else rest
    return body.partition("```")[0].rstrip() + "\n"
