"""Test reading recorded calls: what a line may hold, and errors that name file, line and field."""

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import ConfigurationError, InvalidInputError
from agentspec.simulate import open_tokenizer, read_calls


def _record(**fields: Any) -> dict[str, Any]:
    return {"session": "s", "turn": 0, "prompt_token_ids": [1, 2], "response_token_ids": [3], **fields}


def _write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_a_turn_that_continues_has_the_earlier_prompt_and_response_in_front(tmp_path: Path) -> None:
    file = _write(
        tmp_path / "a.jsonl",
        _record(group="g", tenant="t"),
        _record(session="other", tenant="t", prompt_token_ids=[9]),
        "",
        _record(turn=1, continues=True, tenant="t", prompt_token_ids=[4], response_token_ids=[5]),
        _record(turn=2, continues=True, tenant="t", prompt_token_ids=[], response_token_ids=[6]),
    )
    calls = list(read_calls(file))
    assert [(call.line, call.prompt.tolist(), call.response.tolist()) for call in calls] == [
        (1, [1, 2], [3]),
        (2, [9], [3]),
        (4, [1, 2, 3, 4], [5]),
        (5, [1, 2, 3, 4, 5], [6]),
    ]
    assert (calls[0].session, calls[0].group, calls[0].tenant, calls[2].group) == ("s", "g", "t", None)


def test_sessions_of_two_tenants_are_two_sessions(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.jsonl", _record(tenant="a"), _record(tenant="b", continues=True))
    for tenant in (None, "one"):
        with pytest.raises(InvalidInputError, match=r"a\.jsonl, line 2: continues: session 's' has no earlier record"):
            list(read_calls(file, tenant=tenant))
    file = _write(tmp_path / "b.jsonl", _record(tenant="a"), _record(tenant="b"))
    assert [call.tenant for call in read_calls(file, tenant="one")] == ["one", "one"]


def test_numbers_are_good_names_and_other_fields_are_left_alone(tmp_path: Path) -> None:
    (call,) = read_calls(_write(tmp_path / "a.jsonl", _record(session=7, group=3, model="m")))
    assert (call.session, call.group) == ("7", "3")


def test_what_pandas_writes_for_a_column_that_some_rows_lack_is_read(tmp_path: Path) -> None:
    rows = (_record(session=7.0, turn=0.0, continues=None), _record(session=7.0, turn=None, group=3.0, tenant=None))
    calls = list(read_calls(_write(tmp_path / "a.jsonl", *rows)))
    assert [(call.session, call.turn, call.group, call.tenant) for call in calls] == [
        ("7", 0, None, None),
        ("7", 0, "3", None),
    ]


def test_a_compressed_file_is_read_as_such(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(_record()).encode()))
    assert [call.response.tolist() for call in read_calls(file)] == [[3]]


def test_the_file_is_read_as_the_calls_are_taken(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.jsonl", _record(), "{ this is never reached")
    assert next(read_calls(file)).session == "s"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"session": "a", "session": "b"}', "line 2: the field 'session' stands there twice; give it once"),
        ("[1]", "line 2: an object expected, got list"),
        (_record(session=None), "line 2: session: "),
        (_record(session=""), "line 2: session: must not be empty"),
        (_record(turn=-1), "line 2: turn: "),
        (_record(turn="1"), "line 2: turn: "),
        (_record(turn=1.5), "line 2: turn: "),
        (_record(tenant="a\nb"), "line 2: tenant: control character"),
        (_record(continues="yes"), "line 2: continues: "),
        (_record(prompt_token_ids=[1, "x"]), r"line 2: prompt_token_ids\[1\]: .*'x'"),
        (_record(prompt_token_ids=[1, True]), r"line 2: prompt_token_ids\[1\]: "),
        (_record(response_token_ids=[-1]), r"line 2: response_token_ids\[0\] is -1"),
        (_record(response_token_ids=[2**40]), r"line 2: response_token_ids\[0\] is"),
        (_record(response_token_ids=None), "line 2: response_token_ids: missing"),
        (_record(response_token_ids=None, response="hi"), "line 2: response: is text; give a tokenizer .*data.sources"),
        ({"turn": 0}, "line 2: session: missing; give each conversation an id"),
        (
            f'{{"session": "a", "turn": 1{"0" * 4_300}}}',
            "line 2: a whole number has more than 4,300 digits; write it as",
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, line: Any, message: str) -> None:
    file = _write(tmp_path / "calls.jsonl", _record(), line)
    with pytest.raises(InvalidInputError, match=r"calls\.jsonl, " + message):
        list(read_calls(file))


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = _write(tmp_path / "calls.jsonl", _record(), _record(session="t"))
    with file.open("a") as more:
        more.write(json.dumps(_record(session="u"))[:-9])
    assert [call.session for call in read_calls(file)] == ["s", "t"]
    assert [record.getMessage() for record in caplog.records] == [f"{file}, line 3: has no end yet, and is left out"]
    with file.open("a") as more:
        more.write("\n")
    with pytest.raises(InvalidInputError, match="line 3: not JSON"):
        list(read_calls(file))


def test_a_file_of_something_else_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("what was said")
    with pytest.raises(InvalidInputError, match="line 1: not JSON"):
        list(read_calls(tmp_path / "a"))


@pytest.mark.parametrize("name", ["a.jsonl.GZ", "a"])
def test_a_compressed_file_of_another_name_is_read_too(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(json.dumps(_record()).encode()))
    assert [call.response.tolist() for call in read_calls(tmp_path / name)] == [[3]]


def test_the_records_of_the_guide_can_be_read(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "sdk.md").read_text(encoding="utf-8")
    records = guide.partition("### Recorded conversations")[2].partition("```json\n")[2].partition("```")[0]
    file = tmp_path / "calls.jsonl"
    file.write_text(records, encoding="utf-8")
    first, second, third = read_calls(file, tokenizer=lambda text: list(text.encode()))
    assert bytes(second.prompt.tolist()).startswith(bytes([*first.prompt.tolist(), *first.response.tolist()]))
    assert (first.session, second.session, third.session) == ("fix-42", "fix-42", "fix-43")


@pytest.mark.parametrize("content", [None, b"\x1f\x8b\x08\x00 broken"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "a.jsonl.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"a\.jsonl\.gz: cannot be read"):
        list(read_calls(file))


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    """By itself, transformers asks for most of a minute. It reads the hub's address when it is imported."""
    pytest.importorskip("transformers")
    asked = 0
    with socket.create_server(("127.0.0.1", 0)) as hub:

        def answer() -> None:
            nonlocal asked
            while True:
                try:
                    connection, _ = hub.accept()
                except OSError:
                    return
                asked += b"no/model" in connection.recv(200)
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        code = "from agentspec.simulate import open_tokenizer; open_tokenizer('no/model')"
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        hub.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert "ConfigurationError: --tokenizer no/model: cannot be loaded" in ran.stderr
    assert asked == 1


def test_text_becomes_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"read": 0, "the": 1, "file": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = _write(tmp_path / "a.jsonl", {"session": "s", "turn": 0, "prompt": "read the file", "response": "file ok"})
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        (call,) = read_calls(file, tokenizer=open_tokenizer(str(name)))
        assert (call.prompt.tolist(), call.response.tolist()) == ([0, 1, 2], [2, 3])


def test_a_text_that_is_none_is_named(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.jsonl", {"session": "s", "prompt": "a", "response": "half of a pair: \ud83d"})
    with pytest.raises(InvalidInputError, match=r"a\.jsonl, line 1: response: holds half of a surrogate pair"):
        list(read_calls(file, tokenizer=lambda text: list(map(ord, text))))
    with pytest.raises(InvalidInputError, match=r"a\.jsonl, line 1: prompt: the tokenizer refuses it: invalid literal"):
        list(read_calls(file, tokenizer=lambda text: [int(text)]))


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ConfigurationError, match=r"--tokenizer .*tokenizer\.json"):
        open_tokenizer(str(file))
    monkeypatch.setitem(sys.modules, "transformers", None)  # no hub is asked for a file
    with pytest.raises(ConfigurationError, match=r"--tokenizer .*gone\.json: no such file"):
        open_tokenizer(str(tmp_path / "gone.json"))


def test_a_clients_record_is_told_apart(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.jsonl", {"session": None, "tokens": 3, "text": "abc", "seconds": 1.0})
    with pytest.raises(InvalidInputError, match="line 1: is of a client's record, which `agentspec report` reads"):
        list(read_calls(file))
