"""Test sessions as trees of turns: branches, restoring in any order and twice, eviction and return, several writers."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import Budget, FinishedTurn, SuffixCache, context_hashes
from agentspec.errors import InvalidInputError

Tokens = list[int]


def run(cache: SuffixCache, prompt: Tokens, response: Tokens, number: int = 0, **names: str) -> FinishedTurn:
    cache.start("run", prompt, **{"session": "s", **names})  # type: ignore[arg-type]
    cache.extend("run", response)
    turn = cache.finish("run", name=("writer", number) if number else None)
    assert turn is not None
    return turn


def behind(cache: SuffixCache, context: Tokens, max_draft: int = 1) -> Tokens:
    """Return what the session drafts behind a context."""
    cache.start("probe", [], session="s", scope="session")
    cache.extend("probe", context)
    tokens: Tokens = cache.propose(["probe"], max_draft, cost=0.0)[0].token_ids.tolist()
    cache.abort("probe")
    return tokens


def check_pairs(cache: SuffixCache, contexts: Iterable[Tokens]) -> None:
    """Check that no texts were spliced: each drafted token must follow its context's last token in some context."""
    said: dict[int, set[int]] = {}
    for context in contexts:
        for token, follower in zip(context, [*context[1:], -1], strict=True):
            said.setdefault(token, set()).add(follower)
    for token, after in said.items():
        for drafted in behind(cache, [token]):
            assert drafted in after, f"{token} was never followed by {drafted}"


def conversation(turns: int, seed: int = 0, length: int = 30) -> tuple[list[Tokens], list[Tokens]]:
    """Return prompts that repeat all earlier text, and their responses. New tokens differ from all others."""
    rng = random.Random(seed)
    fresh = iter(range(1_000_000 * (seed + 1), 1_000_000 * (seed + 2)))
    context: Tokens = []
    prompts, responses = [], []
    for _ in range(turns):
        context = [*context, *(next(fresh) for _ in range(rng.randrange(1, length)))]
        prompts.append(context)
        responses.append([next(fresh) for _ in range(rng.randrange(1, length))])
        context = context + responses[-1]
    return prompts, responses


def finished(
    cache: SuffixCache, prompts: list[Tokens], responses: list[Tokens], named: bool = True
) -> list[FinishedTurn]:
    """Run a conversation in a cache and return its turns, whose records are 1, 2, ..."""
    pairs = enumerate(zip(prompts, responses, strict=True), 1)
    return [run(cache, prompt, response, number if named else 0) for number, (prompt, response) in pairs]


def accepted_of(cache: SuffixCache, prompt: Tokens, response: Tokens) -> int:
    """Return how many of the session's draft tokens a replay of a response accepts."""
    cache.start("replay", prompt, session="s")
    accepted = 0
    text = list(prompt)
    drafted: Tokens = []
    while len(text) < len(prompt) + len(response):
        rest = response[len(text) - len(prompt) :]
        right = 0
        while right < min(len(drafted), len(rest) - 1) and drafted[right] == rest[right]:
            right += 1
        text += rest[: right + 1]
        table = np.array([text], np.int32)
        result = cache.step(["replay"], table, [0], [len(text)], [16], [len(drafted)], cost=0.0)
        accepted += int(result.accepted[0, 1])
        drafted = result.lists()[0]
    cache.abort("replay")
    return accepted


def test_a_turn_that_finishes_cuts_off_no_load() -> None:
    """A request of the session ends after a tenth of its 200 stored turns is restored; the rest still counts."""
    source, cache = SuffixCache(), SuffixCache()
    prompts, responses = conversation(200)
    turns = finished(source, prompts, responses)
    cache.start("first", [7, 8, 9], session="s")
    for turn in turns[:20]:
        cache.restore(turn)
    cache.extend("first", [10, 11])
    cache.finish("first")
    for turn in turns[20:]:
        cache.restore(turn)
    for prompt, response in zip(prompts, responses, strict=True):
        assert behind(cache, [prompt[-1]]) == response[:1]
        assert behind(cache, [7, 8, 9]) == [10]
    check_pairs(cache, [*(p + r for p, r in zip(prompts, responses, strict=True)), [7, 8, 9, 10, 11]])


def test_an_evicted_session_comes_back_from_its_records() -> None:
    prompts, responses = conversation(20)
    cache = SuffixCache()
    turns = finished(cache, prompts, responses)
    cache.mark_loaded(None, "s")
    retold = [7, *prompts[-1][-40:]], responses[-1]
    before = accepted_of(cache, *retold)
    tokens = cache.stats().tokens
    cache.resize(max_tokens=1)
    cache.catch_up()
    assert not cache.has_session(None, "s") and cache.needs_load(None, "s")
    assert accepted_of(cache, *retold) == 0
    cache.resize()
    for turn in turns:
        cache.restore(turn)
    assert accepted_of(cache, *retold) == before > 0
    assert cache.stats().tokens == tokens  # group and tenant lost theirs, too


def test_records_that_a_cache_holds_change_nothing() -> None:
    """A load requested before a turn ended brings that turn again. Another writer's copy of it is another record."""
    cache = SuffixCache()
    prompts, responses = conversation(5)
    turns = finished(cache, prompts, responses)
    before = cache.stats()
    for turn in turns:
        cache.restore(turn)
    assert cache.stats() == before
    for turn in turns:
        cache.restore(replace(turn, writer=""))  # a turn without a record equals a held one
    assert cache.stats() == before
    for turn in turns:
        cache.restore(replace(turn, writer="other"))  # group and tenant hold the text twice
    overlaps = [min(len(prompt), 8) for prompt in prompts]
    twice = 2 * sum(1 + overlap + len(response) for overlap, response in zip(overlaps, responses, strict=True))
    assert cache.stats().tokens == before.tokens + twice


@pytest.mark.parametrize("named", [True, False])
def test_turns_may_come_in_any_order_and_twice(named: bool) -> None:
    prompts, responses = conversation(12, length=90)
    turns = finished(SuffixCache(), prompts, responses, named)
    contexts = [p + r for p, r in zip(prompts, responses, strict=True)]
    for seed in range(6):
        order = random.Random(seed).choices(turns, k=20) + random.Random(seed).sample(turns, len(turns))
        cache = SuffixCache()
        for turn in order:
            cache.restore(turn)
        check_pairs(cache, contexts)
        begins = {prompt[-1] for prompt in prompts} | {context[-1] for context in contexts}
        for token, after in pairwise(contexts[-1]):  # a turn without its parent has nothing in front of its first token
            assert token in begins or behind(cache, [token]) == [after]


def test_two_writers_splice_nothing() -> None:
    """Two engines serve one session at the same time and store their turns. A third reads both logs mixed."""
    engines = [SuffixCache(), SuffixCache()]
    shared, answers = conversation(3)
    turns: list[FinishedTurn] = []
    contexts: list[Tokens] = []
    for prompt, response in zip(shared, answers, strict=True):  # the first engine begins the conversation
        turns.append(run(engines[0], prompt, response, len(turns) + 1))
        contexts.append(prompt + response)
    for turn in turns:
        engines[1].restore(turn)
    for number, engine in enumerate(engines):
        prompts, responses = conversation(6, seed=number + 1)
        for at, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            engine.start("run", contexts[2] + prompt, session="s")
            engine.extend("run", response)
            ended = engine.finish("run", name=(f"engine{number}", at + 1))
            before = len(contexts[-1]) if at else len(contexts[2])
            assert ended is not None and ended.kept == before
            turns.append(ended)
            contexts.append(contexts[2] + prompt + response)
    for seed in range(4):
        reader = SuffixCache()
        mixed = turns if seed == 0 else random.Random(seed).sample(turns, len(turns))
        for turn in mixed:
            reader.restore(turn)
        check_pairs(reader, contexts)
    for turn in turns:
        for engine in engines:
            engine.restore(turn)
    for engine in engines:
        check_pairs(engine, contexts)


def test_a_turn_without_its_parent_stands_alone_and_has_children() -> None:
    prompts, responses = conversation(4, length=50)
    source = SuffixCache()
    turns = finished(source, prompts, responses)
    cache = SuffixCache()
    for turn in turns[2:]:
        cache.restore(turn)
    own = turns[2].prompt_tail.tolist() + responses[2] + turns[3].prompt_tail.tolist() + responses[3]
    assert cache.stats().sessions == 1
    cache.start("r", prompts[3] + responses[3] + [1], session="s")
    cache.extend("r", [2])
    child = cache.finish("r")
    assert child is not None and child.kept == len(prompts[3] + responses[3])
    own += [1, 2]
    assert all(behind(cache, [own[at]]) == [own[at + 1]] for at in range(len(own) - 1))
    check_pairs(cache, [own])


def test_a_request_indexes_what_its_session_lacks() -> None:
    """The session holds only the end of a long context. The request still drafts from its beginning."""
    prompts, responses = conversation(4, length=50)
    source, cache = SuffixCache(), SuffixCache()
    turns = finished(source, prompts, responses)
    for turn in turns[2:]:
        cache.restore(turn)
    context = prompts[3] + responses[3]
    for at in range(0, len(context) - 1, 5):
        cache.start("r", context, session="s")
        cache.extend("r", [context[at]])
        draft = cache.propose(["r"], 1)[0]
        assert draft.token_ids.tolist() == [context[at + 1]]
        missing = len(context) - len(turns[2].prompt_tail) - len(responses[2]) - len(turns[3].prompt_tail)
        assert draft.source == ("request" if at + 1 < missing - len(responses[3]) else "session")
        cache.abort("r")


def test_samples_of_one_prompt_store_it_once() -> None:
    cache = SuffixCache()
    prompt = list(range(1000, 3000))
    responses = [list(range(10_000 * n, 10_000 * n + 100)) for n in range(1, 9)]
    for n in range(8):
        cache.start(str(n), prompt, session="s", scope="session")
    for n in range(8):
        cache.extend(str(n), responses[n])
    turns = [cache.finish(str(n)) for n in range(8)]
    assert [len(turn.prompt_tail) for turn in turns if turn] == [2000] + [0] * 7
    assert cache.stats().tokens < 2000 + 2 * 8 * 110  # the responses are in the session and in its family
    for n in range(8):  # each branch goes on
        cache.start("r", prompt + responses[n] + [1], session="s", scope="session")
        turn = cache.finish("r")
        assert turn is not None and turn.kept == 2100
    check_pairs(cache, [prompt + response + [1] for response in responses])


def test_a_branch_is_found_inside_a_block() -> None:
    """Chat templates that end a turn otherwise when it has become history: each prompt differs from the last context
    one token before its end, several times within one block."""
    cache, other = SuffixCache(), SuffixCache()
    context: Tokens = list(range(1000, 1070))
    for number in range(1, 8):
        prompt = [*context[:-1], 2000 + number]
        turn = run(cache, prompt, [3000 + number, 4000 + number], number)
        assert turn.kept == (len(context) - 1 if number > 1 else 0)
        other.restore(turn)
        context = [*prompt, 3000 + number, 4000 + number]
    assert other.stats() == replace(cache.stats(), bytes=other.stats().bytes)
    for number in range(1, 8):
        assert behind(other, [2000 + number]) == [3000 + number]


def test_a_session_over_its_budget_forgets_places_and_records() -> None:
    """It says more than ten times its budget. Cut text isn't found, and kept text goes on."""
    cache = SuffixCache(per_session=Budget(tokens=600))
    prompts, responses = conversation(200, length=40)
    last = None
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True), 1):
        last = run(cache, prompt, response, number, scope="session")
    assert last is not None and last.kept == len(prompts[-2] + responses[-2])
    stats = cache.stats()
    assert stats.tokens <= 2 * 600 and stats.bytes < 2 * 600 * 100
    text = prompts[-1] + responses[-1]
    assert behind(cache, text[-20:-15]) == [text[-15]]
    assert behind(cache, text[:5]) == []


def test_a_session_over_its_tokens_keeps_half_of_them_whatever_its_bytes_may_be() -> None:
    """The largest budget in bytes times the session's tokens does not fit into 64 bits."""
    caches = [SuffixCache(per_session=Budget(tokens=64, bytes=most)) for most in (None, 2**62)]
    for cache in caches:
        run(cache, list(range(100)), [200, 201], 1, scope="session")
        assert cache.has_session(None, "s")
    assert caches[0].stats().tokens == caches[1].stats().tokens


def test_a_turn_of_millions_of_tokens_is_cut_to_what_a_session_holds_without_a_budget() -> None:
    """An import may bring such a turn. Half of it would be more than a session may hold."""
    cache = SuffixCache()
    text = np.random.default_rng(0).integers(0, 1000, 2_000_000, dtype=np.int32)
    for number in (1, 2):
        said = FinishedTurn(None, "s", 0, np.zeros(0, np.int32), text, scope="session", writer="w", number=number)
        cache.restore(said)
        cache.catch_up()
        assert 0 < cache.stats().tokens <= 2**19


def test_a_session_cut_to_nothing_takes_its_records_back(tmp_path: Path) -> None:
    """Its places and records went with the text, so a snapshot is sound, and a stored turn is restored."""
    cache = SuffixCache(per_session=Budget(tokens=1))
    cache.start("other", [9], session="s", scope="session")  # keeps the empty session
    turn = run(cache, [1, 2, 3], [4, 5, 6], 1, scope="session")
    assert not cache.has_session(None, "s")
    cache.resize()
    cache.save(tmp_path / "trees")
    for each in (cache, SuffixCache.load(tmp_path / "trees")):
        each.restore(turn)
        assert each.has_session(None, "s")


def test_a_turn_that_was_cut_to_its_last_token_is_new_again() -> None:
    """The kept text begins where the turn ends."""
    cache = SuffixCache(per_session=Budget(tokens=200))
    context: Tokens = []
    turns = []
    for number, length in enumerate((60, 50, 100)):
        response = list(range(1000 * number, 1000 * number + length))
        turns.append(run(cache, context, response, number + 1, scope="session"))
        context = context + response
    before = cache.stats().tokens
    cache.restore(turns[1])
    assert cache.stats().tokens > before


def test_groups_are_loaded_on_demand() -> None:
    source, cache = SuffixCache(), SuffixCache()
    turn = run(source, [1, 2, 3], [4, 5, 6, 7], 1, session="a", group="g")
    assert cache.needs_load(None, group="g")
    cache.mark_loaded(None, group="g")  # unknown to the cache: nothing to mark
    cache.start("r", [1, 2, 3], session="b", group="g")
    assert cache.needs_load(None, group="g") and cache.needs_load(None, "b") and cache.needs_load(None, "a")
    cache.restore(turn)
    cache.mark_loaded(None, group="g")
    assert not cache.needs_load(None, group="g") and cache.needs_load(None, "b")
    assert cache.needs_load("t", group="g") and cache.needs_load(None, "g")
    draft = cache.propose(["r"], 1)[0]
    assert (draft.token_ids.tolist(), draft.source) == ([4], "group")
    cache.finish("r")
    cache.resize(max_tokens=1)
    cache.catch_up()
    assert cache.needs_load(None, group="g")


def test_a_session_without_its_answers_is_loaded_again() -> None:
    """Only the session's family is evicted. The records bring it back and leave the session as it is."""
    cache = SuffixCache()
    turn = run(cache, list(range(100)), [500, 501, 502], 1)
    cache.mark_loaded(None, "s")
    tokens = cache.stats().tokens
    cache.resize(max_tokens=tokens - 1)
    cache.resize()
    assert cache.has_session(None, "s") and cache.needs_load(None, "s")
    cache.restore(turn)
    assert cache.stats().tokens == tokens


def test_hashes_of_contexts() -> None:
    text = list(range(200))
    whole = context_hashes(text).tolist()
    assert context_hashes(text[150:], whole[149], 150).tolist() == whole[150:]
    assert len(set(whole)) == 200 and context_hashes([]).tolist() == []
    cache = SuffixCache()
    run(cache, text[:150], text[150:170])
    turn = run(cache, [*text[:160], 7], [8])
    assert (turn.kept, turn.parent, turn.block) == (160, whole[159], whole[127])


@pytest.mark.parametrize(
    ("change", "field"),
    [({"kept": -1}, "kept"), ({"kept": 2**32}, "kept"), ({"parent": 2**64}, "parent"), ({"block": -1}, "block")],
)
def test_a_turn_that_cannot_be_right_is_refused(change: dict[str, int], field: str) -> None:
    cache = SuffixCache()
    turn = run(SuffixCache(), [1, 2], [3])
    with pytest.raises(InvalidInputError, match=field):
        cache.restore(replace(turn, **change))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="parent"):
        cache.restore(replace(turn, parent=5))
    assert cache.stats().tokens == 0


def test_a_turn_made_by_hand_continues_the_newest_or_stands_alone() -> None:
    cache = SuffixCache()
    tail, response = np.array([4], np.int32), np.array([5, 6], np.int32)
    run(cache, [1, 2], [3])
    cache.restore(FinishedTurn(None, "s", 3, tail, response))
    assert behind(cache, [3]) == [4]
    cache.restore(FinishedTurn(None, "s", 2, np.array([14], np.int32), np.array([15], np.int32)))
    assert behind(cache, [14]) == [15] and behind(cache, [2]) == [3]
