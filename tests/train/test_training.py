"""Test the command on a small target: what it writes, that it learns, and that an interruption changes nothing."""

import io
import itertools
import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import load_file, save_file

from agentspec.cli import main
from agentspec.errors import ConfigurationError
from agentspec.server_ext.speculator import DraftLoop, Speculator, load_speculator
from agentspec.train import evaluate, run, trainer
from agentspec.train.config import PromptsSource, TrainingConfig
from agentspec.train.corpus import folder_of, gather
from agentspec.train.evaluate import Acceptance, measure
from agentspec.train.hidden_states import HiddenStates
from agentspec.train.run import train
from tests.train.conftest import HIDDEN, VOCABULARY

QUIET = Console(quiet=True)


def test_the_command_trains_and_writes_what_loads(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings["train_iters"] = 150
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    monkeypatch.setattr(sys, "argv", ["agentspec", "train", str(file)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "held-out sessions" in capsys.readouterr().out
    out = tmp_path / "speculator"
    report = json.loads((out / "report.json").read_text())
    held_out = report["held_out"]
    assert held_out["trained"]["mean_acceptance_length"] > 2.5 > 1.5 > held_out["untrained"]["mean_acceptance_length"]
    assert held_out["sessions"] + report["training"]["sessions"] == 20
    speculator = load_speculator(out, hidden_size=HIDDEN, vocab_size=VOCABULARY)
    assert speculator.config.base_model_archs == ("LlamaForCausalLM",)
    assert not (out / "training.pt").exists()
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "holds a finished speculator" in " ".join(capsys.readouterr().err.split())


def test_acceptance_is_that_of_real_decoding(settings: dict[str, Any]) -> None:
    """Compare the figure with the draft loop, which decodes each held-out response step by step."""
    settings["train_iters"] = 60
    config = TrainingConfig.model_validate(settings)
    report = train(config, QUIET)
    speculator = load_speculator(config.checkpoint.output_dir)
    with held_out(config) as data:
        assert measure(speculator, data).as_dict() == report["held_out"]["trained"]
        assert decode(speculator, data) == measure(speculator, data)


@pytest.mark.parametrize(("trained", "measured"), [(2, 2), (64, 8)])
def test_no_more_is_measured_at_once_than_is_trained_on(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, trained: int, measured: int
) -> None:
    """Otherwise a training would not fit into memory that its updates fit into."""
    settings |= {"micro_batch_size": trained, "train_iters": 1}
    sizes, lengths = list[int](), evaluate._lengths

    def counted(*given: Any) -> Any:
        sizes.append(len(given[2]))
        return lengths(*given)

    monkeypatch.setattr(evaluate, "_lengths", counted)
    train(TrainingConfig.model_validate(settings), QUIET)
    assert max(sizes) == measured


def held_out(config: TrainingConfig) -> HiddenStates:
    folder = folder_of(config)
    return HiddenStates(gather(config, folder, lambda _source, _out: None).held_out, folder / "held-out")


def decode(speculator: Speculator, data: HiddenStates) -> Acceptance:
    loop = DraftLoop(speculator)
    n = speculator.config.n_predict
    tokens = steps = 0
    accepted = [0] * n
    for response in data.responses:
        hidden, written = data.rows(response, 0, response.length)
        at = 0
        while at < response.length - 1:
            draft = loop(hidden[at : at + 1], written[at : at + 1]).tokens[0].tolist()
            right = 0
            while right < n and at + right + 1 < response.length and draft[right] == written[at + right + 1]:
                accepted[right] += 1
                right += 1
            steps += 1
            at += right + 1
        tokens += response.length - 1
    return Acceptance(tokens, steps, tuple(accepted))


def cut_off_at_six(config: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a training that ends with an error in its seventh step."""
    real = trainer.Trainer.train_step

    def fail_at_six(self: trainer.Trainer) -> float:
        if self.step == 6:
            raise RuntimeError("power cut")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", fail_at_six)
        with pytest.raises(RuntimeError, match="power cut"):
            train(config, QUIET)


@pytest.mark.parametrize(("kind", "loss"), [("lstm", "lk"), ("mlp", "cross_entropy")])
def test_cut_off_and_resumed_is_as_if_unbroken(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, loss: str
) -> None:
    settings |= {"loss": loss, "type": f"arctic-{kind}-speculator", "gradient_accumulation_steps": 2}
    settings["model"]["method"] = "sum_rnn" if kind == "mlp" else "sum_lstm"
    settings["checkpoint"]["save_every_n_steps"] = 4
    unbroken = train(TrainingConfig.model_validate(settings), QUIET)
    weights = load_speculator(tmp_path / "speculator").state_dict()
    settings["checkpoint"]["output_dir"] = str(tmp_path / "again")
    config = TrainingConfig.model_validate(settings)
    cut_off_at_six(config, monkeypatch)
    resumed = train(config, QUIET)
    assert resumed["held_out"] == unbroken["held_out"]
    for name, value in load_speculator(tmp_path / "again").state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_a_run_goes_on_when_its_records_have_grown(
    settings: dict[str, Any], calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may still be writing them. The checkpoint must not count as one of other data."""
    unbroken = train(TrainingConfig.model_validate(settings), QUIET)
    records = tmp_path / "growing.jsonl"
    shutil.copy(calls, records)
    settings["data"]["sources"][0]["path"] = str(records)
    settings["checkpoint"] = {"output_dir": str(tmp_path / "again"), "save_every_n_steps": 4}
    config = TrainingConfig.model_validate(settings)
    cut_off_at_six(config, monkeypatch)
    before = records.read_text()
    records.write_text(before + json.dumps({"session": "new", "prompt_token_ids": [1], "response_token_ids": [2, 3]}))
    fresh = folder_of(config)
    shutil.copytree(tmp_path / "again", tmp_path / "changed")
    text = io.StringIO()
    assert train(config, Console(file=text))["held_out"] == unbroken["held_out"]
    assert "the sources have grown" in text.getvalue() and not fresh.exists()

    records.write_text(before.replace("s1", "t1") + "\n")
    settings["checkpoint"]["output_dir"] = str(tmp_path / "changed")
    with pytest.raises(ConfigurationError, match="belongs to a run of other settings or data"):
        train(TrainingConfig.model_validate(settings), QUIET)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_stopped_saves_its_step(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Otherwise the steps after the latest checkpoint would be lost, without a message."""
    settings["train_iters"] = 12
    unbroken = train(TrainingConfig.model_validate(settings), QUIET)
    settings["checkpoint"]["output_dir"] = str(tmp_path / "again")
    config = TrainingConfig.model_validate(settings)
    real, steps, before, text = trainer.Trainer.train_step, [0], signal.getsignal(number), io.StringIO()

    def stop_at_six(self: trainer.Trainer) -> float:
        steps[0] += 1
        if self.step == 5:
            signal.raise_signal(number)
        return real(self)

    monkeypatch.setattr(trainer.Trainer, "train_step", stop_at_six)
    with pytest.raises(KeyboardInterrupt):
        train(config, Console(file=text))
    assert "stopped at step 6 of 12, which is saved; run the command again to go on" in text.getvalue()
    assert signal.getsignal(number) is before
    resumed = train(config, QUIET)
    assert steps == [12]  # no step ran twice
    assert resumed["held_out"] == unbroken["held_out"]


def test_a_second_signal_does_not_wait_for_the_step(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(self: trainer.Trainer) -> float:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it waited")

    monkeypatch.setattr(trainer.Trainer, "train_step", hang)
    with pytest.raises(KeyboardInterrupt):
        train(TrainingConfig.model_validate(settings), QUIET)


def test_trainings_of_earlier_checkouts_go_on(tmp_path: Path) -> None:
    """Fields that are new and not used count neither in a checkpoint's settings nor for the cache of its data."""
    model: dict[str, Any] = {"name_or_path": "org/m", "speculator_width": 8, "proj_dim": 8, "emb_dim": 8}
    source: dict[str, Any] = {"type": "store", "url": "redis://localhost"}
    data = {"sources": [source | {"revision": None}], "cache_dir": str(tmp_path)}
    given: dict[str, Any] = {"data": data, "checkpoint": {"output_dir": "out"}, "train_iters": 3}
    config = TrainingConfig.model_validate({"model": model, **given})
    assert trainer._settings(config).startswith("f7778759990f23a5") and folder_of(config).name == "fcf7c97295958182"
    other_source = source | {"revision": "r"}
    other = TrainingConfig.model_validate({"model": model | {"revision": "r"}, **given})
    assert trainer._settings(other) != trainer._settings(config) and folder_of(other) != folder_of(config)
    with pytest.raises(ValidationError, match=r"write it as model\.revision"):
        TrainingConfig.model_validate({"model": model, **given, "data": data | {"sources": [other_source]}})


def test_a_checkpoint_of_other_settings_is_refused(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings["checkpoint"]["save_every_n_steps"] = 1
    real = trainer.Trainer.save

    def interrupt(self: trainer.Trainer) -> None:
        real(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(TrainingConfig.model_validate(settings), QUIET)
    with monkeypatch.context() as patch:  # as from a store that has grown, for another cache folder
        patch.setattr(run, "gather", lambda *given: replace(found := gather(*given), train=found.train[:-1]))
        with pytest.raises(ConfigurationError, match=r"checkpoint\.output_dir: .* other settings or data"):
            train(TrainingConfig.model_validate(settings), QUIET)
    settings["optimizer"] = {"lr": 1e-4}
    with pytest.raises(ConfigurationError, match=r"checkpoint\.output_dir: .* other settings"):
        train(TrainingConfig.model_validate(settings), QUIET)


def test_lk_learns_the_target_s_distribution_and_not_the_recorded_token(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The two differ here: the target's weights are random, and the responses are not its own."""
    overlap: dict[str, float] = {}
    for loss in ("lk", "cross_entropy"):
        settings |= {"loss": loss, "train_iters": 80, "checkpoint": {"output_dir": str(tmp_path / loss)}}
        config = TrainingConfig.model_validate(settings)
        train(config, QUIET)
        speculator = load_speculator(tmp_path / loss)
        head = load_file(folder_of(config) / "head.safetensors")["head"]
        with held_out(config) as data:
            hidden, tokens = data.rows(data.responses[0], 0, data.responses[0].length)
        target = (hidden[1:] @ head.T).softmax(-1)
        drafted = speculator(hidden[:-1], tokens[:-1, None])[0].softmax(-1)
        overlap[loss] = float(torch.minimum(target, drafted).sum(-1).mean())
    assert overlap["lk"] > 0.9
    assert overlap["cross_entropy"] < 0.5


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_progress_in_a_log_is_lines(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Otherwise a log would show no progress for hours."""
    monkeypatch.setattr(run, "_LOG_SECONDS", seconds)
    log = io.StringIO()
    train(TrainingConfig.model_validate(settings), Console(file=log))
    lines = log.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["hidden states, train", "hidden states, held-out"]
    shown = [line.partition(": ")[2] for line in lines if line.startswith("training, loss ")]
    assert shown == [f"{step} of 12" for step in (range(1, 13) if seconds == 0.0 else [12])]
    assert len(lines) == 2 + len(shown)


def test_a_target_that_was_trained_on_in_place_is_read_again(settings: dict[str, Any], tmp_path: Path) -> None:
    copied = tmp_path / "target"
    shutil.copytree(settings["model"]["name_or_path"], copied)
    settings["model"]["name_or_path"] = str(copied)
    config = TrainingConfig.model_validate(settings)
    before = folder_of(config)
    assert folder_of(config) == before
    weights = load_file(copied / "model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, copied / "model.safetensors")
    assert folder_of(config) != before


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_another_config_tokenizer_or_template_of_the_target_is_read_anew(
    settings: dict[str, Any], tmp_path: Path, changed: str
) -> None:
    copied = tmp_path / "target"
    shutil.copytree(settings["model"]["name_or_path"], copied)
    settings["model"]["name_or_path"] = str(copied)
    config = TrainingConfig.model_validate(settings)
    before = folder_of(config)
    with (copied / changed).open("a") as file:
        file.write(" ")
    assert folder_of(config) != before


def test_another_tokenizer_of_the_records_is_read_anew(settings: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    settings["data"]["sources"][0]["tokenizer"] = str(tokenizer)
    config = TrainingConfig.model_validate(settings)
    before = folder_of(config)
    tokenizer.write_text('{"version": "1.0"}')
    assert folder_of(config) != before


def test_a_run_that_is_stopped_behind_its_last_update_has_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring and writing may take long, and the latest regular save may be hours old."""
    settings["checkpoint"]["save_every_n_steps"] = 100
    config = TrainingConfig.model_validate(settings)
    measure, measured = evaluate.measure, list[int]()

    def stopped(*given: Any) -> Any:
        measured.append(1)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(run, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(config, QUIET)
    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(trainer.Trainer, "train_step", lambda _: pytest.fail("an update was lost"))
    assert train(config, QUIET)["training"]["steps"] == 12


def test_a_signal_during_the_last_save_stops_the_run(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainingConfig.model_validate(settings)
    save = trainer.Trainer.save

    def signalled(self: trainer.Trainer) -> None:
        save(self)
        if self.step == 12:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(trainer.Trainer, "save", signalled)
    with pytest.raises(KeyboardInterrupt):
        train(config, QUIET)
    monkeypatch.setattr(trainer.Trainer, "save", save)
    assert train(config, QUIET)["training"]["steps"] == 12


def test_other_settings_or_data_are_noticed_before_anything_is_computed(
    settings: dict[str, Any], calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "calls.jsonl"
    shutil.copy(calls, records)
    settings["data"]["sources"][0]["path"] = str(records)
    settings["checkpoint"]["save_every_n_steps"] = 4
    cut_off_at_six(TrainingConfig.model_validate(settings), monkeypatch)
    monkeypatch.setattr(run, "gather", lambda *_: pytest.fail("the sources were read"))
    other = {**settings, "optimizer": {"lr": 0.5}}
    with pytest.raises(ConfigurationError, match="belongs to a run of other settings or data"):
        train(TrainingConfig.model_validate(other), QUIET)
    records.write_text(records.read_text().replace("s1", "t1"))
    with pytest.raises(ConfigurationError, match="belongs to a run of other settings or data"):
        train(TrainingConfig.model_validate(settings), QUIET)


def test_what_a_run_left_that_was_killed_at_its_very_end_is_removed(settings: dict[str, Any]) -> None:
    config = TrainingConfig.model_validate(settings)
    train(config, QUIET)
    left = config.checkpoint.output_dir / "training.pt"
    left.write_bytes(b"weights")
    with pytest.raises(ConfigurationError, match="holds a finished speculator"):
        train(config, QUIET)
    assert not left.exists()


def test_any_seed_gives_an_order_of_its_own() -> None:
    """A seed may be a time in nanoseconds."""
    orders = [list(itertools.islice(trainer.draws(50, seed, 0), 100)) for seed in (7, 1_780_000_000_000_000_000)]
    assert all(sorted(order[:50]) == sorted(order[50:]) == list(range(50)) for order in orders)
    assert orders[0] != orders[1]


def test_trainings_with_other_seeds_have_the_same_answers(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a cache, so its answers must not depend on which seed came first."""

    def engine(source: PromptsSource, _model: Any, _done: int) -> Any:
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[source.engine.get("seed", 0), 2])])
        llm = SimpleNamespace(generate=lambda *_, **__: [output])
        return SimpleNamespace(llm=llm, tokenise=lambda *_: [1], close=lambda: None)

    def answer(seed: int, engine: dict[str, int]) -> tuple[Path, str]:
        source = {"type": "prompts", "path": str(prompts), "temperature": 1.0, "engine": engine}
        settings.update(seed=seed, data={**settings["data"], "sources": [source]})
        config, out = TrainingConfig.model_validate(settings), tmp_path / f"answers-{seed}-{len(engine)}.jsonl"
        run._Run(config, run._Bars(QUIET)).answer(PromptsSource.model_validate(source), out)
        return folder_of(config), out.read_text()

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setattr("agentspec.train.generate._engine", engine)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    first, sampled_again = answer(1, {}), answer(1, {"seed": 7})
    assert answer(2, {}) == first
    assert sampled_again[0] != first[0]
    assert sampled_again[1] != first[1]
