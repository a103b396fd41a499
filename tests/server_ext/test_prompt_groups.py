"""Test groups of requests without a group id: those with the same prompt, or one that continues it."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentspec.cache.types import Int32Array
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.identity.prompt_groups import PromptGroups

ANY = Identity()


def prompt(seed: int, length: int = 100) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def test_all_samples_of_a_prompt_but_the_first_are_a_group() -> None:
    groups = PromptGroups(1_000_000)
    first, *others = [groups.group_of(ANY, prompt(1)) for _ in range(4)]
    assert first is None and len(set(others)) == 1 and len(others[0] or "") == 32
    assert groups.group_of(ANY, prompt(2)) is None
    assert groups.group_of(ANY, prompt(2)) not in (None, others[0])


def test_the_name_is_the_same_in_another_process() -> None:
    one, two = PromptGroups(1_000_000), PromptGroups(1_000_000)
    assert [groups.group_of(ANY, prompt(1)) for groups in (one, two)] == [None, None]
    assert one.group_of(ANY, prompt(1)) == two.group_of(ANY, prompt(1))


def test_a_later_turn_joins_the_group_of_its_first_prompt() -> None:
    groups = PromptGroups(1_000_000)
    groups.group_of(ANY, prompt(1))
    group = groups.group_of(ANY, prompt(1))
    text = prompt(1)
    for turn in range(5):
        text = np.concatenate([text, prompt(100 + turn, 50)])
        assert groups.group_of(ANY, text) == group
    other = np.concatenate([prompt(1)[:-1], prompt(7, 50)])  # shares all but the last token
    assert groups.group_of(ANY, other) is None


@pytest.mark.parametrize(("length", "joins"), [(31, False), (32, True)])
def test_a_few_tokens_that_everybody_begins_with_make_no_group(length: int, joins: bool) -> None:
    groups = PromptGroups(1_000_000)
    groups.group_of(ANY, prompt(1, length))
    assert (groups.group_of(ANY, np.concatenate([prompt(1, length), prompt(2)])) is not None) == joins


def test_a_later_turn_joins_the_longest_prompt_that_it_continues() -> None:
    groups, long = PromptGroups(1_000_000), prompt(1)
    assert [groups.group_of(ANY, tokens) for tokens in (long, long[:50])] == [None, None]
    later = groups.group_of(ANY, np.concatenate([long, prompt(2)]))
    assert later == groups.group_of(ANY, long) != groups.group_of(ANY, long[:50])


def test_a_prompt_that_returns_is_remembered_and_others_are_forgotten() -> None:
    groups = PromptGroups(max_bytes=10_000)
    for seed in range(1, 100):
        assert (groups.group_of(ANY, prompt(0)) is not None) == (seed > 1)
        assert groups.group_of(ANY, prompt(seed)) is None
    assert groups.group_of(ANY, prompt(0)) is not None and groups.group_of(ANY, prompt(1)) is None


@pytest.mark.parametrize("end", [357, 400])  # with one length too many, and with several
def test_later_turns_are_known_by_the_lengths_that_were_used_last(end: int) -> None:
    """256 lengths are kept, because a prompt is looked up once for each."""
    groups = PromptGroups(1_000_000)
    for length in range(101, end):
        groups.group_of(ANY, prompt(0, 100))
        groups.group_of(ANY, prompt(length, length))
    kept, forgotten = (np.concatenate([prompt(seed, length), [5, 6]]) for seed, length in ((0, 100), (101, 101)))
    assert groups.group_of(ANY, kept) == groups.group_of(ANY, prompt(0, 100)) is not None
    assert groups.group_of(ANY, forgotten) is None


@pytest.mark.parametrize("field", ["tenant", "principal"])
def test_nobody_joins_anothers_group(field: str) -> None:
    ada, bob = ({field: name} for name in ("ada", "bob"))
    groups = PromptGroups(1_000_000)
    assert groups.group_of(Identity(**ada), prompt(1)) is None  # type: ignore[arg-type]
    assert groups.group_of(Identity(**bob), prompt(1)) is None  # type: ignore[arg-type]
    of_ada, of_bob = (groups.group_of(Identity(**who), prompt(1)) for who in (ada, bob))  # type: ignore[arg-type]
    assert of_ada is not None and (field == "tenant" or of_ada != of_bob)


@pytest.mark.parametrize("field", ["tenant", "principal"])
def test_a_later_turn_joins_the_group_of_its_own_callers_prompt_alone(field: str) -> None:
    ada, bob = (replace(Identity("t", principal="p"), **{field: name}) for name in ("ada", "bob"))  # type: ignore[arg-type]
    groups = PromptGroups(1_000_000)
    groups.group_of(ada, prompt(1))
    longer = np.concatenate([prompt(1), prompt(2)])
    assert groups.group_of(bob, longer) is None
    assert groups.group_of(ada, longer) == groups.group_of(ada, prompt(1)) is not None


@pytest.mark.parametrize("given", [{"group": "g"}, {"session": "s"}, {"scope": "session"}, {"scope": "none"}])
def test_what_is_given_wins(given: dict[str, Any]) -> None:
    groups, identity = PromptGroups(1_000_000), Identity(**given)
    assert {groups.group_of(identity, prompt(1)) for _ in range(3)} == {identity.group}
    assert groups.bytes == 0


def test_prompts_that_cannot_be_hashed_are_left_alone() -> None:
    groups = PromptGroups(1_000_000)
    for tokens in (np.array([], np.int32), np.array([-5, 1], np.int32), prompt(1, 40_000)):
        assert [groups.group_of(ANY, tokens) for _ in range(2)] == [None, None]


def test_memory_is_bounded_and_counted() -> None:
    groups = PromptGroups(max_bytes=100_000)
    for seed in range(3_000):
        groups.group_of(ANY, np.array([seed, *([2] * (seed % 1000))], np.int32))
    tracemalloc.start()
    for seed in range(3_000):  # more than ten times what fits
        groups.group_of(ANY, np.array([-1 - seed % 2, 3_000 + seed], np.int32))
        groups.group_of(ANY, np.array([3_000 + seed, *([2] * (seed % 1000))], np.int32))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 50_000 < groups.bytes <= 100_000 and grown < 150_000
