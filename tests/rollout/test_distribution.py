"""Test that a file holds samples of one distribution."""

import json
from pathlib import Path

import pytest
import torch

from agentspec.errors import AgentSpecError
from agentspec.rollout import Plan
from tests.rollout.stand_in_engine import Engine, run


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Plan(temperature=0.5), "temperature 1.0, and this rollout asks for 0.5;"),
        (Plan(top_p=0.9), "top_p 1.0, and this rollout asks for 0.9;"),
        (Plan(max_tokens=5), "max_tokens 1024, and this rollout asks for 5;"),
        (Plan(stop=("\n",)), 'stop [], and this rollout asks for ["\\n"];'),
    ],
)
def test_samples_of_another_distribution_are_not_mixed(tmp_path: Path, asked: Plan, said: str) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=1))
    before = path.read_bytes()
    with pytest.raises(AgentSpecError, match="write to another file") as error:
        run(path, asked)
    assert said in str(error.value) and str(path) in str(error.value)
    assert path.read_bytes() == before


def test_samples_of_another_model_are_not_mixed(tmp_path: Path) -> None:
    """A folder counts as the same however its path is written, and as another if a link now leads elsewhere."""
    folders = [tmp_path / "step-1", tmp_path / "step-2"]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "latest").symlink_to(folders[0])

    def of(model: Path) -> Engine:
        engine = Engine()
        engine.vllm_config.model_config.model = str(model)
        return engine

    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=1), of(tmp_path / "latest"))
    figures, _ = run(path, Plan(samples=2), of(tmp_path / "step-2" / ".." / "step-1"))
    assert figures[0].finished == 3
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(folders[1])
    with pytest.raises(AgentSpecError, match=f'model "{folders[0]}", and this rollout asks for "{folders[1]}"'):
        run(path, Plan(samples=3), of(tmp_path / "latest"))


def test_weights_that_changed_in_their_place_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer may write each checkpoint over the one before it."""
    model, path = tmp_path / "checkpoint", tmp_path / "r.jsonl"
    model.mkdir()
    engine = Engine()
    engine.vllm_config.model_config.model = str(model)
    for samples, text in ((1, "one"), (2, "one"), (3, "another")):
        if samples != 2:
            (model / "model.safetensors").write_text(text)
        run(path, Plan(samples=samples), engine)
        assert ("have changed since samples" in caplog.text) == (samples == 3)


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("model_config", "revision", "v2", 'revision null, and this rollout asks for "v2";'),
        ("model_config", "dtype", torch.bfloat16, 'dtype "float32", and this rollout asks for "bfloat16";'),
        ("model_config", "quantization", "fp8", 'quantization null, and this rollout asks for "fp8";'),
        (
            *("model_config", "hf_overrides", {"eps": 0.5}),
            'hf_overrides "", and this rollout asks for "{\\"eps\\": 0.5}";',
        ),
        ("cache_config", "cache_dtype", "fp8", 'kv_cache_dtype "auto", and this rollout asks for "fp8";'),
        ("load_config", "load_format", "dummy", "random_weights false, and this rollout asks for true;"),
    ],
)
def test_samples_of_a_model_that_was_loaded_otherwise_are_not_mixed(
    tmp_path: Path, part: str, name: str, value: object, said: str
) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=1))
    engine = Engine()
    setattr(getattr(engine.vllm_config, part), name, value)
    with pytest.raises(AgentSpecError, match="write to another file") as error:
        run(path, Plan(samples=2), engine)
    assert said in str(error.value)


def test_what_changes_no_distribution_is_free(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=1, seed=1))
    figures, samples = run(path, Plan(samples=2, epochs=2, seed=2), Engine(batch=8, drafts=True), max_waiting=1)
    assert [one.finished for one in figures] == [3, 6] and len(samples) == 12


def test_samples_of_an_earlier_release_are_gone_on_with(tmp_path: Path) -> None:
    """Such samples do not say how they were sampled. New ones behind them do."""
    path = tmp_path / "r.jsonl"
    run(path, Plan(samples=1))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("sampling")["temperature"] == 1.0 for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures, _ = run(path, Plan(samples=2, temperature=0.5))
    assert figures[0].finished == 3
    with pytest.raises(AgentSpecError, match=r"temperature 0\.5, and this rollout asks for 1\.0"):
        run(path, Plan(samples=2))
