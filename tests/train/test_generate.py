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


class Engine:
    """Stand in for `OfflineEngine`. A prompt's tokens are the lengths of its texts; 99 is too long, and 98 refused."""

    def __init__(self, refusal: type[Exception] = ValueError) -> None:
        self.refusal = refusal
        self.tokenised: list[tuple[Any, Any]] = []
        self.asked: list[list[int]] = []
        self.llm = SimpleNamespace(generate=self.generate)
        self.closed = 0

    def tokenise(self, prompt: Any, tools: Any = None) -> list[int]:
        self.tokenised.append((prompt, tools))
        ids = [len(prompt)] if isinstance(prompt, str) else [len(message["content"]) for message in prompt]
        if 99 in ids:
            raise InvalidInputError("its prompt has 99 tokens, but the model takes 1 to 9 (max_model_len)")
        return ids

    def generate(self, prompts: list[dict[str, list[int]]], *_: Any, **__: Any) -> list[Any]:
        self.asked += [prompt["prompt_token_ids"] for prompt in prompts]
        if [98] in self.asked:
            raise self.refusal("The prompt is odd.\nDetails")
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[2])]) for _ in prompts]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an engine in place of vLLM's."""
    engine = Engine()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setattr("agentspec.train.generate._engine", lambda *_: engine)
    return engine


def test_answers_have_their_prompts_ids(tmp_path: Path, engine: Engine) -> None:
    ask(tmp_path, '{"id": null, "messages": null, "prompt": "a"}\n{"id": 7, "prompt": "bb"}\n')
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert lines == [
        {"session": "prompt-1", "turn": 0, "prompt_token_ids": [1], "response_token_ids": [2]},
        {"session": "7", "turn": 0, "prompt_token_ids": [2], "response_token_ids": [2]},
    ]
    assert engine.closed == 1


def test_problems_of_a_rollout_are_prompts(tmp_path: Path, engine: Engine) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    tools = [{"function": {"name": "edit"}}]
    ask(tmp_path, json.dumps({"id": "a", "prompt": chat, "tools": json.dumps(tools)}) + "\n")
    assert engine.tokenised == [([{"role": "user", "content": "a\nb"}], tools)]


def test_chats_are_asked_with_their_own_tools(tmp_path: Path, engine: Engine) -> None:
    chats = {name: [{"role": "user", "content": name}] for name in "abc"}
    edit, run = [{"function": {"name": "edit"}}], [{"function": {"name": "run"}}]
    given = [{"messages": chats["a"], "tools": edit}, {"messages": chats["b"]}, {"messages": chats["c"], "tools": run}]
    ask(tmp_path, "".join(json.dumps(prompt) + "\n" for prompt in [*given, {"prompt": "d", "tools": run}]))
    assert engine.tokenised == [(chats["a"], edit), (chats["b"], None), (chats["c"], run), ("d", None)]


def test_a_prompt_that_does_not_fit_is_named_before_any_is_answered(tmp_path: Path, engine: Engine) -> None:
    """The answers to the others take hours, and belong to a file that has to be changed."""
    lines = ['{"prompt": "a"}'] * 100 + ["", json.dumps({"prompt": "x" * 99})]
    with pytest.raises(
        InvalidInputError, match=r"prompts\.jsonl, line 102: its prompt has 99 tokens, .*; leave it out"
    ):
        ask(tmp_path, "\n".join(lines) + "\n")
    assert not engine.asked and engine.closed == 1


def test_what_vllm_refuses_all_the_same_is_named(tmp_path: Path, engine: Engine) -> None:
    prompts = '{"prompt": "a"}\n' * 64 + "\n" + json.dumps({"prompt": "x" * 98}) + "\n"
    with pytest.raises(
        InvalidInputError, match=r"line 66, or up to 0 prompts behind it: vLLM .*: The prompt is odd\.$"
    ):
        ask(tmp_path, prompts)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 64


def test_prompts_that_newer_vllm_refuses_are_named(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer vLLM's errors are no ValueErrors. The training must not end with a traceback."""

    class Refusal(Exception):
        pass

    engine.refusal = Refusal
    monkeypatch.setitem(sys.modules, "vllm.exceptions", SimpleNamespace(VLLMClientError=Refusal))
    with pytest.raises(
        InvalidInputError, match=r"prompts\.jsonl, line 1, .*: vLLM refuses one of them: The prompt is odd"
    ):
        ask(tmp_path, json.dumps({"prompt": "x" * 98}) + "\n")


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
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        *(json.dumps({"messages": "hello"}), json.dumps({"id": 1}), json.dumps({"id": "a\nb", "prompt": "x"})),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidInputError, match=r"prompts\.jsonl, line 2: "):
        ask(tmp_path, '{"prompt": "a"}\n' + line + "\n")


def test_the_answers_are_those_of_the_served_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def start(name: str, **options: Any) -> Engine:
        started.append(options)
        return Engine()

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setattr("agentspec.train.generate.OfflineEngine.start", start)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    source = PromptsSource(type="prompts", path=tmp_path / "prompts.jsonl", engine={"dtype": "float32"})
    served = MODEL.model_copy(update={"revision": "v2", "hf_overrides": {"rope_theta": 5.0}})
    for number, model in enumerate((MODEL, served)):
        answer_prompts(source, model, tmp_path / f"answers-{number}.jsonl", lambda done, total: None)
    plain = {"dtype": "float32", "seed": 0}
    assert started == [plain, {**plain, "revision": "v2", "hf_overrides": {"rope_theta": 5.0}}]
