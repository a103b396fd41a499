"""Test that each published layout loads as the same model, and that errors name the field or tensor."""

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator import Speculator, SpeculatorConfig, load_speculator, save_speculator
from tests.speculator.files import GATES, Checkpoint, H, I, N, V, lstm, mlp, rnn

CHECKPOINTS = {
    "lstm": lstm(),
    "lstm, four embeddings": lstm(tied=False),
    "mlp": mlp(),
    "mlp, tied": mlp(tied=True),
    "rnn": rnn(layers=1),
    "rnn, two layers": rnn(),
}
LSTM_ALIASES = tuple(f"{gate}_emb.0.weight" for gate in GATES[1:])
HEADS = tuple(f"head.{k}.weight" for k in range(N))


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return CHECKPOINTS[request.param]


def same(one: Speculator, other: Speculator) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def write_safetensors(checkpoint: Checkpoint, folder: Path, prefix: str = "", shards: int = 1) -> Path:
    """Write safetensors, in one file or shards with an index; tied tensors are stored as copies. Return the folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    named = {prefix + name: value.clone() for name, value in checkpoint.weights.items()}
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(named)}
    for file in set(files.values()):
        save_file({name: value for name, value in named.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_every_form_of_file_is_the_same_model(checkpoint: Checkpoint, prefix: str, tmp_path: Path) -> None:
    plain = load_speculator(checkpoint.write(tmp_path / "bin", prefix=prefix))
    assert same(plain, load_speculator(write_safetensors(checkpoint, tmp_path / "safetensors", prefix)))
    assert same(plain, load_speculator(write_safetensors(checkpoint, tmp_path / "shards", prefix, shards=3)))


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("lstm", LSTM_ALIASES),
        ("lstm", HEADS[1:]),
        ("lstm", (*HEADS[:2], "forget_emb.0.weight")),
        ("rnn, two layers", HEADS[1:]),
        ("mlp, tied", (*HEADS[1:], "emb.1.weight", "emb.2.weight", "ln.2.weight", "proj.2.weight")),
    ],
)
def test_tied_weights_may_stand_there_once(name: str, without: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = CHECKPOINTS[name]
    whole, part = (load_speculator(checkpoint.write(tmp_path / n, without=w)) for n, w in (("a", ()), ("b", without)))
    assert same(whole, part)


@pytest.mark.parametrize(
    "other",
    [
        {"architectures": "MLPSpeculatorPreTrainedModel", "top_k_tokesns_per_head": [1] * N},
        {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]},
        {"architectures": ["MLPVariantSpeculatorPreTrainedModel"]},
        {"architectures": None},
    ],
)
def test_spellings_of_an_mlp(other: dict[str, Any], tmp_path: Path) -> None:
    """The trainer of Arctic's MLP writes the architecture as a string, and misspells a key."""
    checkpoint = mlp(tied=True, scaled=True)
    misspelt = {name: value for name, value in checkpoint.config.items() if name != "top_k_tokens_per_head"}
    config = load_speculator(Checkpoint("mlp", misspelt | other, checkpoint.weights).write(tmp_path)).config
    assert (config.kind, config.hidden_size, config.inner_size, config.scale_input) == ("mlp", H, I, True)


@pytest.mark.parametrize("dims", [str(I), I])
def test_widths_may_be_strings_or_numbers(dims: str | int, tmp_path: Path) -> None:
    checkpoint = lstm()
    config = checkpoint.config | {"inner_dim": dims, "emb_dim": dims, "proj_dim": dims}
    assert same(
        load_speculator(Checkpoint("sum_lstm", config, checkpoint.weights).write(tmp_path / "a")),
        load_speculator(checkpoint.write(tmp_path / "b")),
    )


def test_the_dtype_is_the_files_unless_given(tmp_path: Path) -> None:
    checkpoint = lstm()
    halves = {name: value.to(torch.bfloat16) for name, value in checkpoint.weights.items()}
    folder = Checkpoint("sum_lstm", checkpoint.config, halves).write(tmp_path)
    assert {value.dtype for value in load_speculator(folder).parameters()} == {torch.bfloat16}
    speculator = load_speculator(folder, dtype=torch.float32)
    assert {value.dtype for value in speculator.parameters()} == {torch.float32}
    assert not speculator.training
    assert not any(value.requires_grad for value in speculator.parameters())


def test_what_is_saved_loads_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    first = load_speculator(checkpoint.write(tmp_path / "published"))
    save_speculator(first, tmp_path / "saved")
    second = load_speculator(tmp_path / "saved")
    assert second.config == first.config
    assert same(first, second)
    save_speculator(second, tmp_path / "saved")  # over the file that it was read from
    assert same(first, load_speculator(tmp_path / "saved"))


def test_a_saved_lstm_has_the_names_that_arctic_inference_takes(tmp_path: Path) -> None:
    """ArcticInference takes every gate's embedding and projection from the file before it loads. All must be there."""
    checkpoint = lstm()
    save_speculator(load_speculator(checkpoint.write(tmp_path / "published")), tmp_path / "saved")
    saved = torch.load(tmp_path / "saved" / "pytorch_model.bin", weights_only=True)
    assert saved.keys() == checkpoint.weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in checkpoint.weights.items())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    for name in ("architectures", "model_type", "method", "inner_dim", "emb_dim", "proj_dim", "input_hidden_dim"):
        assert config[name] == checkpoint.config[name]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in saved.values()}
    assert sum(storages.values()) == 4 * (2 * V * I + 4 * I * H + 4 * I * I + 4 * I)  # tied tensors once, float32


def test_a_saved_mlp_has_the_names_that_arctic_inference_takes(tmp_path: Path) -> None:
    checkpoint = mlp(tied=True)
    save_speculator(load_speculator(checkpoint.write(tmp_path / "published", prefix="speculator.")), tmp_path / "saved")
    saved = torch.load(tmp_path / "saved" / "pytorch_model.bin", weights_only=True)
    assert saved.keys() == checkpoint.weights.keys()
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["ArcticMLPSpeculatorPreTrainedModel"]
    assert (config["emb_dim"], config["inner_dim"], config["input_hidden_dim"]) == (H, I, H)


@pytest.mark.parametrize("name", ["mlp, tied", "rnn, two layers"])
def test_an_mlp_of_one_position_is_saved_as_not_tied(name: str, tmp_path: Path) -> None:
    """ArcticInference and vLLM refuse weights that are tied between no others. The published file still loads."""
    checkpoint = CHECKPOINTS[name]
    assert checkpoint.config["tie_weights"]
    one = Checkpoint(name, checkpoint.config | {"n_predict": 1}, checkpoint.weights)
    first = load_speculator(one.write(tmp_path / "published"))
    save_speculator(first, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_weights"] is False
    second = load_speculator(tmp_path / "saved")
    assert second.config == first.config and same(first, second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: 'LlamaForCausalLM' is no speculator"),
        ({"architectures": [], "model_type": "llama", "method": None}, "neither architectures nor model_type"),
        ({"architectures": 7}, "architectures: a list of names expected, got 7"),
        ({"base_model_archs": [None]}, r"base_model_archs: a list of names expected, got \[None\]"),
        ({"method": "sum_gru"}, "method: sum_rnn or sum_lstm"),
        ({"method": ["sum_lstm"]}, "method: sum_rnn or sum_lstm"),
        ({"inner_dim": "wide"}, "inner_dim: a width"),
        ({"inner_dim": "16.16"}, "one layer each"),
        ({"emb_dim": "12"}, r"emb_size \(emb_dim\): 16 expected"),
        ({"proj_dim": "12.16"}, "proj_dim: layers of one width"),
        ({"n_predict": None}, "n_predict: a width"),
        ({"n_predict": 0}, "n_predict: 1 to 128 expected, got 0"),
        ({"n_predict": MAX_DRAFT + 1}, "n_predict: 1 to 128 expected, got 129"),
        ({"vocab_size": 2**63}, "vocab_size: 1 to 2147483647 expected"),
        ({"input_hidden_dim": 2**62}, "hidden_size: 1 to 1048576 expected"),
        ({"method": "sum_rnn", "inner_dim": "16.-1.16"}, "inner_dim: 1 to 128 widths from 1 to 1048576 expected"),
        ({"vocab_size": V + 1}, r"tensor forget_emb.0.weight has shape \[50, 16\], by config.json it is \[51, 16\]"),
        ({"input_hidden_dim": H + 1}, r"tensor forget_proj.0.weight has shape \[16, 24\]"),
        ({"tie_weights": False}, r"an LSTM speculator \(sum_lstm\) needs tie_weights: true"),
        ({"tie_weights": "yes"}, "tie_weights: true or false"),
    ],
)
def test_a_config_that_cannot_be_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = lstm()
    folder = Checkpoint("sum_lstm", checkpoint.config | change, checkpoint.weights).write(tmp_path)
    with pytest.raises(SpeculatorError, match=message):
        load_speculator(folder)


@pytest.mark.parametrize(
    ("kind", "name"), [("lstm", "cell_proj.1.weight"), ("lstm", "state_ln.0.bias"), ("mlp", "head.2.weight")]
)
def test_a_missing_tensor_is_named(kind: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(SpeculatorError, match=f"tensor {name} is missing"):
        load_speculator(CHECKPOINTS[kind].write(tmp_path, without=(name,)))


def test_a_target_s_architecture_may_stand_alone(tmp_path: Path) -> None:
    checkpoint = lstm()
    checkpoint.config["base_model_archs"] = "LlamaForCausalLM"
    assert load_speculator(checkpoint.write(tmp_path)).config.base_model_archs == ("LlamaForCausalLM",)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(stored: torch.dtype, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Their scales are not read, so they would draft nonsense."""
    checkpoint = lstm()
    head = checkpoint.weights["head.0.weight"].to(stored)
    checkpoint.weights.update(dict.fromkeys((f"head.{k}.weight" for k in range(3)), head))
    with pytest.raises(SpeculatorError, match=r"tensor head\.0\.weight is .*8.* before it was quantized"):
        load_speculator(checkpoint.write(tmp_path), dtype=dtype)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e5])
def test_weights_that_are_not_finite_are_named(number: float, tmp_path: Path) -> None:
    checkpoint = lstm()
    checkpoint.weights["input_proj.1.weight"][2, 3] = number
    folder = checkpoint.write(tmp_path)
    with pytest.raises(SpeculatorError, match=r"tensor input_proj\.1\.weight.* not finite in float16.*wider dtype"):
        load_speculator(folder, dtype=torch.float16)
    if number == 1e5:
        load_speculator(folder)


@pytest.mark.parametrize(
    ("target", "field"), [({"hidden_size": H + 8}, "input_hidden_dim"), ({"vocab_size": V - 1}, "vocab_size")]
)
def test_another_target_is_refused(target: dict[str, int], field: str, tmp_path: Path) -> None:
    folder = lstm().write(tmp_path)
    load_speculator(folder, hidden_size=H, vocab_size=V)
    with pytest.raises(SpeculatorError, match=f"{field}.*some/target.*take one for your target"):
        load_speculator(folder, **target)


class _Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    folder = lstm().write(tmp_path / "speculator")
    torch.save({"head.0.weight": _Evil(tmp_path / "trace")}, folder / "pytorch_model.bin")
    with pytest.raises(SpeculatorError, match=r"pytorch_model\.bin: cannot be read"):
        load_speculator(folder)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("content", [b"", b"not weights", {"model": {"head.0.weight": torch.zeros(1)}}])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_files_that_are_no_weights_are_named(content: Any, name: str, tmp_path: Path) -> None:
    folder = lstm().write(tmp_path)
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        torch.save(content, folder / name)
    with pytest.raises(SpeculatorError, match=name):
        load_speculator(folder)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02h\xbc.",  # a value that was not kept
        b"\x80\x02.",  # no value
        b"\x80\x02}K\x01K\x02s.",  # numbers by number
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",  # a tensor of nothing
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.",
    ],
)
def test_a_damaged_pickle_is_named(pickled: bytes, tmp_path: Path) -> None:
    folder = lstm().write(tmp_path)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
    with pytest.raises(SpeculatorError, match=r"pytorch_model\.bin: cannot be read .*download or save it again"):
        load_speculator(folder)


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    folder = lstm().write(tmp_path)
    torch.save({0: torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(SpeculatorError, match="not a dictionary of tensors by name"):
        load_speculator(folder)


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.to_sparse(),
        lambda head: head.to_sparse_csr(),
        lambda head: head.to("meta"),
        lambda head: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]),
    ],
)
@pytest.mark.parametrize("name", ["head.0.weight", "cell_proj.1.weight"])
def test_a_tensor_that_is_not_dense_is_named(name: str, change: Any, tmp_path: Path) -> None:
    checkpoint = lstm()
    checkpoint.weights[name] = change(checkpoint.weights[name])
    with pytest.raises(SpeculatorError, match=rf"tensor {re.escape(name)} cannot be read \(it is sparse, .*; download"):
        load_speculator(checkpoint.write(tmp_path))


def test_a_number_format_that_torch_lacks_is_named(tmp_path: Path) -> None:
    """safetensors opens the file, and cannot read the tensor."""
    folder = write_safetensors(lstm(), tmp_path / "speculator")
    header = {"head.0.weight": {"dtype": "F6_E2M3", "shape": [V, I], "data_offsets": [0, V * I * 6 // 8]}}
    (folder / "other.safetensors").write_bytes(_packed(header) + bytes(V * I * 6 // 8))
    with pytest.raises(SpeculatorError, match=r"tensor head\.0\.weight cannot be read \(.*F6_E2M3\); download"):
        load_speculator(folder)


def _packed(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": {"x": 5}}'])
def test_json_of_something_else_is_named(name: str, text: str, tmp_path: Path) -> None:
    folder = write_safetensors(lstm(), tmp_path / "speculator")
    (folder / name).write_text(text)
    with pytest.raises(SpeculatorError, match=rf"{re.escape(name)}: |neither architectures nor model_type"):
        load_speculator(folder)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpeculatorError, match="no such folder"):
        load_speculator(tmp_path / "nowhere")
    with pytest.raises(SpeculatorError, match="File name too long; give another folder"):
        load_speculator("./" + "a" * 5_000)
    with pytest.raises(SpeculatorError, match="~nobody-here/s: there is no such home folder; write"):
        load_speculator("~nobody-here/s")
    folder = lstm().write(tmp_path / "speculator")
    with pytest.raises(SpeculatorError, match="a file; give the folder"):
        load_speculator(folder / "config.json")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(SpeculatorError, match="no weights"):
        load_speculator(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(SpeculatorError, match="cannot be read"):
        load_speculator(folder)
    (folder / "config.json").unlink()
    with pytest.raises(SpeculatorError, match=r"config\.json: missing"):
        load_speculator(folder)
    shards = write_safetensors(lstm(), tmp_path / "shards", shards=3)
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SpeculatorError, match=r"model-00002-of-00003\.safetensors is missing, 1 of 3"):
        load_speculator(shards)


def test_other_files_of_a_repository_are_left_alone(tmp_path: Path) -> None:
    """These are, for example, the index of the form that was not downloaded, and a trainer's leftovers."""
    folder = write_safetensors(lstm(), tmp_path / "safetensors", shards=2)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "pytorch_model-00001-of-00001.bin"}}')
    assert load_speculator(folder).config.vocab_size == V
    folder = lstm().write(tmp_path / "bin")
    (folder / "training_args.bin").write_bytes(b"anything")
    assert load_speculator(folder).config.vocab_size == V


def test_a_hub_id_is_found_in_the_local_copy_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own client is offline, and has downloaded the repository before."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--speculator"
    lstm().write(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert load_speculator("some/speculator").config.vocab_size == V
    with pytest.raises(
        SpeculatorError, match=r"some/other: no such folder, and it cannot be downloaded .*give a folder"
    ):
        load_speculator("some/other")


def test_a_config_says_what_it_needs() -> None:
    for change, field in (({"emb_size": 8}, "emb_size"), ({"draft_vocab_size": 99}, "draft_vocab_size")):
        values: dict[str, Any] = {"kind": "mlp", "hidden_size": H, "inner_size": I, "n_predict": N, "vocab_size": V}
        with pytest.raises(SpeculatorError, match=field):
            SpeculatorConfig(**values | change)
