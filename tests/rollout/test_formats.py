"""Test what trainers read: TRL's parquet and rollout_func, verl's JSON lines, and Hugging Face datasets."""

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentspec.rollout import Journal, Sample
from agentspec.rollout.formats import advantages, for_rollout_func, write_trl, write_verl

SAMPLES = [
    Sample("b", 3, 0, [1], [2, 3], [-0.1, -0.2], "two three", reward=1.0, fields={"answer": 7}),
    Sample("a", 3, 1, [4], [5], [-0.3], "five", reward=0.0),
    Sample("a", 3, 0, [4], [6], [-0.4], "six", reward=1.0, fields={"reward_model": {"ground_truth": "6"}}),
    Sample("c", 3, 0, [4], [6], [-0.4], "six", reward_error="ValueError: x"),
]


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def test_verls_lines(tmp_path: Path) -> None:
    path = write_verl(SAMPLES, tmp_path / "verl", 3, decode)
    assert path.name == "3.jsonl"
    first, *_, last = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"input": "4", "output": "six", "gts": "6", "score": 1.0, "step": 3}
    assert last["score"] is None and last["gts"] is None


def test_half_a_character_in_a_field_does_not_lose_the_epoch(tmp_path: Path) -> None:
    path = write_verl([Sample("a", 0, 0, [1], [2], [0.0], "x", fields={"answer": "\ud83d"})], tmp_path, 0, decode)
    assert json.loads(path.read_text(encoding="utf-8"))["gts"] == "?"


def test_an_epoch_of_an_earlier_release_has_no_numbers_that_json_lacks(tmp_path: Path) -> None:
    """Earlier releases wrote `NaN` into the problems' fields."""
    path = write_verl([Sample("a", 0, 0, [1], [2], [0.0], "x", fields={"answer": float("nan")})], tmp_path, 0, decode)
    assert '"gts": null' in path.read_text()


def test_trls_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write_trl(SAMPLES, tmp_path / "trl", 3, decode)
    assert path.name == "completions_00003.parquet"
    rows = parquet.read_table(path).to_pylist()
    assert [row["completion"] for row in rows] == ["six", "five", "two three", "six"]
    assert rows[0] | {"advantage": None} == {
        "step": 3,
        "prompt": "4",
        "completion": "six",
        "reward": 1.0,
        "advantage": None,
    }


@pytest.mark.parametrize("write", [write_trl, write_verl])
def test_an_epoch_that_cannot_be_written_whole_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    if write is write_trl:
        pytest.importorskip("pyarrow")
    path = write(SAMPLES, tmp_path, 0, decode)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(SAMPLES[:1], tmp_path, 0, decode)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_an_epoch_without_rewards_has_the_columns_of_the_others(tmp_path: Path) -> None:
    """Readers of several epochs refuse a column of another type."""
    parquet = pytest.importorskip("pyarrow.parquet")
    unknown = [replace(sample, reward=None) for sample in SAMPLES]
    schemas = [parquet.read_schema(write_trl(each, tmp_path, 0, decode)) for each in (SAMPLES, unknown)]
    assert schemas[0] == schemas[1]


def test_advantages_compare_a_sample_with_its_group() -> None:
    b, a1, a0, c = advantages(SAMPLES)
    assert b == 0.0 and c is None
    assert a0 == -(a1 or 0) == pytest.approx(0.5 / (0.5**0.5 + 1e-4))


def test_trls_rollout_func_gets_what_it_wants() -> None:
    given = for_rollout_func(SAMPLES)
    assert set(given) == {"prompt_ids", "completion_ids", "logprobs"}
    assert given["completion_ids"] == [[2, 3], [5], [6], [6]]
    assert [len(row) for row in given["logprobs"]] == [len(row) for row in given["completion_ids"]]


def test_the_samples_load_as_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    with Journal(tmp_path / "rollouts.jsonl") as journal:
        for sample in SAMPLES:
            journal.write(sample)
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rollouts.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded["completion_ids"][:] == [sample.completion_ids for sample in SAMPLES]
    assert loaded["logprobs"][0] == [-0.1, -0.2]
    rows = for_rollout_func(Sample(**row) for row in loaded)
    assert rows["prompt_ids"] == [sample.prompt_ids for sample in SAMPLES], "what was loaded goes to TRL as it is"


def test_samples_load_as_a_dataset_though_only_a_late_one_has_an_error(tmp_path: Path) -> None:
    """A library guesses the types of columns from the first 10 MB, and then refuses a text where all was null."""
    datasets = pytest.importorskip("datasets")
    long = replace(SAMPLES[0], fields={"note": "x" * 1_000_000})
    with Journal(tmp_path / "rollouts.jsonl") as journal:
        for number in range(25):
            journal.write(replace(long, sample=number))
        journal.write(replace(long, sample=25, weight_version="2", reward=None, reward_error="TimeoutError"))
        assert [sample.reward_error for sample in journal.samples()][-2:] == [None, "TimeoutError"]
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rollouts.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert (loaded["weight_version"][-2:], loaded["reward_error"][-2:]) == (["", "2"], ["", "TimeoutError"])


def test_what_trainers_read_loads_as_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = {"parquet": write_trl(SAMPLES, tmp_path, 3, decode), "json": write_verl(SAMPLES, tmp_path, 3, decode)}
    for kind, path in kinds.items():
        loaded = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        assert len(loaded) == len(SAMPLES)
        assert loaded["completion" if kind == "parquet" else "output"][:] == ["six", "five", "two three", "six"]
