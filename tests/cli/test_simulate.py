"""Test `agentspec simulate` as users call it: a table or one JSON object on stdout, everything else on stderr."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cli import main
from agentspec.simulate import read_calls
from agentspec.simulate import simulate as replay


class Program:
    """Run the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return the exit status, stdout and stderr."""
        self._monkeypatch.setattr(sys, "argv", ["agentspec", "simulate", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = self._capsys.readouterr()
        return int(end.value.code or 0), printed.out, " ".join(printed.err.split())


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Return the command, to be called with its arguments."""
    return Program(monkeypatch, capsys)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Return a file of two sessions with the same answer, which the first gives twice."""
    random = np.random.default_rng(1)
    answer = random.integers(0, 32_000, 80).tolist()
    turns = [
        {"session": "a", "turn": 0},
        {"session": "a", "turn": 1, "continues": True},
        {"session": "b", "turn": 0},
    ]
    file = tmp_path / "calls.jsonl"
    with file.open("w") as out:
        for turn in turns:
            prompt = random.integers(0, 32_000, 40).tolist()
            out.write(json.dumps({**turn, "prompt_token_ids": prompt, "response_token_ids": answer}) + "\n")
    return file


def test_conversations_come_through_a_pipe(simulate: Program, conversations: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, conversations.read_bytes())
    os.close(writing)
    status, out, errors = simulate(f"/dev/fd/{reading}", "--json")
    os.close(reading)
    assert (status, errors) == (0, "") and json.loads(out)["tokens"] == 240


def test_json_is_one_object_and_nothing_else(simulate: Program, conversations: Path) -> None:
    status, out, _ = simulate(str(conversations), "--json", "--verify-cost", "0.01", "--max-draft", "16")
    figures = json.loads(out)
    assert status == 0
    assert figures["tokens"] == 240
    assert figures["steps"] < 200
    assert figures["tokens_per_step"] == pytest.approx(240 / figures["steps"], abs=1e-3)
    assert figures["acceptance_rate"] == pytest.approx(figures["accepted"] / figures["drafted"], abs=1e-3)
    assert sum(figures["accepted_by_source"].values()) == figures["accepted"]
    assert 0 < figures["propose_us"]["p50"] <= figures["propose_us"]["p99"]
    assert 0 < figures["extend_us"]["p50"] <= figures["extend_us"]["p99"]
    assert figures["bytes_per_token"] > 0


def test_steps_that_compute_prompts_are_counted_where_that_is_asked_for(simulate: Program, conversations: Path) -> None:
    """Each of the three answers begins with a token that no draft gave, as on a server and in a client's forecast."""
    without, counted = (
        json.loads(simulate(str(conversations), "--json", *options)[1]) for options in ((), ("--prefill-steps",))
    )
    assert without["tokens"] == counted["tokens"] == 240
    assert without["steps"] <= counted["steps"] <= without["steps"] + 3
    calls = list(read_calls(conversations))
    replayed = replay(calls, SuffixCache(), prefill_steps=True)
    assert (counted["steps"], counted["drafted"]) == (replayed.steps, replayed.drafted)


def test_sessions_of_two_tenants_stay_apart_although_both_count_for_one(tmp_path: Path) -> None:
    lines = [
        {"tenant": "a", "session": "s", "prompt_token_ids": [1], "response_token_ids": [2, 3]},
        {"tenant": "b", "session": "s", "prompt_token_ids": [11], "response_token_ids": [12, 13]},
        {"tenant": "a", "session": "s", "continues": True, "prompt_token_ids": [4], "response_token_ids": [5]},
    ]
    file = tmp_path / "calls.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    calls = list(read_calls(file, tenant="x"))
    assert calls[2].prompt.tolist() == [1, 2, 3, 4]
    first, other, again = (call.session for call in calls)
    assert first == again != other and {call.tenant for call in calls} == {"x"}
    alike = [("a", "b/c"), ("a/b", "c"), ("a", "s" * 256), ("b", "s" * 256)]
    tokens = {"prompt_token_ids": [1], "response_token_ids": [2]}
    lines = [{"tenant": owner, "session": session, **tokens} for owner, session in alike]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len({call.session for call in read_calls(file, tenant="x")}) == 4


def test_sessions_help_each_other_unless_the_scope_is_narrowed(simulate: Program, conversations: Path) -> None:
    def run(*options: str) -> dict[str, Any]:
        """Return the figures that do not depend on time."""
        figures: dict[str, Any] = json.loads(simulate(str(conversations), "--json", *options)[1])
        return {name: value for name, value in figures.items() if not name.endswith("_us")}

    shared, session, nothing = run(), run("--scope", "session"), run("--scope", "none")
    assert shared == run("--tenant", "acme") == run("--scope", "tenant")
    assert shared["steps"] < session["steps"] <= nothing["steps"]  # a prompt repeats its session
    assert session["accepted_by_source"]["global"] == 0 < shared["accepted_by_source"]["global"]
    assert nothing["accepted_by_source"]["session"] == 0 < session["accepted_by_source"]["session"]


def test_the_verify_cost_shortens_drafts(simulate: Program, conversations: Path) -> None:
    cheap = json.loads(simulate(str(conversations), "--json", "--verify-cost", "0")[1])
    dear = json.loads(simulate(str(conversations), "--json", "--verify-cost", "0.9")[1])
    assert dear["drafted"] < cheap["drafted"]


def test_the_arctic_rule_has_its_own_options(simulate: Program, conversations: Path) -> None:
    arctic = ("--json", "--rule", "arctic")
    wide = json.loads(simulate(str(conversations), *arctic)[1])
    narrow = json.loads(simulate(str(conversations), *arctic, "--max-spec-factor", "0.5", "--max-depth", "16")[1])
    assert 0 < narrow["drafted"] < wide["drafted"]
    assert wide["accepted_by_source"]["session"] == 0
    assert json.loads(simulate(str(conversations), *arctic, "--min-token-prob", "1", "--max-draft", "4")[1])["steps"]


def test_a_table_without_json(simulate: Program, conversations: Path, tmp_path: Path) -> None:
    named = tmp_path / "[bold]:smile:[@x].jsonl"  # rich would take it for markup
    conversations.rename(named)
    status, out, _ = simulate(str(named))
    assert status == 0
    assert named.name in out
    assert "tokens a step" in out and "240" in out and "from session" in out


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("{}", (), "calls.jsonl, line 4: session: missing; give"),
        ("", ("--verify-cost", "nan"), "--verify-cost=nan"),
        ("", ("--max-draft", "1000"), "--max-draft=1000"),
        ("", ("--tenant", "a\nb"), "tenant"),
        ("", ("--max-depth", "8"), "--max-depth has no effect with --rule learned"),
        ("", ("--rule", "arctic", "--verify-cost", "0.1"), "--verify-cost has no effect with --rule arctic"),
        ("", ("--rule", "arctic", "--min-token-prob", "7"), "--min-token-prob=7"),
    ],
)
def test_bad_input_is_one_line(
    simulate: Program, conversations: Path, line: str, options: tuple[str, ...], message: str
) -> None:
    with conversations.open("a") as file:
        file.write(line + "\n")
    status, out, err = simulate(str(conversations), "--json", *options)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_a_file_with_nothing_to_replay_is_named(simulate: Program, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for file, message in ((empty, "no record with a response"), (tmp_path / "gone.jsonl", "cannot be read")):
        status, _, err = simulate(str(file))
        assert status == 2
        assert file.name in err and message in err
