"""Run the examples for agents as a user does, on a server that gives the answers that each needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .fake_server import FakeServer
from .test_speculation import COUNTS

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
GOOD = '```python\nimport re\ndef slugify(text):\n    return "-".join(re.findall(r"[a-z]+", text.lower()))\n```'


def run_example(name: str, server: FakeServer, folder: Path, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--base-url", server.url, "--model", "small", *options]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_refining_coder_corrects_its_code(server: FakeServer, tmp_path: Path) -> None:
    server.counts = COUNTS
    server.answers = [{"content": "def slugify(text): return text"}, {"content": GOOD}]
    said = run_example("refine_loop.py", server, tmp_path)
    assert "attempt 1: The tests fail" in said and "attempt 2: all tests pass" in said and "session 5" in said


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (
            "```python\nimport sys\ndef slugify(text): return text\nsys.exit()\n```",
            "the program ended before the tests",
        ),
        ("```\nx = '\0'\n```", "embedded null"),
        ("```\nimport os\nos.write(2, b'\\xff')\nos._exit(1)\n```", "\ufffd"),
    ],
)
def test_the_refining_coder_hands_back_what_ended_the_program(
    server: FakeServer, tmp_path: Path, code: str, failure: str
) -> None:
    server.answers = [{"content": code}, {"content": GOOD}]
    said = run_example("refine_loop.py", server, tmp_path)
    assert f"attempt 1: The tests fail: {failure}" in said and "attempt 2: all tests pass" in said


@pytest.mark.parametrize("fence", ["```py", "```Python 3", "``` ", "```"])
def test_the_refining_coder_takes_any_fence(server: FakeServer, tmp_path: Path, fence: str) -> None:
    server.answers = [{"content": f"Here it is:\n{GOOD.replace('```python', fence)}\nDone."}]
    assert "attempt 1: all tests pass" in run_example("refine_loop.py", server, tmp_path)


def test_the_tool_agent_reads_its_folder_and_nothing_else(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the answer is 42")

    def call(number: int, name: str, arguments: str) -> dict[str, object]:
        return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call(1, "list_files", "{}"), call(2, "read_file", '{"path": "notes.txt"}')]
    server.answers = [{"tool_calls": [*calls, call(3, "read_file", '{"path": "../secret"}')]}, {"content": "42"}]
    said = run_example("tool_agent.py", server, tmp_path)
    assert "the answer is 42" in said and "PermissionError" in said and said.endswith("42\n")


def test_the_pipeline_ends_with_a_report(server: FakeServer, tmp_path: Path) -> None:
    server.counts = COUNTS
    said = run_example("pipeline.py", server, tmp_path)
    assert "review: answer 3" in said and "answer 3" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "report.html").stat().st_mode & 0o077 == 0
    assert {chat.headers["x-parent-session-id"] for chat in server.chats} == {"pipeline"}


def test_the_pipeline_writes_its_report_alone(server: FakeServer, tmp_path: Path) -> None:
    """A record beside the report would be another program's file, or an earlier run's."""
    (tmp_path / "run.jsonl").write_text('{"my": "data"}\n')
    pages = []
    for _ in range(2):
        run_example("pipeline.py", server, tmp_path, "--report", "run.html")
        pages.append((tmp_path / "run.html").read_text().count("<details"))
    assert pages[0] == pages[1] > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.html", "run.jsonl"]
    assert (tmp_path / "run.jsonl").read_text() == '{"my": "data"}\n'


def test_the_pipeline_without_a_server_says_why(server: FakeServer, tmp_path: Path) -> None:
    server.failures = [400]
    command = [sys.executable, str(EXAMPLES / "pipeline.py"), "--base-url", server.url, "--model", "small"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert result.returncode == 1 and "told to answer 400" in result.stdout and "Traceback" not in result.stderr
    assert not (tmp_path / "report.html").exists()


def test_the_editor_predicts_the_file(server: FakeServer, tmp_path: Path) -> None:
    server.counts, server.prediction_usage = COUNTS, (9, 1)
    (tmp_path / "sum.py").write_text("total = 1\nprint(total)\n")
    edits = ["count = 1\nprint(count)\n", "count = 2\nprint(count)\n"]
    server.answers = [{"content": f"```python\n{text}```"} for text in edits]
    said = run_example("editor.py", server, tmp_path, "sum.py", "rename total", "start at 2")
    assert "-total = 1\n" in said and "+count = 1\n" in said and "+count = 2\n" in said
    assert said.count("9 of them from the prediction") == 2
    predicted = [chat.body["prediction"]["content"] for chat in server.chats]
    assert predicted == [f"```\n{text}```" for text in ("total = 1\nprint(total)\n", edits[0])]
    # A server whose context cannot hold so many tokens would refuse a limit.
    assert not any("max_tokens" in chat.body for chat in server.chats)


def test_the_editor_takes_a_file_with_code_blocks(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("old\n```\ncode\n```\n")
    server.answers = [{"content": "````markdown\nnew\n```\ncode\n```\n````"}]
    said = run_example("editor.py", server, tmp_path, "notes.md", "say new")
    assert said.splitlines()[1:] == ["--- before", "+++ after", "@@ -1 +1 @@", "-old", "+new"]


@pytest.mark.parametrize(
    ("given", "answer", "edited"),
    [
        ("a = 1", "```\na = 2\n```", "a = 2\n"),
        ("a = 1\n", "Here:\n```c++ title=x\na = 2\n```\nDone.", "a = 2\n"),
        (
            "a = 1\n",
            '```\n"""Example:\n    ```\n    a\n    ```\n"""\n```',
            '"""Example:\n    ```\n    a\n    ```\n"""\n',
        ),
        ("a = 1\n", "a = 2\n", "a = 2\n"),
        ("a = 1\n", "```\na = 2\n```\nRun:\n```\npython a.py\n```", "a = 2\n"),
        ("a = 1\n", "````\na = 2\n````", "a = 2\n"),
        ("a = 1\n", "```md\n# T\n```py\na = 2\n```\nb\n```", "# T\n```py\na = 2\n```\nb\n"),
    ],
)
def test_the_editor_takes_the_whole_block_of_an_answer(
    server: FakeServer, tmp_path: Path, given: str, answer: str, edited: str
) -> None:
    (tmp_path / "file").write_text(given)
    server.answers = [{"content": answer}, {"content": answer}]
    run_example("editor.py", server, tmp_path, "file", "change it", "change it again")
    predicted = [chat.body["prediction"]["content"] for chat in server.chats]
    assert predicted == [f"```\n{given.rstrip()}\n```", f"```\n{edited}```"]
    assert "\n```\nChange it" in server.chats[0].body["messages"][0]["content"]


def test_the_editor_takes_no_answer_that_was_cut_off_for_the_file(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text("total = 1\n")
    server.answers, server.finish_reason = [{"content": "```\ntotal"}], "length"
    said = run_example("editor.py", server, tmp_path, "sum.py", "rename total", "start at 2")
    assert "rename total: " in said and "the answer was cut off" in said and "-total" not in said
    assert len(server.chats) == 1


def test_the_fan_out_reviews_each_file(server: FakeServer, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("pass")
    said = run_example("async_fanout.py", server, tmp_path, "a.py", "b.py")
    assert "a.py: done" in said and "b.py: done" in said and len(server.chats) == 5


def test_the_fan_out_takes_files_of_one_name_and_a_file_that_is_given_twice(server: FakeServer, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_bytes(b"pass  # \xff")
    said = run_example("async_fanout.py", server, tmp_path, "one/a.py", "two/a.py", "./one/a.py")
    assert "one/a.py: done" in said and "two/a.py: done" in said and len(server.chats) == 5


def test_two_sessions_tell_their_sources(server: FakeServer, tmp_path: Path) -> None:
    server.counts = COUNTS
    assert run_example("two_sessions.py", server, tmp_path).count("accepted from {'request': 3, 'session': 5}") == 4


@pytest.mark.skipif(importlib.util.find_spec("agents") is None, reason="openai-agents is not installed")
def test_the_runner_of_openai_agents_keeps_its_history_in_a_session(server: FakeServer, tmp_path: Path) -> None:
    server.answers = [{"content": text} for text in ("one", "two")]
    said = run_example("openai_agents.py", server, tmp_path)
    assert said == "one\ntwo\n4 messages in session poet\n"
    assert {chat.headers["x-session-id"] for chat in server.chats} == {"poet"}


@pytest.mark.skipif(importlib.util.find_spec("pydantic_ai") is None, reason="pydantic-ai-slim is not installed")
def test_pydantic_ai_needs_an_address_and_a_header(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.api_key = "secret"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.answers = [{"content": text} for text in ("one", "two")]
    said = run_example("pydantic_ai_agent.py", server, tmp_path, "--session", "hares")
    assert said == "one\ntwo\nsession hares: 3 tokens in the last turn\n"
    assert [chat.headers["x-session-id"] for chat in server.chats] == ["hares", "hares"]
    assert [message["content"] for message in server.chats[1].body["messages"]][-2:] == [
        "one",
        "Say it again, with a rhyme.",
    ]
