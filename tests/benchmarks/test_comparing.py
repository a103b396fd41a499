"""Test the benchmarks that compare drafters: what they count and print, and errors that name the remedy."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import report  # isort: skip
import drafting  # isort: skip
import arctic  # isort: skip
import drafters  # isort: skip
import trace_files  # isort: skip
from agentspec.cache import DraftPolicy
from agentspec.errors import ConfigurationError
from agentspec.testing.replay import ReplayResult


def test_a_result_names_the_gpus_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report.machine().endswith(" cores, no GPU")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert report.machine().endswith(" cores, NVIDIA H200, NVIDIA H200")


def test_a_row_says_how_many_times_better_and_whether_that_meets_the_target() -> None:
    assert report.less("f", 2.0, 30.0, 10) == report.Row("f", 2.0, 30.0, 15.0, "at least 10x less", True)
    assert report.less("f", 4.0, 30.0, 10).met is False
    assert report.less("f", 4.0, 30.0).met is None
    assert report.more("f", 2.2, 2.0, 1.1).met is True
    assert report.more("f", 1.9, 2.0, 1.0).met is False
    assert report.at_most("f", 0.2, 0.3, "s").met is True


def test_the_noise_of_a_speed_ratio_comes_from_its_turns() -> None:
    def result(*seconds: float) -> ReplayResult:
        turns = tuple((10, duration) for duration in seconds)
        return ReplayResult(tokens=10 * len(seconds), seconds=sum(seconds), turns=turns)

    steady = report.speed_ratio(result(1.0, 2.0, 3.0), result(2.0, 4.0, 6.0))
    assert steady == pytest.approx((2.0, 0.0), abs=1e-9)
    ratio, noise = report.speed_ratio(result(1.0, 1.0, 1.0), result(1.0, 2.0, 3.0))
    assert ratio == pytest.approx(2.0) and 0.3 < noise < 1.0
    assert report.speed_ratio(result(1.0, 2.0), result(2.0, 3.0))[1] == 0.0  # too few turns to say


def test_json_is_a_list_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    report.show([report.less("time", 2.0, 30.0, 10), report.Row("alone", 1.23456789)], "title", True)
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "figure": "time",
        "ours": 2.0,
        "peer": 30.0,
        "ratio": 15.0,
        "target": "at least 10x less",
        "met": True,
    }
    assert (second["ours"], second["peer"], second["met"]) == (1.2346, None, None)


def test_what_never_came_is_null_in_json() -> None:
    assert report.rounded({"figure": "ms", "value": float("inf")}) == {"figure": "ms", "value": None}


def test_a_result_is_written_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    report.save("name", "counts", {"rows": []})
    result = json.loads((tmp_path / "name.json").read_text())
    assert (result["kind"], result["commit"], result["rows"]) == ("counts", "", [])


@pytest.mark.parametrize(
    ("draft", "accepted"), [([], 0), ([1, 2], 2), ([1, 9, 3], 1), ([9, 2], 0), ([1, 2, 3, 4, 5], 3)]
)
def test_a_draft_is_accepted_up_to_its_first_wrong_token(draft: list[int], accepted: int) -> None:
    assert trace_files.accepted_tokens(draft, np.array([1, 2, 3], np.int32)) == accepted


def test_documents_go_on_with_other_token_ids(traces: Path) -> None:
    recorded = 3 * len(trace_files.WORKLOADS)
    source = trace_files.documents(traces)
    first = [next(source) for _ in range(recorded)]
    again = next(source)
    assert again.dtype == np.int32 and len(again) == len(first[0])
    assert not set(again.tolist()) & set(first[0].tolist())
    assert (again[0] == again[3]) and (again[0] != again[1])  # repeats itself as the recorded text does
    assert int(again.max()) < trace_files.VOCABULARY


def test_a_folder_without_traces_is_named(tmp_path: Path, traces: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--traces .*load\.py"):
        list(trace_files.records(tmp_path, "chat_mtbench"))
    with pytest.raises(ConfigurationError, match=r"'gone'.*chat_mtbench"):
        list(trace_files.records(traces, "gone"))


def test_recordings_of_other_names_are_named_where_the_default_ones_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drafting, "pin", lambda cpu: None)
    (tmp_path / "load.py").write_text("")
    (tmp_path / "mine.tok.npz").touch()
    assert drafting.main(["--traces", str(tmp_path), "--peer-dir", str(tmp_path)]) == 2
    assert "no workload 'react_hotpot'; there are mine" in capsys.readouterr().err


def _record_with(traces: Path, workload: str, *records: str) -> None:
    """Let load.py yield these records, which are Python source."""
    trace_files._module.cache_clear()
    (traces / "load.py").write_text(f"def tokens(name):\n    return [{', '.join(records)}]\n")


def test_a_record_without_group_and_turn_has_none_and_lists_become_arrays(traces: Path) -> None:
    _record_with(traces, "chat_mtbench", '{"session": 7, "prompt": [1, 2], "response": [3]}')
    (call,) = trace_files.calls(traces, "chat_mtbench")
    assert (call.session, call.turn, call.group) == ("7", 0, None)
    assert call.prompt.dtype == call.response.dtype == np.int32
    with pytest.raises(ConfigurationError, match=r"chat_mtbench.* without a group"):
        list(trace_files.samples_by_problem(traces, "chat_mtbench"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"session": 0, "prompt": [1]}', "record 1: has no field 'response'"),
        ('{"session": 0, "prompt": "hi", "response": [1]}', "record 1: prompt: give an int32 array"),
        ('{"session": 0, "prompt": [1], "response": [-1]}', r"record 1: response\[0\] is -1"),
        ('{"session": "a\\n", "prompt": [1], "response": [1]}', "record 1: session: control character"),
        ('{"session": 0, "prompt": [1], "response": []}', "no record has a response"),
        ("", "no record has a response"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(
    traces: Path,
    record: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(drafting, "pin", lambda cpu: None)
    monkeypatch.setattr(arctic, "load", lambda folder: SimpleNamespace(SuffixDecodingCache=_ListingCache))
    _record_with(traces, "chat_mtbench", record)
    peers = str(traces / "peer")
    assert drafting.main(["--traces", str(traces), "--workloads", "chat_mtbench", "--peer-dir", peers]) == 2
    assert re.search(f"error: --traces .*chat_mtbench.*{message}", capsys.readouterr().err)


def test_a_call_without_a_response_says_nothing_to_the_peer(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arctic, "load", lambda folder: SimpleNamespace(SuffixDecodingCache=_ListingCache))
    said_tokens = [7, 8, 9, 7, 8, 9, 7, 8, 2]
    said = f'{{"session": 0, "prompt": [5], "response": {said_tokens}}}'
    _record_with(traces, "chat_mtbench", said)
    counts = drafters.OtherDrafters(traces, tmp_path).settings("chat_mtbench")
    _record_with(traces, "chat_mtbench", said, '{"session": 0, "prompt": [5], "response": []}')
    monkeypatch.setattr(_ListingCache, "ended", [])
    assert drafters.OtherDrafters(traces, tmp_path).settings("chat_mtbench") == counts, "counted again: load.py is new"
    assert _ListingCache.ended == [said_tokens, []]


class _Cache:
    """Draft what followed the last token earlier in the response: three tokens of 7, 8, 9, 7, …"""

    def __init__(self, max_tree_depth: int) -> None:
        self.held: dict[int, list[int]] = {}

    def start_request(self, name: int, prompt: np.ndarray) -> None:
        self.held[name] = []

    def add_active_response(self, name: int, tokens: np.ndarray) -> None:
        self.held[name] += tokens.tolist()

    def stop_request(self, name: int) -> None:
        assert self.held.pop(name) == [7, 8, 9, 7, 8, 9, 7, 8, 2]  # every token once, in order

    def speculate(self, name: int, context: np.ndarray, **settings: Any) -> SimpleNamespace:
        cycle, last = [7, 8, 9], int(context[-1])
        begin = cycle.index(last) + 1 if last in cycle and self.held[name] else 0
        count = 3 if settings["min_token_prob"] < 0.3 and self.held[name] else 0
        return SimpleNamespace(token_ids=[cycle[(begin + k) % 3] for k in range(count)])


class _ListingCache(_Cache):
    """Record what requests have said."""

    ended: ClassVar[list[list[int]]] = []

    def stop_request(self, name: int) -> None:
        self.ended.append(self.held.pop(name))


def test_the_peers_settings_are_counted_in_one_pass(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arctic, "load", lambda folder: SimpleNamespace(SuffixDecodingCache=_Cache))
    counts = drafters.OtherDrafters(traces, tmp_path).settings("chat_mtbench")
    assert len(counts) == 12
    # The first step has no draft and gives one token; then 3 + 1, then 3 and the one after them.
    assert counts["1/0.1"] == drafters.Counts(tokens=27, steps=9, drafted=18)
    assert counts["1/0.5"] == drafters.Counts(tokens=27, steps=27, drafted=0)
    assert counts["1/0.1"].throughput(0.5) == pytest.approx(27 / 18)

    monkeypatch.setattr(arctic, "load", lambda folder: pytest.fail("the counts are kept"))
    assert drafters.OtherDrafters(traces, tmp_path).settings("chat_mtbench") == counts


def test_counts_that_could_not_be_written_whole_are_not_kept(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arctic, "load", lambda folder: SimpleNamespace(SuffixDecodingCache=_Cache))
    peers = drafters.OtherDrafters(traces, tmp_path / "peer")

    def half(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:9])
        raise OSError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="No space"):
            peers.settings("chat_mtbench")
    assert len(peers.settings("chat_mtbench")) == 12


def test_every_rival_is_counted_with_its_own_defaults(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arctic, "load", lambda folder: SimpleNamespace(SuffixDecodingCache=_Cache))
    monkeypatch.setattr(drafters, "ngram_rule", lambda: lambda text: text[-2:].tolist())
    counts = drafters.OtherDrafters(traces, tmp_path).defaults("chat_mtbench")
    assert set(counts) == {*drafters.ARCTIC_DEFAULTS, drafters.NGRAM}
    assert counts["vLLM suffix"] == drafters.Counts(tokens=27, steps=9, drafted=18)
    assert (counts[drafters.NGRAM].tokens, counts[drafters.NGRAM].drafted) == (27, 2 * counts[drafters.NGRAM].steps)

    monkeypatch.setattr(drafters, "ngram_rule", lambda: None)  # no vLLM here
    assert set(drafters.OtherDrafters(traces, tmp_path).defaults("chat_mtbench")) == set(drafters.ARCTIC_DEFAULTS)


def test_defaults_have_targets_beside_the_best_setting_and_must_beat_every_default(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rivals:
        def settings(self, workload: str) -> dict[str, drafters.Counts]:
            return {str(s): drafters.Counts(100, 50, int(10 * s.factor)) for s in drafters.ARCTIC_SETTINGS}

        def defaults(self, workload: str) -> dict[str, drafters.Counts]:
            return {"vLLM suffix": drafters.Counts(100, 40, 0)}

    told: list[float | None] = []

    def count(traces: Path, workload: str, policy: DraftPolicy) -> drafters.Counts:
        told.append(policy.cost)
        return drafters.Counts(100, 45, 0)

    monkeypatch.setattr(drafting, "default_counts", count)
    rows = drafting.default_rows(traces, ["refine_code_ldb", "chat_mtbench"], Rivals())  # type: ignore[arg-type]
    assert told == 2 * [None, 0.01, 0.03]
    ldb, chat = rows[0], rows[4]
    assert (ldb.target, ldb.met) == ("at least 1.35", False)
    assert (chat.figure, chat.target, chat.met) == (
        "throughput, defaults, chat_mtbench, cost 0.01 (the peer's best: 1/0.1)",
        "at least 1.03",
        True,
    )
    assert sum("told the cost" in row.figure for row in rows) == 4
    beside = [row for row in rows if "beside vLLM suffix" in row.figure]
    assert [row.met for row in beside] == 2 * [False, False, None]  # 45 steps are more than 40


def test_a_peer_that_cannot_be_fetched_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(arctic.PeerUnavailableError, match=r"cannot be fetched.*requirements/dev\.txt"):
        arctic.build(tmp_path / "peer")
    assert not [path for path in (tmp_path / "peer").iterdir() if path.is_dir()]


def test_another_package_than_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(verb: str, command: list[str], environment: dict[str, str]) -> None:
        (Path(command[command.index("--dest") + 1]) / "arctic_inference-0.3.0.tar.gz").write_bytes(b"another")

    monkeypatch.setattr(arctic, "_run", fetch)
    with pytest.raises(arctic.PeerUnavailableError, match="sha256"):
        arctic.build(tmp_path)


def test_a_relative_folder_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built: list[Path] = []

    def lay_out(source: Path, module: Path) -> Path:
        module.mkdir()
        return module

    monkeypatch.setattr(arctic, "_fetch", lambda scratch, root: scratch)
    monkeypatch.setattr(arctic, "_unpack", lambda archive, scratch: scratch)
    monkeypatch.setattr(arctic, "_lay_out", lay_out)
    monkeypatch.setattr(arctic, "_compile", lambda source, build, target: built.append(target))
    assert arctic.build(Path("peer")).parent == tmp_path / "peer"
    assert built[0].is_relative_to(tmp_path), "CMake would put it into its build folder"


def test_a_missing_cmake_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(arctic.PeerUnavailableError, match="no cmake"):
        arctic._compile(tmp_path, tmp_path, tmp_path)
