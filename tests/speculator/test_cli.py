"""Test ``agentspec speculator`` on a real store and a real tokenizer."""

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.cache.store import (
    LogNames,
    NewEntry,
    TurnRecord,
    encode,
    open_store,
)
from agentspec.cli import main
from agentspec.errors import ConfigurationError
from agentspec.server_ext.persistence.model_key import find_model_key
from agentspec.server_ext.speculator import SpeculatorConfig, build_speculator, load_speculator, save_speculator
from agentspec.testing.server import free_port

MODEL = "demo/model"
VOCAB = 1536


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return a store: forty turns of tokens 100 to 139, in twenty sessions of tenant acme, and another's turn."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    opened = open_store(url)
    logs = LogNames(find_model_key(MODEL), opened.secret().hex().encode())
    for tenant, first, turns in (("acme", 100, 40), ("other", 900, 1)):
        records = [
            TurnRecord(
                writer="0" * 16,
                number=i + 1,
                session=f"session-{i // 2}",
                kept=0,
                prompt_tail=np.array([500, 501], dtype=np.int32),
                response=np.array([first + i, first, first], dtype=np.int32),
                created=float(i),
            )
            for i in range(turns)
        ]
        opened.append(logs.of(tenant), [NewEntry(record.session, encode(record)) for record in records])
    opened.close()
    return url


@pytest.fixture
def speculator(tmp_path: Path) -> Path:
    config = SpeculatorConfig(kind="lstm", hidden_size=192, inner_size=32, n_predict=3, vocab_size=VOCAB)
    save_speculator(build_speculator(config), tmp_path / "speculator")
    return tmp_path / "speculator"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Run the command. Return the JSON that it prints; (status, message) if it fails."""
    monkeypatch.setattr("sys.argv", ["agentspec", "speculator", *map(str, arguments), "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    return (end.value.code, printed.err) if end.value.code else json.loads(printed.out)


def test_prune_keeps_what_the_tenant_says(
    store: str, speculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--store", store, "--model", MODEL, "--tenant", "acme", "--size", 64)
    figures = run(monkeypatch, capsys, "prune", speculator, tmp_path / "out", *options)
    assert (figures["kept"], figures["tokens"], figures["distinct_tokens"]) == (64, 120, 40)
    assert figures["coverage"] == 1.0
    assert 0.5 < figures["held_out_coverage"] < 1.0  # a session's own tokens are said in no other
    assert figures["bytes_a_position_after"] < figures["bytes_a_position_before"]
    kept = set(load_speculator(tmp_path / "out").draft_vocabulary.tolist())
    assert kept >= {0, 1, 500, 501, *range(100, 140)}  # 0 and 1 are the tokenizer's padding and end of turn
    assert 900 not in kept
    shown = run(monkeypatch, capsys, "show", tmp_path / "out")
    assert (shown["kind"], shown["draft_vocab_size"], shown["vocab_size"]) == ("lstm", 64, VOCAB)
    assert shown["head_bytes"] == 64 * 32 * 4
    assert shown["projection_bytes"] == 4 * 32 * 32 * 4


def test_prune_on_a_full_disk_is_named_and_can_be_repeated(
    store: str, speculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must not be a traceback, nor leave files in the folder that make the next call refuse it."""
    options = ("--store", store, "--model", MODEL, "--tenant", "acme", "--size", 64)
    save = torch.save

    def save_on_full_disk(values: Any, path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            save(values, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save_on_full_disk)
        status, printed = run(patch, capsys, "prune", speculator, tmp_path / "out", *options)
    assert status == 2 and "pytorch_model.bin: cannot be written" in printed and "make room on its disk" in printed
    assert run(monkeypatch, capsys, "prune", speculator, tmp_path / "out", *options)["kept"] == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tenant", "nobody"), "no stored turn of model demo/model, tokenizer demo/model and tenant nobody"),
        (("--hf-overrides", '{"rope_scaling": {"factor": 4.0}}'), "--model-key and AGENTSPEC_SECRET as the server has"),
        (("--hf-overrides", "[]"), "--hf-overrides must be a JSON object, got list"),
        (("--tenant", "a\nb"), "tenant"),
        (("--size", 1536), "size: "),
        (("--size", 1), "size: "),
        (("--store", "foo://x"), "store URL"),
    ],
)
def test_prune_names_what_cannot_be(
    options: tuple[object, ...],
    message: str,
    store: str,
    speculator: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = ("--store", store, "--model", MODEL, "--tenant", "acme")
    status, printed = run(monkeypatch, capsys, "prune", speculator, tmp_path / "out", *usual, *options)
    assert status == 2
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_prune_makes_no_store_where_there_is_none(
    speculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none" / "store.db"
    options = ("--store", f"sqlite:///{missing}", "--model", MODEL)
    status, printed = run(monkeypatch, capsys, "prune", speculator, tmp_path / "out", *options)
    assert status == 2 and f"store {missing}: no such file; " in printed
    assert not missing.parent.exists()


def test_prune_names_a_redis_that_is_away_once(
    speculator: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ("--store", f"redis://127.0.0.1:{free_port()}/0", "--model", MODEL)
    status, printed = run(monkeypatch, capsys, "prune", speculator, tmp_path / "out", *options)
    assert status == 2 and "Connection refused" in printed
    assert "secret" not in printed + caplog.text


def test_prune_leaves_what_is_there(
    store: str, speculator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (speculator / "config.json").read_bytes()
    usual = ("--store", store, "--model", MODEL, "--tenant", "acme")
    status, printed = run(monkeypatch, capsys, "prune", speculator, speculator, *usual)
    assert (status, "not an empty folder" in printed) == (2, True)
    assert (speculator / "config.json").read_bytes() == before


def test_a_speculator_of_a_smaller_vocabulary_is_refused(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SpeculatorConfig(kind="mlp", hidden_size=192, inner_size=32, n_predict=3, vocab_size=500)
    save_speculator(build_speculator(config), tmp_path / "small")
    options = ("--store", store, "--model", MODEL, "--tenant", "acme", "--size", 64)
    status, printed = run(monkeypatch, capsys, "prune", tmp_path / "small", tmp_path / "out", *options)
    assert (status, "the store has token 501" in printed) == (2, True)


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    from agentspec.server_ext.speculator.vocabulary import special_tokens

    with pytest.raises(ConfigurationError, match="tokenizer tests/speculator: cannot be loaded"):
        special_tokens("tests/speculator", "tests/speculator")


@pytest.mark.parametrize(
    ("options", "revisions"),
    [
        (("--revision", "m"), {"tokenizer": "m", "ends": "m"}),
        (("--revision", "m", "--tokenizer-revision", "t"), {"tokenizer": "t", "ends": "m"}),
    ],
)
def test_special_tokens_are_those_of_the_served_revision(
    options: tuple[str, ...],
    revisions: dict[str, str],
    store: str,
    speculator: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another revision may have other ends of text, which the reduced head would lack."""
    from transformers import AutoTokenizer, GenerationConfig

    asked: dict[str, str | None] = {}

    def recorded(name: str, load: Any) -> Any:
        def from_pretrained(place: str, *, revision: str | None = None) -> Any:
            asked[name] = revision
            return load(place)

        return from_pretrained

    for name, kind in (("tokenizer", AutoTokenizer), ("ends", GenerationConfig)):
        monkeypatch.setattr(kind, "from_pretrained", recorded(name, kind.from_pretrained))
    usual = ("--store", store, "--model", MODEL, "--tenant", "acme", "--size", 64)
    run(monkeypatch, capsys, "prune", speculator, tmp_path / "out", *usual, *options)
    assert asked == revisions
