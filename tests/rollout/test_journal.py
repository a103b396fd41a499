"""Test the file of samples: it has each exactly once, whatever happens to the process that writes it."""

import gc
import json
import math
import os
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from agentspec.errors import AgentSpecError, InvalidInputError
from agentspec.rollout import Journal, Key, Sample
from agentspec.rollout import journal as journal_module
from agentspec.rollout.samples import parse_sample

SAMPLED = {"sample": 0, "prompt_ids": [], "completion_ids": [], "logprobs": [], "text": ""}


def sample(number: int = 0, epoch: int = 0, **changes: object) -> Sample:
    return Sample("p", epoch, number, [1, 2], [3, 4], [-0.1, -0.2], "text", **changes)  # type: ignore[arg-type]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rollouts.jsonl"
    wanted = [sample(0), sample(1, reward=0.5, fields={"answer": "é\u2028😀"}), sample(0, epoch=1, reward=1)]
    with Journal(path) as journal:
        for one in wanted:
            journal.write(one)
        assert Key("p", 0, 1) in journal and Key("p", 0, 2) not in journal and len(journal) == 3
    with Journal(path) as journal:
        assert list(journal.samples()) == wanted
        assert list(journal.samples(epoch=1)) == wanted[2:]
    assert list(journal.samples()) == wanted, "closed, too"


def test_an_epoch_is_read_without_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with many epochs that writes each of them in another format would otherwise read more and more."""
    path, wanted = tmp_path / "rollouts.jsonl", [sample(n, epoch) for epoch in range(3) for n in range(4)]
    wanted.insert(9, sample(7, epoch=0))  # a run that was continued
    parsed: list[bytes] = []

    def parse(line: bytes) -> Sample:
        parsed.append(line)
        return parse_sample(line)

    monkeypatch.setattr(journal_module, "parse_sample", parse)

    def check(journal: Journal, *lines_read: int) -> None:
        for epoch, most in enumerate(lines_read):
            parsed.clear()
            assert list(journal.samples(epoch)) == [one for one in wanted if one.epoch == epoch]
            assert len(parsed) == most

    with Journal(path) as journal:
        for one in wanted:
            journal.write(one)
        check(journal, 13, 9, 5)
    with Journal(path) as journal:
        check(journal, 13, 9, 5)
        wanted[0] = sample(reward=0.123456789)
        journal.replace({wanted[0].key: wanted[0]})  # the lines behind it lie elsewhere now
        check(journal, 13, 13, 13)
        wanted.append(sample(epoch=3))
        journal.write(wanted[-1])
        check(journal, 14, 14, 14, 1)


def test_reading_closes_one_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time could close a file that another thread has opened meanwhile."""
    closed, close = list[int](), os.close

    def noted(file: int) -> None:
        closed.append(file)
        close(file)

    with Journal(tmp_path / "rollouts.jsonl") as journal:
        journal.write(sample())
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", noted)
            assert list(journal.samples()) == [sample()]
            gc.collect()
        assert len(closed) == 1


def test_every_line_is_utf_8(tmp_path: Path) -> None:
    """If one line is not UTF-8, ``datasets`` refuses the whole file."""
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(reward_error="ValueError: \udce9", fields={"\ud800": ['"\ud83d\\']}))
        (read,) = journal.samples()
    assert json.loads(path.read_text(encoding="utf-8"))["reward_error"] == read.reward_error == r"ValueError: \udce9"
    assert read.fields == {r"\ud800": [r'"\ud83d' + "\\"]}


def test_what_only_later_samples_say_of_their_distribution_counts(tmp_path: Path) -> None:
    """Otherwise a file that an earlier release began could be continued in another dtype."""
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        for number, more in enumerate(({}, {"dtype": "float32"})):
            journal.write(sample(number, sampling={"temperature": 1.0, **more}))
    with Journal(path) as journal:
        journal.check_sampling({"temperature": 1.0, "dtype": "float32"})
        with pytest.raises(AgentSpecError, match=r'samples have dtype "float32", and this rollout asks for "bfloat16"'):
            journal.check_sampling({"temperature": 1.0, "dtype": "bfloat16"})


def test_a_sample_is_written_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "rollouts.jsonl") as journal:
        journal.write(sample())
        with pytest.raises(AgentSpecError, match="holds \\('p', 0, 0\\) already"):
            journal.write(sample())


@pytest.mark.parametrize("torn", ["{", '{"id": "p", "epoch"', json.dumps({"id": "p", "epoch": 0, "sample": 9})[:-1]])
def test_a_line_that_was_cut_off_is_removed(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode())
    with Journal(path) as journal:
        assert len(journal) == 1
        assert path.read_bytes() == whole
        journal.write(sample(1))


def test_a_long_line_that_was_cut_off_is_removed_wherever_that_was(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(Sample('p "\\é', 0, 0, [1], [2], [-0.1], "long " * 40_000))  # longer than one read from the end
        journal.write(sample(0))
    whole, short = path.read_bytes().splitlines(keepends=True)
    for length in [*range(1, 40), 65_535, 65_536, 65_537, len(whole) - 2]:
        for before in (b"", short):
            path.write_bytes(before + whole[:length])
            with Journal(path) as journal:
                assert len(journal) == (1 if before else 0) and path.read_bytes() == before


def test_a_last_sample_that_lacks_only_the_end_of_its_line_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with Journal(path) as journal:
        assert Key("p", 0, 0) in journal and path.read_bytes() == whole
        journal.write(sample(1))
    with Journal(path) as journal:
        assert len(journal) == 2


def test_samples_are_replaced_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.symlink_to(tmp_path / "elsewhere.jsonl")
    with Journal(path) as journal:
        for number in range(3):
            journal.write(sample(number))
        path.chmod(0o640)
        journal.replace({Key("p", 0, 1): sample(1, reward=0.5)})
        assert path.stat().st_mode & 0o777 == 0o640
        assert (journal.reward(Key("p", 0, 1)), journal.reward(Key("p", 0, 2))) == (0.5, None)
        journal.write(sample(3))
        with pytest.raises(AgentSpecError, match="another rollout writes it"):
            Journal(path)
    with Journal(path) as journal:
        assert list(journal.samples()) == [sample(0), sample(1, reward=0.5), sample(2), sample(3)]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "elsewhere.jsonl", path] and path.is_symlink()


@pytest.mark.parametrize(
    "text",
    [
        '{"id": 1}\n',
        '{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}',  # problems, whose last line ends with the file
        '{"id": "b", "prompt": "y"}',
        "a note",
        '{"id":"p","epoch":0',
        '{"id": "a", "epoch": 3, "prompt": "a problem of somebody\'s"}',
        json.dumps({"id": "p", "epoch": 0, "sample": 0, "completion_ids": []}) + '\n{"id": "b", "epoch": 3',
        json.dumps(
            {"id": ["a"], "epoch": 0, "sample": 0, "prompt_ids": [], "completion_ids": [], "logprobs": [], "text": ""}
        )
        + "\n",
        "[" * 100_000 + "\n",
        "[" * 100_000,
        json.dumps({"id": ["a"], "epoch": 0, **SAMPLED}),
        # Samples rewritten by another program: pandas turns "7" into a number, so each would be sampled twice.
        *(
            json.dumps({"id": "7", "epoch": 0, **SAMPLED, **wrong}) + "\n"
            for wrong in (
                {"id": 7},
                {"epoch": "0"},
                {"sample": True},
                {"reward": "high"},
                {"reward": math.nan},
                {"reward": 10**400},
                {"reward": True},
                {"sampling": "greedy"},
            )
        ),
        *(json.dumps({"id": "p", "epoch": 0, **SAMPLED, name: None}) + "\n" for name in ("text", "logprobs", "fields")),
        json.dumps({"id": "p", "epoch": 0, **SAMPLED})[:-1] + ', "id": "q"}\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(text)
    with pytest.raises(AgentSpecError, match=r"notes\.jsonl.* line.* not a sample of a rollout"):
        Journal(path)
    assert path.read_text() == text
    path.write_text("")
    Journal(path).close()  # nothing holds the file


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_sample_that_a_file_holds_twice_is_named(tmp_path: Path, end: str) -> None:
    """Otherwise trainers would get both, although each sample must be there exactly once."""
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        for number in range(2):
            journal.write(sample(number))
    text = path.read_text() + path.read_text().splitlines()[0] + end
    path.write_text(text)
    with pytest.raises(
        AgentSpecError, match=r"jsonl, (line 3|its last line): the sample \('p', 0, 0\) stands there twice"
    ):
        Journal(path)
    assert path.read_text() == text


def test_fields_may_have_a_name_twice(tmp_path: Path) -> None:
    """Python's dictionaries may have both keys 1 and "1", which JSON writes alike."""
    with Journal(tmp_path / "rollouts.jsonl") as journal:
        journal.write(sample(fields={"by": {1: "a", "1": "b"}}))
        assert [one.fields for one in journal.samples()] == [{"by": {"1": "b"}}]


def test_a_file_that_is_no_text_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n\xff\n")
    with pytest.raises(AgentSpecError, match=r"notes\.jsonl, line 1: not a sample of a rollout"):
        Journal(path)
    assert path.read_bytes() == b"\xff\xfe\x00\n\xff\n"


def test_what_json_has_no_form_for_is_written_as_text(tmp_path: Path) -> None:
    with Journal(tmp_path / "rollouts.jsonl") as journal:
        journal.write(sample(fields={"day": date(2026, 1, 2), "price": Decimal("1.50"), "picture": b"x"}))
        (read,) = journal.samples()
    assert read.fields == {"day": "2026-01-02", "price": "1.50", "picture": "b'x'"}


def test_numbers_that_json_lacks_are_written_as_null(tmp_path: Path) -> None:
    """pandas has them in parquet for missing values. `NaN` is no JSON, so other readers would refuse the line."""
    path = tmp_path / "rollouts.jsonl"
    fields = {"price": math.nan, "tests": [{"limit": -math.inf}, (math.inf, 1.5)], "answer": "NaN"}
    with Journal(path) as journal:
        journal.write(sample(fields=fields))
        (read,) = journal.samples()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["fields"] == read.fields
    assert read.fields == {"price": None, "tests": [{"limit": None}, [None, 1.5]], "answer": "NaN"}


def test_the_first_samples_say_what_the_file_is_of(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
        journal.write(sample(1, sampling={"model": "a", "temperature": 1.0}))
        journal.write(Sample("p", 0, 2, [1, 9], [3], [-0.1], "text", sampling={"model": "b"}))
    for reward in (None, 0.0):
        with Journal(path) as journal:
            assert not journal.holds_another_prompt("p", [1, 2]) and not journal.holds_another_prompt("new", [7])
            assert journal.holds_another_prompt("p", [1, 9])
            journal.check_sampling({"model": "a", "temperature": 1.0, "top_p": 0.9})
            for other in ({"model": "b"}, {"model": "a", "temperature": 0.5}):
                with pytest.raises(InvalidInputError, match="its samples have"):
                    journal.check_sampling(other)
            assert (sample(1).key in journal.without_reward()) == (reward is None)
            journal.replace({sample(1).key: sample(1, reward=0.0, sampling={"model": "a", "temperature": 1.0})})
            assert journal.without_reward() == {sample(0).key, sample(2).key}


def test_the_first_sample_of_an_epoch_says_whose_weights_wrote_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "rollouts.jsonl") as journal:
        for number, version in enumerate(("first", "second")):
            journal.write(sample(number, weight_version=version))
        assert (journal.weight_version(0), journal.weight_version(1)) == ("first", None)


def test_a_process_that_changes_its_folder_goes_on_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Journal(Path("rollouts.jsonl")) as journal:
        journal.write(sample(0))
        monkeypatch.chdir(tmp_path / "elsewhere")
        journal.write(sample(1))
        journal.replace({sample(0).key: sample(0, reward=1.0)})
        assert [one.reward for one in journal.samples()] == [1.0, None]
    assert len((tmp_path / "rollouts.jsonl").read_bytes().splitlines()) == 2
    assert not list((tmp_path / "elsewhere").iterdir()) and not caplog.records


def test_a_pipe_or_a_device_is_refused(tmp_path: Path) -> None:
    """Reading one would never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(AgentSpecError, match=r"a pipe or a device.*give a file"):
            Journal(path)
    with Journal(Path(os.devnull)) as journal:  # for a rollout that is only timed
        journal.write(sample(0))
        assert list(journal.samples()) == []
