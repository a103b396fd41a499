"""Test which sessions are trained on, and which are held out to measure on."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from agentspec.cache.store import LogNames, NewEntry, TurnRecord, encode, open_store
from agentspec.errors import InvalidInputError
from agentspec.server_ext.identity.server_secrets import server_secret
from agentspec.server_ext.persistence.model_key import find_model_key, overrides_text
from agentspec.server_ext.settings import Settings
from agentspec.train.config import Model, StoreSource, TrainingConfig
from agentspec.train.conversations import Conversation
from agentspec.train.corpus import Corpus, _load, _save, _stored, folder_of, gather


def gathered(settings: dict[str, Any], eval_file: Path) -> Corpus:
    settings["data"]["eval_sources"] = [{"type": "records", "path": str(eval_file)}]
    config = TrainingConfig.model_validate(settings)
    return gather(config, folder_of(config), lambda _source, _out: None)


def test_a_session_that_is_measured_on_is_not_trained_on(settings: dict[str, Any], calls: Path, tmp_path: Path) -> None:
    """Otherwise the report's acceptance would be measured on texts that the speculator knows."""
    recorded = calls.read_text().splitlines()
    first, second = json.loads(recorded[0]), json.loads(recorded[3])
    longer = {**second, "response_token_ids": [*second["response_token_ids"], 1, 2, 3]}
    other = {"session": "s2", "prompt_token_ids": [47, 46, 45], "response_token_ids": [44, 43]}
    eval_file = tmp_path / "eval.jsonl"
    eval_file.write_text("".join(json.dumps(call) + "\n" for call in (first, other)))
    corpus = gathered(settings, eval_file)
    assert [each.session for each in corpus.held_out] == ["s0", "s2"]
    # s2 is another text under the same name, as when the prompts of two files are numbered.
    assert {each.session for each in corpus.train} == {f"s{number}" for number in range(1, 20)}

    trained = tmp_path / "trained.jsonl"
    trained.write_text("".join(json.dumps(call) + "\n" for call in (second, json.loads(recorded[6]))))
    settings["data"]["sources"] = [{"type": "records", "path": str(trained)}]
    eval_file.write_text(json.dumps(longer) + "\n")
    assert [each.session for each in gathered(settings, eval_file).train] == ["s2"]


def test_a_session_of_another_file_is_trained_on_although_it_has_a_held_out_name(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts without ids are numbered in each file."""
    held, both, other = (
        {"session": name, "prompt_token_ids": ids, "response_token_ids": [*ids, 7, 7]}
        for name, ids in (("prompt-1", [1, 2]), ("prompt-2", [3, 4]), ("prompt-1", [5, 6]))
    )
    files = {"eval": [held], "first": [held], "second": [other, both]}
    for name, calls in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(call) + "\n" for call in calls))
    sources = [{"type": "records", "path": str(tmp_path / f"{name}.jsonl")} for name in ("first", "second")]
    settings["data"]["sources"] = sources
    assert [each.tokens[0] for each in gathered(settings, tmp_path / "eval.jsonl").train] == [5, 3]


def test_a_prompt_that_is_measured_on_is_not_trained_on_with_another_answer(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    for name, answers in (("eval", {"a": [9]}), ("train", {"a": [8], "b": [8]})):
        lines = [
            {"session": session, "prompt_token_ids": [1, 2], "response_token_ids": [*answer, 3, 4]}
            for session, answer in answers.items()
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings["data"]["sources"] = [{"type": "records", "path": str(tmp_path / "train.jsonl")}]
    assert [each.session for each in gathered(settings, tmp_path / "eval.jsonl").train] == ["b"]


def test_a_session_from_a_later_turn_on_is_not_trained_on_where_it_is_measured_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """A source may begin in the middle of a session."""
    turns = [
        {"session": "s", "prompt_token_ids": [1, 2], "response_token_ids": [3, 4]},
        {"session": "s", "turn": 1, "prompt_token_ids": [1, 2, 3, 4, 5], "response_token_ids": [6, 7, 8]},
    ]
    other = {"session": "t", "prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}
    for name, calls in (("eval", turns), ("train", [turns[1], other])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(call) + "\n" for call in calls))
    settings["data"]["sources"] = [{"type": "records", "path": str(tmp_path / "train.jsonl")}]
    assert [each.session for each in gathered(settings, tmp_path / "eval.jsonl").train] == ["t"]


def test_something_is_left_to_train_on(settings: dict[str, Any], calls: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^data.eval_sources: every session of data.sources is in it; give"):
        gathered(settings, calls)


def test_a_store_is_read_under_the_key_of_its_server(settings: dict[str, Any], tmp_path: Path) -> None:
    """A server with another tokenizer, or with --hf-overrides, has a log of its own."""
    model = settings["model"]["name_or_path"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    tokenizer = str(tmp_path / "tokenizer")
    overrides = {"rope_scaling": {"factor": 4.0}}
    key = find_model_key(model, tokenizer, overrides=overrides_text(overrides))
    url = f"sqlite:///{tmp_path}/server.db"
    record = TurnRecord(
        writer="0" * 16,
        number=1,
        session="s",
        kept=0,
        prompt_tail=np.array([1, 2], np.int32),
        response=np.array([3, 4, 5], np.int32),
        created=1.0,
    )
    log = LogNames(key, server_secret(Settings(store=url))).of(None)
    with closing(open_store(url)) as store:
        store.append(log, [NewEntry("s", encode(record))])

    def read(given: str | None, changed: dict[str, Any]) -> list[Conversation]:
        target = Model(name_or_path=model, hf_overrides=changed, proj_dim=8, emb_dim=8, speculator_width=8)
        return _stored(StoreSource(type="store", url=url, tokenizer=given), target)

    assert [each.tokens.tolist() for each in read(tokenizer, overrides)] == [[1, 2, 3, 4, 5]]
    assert not read(None, {}) and not read(tokenizer, {})


def test_another_revision_is_other_data(settings: dict[str, Any]) -> None:
    """Its hidden states are others, too."""
    folders = []
    for variant in ({}, {"revision": "v2"}, {"hf_overrides": {"rope_theta": 5.0}}):
        config = TrainingConfig.model_validate({**settings, "model": settings["model"] | variant})
        folders.append(folder_of(config))
    assert len(set(folders)) == 3


def test_a_corpus_keeps_more_names_than_a_header_holds(tmp_path: Path) -> None:
    """safetensors takes 100 MB of metadata. A large store has longer names than that, all together."""
    tokens = np.array([1, 2, 3], np.int32)
    names = ["\ud800/é", *(letter * 60_000_000 for letter in "ab")]
    _save([Conversation(name, tokens, ((1, 3),)) for name in names], tmp_path / "train.safetensors")
    assert [each.session for each in _load(tmp_path / "train.safetensors")] == names


def test_a_corpus_of_an_earlier_checkout_is_read(tmp_path: Path) -> None:
    """Hidden states lie beside it, which took hours."""
    file = tmp_path / "train.safetensors"
    _save([Conversation("", np.array([1, 2, 3], np.int32), ((1, 2), (2, 3)))], file)
    tensors = load_file(file)
    del tensors["sessions"]
    save_file(tensors, file, {"sessions": '["a"]'})
    (read,) = _load(file)
    assert (read.session, read.tokens.tolist(), read.responses) == ("a", [1, 2, 3], ((1, 2), (2, 3)))


def test_the_target_s_own_tokenizer_is_that_of_its_revision(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str | None]] = []

    def open_tokenizer(name: str, _option: str, revision: str | None) -> None:
        opened.append((name, revision))

    monkeypatch.setattr("agentspec.train.conversations.open_tokenizer", open_tokenizer)
    (source,), target = settings["data"]["sources"], settings["model"]["name_or_path"]
    settings["model"]["revision"] = "v2"
    settings["data"]["sources"] = [source | {"tokenizer": name} for name in (target, "other")]
    config = TrainingConfig.model_validate(settings)
    gather(config, folder_of(config), lambda _source, _out: None)
    assert opened == [(target, "v2"), ("other", None)]
