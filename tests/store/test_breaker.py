"""Test the circuit breaker, on a clock of the test's own."""

from agentspec.cache.store import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock, **options: float) -> CircuitBreaker:
    breaker = CircuitBreaker(clock=clock, first_pause=1.0, **options)  # type: ignore[arg-type]
    for _ in range(5):
        breaker.failure()
    assert breaker.state == "open"
    return breaker


def test_it_opens_at_the_fifth_failure_in_a_row_and_says_so_once() -> None:
    breaker = CircuitBreaker(clock=Clock())
    assert [breaker.failure() for _ in range(4)] == [False] * 4
    assert breaker.allow()
    assert breaker.failure() is True
    assert breaker.state == "open"
    assert not breaker.allow()


def test_it_opens_at_once_if_a_call_that_fails_takes_long() -> None:
    breaker = CircuitBreaker(clock=Clock(), first_pause=1.0)
    assert breaker.failure(slow=True) is True
    assert (breaker.state, breaker.wait()) == ("open", 1.0)


def test_a_success_between_failures_starts_the_count_again() -> None:
    breaker = CircuitBreaker(clock=Clock())
    for _ in range(3):
        assert [breaker.failure() for _ in range(4)] == [False] * 4
        assert breaker.success() is False
    assert breaker.state == "closed"
    assert breaker.wait() == 0


def test_failures_before_it_opens_are_spaced_out() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock=clock, retry_delay=0.1)
    waits = []
    for _ in range(4):
        breaker.failure()
        waits.append(round(breaker.wait(), 6))
    assert waits == [0.1, 0.2, 0.4, 0.8]
    clock.now += 0.9
    assert breaker.wait() == 0


def test_after_the_pause_one_call_probes_and_no_other() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert breaker.wait() == 1.0
    clock.now += 0.999
    assert not breaker.allow()
    clock.now += 0.001
    assert breaker.allow()
    assert breaker.state == "half-open"
    assert not breaker.allow()


def test_a_good_probe_closes_it_and_resets_the_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1
    assert breaker.allow()
    assert breaker.success() is True
    assert breaker.state == "closed"
    assert breaker.allow()
    for _ in range(5):
        breaker.failure()
    assert breaker.wait() == 1.0


def test_bad_probes_double_the_pause_up_to_the_maximum_without_a_new_outage() -> None:
    clock = Clock()
    breaker = opened(clock, max_pause=6.0)
    pauses = []
    for _ in range(5):
        pauses.append(breaker.wait())
        clock.now += breaker.wait()
        assert breaker.allow()
        assert breaker.failure() is False
    assert pauses == [1.0, 2.0, 4.0, 6.0, 6.0]
