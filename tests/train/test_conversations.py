"""Test that contexts are what the target saw: turns of a session are joined only where they continue each other."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from agentspec.cache import FinishedTurn, Scope, SuffixCache, context_hashes
from agentspec.cache.store import SQLiteStore, TurnRecord
from agentspec.cache.store.contexts import SessionContexts
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.train.conversations import Conversation, Joiner, cut, from_records, from_store
from tests.store.helpers import LOGS


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def shown(conversations: list[Conversation]) -> list[tuple[str, list[int], tuple[tuple[int, int], ...]]]:
    return [(each.session, each.tokens.tolist(), each.responses) for each in conversations]


def test_turns_of_a_session_are_read_once() -> None:
    joiner = Joiner()
    joiner.add("a", ids(1, 2), ids(3, 4))
    joiner.add("b", ids(9), ids(8, 7))
    joiner.add("a", ids(1, 2, 3, 4, 5), ids(6, 7, 8))
    assert shown(joiner.conversations()) == [
        ("a", [1, 2, 3, 4, 5, 6, 7, 8], ((2, 4), (5, 8))),
        ("b", [9, 8, 7], ((1, 3),)),
    ]


def test_an_edited_history_is_another_conversation() -> None:
    joiner = Joiner()
    joiner.add("a", ids(1, 2), ids(3, 4))
    joiner.add("a", ids(1, 2, 4, 4, 5), ids(6, 7))
    assert shown(joiner.conversations()) == [("a", [1, 2, 3, 4], ((2, 4),)), ("a", [1, 2, 4, 4, 5, 6, 7], ((5, 7),))]


def test_a_response_of_one_token_is_only_context() -> None:
    joiner = Joiner()
    joiner.add("a", ids(1), ids(2))
    joiner.add("a", ids(1, 2, 3), ids(4, 5))
    assert shown(joiner.conversations()) == [("a", [1, 2, 3, 4, 5], ((3, 5),))]


def test_records_of_tenants_stay_apart(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    call = {"session": "a", "turn": 0, "prompt_token_ids": [1], "response_token_ids": [2, 3]}
    file.write_text("".join(json.dumps({**call, "tenant": tenant}) + "\n" for tenant in ("x", "y")))
    assert shown(from_records(file, None)) == [("x/a", [1, 2, 3], ((1, 3),)), ("y/a", [1, 2, 3], ((1, 3),))]


def test_a_slash_in_a_name_makes_it_no_other_one(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    first = {"tenant": "x/y", "session": "a", "prompt_token_ids": [1], "response_token_ids": [2, 3]}
    second = {"tenant": "x", "session": "y/a", "prompt_token_ids": [1, 2, 3], "response_token_ids": [4, 5]}
    third = {"session": "x/y/a", "prompt_token_ids": [1, 2, 3, 4, 5], "response_token_ids": [6, 7]}
    file.write_text("".join(json.dumps(call) + "\n" for call in (first, second, third)))
    found = [each.tokens.tolist() for each in from_records(file, None)]
    assert found == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]


class Log:
    """Write a store as the engine does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.persistence = Persistence(SuffixCache(), SQLiteStore(path), LOGS, preload=0)

    def say(
        self,
        prompt: NDArray[np.int32],
        kept: int,
        response: NDArray[np.int32],
        *,
        session: str | None = "a",
        tenant: str | None = "acme",
        scope: Scope = "tenant",
    ) -> None:
        """Store a turn whose prompt's first ``kept`` tokens were said before."""
        hashes = [0, *context_hashes(prompt).tolist()]
        parent, block = hashes[kept], hashes[kept // 64 * 64]
        name = self.persistence.next_name()
        turn = FinishedTurn(tenant, session, kept, prompt[kept:], response, None, scope, parent, block, *name)
        self.persistence.save(turn, Identity(tenant=tenant))

    def read(self, newest: int | None = None, tenant: str | None = "acme") -> list[Conversation]:
        self.persistence.close()
        return from_store(SQLiteStore(self.path), LOGS.of(tenant), newest)


def test_the_store_gives_back_what_was_served(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.db")
    log.say(ids(1, 2, 3), 0, ids(4, 5))
    log.say(ids(7, 7), 0, ids(8, 8, 8), session="b")
    log.say(ids(1, 2, 3, 4, 5, 6), 5, ids(7, 8, 9))
    log.say(ids(5), 0, ids(6, 7), session=None)
    log.say(ids(1, 2, 1, 1), 2, ids(2, 2))  # the history was edited after its second token
    assert shown(log.read()) == [
        ("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], ((3, 5), (6, 9))),
        ("a", [1, 2, 1, 1, 2, 2], ((4, 6),)),
        ("b", [7, 7, 8, 8, 8], ((2, 5),)),
        ("(none) 00000000000000000004", [5, 6, 7], ((1, 3),)),
    ]


def test_a_turn_without_a_session_has_one_name_however_much_is_read(tmp_path: Path) -> None:
    """Otherwise a training that holds out the newest turns of a store would train on them, too."""
    log = Log(tmp_path / "log.db")
    for number in range(5):
        log.say(ids(number), 0, ids(6, 7), session=None)
    whole = {conversation.session: conversation.tokens[0] for conversation in log.read()}
    assert len(whole) == 5
    newest = from_store(SQLiteStore(log.path), LOGS.of("acme"), 2)
    assert {conversation.session: conversation.tokens[0] for conversation in newest} == dict(list(whole.items())[3:])


@pytest.mark.parametrize("named", [None, "acme"])
def test_what_callers_do_not_share_is_left_out(tmp_path: Path, named: str | None) -> None:
    log = Log(tmp_path / "log.db")
    scopes: tuple[Scope, ...] = ("tenant", "session")  # under "none" nothing is written
    for number, tenant in enumerate((None, "acme", "an API key's own")):
        for scope in scopes:
            log.say(ids(number), 0, ids(number, 5), session=f"{tenant} {scope}", tenant=tenant, scope=scope)
    assert [session for session, _, _ in shown(log.read(tenant=named))] == [f"{named} tenant"]


def test_a_turn_without_the_beginning_of_its_context_is_left_out(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.db")
    log.say(ids(1, 2), 0, ids(3, 4))
    log.say(ids(1, 2, 3, 4, 5), 4, ids(6, 7))
    log.say(ids(1, 2, 3, 4, 5, 6, 7, 8), 7, ids(8, 8))  # goes on from a turn without a beginning
    log.say(ids(9), 0, ids(9, 9))
    assert [text for _, text, _ in shown(log.read(newest=3))] == [[9, 9, 9]]
    whole = [text for _, text, _ in shown(from_store(SQLiteStore(log.path), LOGS.of("acme"), None))]
    assert whole == [[1, 2, 3, 4, 5, 6, 7, 8, 8, 8], [9, 9, 9]]


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_of_long_turns_is_rebuilt_whichever_are_missing(seed: int) -> None:
    """Turns continue any earlier context at any place. A rebuilt prompt is the true one, or missing."""
    chance = np.random.default_rng(seed)
    said: list[NDArray[np.int32]] = []
    contexts, rebuilt, cut_off, lost = SessionContexts(), 0, 0, 0
    for number in range(30):
        kept = ids()
        if said and chance.random() < 0.9:
            earlier = said[int(chance.integers(len(said)))]
            # At its end, or anywhere in it, as when a chat template rewrites a part of the history.
            kept = earlier if chance.random() < 0.5 else earlier[: int(chance.integers(len(earlier)))]
        tail, response = (chance.integers(0, 3, int(chance.integers(1, 150))).astype(np.int32) for _ in range(2))
        prompt = np.concatenate([kept, tail])
        said.append(np.concatenate([prompt, response]))
        if chance.random() < 0.1:
            lost += 1
            continue
        hashes = [0, *context_hashes(prompt).tolist()]
        record = TurnRecord(
            writer="0" * 16,
            number=number + 1,
            kept=len(kept),
            parent=hashes[len(kept)],
            block=hashes[len(kept) // 64 * 64],
            prompt_tail=tail,
            response=response,
            created=1.0,
        )
        found = contexts.add(record)
        if found is None:
            cut_off += 1
        else:
            rebuilt += 1
            assert np.array_equal(found, prompt)
    assert rebuilt + cut_off + lost == 30
    assert cut_off == 0 or lost


def test_cut_keeps_whole_responses() -> None:
    whole = Conversation("a", ids(*range(10)), ((2, 4), (6, 9)))
    assert shown([cut(whole, 8)]) == [("a", [0, 1, 2, 3], ((2, 4),))]
    assert cut(whole, 10) is whole
    assert cut(whole, 3).responses == ()
