"""Test detailed figures, and the record of replies."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from agentspec import AgentClient, AsyncAgentClient, ConfigurationError, DecodeStep, DraftedToken
from agentspec.report.records import read_run

from .fake_server import FakeServer
from .test_speculation import COUNTS

DETAIL = [
    {
        "tokens": ["an", "swer"],
        "sources": ["session"],
        "rejected": [" x", None],
        "rejected_sources": ["session", "global"],
    },
    {"tokens": [" 1"], "sources": [], "rejected": [], "rejected_sources": []},
]


def test_detail_has_the_source_of_each_token(server: FakeServer) -> None:
    server.counts = {**COUNTS, "detail": DETAIL}
    with AgentClient(base_url=server.url, model="small", store=None, speculation="detailed") as client:
        reply = client.chat("hello")
    assert reply.speculation is not None
    assert reply.speculation.detail == (
        DecodeStep(
            (DraftedToken("an", "session"), DraftedToken("swer", None)),
            (DraftedToken(" x", "session"), DraftedToken(None, "global")),
        ),
        DecodeStep((DraftedToken(" 1", None),), ()),
    )
    assert server.chats[0].headers["x-agentspec-figures"] == "detailed"


def test_a_record_has_a_line_for_each_reply(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    server.counts = {**COUNTS, "detail": DETAIL}
    with AgentClient(base_url=server.url, model="small", store=None, record=path) as client:
        session = client.session("s", parent="root")
        session.chat("one")
        session.stream("two").until_done()
        server.counts = None
        client.chat("three")
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["text"] for line in lines] == ["answer 1", "answer 2", "answer 3"]
    assert [line["session"] for line in lines] == ["s", "s", None] and lines[0]["parent"] == "root"
    assert lines[0]["accepted_by_source"] == COUNTS["accepted_by_source"] and lines[0]["steps"] == 6
    assert lines[1]["detail"][0] == [[["an", "session"], ["swer", None]], [[" x", "session"], [None, "global"]]]
    assert "steps" not in lines[2] and lines[2]["tokens"] == 3
    assert all(line["seconds"] > 0 for line in lines)


def test_half_a_character_is_recorded(server: FakeServer, tmp_path: Path) -> None:
    """Some gateways split a surrogate pair between chunks, or cut it off."""
    path = tmp_path / "replies.jsonl"
    server.answers = [{"content": "a\ud83d\ude00b"}, {"content": "cut \ud83d"}]
    with AgentClient(base_url=server.url, model="small", store=None, record=path) as client:
        replies = [client.chat("one"), client.chat("two")]
    assert [reply.text for reply in replies] == ["a\U0001f600b", "cut \\ud83d"]
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == [reply.text for reply in replies]


async def test_the_asyncio_client_records_too(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    async with AsyncAgentClient(base_url=server.url, model="small", store=None, record=path) as client:
        await client.chat("one")
    assert json.loads(path.read_text())["text"] == "answer 1"


def test_only_its_owner_may_read_a_record(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    before = os.umask(0)
    try:
        with AgentClient(base_url=server.url, model="small", store=None, record=path) as client:
            client.chat("one")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text()


def test_others_may_read_what_was_there(server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "replies.jsonl"
    path.touch()
    path.chmod(0o644)
    with AgentClient(base_url=server.url, model="small", store=None, record=path) as client:
        client.chat("one")
    assert path.stat().st_mode & 0o777 == 0o644
    assert f"{path}: others may read it (mode 0644), and it holds what was said: chmod 600 {path}" in caplog.text
    caplog.clear()
    path.chmod(0o600)
    AgentClient(base_url=server.url, model="small", store=None, record=path).close()
    assert not caplog.text


def test_a_record_that_cannot_be_opened_fails_at_once(server: FakeServer, tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no" / "such.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationError, match=f"record .*: cannot be written: {why}.*; name another file"):
            AgentClient(base_url=server.url, model="small", store=None, record=path)


def test_a_file_that_holds_something_else_is_refused_and_kept(server: FakeServer, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("remember")
    with pytest.raises(ConfigurationError, match=r"record .*notes\.txt: .*name another file"):
        AgentClient(base_url=server.url, model="small", store=None, record=notes)
    assert notes.read_text() == "remember"


def test_a_record_has_the_name_of_a_file(server: FakeServer) -> None:
    for name in ("", "a\0b"):
        with pytest.raises(ConfigurationError, match="record: the name of a file is needed"):
            AgentClient(base_url=server.url, model="small", store=None, record=name)


def test_a_full_disk_takes_no_reply_but_those_that_did_not_fit(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    with AgentClient(base_url=server.url, model="small", store=None, record=path) as client:
        client.chat("one")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
        try:
            server.answers = [{"content": "long " * 10_000}]  # more than Python's buffer, so its beginning is written
            client.chat("two")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        client.chat("three")
        client.chat("four")
    (session,) = read_run(path).sessions
    assert [turn.text for turn in session.turns] == ["answer 1", "answer 3", "answer 4"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_client_closes_though_its_record_cannot_be_written(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with AgentClient(base_url=server.url, model="small", store=None, record="/dev/full") as client:
        assert client.chat("one").text == "answer 1"
    assert "the end of the record cannot be written" in caplog.text
