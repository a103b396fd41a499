"""Test the YAML file: ArcticTraining's spelling is read, and errors name the field."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentspec.errors import ConfigurationError
from agentspec.train.config import RecordsSource, load_config


def write(folder: Path, settings: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
    return file


def test_reads_the_published_recipe(tmp_path: Path, settings: dict[str, Any]) -> None:
    recipe = """
        type: arctic-lstm-speculator
        micro_batch_size: 64
        gradient_accumulation_steps: 4
        train_iters: 3000
        loss: cross_entropy
        model:
          name_or_path: meta-llama/Llama-3.1-8B-Instruct
          method: sum_lstm
          proj_dim: "4096"
          emb_dim: "4096"
          speculator_width: "4096"
          speculator_tie_weights: true
          speculator_scale_input: true
          tie_lstm_embs: true
          n_speculator_heads: 3
        data:
          sources:
            - type: store
              url: redis://localhost:6379/0
          cache_dir: data-cache-llama31-8b
        scheduler:
          name: cosine
          warmup_ratio: 0.05
        optimizer:
          betas: [0.9, 0.999]
          weight_decay: 0.1
          lr: 1.0e-3
        checkpoint:
          output_dir: spec-decode-llama31-8b
    """
    config = load_config(write(tmp_path, recipe))
    assert (config.model.proj_dim, config.model.n_speculator_heads) == (4096, 3)
    assert config.optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("model", "speculator_widht"), 8, "model.speculator_widht: unknown field"),
        (("deepspeed",), {}, "deepspeed: unknown field"),
        (("model", "method"), "sum_rnn", "model.method: sum_rnn does not fit type arctic-lstm-speculator"),
        (("model", "speculator_tie_weights"), False, "model.speculator_tie_weights"),
        (("model", "emb_dim"), "64", "model: emb_dim: projection and embedding are summed"),
        (("data", "train_eval_split"), [0.9, 0.2], "data: train_eval_split: two shares"),
        (("data", "sources"), [{"type": "huggingface"}], "data.sources.0"),
        (("loss",), "mse", "loss: "),
        (("train_iters",), 0, "train_iters: "),
        (("train_iters",), 10**400, "train_iters: "),
        (("micro_batch_size",), 10**30, "micro_batch_size: "),
        (("optimizer",), {"lr": 3e38}, "optimizer.lr: "),
        (("data", "sources"), [{"type": "store", "url": "memory://", "newest": 2**63}], "newest: "),
        (("data", "sources"), [{"type": "prompts", "path": "p", "max_tokens": 10**23}], "max_tokens: "),
        (("seed",), 2**70, "seed: "),
        *(
            (("data", "sources"), [source], f"{name}: write it as model.{name}, with which the target is loaded, too")
            for name in ("revision", "hf_overrides")
            for source in (
                {"type": "store", "url": "memory://", name: "v2"},
                {"type": "prompts", "path": "p", "engine": {name: "v2"}},
            )
        ),
        (("optimizer",), {"betas": [5, 0.9]}, "optimizer.betas.0: "),
        (("optimizer",), {"lr": True}, "optimizer: lr: true and false are no values of it"),
        (("optimizer",), {"betas": [False, 0.9]}, "optimizer: betas: true and false are no values of it"),
        (("checkpoint", "output_dir"), "", "checkpoint.output_dir: is empty; write a path"),
        (
            ("checkpoint", "output_dir"),
            "a\0",
            "checkpoint.output_dir: 'a\\x00' holds a character that no path can have",
        ),
        (("data", "cache_dir"), "~nobody-at-all/cache", "data.cache_dir: ~nobody-at-all/cache: there is no such home"),
        (("micro_batch_size",), True, "micro_batch_size: true and false"),
        (
            ("data", "sources"),
            [{"type": "prompts", "path": "p", "max_tokens": 8, "temperature": True}],
            "temperature: true",
        ),
    ],
)
def test_names_the_field(
    tmp_path: Path, settings: dict[str, Any], path: tuple[str, ...], value: object, named: str
) -> None:
    section = settings
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = value
    with pytest.raises(ConfigurationError, match=r"config\.yaml: ") as error:
        load_config(write(tmp_path, settings))
    assert named in str(error.value)


def test_paths_may_begin_at_the_home_folder(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings["model"]["name_or_path"] = "~/model"
    settings["data"] |= {
        "cache_dir": "~/cache",
        "sources": [{"type": "records", "path": "~/calls", "tokenizer": "~/t"}],
    }
    settings["checkpoint"]["output_dir"] = "~/out"
    config = load_config(write(tmp_path, settings))
    (source,) = config.data.sources
    assert isinstance(source, RecordsSource)
    assert (config.model.name_or_path, source.tokenizer) == ("/home/me/model", "/home/me/t")
    assert (config.data.cache_dir, source.path) == (Path("/home/me/cache"), Path("/home/me/calls"))
    assert config.checkpoint.output_dir == Path("/home/me/out")


@pytest.mark.parametrize("text", ["- a list", "a: [", "", "[" * 5_000, "seed: 2024-13-40", "seed: !!int x"])
def test_refuses_what_is_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("seed: 1\nmodel:\n  method: sum_lstm\n  method: sum_rnn\n", ", line 4: .*: method stands there twice"),
        ("model: [1\n", ", line 2: .*: expected ',' or ']'"),
        ("loss: \x07", ": cannot be read as YAML: .*special characters"),
    ],
)
def test_an_error_of_yaml_is_one_line(tmp_path: Path, text: str, named: str) -> None:
    """A repeated field must be an error, too: YAML's reader would silently take the last."""
    with pytest.raises(ConfigurationError, match=rf"config\.yaml{named}") as error:
        load_config(write(tmp_path, text))
    assert len(str(error.value).splitlines()) == 1


def test_a_file_that_is_not_there_is_no_matter_of_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read \(No such file or directory\); give a training"):
        load_config(tmp_path / "none.yaml")
