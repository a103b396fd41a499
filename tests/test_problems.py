"""Test problem files: what is read, and which line and field an error names."""

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import AgentSpecError
from agentspec.rollout import read_problems

CHAT = [{"role": "user", "content": "x"}]


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_a_prompt_is_a_text_a_chat_or_token_ids(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "x", "answer": 4},
        {"id": 7, "messages": CHAT},
        "",
        {"id": "c", "prompt_token_ids": [1, 2], "prompt": None},
        {"id": "d", "prompt": CHAT, "reward_model": {"ground_truth": "4"}},  # as verl writes it
    ]
    text, chat, tokens, verl = read_problems(written(tmp_path, *rows))
    assert (text.id, text.prompt, text.fields) == ("a", "x", {"answer": 4})
    assert (chat.id, chat.prompt) == ("7", CHAT)
    assert tokens.prompt == [1, 2]
    assert verl.prompt == CHAT and verl.fields == {"reward_model": {"ground_truth": "4"}}


def test_a_file_may_begin_with_a_byte_order_mark_and_have_the_lines_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "prompt": "x"}\r\n\r\n{"id": "b", "prompt": "y"}\r\n')
    assert [problem.id for problem in read_problems(path)] == ["a", "b"]


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"id": "a", "prompt": "x", "answer": 4}, {"id": "b", "prompt": "y", "answer": 5}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "problems.parquet")
    assert read_problems(tmp_path / "problems.parquet") == read_problems(written(tmp_path, *rows))
    (tmp_path / "problems.parquet").rename(tmp_path / "other.PARQUET")
    assert read_problems(tmp_path / "other.PARQUET") == read_problems(written(tmp_path, *rows))
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(AgentSpecError, match=r"bad\.parquet: cannot be read as parquet"):
        read_problems(tmp_path / "bad.parquet")


def test_a_value_of_parquet_that_python_has_no_form_for_is_refused(tmp_path: Path) -> None:
    """Parquet's dates go beyond the year 9999."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    day = pyarrow.array([2**62], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"id": ["a"], "prompt": ["x"], "day": day}), tmp_path / "far.parquet")
    with pytest.raises(AgentSpecError, match=r"far\.parquet: cannot be read as parquet"):
        read_problems(tmp_path / "far.parquet")


def test_messages_in_parquet_have_the_fields_that_they_had(tmp_path: Path) -> None:
    """Otherwise a template that asks ``'tool_calls' in message`` would find them in every message."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("path", "content")]
    asks = {"role": "assistant", "content": None, "tool_calls": calls}
    rows = [{"id": "a", "messages": [*CHAT, asks]}, {"id": "b", "messages": CHAT}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "problems.parquet")
    assert [each.prompt for each in read_problems(tmp_path / "problems.parquet")] == [[*CHAT, asks], CHAT]


def test_tools_beside_messages_belong_to_the_prompt(tmp_path: Path) -> None:
    """TRL has a list, or its JSON, because a parquet column gives each tool the arguments of all."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tools = [{"function": {"name": name, "parameters": {name: 1}}} for name in ("path", "content")]
    parquet.write_table(
        pyarrow.Table.from_pylist([{"id": "a", "messages": CHAT, "tools": tools}]), tmp_path / "problems.parquet"
    )
    rows = [{"messages": CHAT, "tools": given} for given in (tools, json.dumps(tools), [], "[]", None)]
    rows += [{"prompt": "x", "tools": given} for given in (tools, "f, g")]  # a field like others
    rows = [{**row, "id": str(number)} for number, row in enumerate(rows)]
    assert [each.tools for each in read_problems(tmp_path / "problems.parquet")] == [tools]
    assert [each.tools for each in read_problems(written(tmp_path, *rows))] == [tools, tools, *[None] * 5]


@pytest.mark.parametrize("given", [["f"], "f, g", [{"name": "f"}, None], {"name": "f"}, "[" * 100_000, 4])
def test_tools_that_no_template_can_take_are_named(tmp_path: Path, given: Any) -> None:
    with pytest.raises(AgentSpecError, match=r'line 1: "tools" go into the chat template: give a list of objects'):
        read_problems(written(tmp_path, {"id": "a", "messages": CHAT, "tools": given}))


@pytest.mark.parametrize("line", ['{"id": "é", "prompt": "x"}'.encode("latin-1"), b"[" * 100_000])
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'{"id": "a", "prompt": "x"}\n' + line)
    with pytest.raises(AgentSpecError, match="line 2: not JSON in UTF-8"):
        read_problems(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[]", "an object expected, got list; write one JSON object a line"),
        ("[", "not JSON in UTF-8 .*; write one JSON object a line"),
        ({"prompt": "x"}, 'needs "id", .* has none; give each problem its own'),
        ({"id": 1.5, "prompt": "x"}, 'needs "id", .* got 1.5; give'),
        ({"id": "b", "prompt": "x", "images": ["a.png"]}, '"images" would not reach the model.*name the field other'),
        ({"id": True, "prompt": "x"}, 'needs "id"'),
        ({"id": "a\nb", "prompt": "x"}, "id: control character"),
        ({"id": "b"}, 'needs one of "prompt"'),
        ({"id": "b", "prompt": "x", "messages": CHAT}, "has prompt, messages"),
        ({"id": "b", "prompt": ""}, "or it is empty"),
        ({"id": "b", "messages": "x"}, "neither a text"),
        ({"id": "b", "messages": [{"content": "x"}]}, "neither a text"),
        ({"id": "b", "prompt_token_ids": [1, -2]}, "neither a text"),
        ({"id": "first", "prompt": "x"}, "stands there twice"),
        ('{"id": "b", "prompt": "x", "prompt": "y"}', "the field 'prompt' stands there twice; give it once"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, row: Any, message: str) -> None:
    path = written(tmp_path, {"id": "first", "prompt": "x"}, row)
    with pytest.raises(AgentSpecError, match=r"problems\.jsonl, line 2.*" + message):
        read_problems(path)


def test_problems_may_come_from_a_pipe(tmp_path: Path) -> None:
    """`agentspec rollout <(head -100 problems.jsonl)` gives such a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"id": 1, "prompt": "x"}\n{"id": 2, "prompt": "y"}\n',))
    writer.start()
    assert [problem.id for problem in read_problems(pipe)] == ["1", "2"]
    writer.join()


def test_gzip_may_have_compressed_the_problems(tmp_path: Path) -> None:
    """The file's name doesn't matter, as for `agentspec simulate`."""
    path = written(tmp_path, {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"})
    whole = gzip.compress(path.read_bytes())
    path.write_bytes(whole)
    assert [problem.id for problem in read_problems(path)] == ["a", "b"]
    path.write_bytes(whole[:-9])
    with pytest.raises(AgentSpecError, match=r"problems\.jsonl: cannot be read: .*end-of-stream"):
        read_problems(path)


def test_a_file_without_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentSpecError, match="holds no problem"):
        read_problems(written(tmp_path, ""))
    with pytest.raises(AgentSpecError, match="no such file"):
        read_problems(tmp_path / "missing.jsonl")
    with pytest.raises(AgentSpecError, match="is a folder; give a file"):
        read_problems(tmp_path)


def test_text_parts_of_a_message_are_joined(tmp_path: Path) -> None:
    """Templates that expect a text would refuse parts, with their own error."""
    parts = [{"type": "text", "text": "Write f"}, {"type": "text", "text": "in C."}]
    (problem,) = read_problems(written(tmp_path, {"id": "a", "messages": [{"role": "user", "content": parts}]}))
    assert problem.prompt == [{"role": "user", "content": "Write f\nin C."}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user"}], '"prompt", message 1: needs a content'),
        ([*CHAT, {"role": "user", "content": None}], '"prompt", message 2: needs a content'),
        ([{"role": 7, "content": "x"}], '"prompt", message 1: its role is a text'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "neither a text nor .*; leave the problem out"),
        ([1, 2, 3], 'token ids, which go into "prompt_token_ids"'),
        ("x\ud800", '"prompt" holds half of a surrogate pair'),
        ([{"role": "user", "content": "x\ud800"}], '"prompt" holds half of a surrogate pair.*; remove it'),
    ],
)
def test_a_prompt_that_no_model_can_read_is_named(tmp_path: Path, prompt: Any, message: str) -> None:
    with pytest.raises(AgentSpecError, match=rf"problems\.jsonl, line 1: .*{message}"):
        read_problems(written(tmp_path, {"id": "a", "prompt": prompt}))


def test_a_tool_that_is_no_text_is_named(tmp_path: Path) -> None:
    """The tokenizer would refuse it once vLLM has started."""
    tools = [{"function": {"name": "\ud800"}}]
    with pytest.raises(AgentSpecError, match=r'^[^:]+, line 1: "tools" holds half of a surrogate pair'):
        read_problems(written(tmp_path, {"id": "a", "messages": CHAT, "tools": tools}))


def test_problems_need_no_ids_where_they_are_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "x"}, {"id": "own", "prompt": "y"}, {"id": None, "prompt": "z"}]
    assert [problem.id for problem in read_problems(written(tmp_path, *rows), named=False)] == [
        "prompt-1",
        "own",
        "prompt-3",
    ]
