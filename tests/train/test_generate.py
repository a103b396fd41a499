"""Prompts whose answers are there, or cannot be had; tests/end_to_end lets vLLM answer some."""

import json
import sys
from pathlib import Path

import pytest

from agentspec.errors import ConfigurationError, InvalidInputError
from agentspec.train.config import Model, PromptsSource
from agentspec.train.generate import answer_prompts

MODEL = Model(name_or_path="model", proj_dim=8, emb_dim=8, speculator_width=8)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)


def ask(folder: Path, prompts: str, answered: int = 0) -> list[tuple[int, int]]:
    """Answer these prompts where so many answers are there; what progress was shown."""
    source = PromptsSource(type="prompts", path=folder / "prompts.jsonl")
    source.path.write_text(prompts)
    (folder / "answers.jsonl").write_text("{}\n" * answered)
    shown: list[tuple[int, int]] = []
    answer_prompts(source, MODEL, 0, folder / "answers.jsonl", lambda done, total: shown.append((done, total)))
    return shown


def test_nothing_is_started_where_nothing_is_missing(tmp_path: Path) -> None:
    assert ask(tmp_path, '{"prompt": "a"}\n\n{"prompt": "b"}\n', answered=2) == [(2, 2)]


def test_vllm_is_needed_for_the_rest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="type prompts needs vLLM"):
        ask(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n', answered=1)


@pytest.mark.parametrize("line", ["{", "[]", json.dumps({"messages": "hello"}), json.dumps({"id": 1})])
def test_a_prompt_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidInputError, match=r"prompts\.jsonl, line 2: "):
        ask(tmp_path, '{"prompt": "a"}\n' + line + "\n")
