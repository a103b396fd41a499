"""Test which sessions are trained on, and which are held out to measure on."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import InvalidInputError
from agentspec.train.config import TrainingConfig
from agentspec.train.corpus import Corpus, folder_of, gather


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


def test_something_is_left_to_train_on(settings: dict[str, Any], calls: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^data.eval_sources: every session of data.sources is in it; give"):
        gathered(settings, calls)
