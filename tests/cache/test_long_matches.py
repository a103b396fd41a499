"""Test that matches of thousands of tokens are right to the last one, and cost no more than short ones."""

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from tests.cache.streams import Pair, fibonacci
from tests.timing import assert_fast, cpu

RNG = np.random.default_rng(5)
RANDOM = RNG.integers(0, 5000, 1500).tolist()
TEXTS = {
    "one token": [7] * 3000,
    "a period of 700": (RANDOM[:700] * 5)[:3000],
    "a copy": RANDOM * 2,
    "a copy with other tokens here and there": RANDOM + [3 if n % 400 == 399 else t for n, t in enumerate(RANDOM)],
    "the Fibonacci word": fibonacci(3000),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_repeats_itself_is_drafted_as_the_oracle_does(name: str) -> None:
    """The text grows in pieces, so a step's look-up starts from what the previous one compared."""
    text, pair = TEXTS[name], Pair(vocab_size=6000)
    pair.start("r", text[:2400], None, None)
    pair.catch_up(10**9)
    at = 2400
    for count in [1, 2, 5, 1, 17, 3, 40, 1, 1, 130, 2, 1]:
        pair.propose(["r"], 16)
        pair.extend("r", text[at : at + count])
        at += count


def test_siblings_of_a_long_prompt_are_asked_as_the_oracle_does() -> None:
    """The siblings agree in more tokens than a request searches for, then differ, then agree again."""
    prompt, answer = RANDOM[:1300], RANDOM[1300:]
    pair = Pair(vocab_size=6000)
    names = [f"r{number}" for number in range(5)]
    for name in names:
        pair.start(name, prompt, None, "t", group="g")
    pair.catch_up(10**9)
    for step in range(24):
        for number, name in enumerate(names):
            if step >= 2 * number:  # each request is a little behind the one before it
                at = 3 * (step - 2 * number)
                pair.extend(name, [answer[at], answer[at + 1], number if at == 12 else answer[at + 2]])
        pair.propose(names, 8)


@pytest.mark.parametrize("others", [[5501], [5999]], ids=["lower", "higher"])
def test_what_a_sibling_shared_says_nothing_about_the_next_sibling(others: list[int]) -> None:
    """The next one has other tokens before a part of the shared text, at the place where it lies in the first one."""
    shared, begin, end = RANDOM[:600], [5600], [5700, 5701]
    pair = Pair(vocab_size=6000)
    pair.start("first", [*begin, *shared], None, "t", group="g")
    pair.start("next", [*others, *shared, 5800, 5801, 5802, 5803], None, "t", group="g")
    pair.start("r", [*end, *begin, *shared], None, "t", group="g")
    pair.extend("first", [5800, 5801, 5802, 5810])
    pair.catch_up(10**9)
    pair.propose(["r"], 4)
    pair.extend("r", [5800])
    pair.propose(["r"], 4)
    pair.extend("next", [*end, *begin, *shared, 5800, 5801, 5802, 5900, 5901])
    pair.catch_up(10**9)
    pair.extend("r", [5801])
    assert pair.propose(["next", "r"], 4)[1][0] == 5802
    pair.extend("r", [5802])
    assert pair.propose(["r"], 4)[0][0] == 5900


@pytest.mark.parametrize("other", [1, 5999])
def test_what_a_sibling_shared_is_forgotten_once_the_engine_takes_its_tokens_back(other: int) -> None:
    """It says most of them again, so that text which differs lies in the place of what was shared."""
    shared = RANDOM[:600]
    pair = Pair(vocab_size=6000)
    before = [*shared[-300:], 5800, 5801, 5900, 5901, 5902]
    first = [*before, 5600, *shared, 5800, 5801]
    row = [5700, 5600, *shared]
    pair.start("first", before, None, "t", group="g")
    pair.start("r", row, None, "t", group="g")
    pair.extend("first", first[len(before) :])
    pair.catch_up(10**9)
    pair.propose(["r"], 4)
    row += [5800]
    pair.step(["r"], [row], [4], [0])
    cut = first[: len(before) + 400]
    pair.step(["first"], [cut], [0], [0])
    again = [*cut, other, *first[len(cut) + 1 :], 5850, 5851]
    pair.step(["first"], [again], [0], [0])
    pair.catch_up(10**9)
    row += [5801]
    assert pair.step(["r"], [row], [4], [0]).lists()[0][0] == 5900


def alone(text: Sequence[int], known: int) -> Callable[[], None]:
    """Return a step of one request that has `known` tokens of the text and adds one in each step."""
    cache = SuffixCache()
    cache.start("r", text[:known])
    cache.catch_up()
    rest = iter(text[known:])

    def step() -> None:
        cache.propose(["r"], [16])
        cache.extend("r", [next(rest)])

    return step


def siblings(prompt: int) -> Callable[[], None]:
    """Return a step of eight requests with a prompt of `prompt` tokens, which say the same text one after another."""
    rng, cache = np.random.default_rng(1), SuffixCache()
    names, said = [f"r{number}" for number in range(8)], rng.integers(0, 50_000, 1000).tolist()
    shared = rng.integers(0, 50_000, prompt)
    for number, name in enumerate(names):
        cache.start(name, shared, group="g")
        cache.extend(name, said[: 8 - number])
    cache.catch_up()
    steps = iter(range(1000))

    def step() -> None:
        cache.propose(names, [16] * len(names))
        at = next(steps)
        for number, name in enumerate(names):
            cache.extend(name, [said[8 - number + at]])

    return step


def times(step: Callable[[], None]) -> float:
    return median(cpu(step) for _ in range(200))


@pytest.mark.alone
def test_a_step_costs_as_much_behind_a_long_text_as_behind_a_short_one() -> None:
    """Each figure is a step's time over that of the same step with a fortieth of the text before it."""
    long, short = 80_000, 2000

    def measure() -> dict[str, float]:
        period = RANDOM[:500] * 200
        return {
            "one token": times(alone([7] * (long + 300), long)) / times(alone([7] * (short + 300), short)),
            "period": times(alone(period, long)) / times(alone(period, short)),
            "siblings": times(siblings(long)) / times(siblings(short)),
        }

    assert_fast(measure, **{"one token": 2.5, "period": 2.5, "siblings": 2.5})
