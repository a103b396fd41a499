"""Test which servers share a model's logs: those with the same config and tokenizer, wherever the files lie."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentspec.server_ext.persistence.model_key import adapter_key, find_model_key

MODEL = Path(__file__).parents[2] / "demo" / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the demo's model."""
    return shutil.copytree(MODEL, tmp_path / "models" / "copy")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_copy_in_another_folder_shares(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = find_model_key(str(MODEL))
    assert len(key) == 16
    change(folder / "config.json", _name_or_path="/elsewhere", transformers_version="1.0", _commit_hash="abc")
    (folder / "generation_config.json").write_text("{}")
    (folder / "README.md").unlink()
    monkeypatch.chdir(folder.parent)
    assert find_model_key(str(folder)) == find_model_key("copy") == find_model_key("copy", str(MODEL)) == key


TOKENIZER_FILES = (
    *("added_tokens.json", "merges.txt", "vocab.json", "special_tokens_map.json", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken", "source.spm"),
)
CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda folder: change(folder / "config.json", hidden_size=193),
    "dtype": lambda folder: change(folder / "config.json", dtype="float32"),
    "quantization": lambda folder: change(folder / "config.json", quantization_config={"bits": 4}),
    "config that is no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "vocabulary": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    **{
        name: lambda folder, name=name: (folder / name).write_text("{}")  # type: ignore[misc]
        for name in TOKENIZER_FILES
    },
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_config_or_tokenizer_does_not_share(folder: Path, what: str) -> None:
    CHANGES[what](folder)
    assert find_model_key(str(folder)) != find_model_key(str(MODEL))


def test_a_mistral_folder_is_known_by_its_params(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(folder / "params.json")
    same, other = (shutil.copytree(folder, tmp_path / name) for name in ("same", "other"))
    change(other / "params.json", hidden_size=193)
    keys = [find_model_key(str(each)) for each in (folder, same, other)]
    assert keys[0] == keys[1] != keys[2]


def test_the_order_in_a_config_does_not_count(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert find_model_key(str(folder)) == find_model_key(str(MODEL))


def test_a_nested_config_counts_and_its_origin_does_not(folder: Path, tmp_path: Path) -> None:
    change(folder / "config.json", text_config={"layers": [{"size": 1}], "_name_or_path": "here"})
    same, other = (shutil.copytree(folder, tmp_path / name) for name in ("same", "other"))
    change(same / "config.json", text_config={"_name_or_path": "there", "layers": [{"size": 1}]})
    change(other / "config.json", text_config={"layers": [{"size": 2}], "_name_or_path": "here"})
    keys = [find_model_key(str(each)) for each in (folder, same, other)]
    assert keys[0] == keys[1] != keys[2]


def test_the_setting_stands_for_the_config_and_not_for_the_tokenizer(folder: Path) -> None:
    change(folder / "config.json", hidden_size=193)
    keys = {find_model_key(str(each), given="ours") for each in (MODEL, folder)}
    assert len(keys) == 1
    assert keys.isdisjoint({find_model_key(str(MODEL)), find_model_key(str(MODEL), given="theirs")})
    other = shutil.copytree(folder, folder.parent / "other")
    (other / "tokenizer.json").write_text("{}")
    assert find_model_key(str(other), given="ours") not in keys


def test_what_the_server_overrides_in_the_config_counts() -> None:
    assert find_model_key(str(MODEL), overrides='{"rope_theta": 1}') != find_model_key(str(MODEL))


def test_a_hub_model_shares_with_a_folder_of_the_same_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert {"config.json", "tokenizer*"} & set(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_model_key("org/of-the-test", revision="r1") == find_model_key(str(MODEL))
    assert asked == [("org/of-the-test", "r1")] * 2
    find_model_key("org/of-the-test", revision="r1", tokenizer_revision="r2")
    assert asked[2:] == [("org/of-the-test", "r1"), ("org/of-the-test", "r2")]
    find_model_key("org/of-the-test", "org/tokenizer-of-the-test", revision="r1")
    assert asked[4:] == [("org/of-the-test", "r1"), ("org/tokenizer-of-the-test", "r1")]  # as vLLM loads it


def test_without_its_files_a_model_goes_by_its_name_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def snapshot_download(*args: object, **names: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    keys = {find_model_key(f"org/lost-{number}", revision=revision) for number in (1, 2) for revision in ("a", "b")}
    assert len(keys) == 4
    assert "set model_key" in caplog.text


def test_a_model_in_one_file_is_known_by_its_beginning(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for file, content in zip(files, (b"one", b"one", b"two"), strict=True):
        file.write_bytes(content)
    keys = [find_model_key(str(file)) for file in files]
    assert keys[0] == keys[1] != keys[2]


def test_a_longer_file_with_the_same_beginning_is_another_model(tmp_path: Path) -> None:
    """Two sizes of one model may have the same config and tokenizer at the beginning; the rest is not read."""
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    for file, size in ((small, 33 << 20), (large, 34 << 20)):
        file.touch()
        os.truncate(file, size)
    assert find_model_key(str(small)) != find_model_key(str(large))


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("change", ["beginning", "end", "length"])
def test_an_adapter_with_other_weights_is_another_one(tmp_path: Path, weights: str, change: str) -> None:
    contents = {
        "as it was": bytes(3_000_000),
        "beginning": b"1" + bytes(2_999_999),
        "end": bytes(2_999_999) + b"1",
        "length": bytes(3_000_001),
    }
    keys = set()
    for name in ("as it was", change):
        (tmp_path / name).mkdir()
        (tmp_path / name / weights).write_bytes(contents[name])
        keys.add(adapter_key("name", str(tmp_path / name)))
    assert len(keys) == 2


def test_an_adapter_is_known_by_its_name_and_files_wherever_it_lies(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    (one / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": "/models/here"}))
    (one / "adapter_model.safetensors").write_bytes(bytes(3_000_000))
    same, other = (shutil.copytree(one, tmp_path / name) for name in ("same", "other"))
    change(same / "adapter_config.json", base_model_name_or_path="/models/there")
    (same / "README.md").write_text("hello")
    change(other / "adapter_config.json", r=16)
    keys = [adapter_key("name", str(folder)) for folder in (one, same, other)]
    assert keys[0] == keys[1] != keys[2]
    assert adapter_key("another name", str(one)) != keys[0]
    (one / "adapter_model.safetensors").write_bytes(bytes(2_999_999) + b"1")  # loaded again from the same place
    assert adapter_key("name", str(one)) != keys[0]
    assert adapter_key("name", "org/adapter") == "name@org/adapter"
