"""Test large sessions that are indexed beside the cache and put into it whole."""

import random
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentspec.cache import Budget, FinishedTurn, HistoryWindow, SuffixCache
from agentspec.errors import InvalidInputError, InvalidTokenError
from tests.cache.test_stalls import STALL, Texts, most
from tests.timing import assert_fast, cpu

pytestmark = pytest.mark.usefixtures("clock_on")


def conversation(
    seed: int, turns: int, session: str = "s", length: int = 60
) -> tuple[list[FinishedTurn], list[list[int]]]:
    """Return turns of a session with branches, groups and parallel calls, and the context after each."""
    rng = random.Random(seed)
    source = SuffixCache()
    contexts: list[list[int]] = [[]]
    found = []
    for number in range(turns):
        base = contexts[-1] if rng.random() < 0.7 else rng.choice(contexts)
        piece = rng.choice(contexts)[-rng.randrange(1, length) :] if rng.random() < 0.5 else []
        prompt = base + rng.choices(range(40), k=rng.randrange(1, length)) + piece
        response = rng.choices(range(40), k=rng.randrange(1, length)) + piece[: length // 2]
        group = "g" if rng.random() < 0.2 else None
        source.start("r", prompt, session=session, group=group, tenant="t")
        source.extend("r", response)
        turn = source.finish("r", name=("w", number + 1))
        assert turn is not None
        found.append(turn)
        contexts.append(prompt + response)
    return found, contexts


def drafts(
    cache: SuffixCache, contexts: list[list[int]], seed: int = 0
) -> list[tuple[list[int], list[float], list[int]]]:
    """Return the drafts behind pieces of these contexts, for requests of the session, its group and the tenant."""
    rng = random.Random(seed)
    found = []
    for names in ({"session": "s"}, {"session": "s", "group": "g"}, {"session": "x", "group": "g"}, {}):
        for _ in range(40):
            context = rng.choice(contexts)
            at = rng.randrange(len(context) + 1)
            cache.start("probe", context[max(0, at - rng.randrange(1, 200)) : at], tenant="t", **names)  # type: ignore[arg-type]
            cache.catch_up()
            draft = cache.propose(["probe"], 16, cost=0.0)[0]
            found.append((draft.token_ids.tolist(), draft.probabilities.tolist(), draft.sources.tolist()))
            cache.abort("probe")
    return found


@pytest.mark.parametrize("seed", range(6))
def test_it_drafts_as_if_its_turns_had_been_restored(seed: int) -> None:
    turns, contexts = conversation(seed, 60)
    ordinary, prepared = SuffixCache(), SuffixCache()
    for cache in (ordinary, prepared):
        for turn in conversation(99, 5, "other")[0]:
            cache.restore(turn)
        if seed % 2:
            cache.restore(turns[0])  # the session is held in part, and one of its requests runs
        cache.start("running", contexts[3], session="s", tenant="t")
        cache.catch_up()
        cache.propose(["running"], 8)
    assert prepared.adopt(prepared.prepare(turns), turns[0])
    for turn in turns:
        ordinary.restore(turn)
    for turn in turns:
        prepared.restore(turn)
    ours, theirs = prepared.stats(), ordinary.stats()
    assert (ours.tokens, ours.sessions, ours.requests) == (theirs.tokens, theirs.sessions, theirs.requests)
    assert ours.pending < theirs.pending  # the session is indexed already
    for cache in (ordinary, prepared):
        cache.catch_up()
        cache.extend("running", contexts[3][-5:])
    first, second = (cache.propose(["running"], 16, cost=0.0)[0] for cache in (ordinary, prepared))
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert drafts(prepared, contexts) == drafts(ordinary, contexts)
    core = prepared._core
    assert core.recount()[0] == core.stats()[0] and core.recount()[1] == core.stats()[1]
    for turn in turns:  # the cache knows all records
        prepared.restore(turn)
    assert prepared.stats().tokens == ordinary.stats().tokens
    for cache in (ordinary, prepared):
        cache.finish("running", name=("w", 1000))
        cache.remove_session("t", "s")
        cache.catch_up()
    assert prepared.stats().tokens == ordinary.stats().tokens
    assert drafts(prepared, contexts) == drafts(ordinary, contexts)


def test_what_would_be_lost_is_restored_turn_by_turn() -> None:
    turns, _ = conversation(1, 10)
    cache = SuffixCache()
    cache.restore(turns[-1])
    before = cache.stats()
    assert not cache.adopt(cache.prepare(turns[:-1]), turns[0])  # the cache holds a later turn
    assert cache.stats() == before
    small = SuffixCache(per_session=Budget(tokens=100))
    assert not small.adopt(small.prepare(turns), turns[0])
    assert small.stats().tokens == 0 and not small.has_session("t", "s")
    assert cache.adopt(cache.prepare(turns), turns[0])
    assert cache.has_session("t", "s")


@pytest.mark.parametrize("group", [None, "g"])
def test_a_turn_without_a_name_is_not_lost(group: str | None) -> None:
    """Stored turns have record names; a turn that ended here since then has none."""
    turns, contexts = conversation(1, 10)
    turns = [replace(turn, group=group) for turn in turns]
    cache = SuffixCache()
    for turn in turns:
        cache.restore(turn)
    said = list(range(100, 130))
    cache.start("r", contexts[-1], session="s", group=group, tenant="t")
    cache.extend("r", said)
    cache.finish("r")
    assert not cache.adopt(cache.prepare(turns), turns[0])
    cache.start("q", said[:10], session="s", tenant="t", scope="session")
    cache.catch_up()
    assert cache.propose(["q"], 4, cost=0.0)[0].token_ids.tolist() == said[10:14]


def test_a_response_without_a_name_is_not_lost_to_a_longer_session() -> None:
    turns, contexts = conversation(1, 10)
    cache = SuffixCache()
    said = list(range(100, 130))
    cache.start("r", contexts[-1], session="s", tenant="t", scope="session")
    cache.extend("r", said)
    cache.finish("r", output_limit=20)
    assert not cache.adopt(cache.prepare([replace(turn, group=None) for turn in turns]), turns[0])
    assert cache.has_session("t", "s")


def test_a_family_beyond_the_budget_of_a_session_is_restored_turn_by_turn() -> None:
    """A family holds the end of the prompt with each response, so it can be larger than its session."""
    source = SuffixCache()
    context: list[int] = []
    turns = []
    for number in range(150):
        context += [number]
        source.start("r", context, session="s", tenant="t")
        source.extend("r", [1000 + number, 2000 + number])
        turn = source.finish("r", name=("w", number + 1))
        assert turn is not None
        turns.append(turn)
        context += [1000 + number, 2000 + number]
    restored, cache = (SuffixCache(per_session=Budget(tokens=1000)) for _ in range(2))
    assert not cache.adopt(cache.prepare(turns), turns[0])
    for turn in turns:
        restored.restore(turn)
        cache.restore(turn)
    assert cache.stats().tokens == restored.stats().tokens


def test_a_session_that_another_one_has_started_is_restored_turn_by_turn() -> None:
    """Adopting it whole would replace the responses of the other session's family."""
    turns, _ = conversation(1, 5)
    cache = SuffixCache()
    cache.start("r", [1, 2], session="s", tenant="t", parent="root")
    before = cache.stats().tokens
    assert not cache.adopt(cache.prepare(turns), turns[0]) and cache.stats().tokens == before


def test_a_session_beyond_its_budget_is_restored_turn_by_turn() -> None:
    text = np.arange(1500, dtype=np.int32)
    turn = FinishedTurn("t", "s", 0, text, text[:0], writer="w", number=1)
    for budget, fits in ((1000, False), (2000, True)):
        cache = SuffixCache(per_session=Budget(tokens=budget))
        assert cache.adopt(cache.prepare([turn]), turn) == fits


def test_responses_that_were_prepared_count_as_written_now() -> None:
    turns, _ = conversation(1, 5)
    cache = SuffixCache(history=HistoryWindow.parse("1 weights"))
    for _ in range(3):
        cache.begin_weights()
    assert cache.adopt(cache.prepare(turns), turns[0])
    before = cache.stats().tokens
    cache.start("r", [1, 2], session="s", tenant="t")
    assert cache.stats().tokens == before
    cache.abort("r")
    cache.begin_weights()
    cache.start("r", [1, 2], session="s", tenant="t")
    assert cache.stats().tokens < before


def test_a_session_that_was_prepared_makes_room_for_itself_at_once() -> None:
    text = np.arange(1500, dtype=np.int32)
    cache = SuffixCache(max_tokens=4000)
    for number in range(10):
        turn = FinishedTurn("t", f"s{number}", 0, text, text[:0], writer="w", number=1)
        assert cache.adopt(cache.prepare([turn]), turn) and cache.stats().tokens <= 4000


def test_it_counts_in_the_budget() -> None:
    texts = Texts()
    cache = SuffixCache(vocab_size=60_000, max_bytes=4_000_000)
    for number in range(20):
        turns = [
            FinishedTurn("t", f"s{number}", 0, texts.make(20_000), texts.make(100), writer="w", number=100 * number + n)
            for n in range(1, 4)
        ]
        prepared = cache.prepare(turns)
        assert prepared.bytes() > 400_000
        assert cache.adopt(prepared, turns[0])
        cache.catch_up()
        assert cache.stats().bytes <= 4_000_000
    assert cache.has_session("t", "s19") and not cache.has_session("t", "s0")


def test_bad_turns_are_refused() -> None:
    cache = SuffixCache(vocab_size=100)
    (turn,), _ = conversation(1, 1)
    with pytest.raises(InvalidInputError, match="turns: give those of one session"):
        cache.prepare([turn, replace(turn, session="other")])
    with pytest.raises(InvalidInputError, match="turns"):
        cache.prepare([replace(turn, session=None)])
    with pytest.raises(InvalidInputError, match="turns"):
        cache.prepare([])
    with pytest.raises(InvalidTokenError):
        cache.prepare([replace(turn, response=np.array([100], np.int32))])
    assert cache.stats().tokens == 0


@pytest.mark.alone
def test_no_step_waits_while_a_large_session_is_indexed() -> None:
    def measure() -> dict[str, float]:
        texts, cache = Texts(), SuffixCache(vocab_size=60_000)
        turns = [
            FinishedTurn("t", "s", 0, texts.make(9_500), texts.make(500), writer="w", number=n + 1) for n in range(50)
        ]
        cache.start("r", texts.make(500), session="s", tenant="t")
        cache.catch_up()
        ready: list[object] = []
        thread = threading.Thread(target=lambda: ready.append(cache.prepare(turns)))
        thread.start()
        steps = []
        while thread.is_alive():
            steps.append(cpu(lambda: cache.propose(["r"], 8)))
            time.sleep(0.002)
        few = len(steps) <= 20  # steps waited for the thread, which takes a second, or the machine is busy
        adopt = cpu(lambda: cache.adopt(ready[0], turns[0]))  # type: ignore[arg-type]
        assert cache.stats().pending == 0
        probe = turns[40].response[100:110].tolist()
        cache.extend("r", probe)
        draft = cache.propose(["r"], 4)[0]
        assert draft.token_ids.tolist() == turns[40].response[110 : 110 + len(draft.token_ids)].tolist()
        assert draft.source == "session"
        restores = [cpu(lambda turn=turn: cache.restore(turn)) for turn in turns]  # type: ignore[misc]
        return {"step": float("inf") if few else most(steps), "adopt": adopt, "restore": most(restores)}

    assert_fast(measure, step=STALL, adopt=5 * STALL, restore=STALL)


@pytest.mark.parametrize("change", [{"tenant": "u"}, {"tenant": None}, {"session": "other"}, {"session": None}])
def test_a_prepared_session_is_adopted_by_its_own_turns_alone(change: dict[str, Any]) -> None:
    """Under another tenant an erasure would not find what the session said."""
    turns, _ = conversation(1, 3)
    cache = SuffixCache()
    prepared = cache.prepare(turns)
    with pytest.raises(InvalidInputError, match="of: give a turn of the session"):
        cache.adopt(prepared, replace(turns[0], **change))
    with pytest.raises(InvalidInputError, match="turn: give a FinishedTurn"):
        cache.adopt(prepared, None)  # type: ignore[arg-type]
    assert cache.adopt(prepared, turns[0])
