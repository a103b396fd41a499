"""Contexts are what the target saw: turns of a session joined where they continue each other, and nowhere else."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from agentspec.cache import FinishedTurn, Scope
from agentspec.cache.store import SQLiteStore, namespace
from agentspec.server_ext.persistence import Persistence
from agentspec.train.corpus import Conversation, Joiner, cut, from_records, from_store

KEY = namespace("model", "tokenizer", "acme")


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


def test_the_store_gives_back_what_was_served(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "log.db")
    persistence = Persistence(store, KEY, "acme", preload=0)
    turns = [
        ("a", 0, ids(1, 2, 3), ids(4, 5)),
        ("b", 0, ids(7, 7), ids(8, 8, 8)),
        ("a", 5, ids(6), ids(7, 8, 9)),
        (None, 0, ids(5), ids(6, 7)),
        ("a", 2, ids(1, 1), ids(2, 2)),  # the history was edited after its second token
    ]
    for session, kept, tail, response in turns:
        persistence.save(
            FinishedTurn(tenant="acme", session=session, kept=kept, prompt_tail=tail, response=response, group=None)
        )
    persistence.close()
    assert shown(from_store(SQLiteStore(tmp_path / "log.db"), KEY, None, "acme")) == [
        ("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], ((3, 5), (6, 9))),
        ("a", [1, 2, 1, 1, 2, 2], ((4, 6),)),
        ("b", [7, 7, 8, 8, 8], ((2, 5),)),
        ("(none) 3", [5, 6, 7], ((1, 3),)),
    ]


@pytest.mark.parametrize(("named", "tenants"), [(None, [None]), ("acme", [None, "acme"])])
def test_what_callers_do_not_share_is_left_out(tmp_path: Path, named: str | None, tenants: list[str | None]) -> None:
    store = SQLiteStore(tmp_path / "log.db")
    persistence = Persistence(store, KEY, named, preload=0)
    scopes: tuple[Scope, ...] = ("tenant", "session")  # under "none" nothing is written
    for number, tenant in enumerate((None, "acme", "an API key's own")):
        for scope in scopes:
            persistence.save(FinishedTurn(tenant, f"{tenant} {scope}", 0, ids(number), ids(number, 5), None, scope))
    persistence.close()
    found = from_store(SQLiteStore(tmp_path / "log.db"), KEY, None, named)
    wanted = [f"{tenant} {scope}" for tenant in tenants for scope in scopes[:1]]
    assert sorted(session for session, _, _ in shown(found)) == sorted(wanted)


def test_a_turn_without_the_beginning_of_its_context_is_left_out(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "log.db")
    persistence = Persistence(store, KEY, "acme", preload=0)
    for kept, tail, response in ((0, ids(1, 2), ids(3, 4)), (4, ids(5), ids(6, 7)), (0, ids(9), ids(9, 9))):
        persistence.save(
            FinishedTurn(tenant="acme", session="a", kept=kept, prompt_tail=tail, response=response, group=None)
        )
    persistence.close()
    store = SQLiteStore(tmp_path / "log.db")
    assert [text for _, text, _ in shown(from_store(store, KEY, 2, "acme"))] == [[9, 9, 9]]
    assert [text for _, text, _ in shown(from_store(store, KEY, None, "acme"))] == [[1, 2, 3, 4, 5, 6, 7], [9, 9, 9]]


def test_cut_keeps_whole_responses() -> None:
    whole = Conversation("a", ids(*range(10)), ((2, 4), (6, 9)))
    assert shown([cut(whole, 8)]) == [("a", [0, 1, 2, 3], ((2, 4),))]
    assert cut(whole, 10) is whole
    assert cut(whole, 3).responses == ()
