"""Test prompts that are answered already, or cannot be answered; in tests/end_to_end, vLLM answers some."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.errors import ConfigurationError, InvalidInputError
from agentspec.train.config import Model, PromptsSource
from agentspec.train.generate import answer_prompts

MODEL = Model(name_or_path="model", proj_dim=8, emb_dim=8, speculator_width=8)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)


def ask(folder: Path, prompts: str, answered: int = 0) -> list[tuple[int, int]]:
    """Answer these prompts, of which `answered` have answers. Return the progress that was shown."""
    source = PromptsSource(type="prompts", path=folder / "prompts.jsonl")
    source.path.write_text(prompts, encoding="utf-8", errors="surrogateescape")
    (folder / "answers.jsonl").write_text("{}\n" * answered)
    shown: list[tuple[int, int]] = []
    answer_prompts(source, MODEL, folder / "answers.jsonl", lambda done, total: shown.append((done, total)))
    return shown


def test_nothing_is_started_where_nothing_is_missing(tmp_path: Path) -> None:
    assert ask(tmp_path, '{"prompt": "a"}\n\n{"prompt": "b"}\n', answered=2) == [(2, 2)]


def test_gzip_may_have_compressed_the_prompts(tmp_path: Path) -> None:
    source = PromptsSource(type="prompts", path=tmp_path / "prompts.jsonl.gz")
    source.path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    (tmp_path / "answers.jsonl").write_text("{}\n")
    shown: list[tuple[int, int]] = []
    answer_prompts(source, MODEL, tmp_path / "answers.jsonl", lambda done, total: shown.append((done, total)))
    assert shown == [(1, 1)]


def test_vllm_is_needed_for_the_rest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="type prompts needs vLLM"):
        ask(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n', answered=1)


def test_separators_of_unicode_end_no_line(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False)
    assert ask(tmp_path, f"{line}\n", answered=1) == [(1, 1)]


def test_a_file_without_prompts_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"prompts\.jsonl: holds no prompt"):
        ask(tmp_path, "\n")


def test_prompts_that_vllm_takes_are_told_from_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(prompts: list[Any], *_: Any, **__: Any) -> list[Any]:
        if any("long" in str(prompt) for prompt in prompts):
            raise ValueError("The prompt is too long.\nDetails")
        return [SimpleNamespace(prompt_token_ids=[1], outputs=[SimpleNamespace(token_ids=[2])]) for _ in prompts]

    core = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
    engine = SimpleNamespace(chat=answer, generate=answer, llm_engine=core)
    fake = SimpleNamespace(LLM=lambda *_, **__: engine, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    ask(tmp_path, '{"id": null, "messages": null, "prompt": "a"}\n{"id": 7, "prompt": "b"}\n')
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["session"] for line in lines] == ["prompt-1", "7"]
    with pytest.raises(InvalidInputError, match=r"prompts\.jsonl: .* prompts 1 to 1: The prompt is too long\.$"):
        ask(tmp_path, '{"prompt": "long"}\n')


def test_chats_are_asked_with_their_own_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(prompts: list[Any], *_: Any, tools: Any = "none given", **__: Any) -> list[Any]:
        seen.extend((prompt, tools) for prompt in prompts)
        number = {"a": 1, "b": 2, "c": 3, "d": 4}
        named = [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in prompts]
        return [SimpleNamespace(prompt_token_ids=[number[n]], outputs=[SimpleNamespace(token_ids=[9])]) for n in named]

    seen: list[tuple[Any, Any]] = []
    core = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
    engine = SimpleNamespace(chat=answer, generate=answer, llm_engine=core)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda *_, **__: engine, SamplingParams=dict))
    chats = {name: [{"role": "user", "content": name}] for name in "abc"}
    edit, run = [{"function": {"name": "edit"}}], [{"function": {"name": "run"}}]
    given = [{"messages": chats["a"], "tools": edit}, {"messages": chats["b"]}, {"messages": chats["c"], "tools": run}]
    ask(tmp_path, "".join(json.dumps(prompt) + "\n" for prompt in [*given, {"prompt": "d", "tools": run}]))
    assert seen == [(chats["a"], edit), (chats["b"], None), (chats["c"], run), ("d", "none given")]
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["prompt_token_ids"] for line in lines] == [[1], [2], [3], [4]]


def test_prompts_that_newer_vllm_refuses_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer vLLM's errors are no ValueErrors. The training must not end with a traceback."""

    class Refusal(Exception):
        pass

    def refuse(*_: Any, **__: Any) -> list[Any]:
        raise Refusal("The prompt is too long.")

    core = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
    engine = SimpleNamespace(chat=refuse, generate=refuse, llm_engine=core)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda *_, **__: engine, SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", SimpleNamespace(VLLMClientError=Refusal))
    with pytest.raises(InvalidInputError, match=r"prompts\.jsonl: .* prompts 1 to 1: The prompt is too long\.$"):
        ask(tmp_path, '{"prompt": "long"}\n')


@pytest.mark.parametrize(
    "line",
    [
        *(
            '{"prompt": "\\ud800"}',
            "{",
            "[]",
            "[" * 100_000,
            '{"prompt": "\udcff"}',
            '{"messages": []}',
            '{"messages": [1]}',
        ),
        json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": "edit"}),
        *(json.dumps({"messages": "hello"}), json.dumps({"id": 1}), json.dumps({"id": "a\nb", "prompt": "x"})),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidInputError, match=r"prompts\.jsonl, line 2: "):
        ask(tmp_path, '{"prompt": "a"}\n' + line + "\n")
