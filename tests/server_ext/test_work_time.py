"""Test the CPU time of a step for work beside drafting: what is done in it, and what waits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentspec.server_ext.pricing.work_time import WorkTime
from tests.server_ext.slow_rows import ROWS, Rows, rows

__all__ = ["rows"]


def test_stored_turns_are_applied_once_in_a_step_and_wait_for_one_at_most(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.begin("stays0")
    applied: list[float] = []
    persistence = rows.engine._persistence
    monkeypatch.setattr(persistence, "has_loaded", lambda: True)
    monkeypatch.setattr(persistence, "has_loaded_of", lambda _: True)
    monkeypatch.setattr(persistence, "apply_loaded", applied.append)
    rows.begin_first("r1")
    assert len(applied) == 1  # applied before the start, in a part of the step's time
    rows.step()
    assert len(applied) == 1
    rows.step()
    assert len(applied) == 2


def test_the_work_of_a_step_none_of_whose_requests_has_started_is_counted_as_its_own(rows: Rows) -> None:
    rows.begin("r0")
    rows.step()
    rows.end("r0", last=False)
    rows.begin_first("r1")
    del rows.rows["r1"], rows.lengths["r1"]  # its prompt is still being computed
    before = rows.engine.stats()["seconds"]["beside"]
    for _ in range(2):
        rows.step()
    after = rows.engine.stats()["seconds"]["beside"]
    assert (rows.started, rows.finished) == (2, 1)
    new = [now - then for now, then in zip(after["counts"], before["counts"], strict=True)]
    assert sum(new) == 2 and not any(new[: after["bounds"].index(0.0025) + 1])  # 3 ms each, of CPU time


class Clock:
    """Stand in for the module ``time``: time passes where a test says so, whatever else the machine does."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = monotonic = perf_counter

    def perf_counter_ns(self) -> int:
        return round(1e9 * self.now)

    thread_time_ns = perf_counter_ns

    def taking(self, call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """Make a call take `seconds`."""

        def slowly(*args: Any, **names: Any) -> Any:
            self.now += seconds
            return call(*args, **names)

        return slowly


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("engine", "requests.turnover", "pricing.work_time"):
        monkeypatch.setattr(f"agentspec.server_ext.{module}.time", clock)
    return clock


@pytest.mark.parametrize(("step_seconds", "started"), [(0.001, 3), (1.0, ROWS)])
def test_a_step_whose_prompts_took_long_starts_more_requests(clock: Clock, step_seconds: float, started: int) -> None:
    rows = Rows(0.0)
    rows.engine.cache.start = clock.taking(rows.engine.cache.start, 5e-5)  # type: ignore[method-assign]
    rows.begin("first0")
    lookup = rows.engine._lookup
    assert lookup is not None
    lookup.allowance = replace(lookup.allowance, work=1e-5)  # 2 % of a step of .5 ms
    clock.now += step_seconds
    rows.begin("r1", "r2", "r3")
    assert rows.started == started
    rows.engine.close()


@pytest.mark.parametrize("verify_cost", [None, 0.03])
def test_a_step_whose_duration_nobody_tells_works_for_two_percent_of_the_time_between_calls(
    clock: Clock, verify_cost: float | None
) -> None:
    rows = Rows(0.0, verify_cost)
    rows.begin("r0")
    for _ in range(20):
        clock.now += 0.002
        rows.step()
    clock.now += 0.002
    rows.begin("r1")  # a batch of its own
    assert rows.engine._lookup is not None
    assert rows.engine._lookup.allowance.work == pytest.approx(0.02 * 0.002)  # half a millisecond, where it is unknown
    rows.engine.close()


def test_stored_turns_wait_for_two_steps_that_have_no_time_for_them() -> None:
    work = WorkTime()
    answers = []
    for _ in range(6):
        work._spent_ns = 10**9  # starts and ends
        with work:
            must, seconds = work.must_apply(), work.for_stored_turns(5e-4, any_wait=True)
            work.note_stored_turns(waited=seconds is None)
        answers.append((must, seconds))
        work.take(0)
    assert answers == 2 * [(False, None), (False, None), (True, 0.0)]
    work._spent_ns = 10**9
    with work:
        assert work.for_stored_turns(5e-4, any_wait=False) == 0.0  # none wait
