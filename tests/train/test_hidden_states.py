"""Test that rows on disk are the target's own hidden states, however they were batched, and are computed once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from agentspec.errors import ConfigurationError, InvalidInputError
from agentspec.train import hidden_states
from agentspec.train.conversations import Conversation, from_records
from agentspec.train.hidden_states import HiddenStates, Target, extract, target_shape

CPU = torch.device("cpu")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Split this little data into several shards, with several batches each."""
    monkeypatch.setattr(hidden_states, "_SHARD_ROWS", 300)
    monkeypatch.setattr(hidden_states, "_FORWARD_TOKENS", 400)
    yield


def test_rows_are_the_target_s_states(target: Path, calls: Path, tmp_path: Path, small_shards: None) -> None:
    conversations = from_records(calls, None)
    extract(conversations, tmp_path, lambda: Target(str(target), "float32", CPU), lambda _: None)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    by_session = {conversation.session: conversation for conversation in conversations}
    with HiddenStates(conversations, tmp_path) as data:
        assert len({response.shard for response in data.responses}) > 3
        assert len(data.responses) == 60
        spans = {session: iter(conversation.responses) for session, conversation in by_session.items()}
        for response in data.responses:
            conversation = by_session[response.session]
            start, end = next(spans[response.session])
            with torch.no_grad():
                states = model(torch.from_numpy(conversation.tokens).long()[None], output_hidden_states=True)
            hidden, tokens = data.rows(response, 0, response.length)
            assert tokens.tolist() == conversation.tokens[start:end].tolist()
            torch.testing.assert_close(hidden, states.hidden_states[-1][0, start - 1 : end - 1], rtol=1e-4, atol=1e-5)
            part, _ = data.rows(response, 2, 5)
            assert torch.equal(part, hidden[2:5])


def test_goes_on_where_it_was_cut_off(target: Path, calls: Path, tmp_path: Path, small_shards: None) -> None:
    conversations = from_records(calls, None)
    opened, done = 0, 0

    def open_target() -> Target:
        nonlocal opened
        opened += 1
        return Target(str(target), "float32", CPU)

    def progress(tokens: int) -> None:
        nonlocal done
        done += tokens

    extract(conversations, tmp_path, open_target, progress)
    total = sum(len(conversation.tokens) for conversation in conversations)
    assert (opened, done) == (1, total)
    files = sorted(tmp_path.glob("*.safetensors"))
    before = [file.read_bytes() for file in files]
    files[1].unlink()
    (tmp_path / "hidden-00001.safetensors.part").write_bytes(b"half")
    extract(conversations, tmp_path, open_target, progress)
    assert (opened, done) == (2, 2 * total)
    assert [file.read_bytes() for file in files] == before
    extract(conversations, tmp_path, open_target, progress)
    assert opened == 2


def test_another_tokenizer_s_data_is_refused(target: Path, tmp_path: Path) -> None:
    conversations = [Conversation("s1", np.array([1, 2, 400, 3], dtype=np.int32), ((1, 4),))]
    with pytest.raises(InvalidInputError, match=r"session 's1': token 400 is outside the target's vocabulary of 48"):
        extract(conversations, tmp_path, lambda: Target(str(target), "float32", CPU), lambda _: None)


def test_the_head_gives_the_target_s_logits(target: Path) -> None:
    head = Target(str(target), "float32", CPU).head()
    assert head is not None
    assert torch.equal(head, LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).lm_head.weight)


def test_a_target_that_does_more_than_its_head_has_none(target: Path) -> None:
    opened = Target(str(target), "float32", CPU)
    head = opened._model.lm_head
    head.register_forward_hook(lambda _module, _inputs, logits: 3.0 * torch.tanh(logits / 3.0) + 1.0)
    assert opened.head() is None


def test_a_missing_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.name_or_path: .*nowhere"):
        target_shape(str(tmp_path / "nowhere"))


def test_a_target_that_lacks_weights_is_refused(target: Path, tmp_path: Path) -> None:
    """transformers makes them up, and a speculator would be trained on random hidden states."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    weights = {name: value for name, value in model.state_dict().items() if "layers.0.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path / "part", state_dict=weights)
    with pytest.raises(
        ConfigurationError, match=r"1 of its weights are missing .*such as model\.layers\.0\.mlp\.up_proj"
    ):
        Target(str(tmp_path / "part"), "float32", CPU)


def test_the_target_is_the_one_that_is_served(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's revision and --hf-overrides decide which hidden states there are."""
    asked = set[tuple[str, str | None]]()
    for kind in (AutoConfig, AutoModelForCausalLM):
        load = kind.from_pretrained

        def from_pretrained(name: str, *, load: Any = load, revision: str | None = None, **more: Any) -> Any:
            asked.add((name, revision))
            return load(name, **more)

        monkeypatch.setattr(kind, "from_pretrained", from_pretrained)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    served: dict[str, Any] = {"revision": "v2", "hf_overrides": {"rope_parameters": rope, "architectures": ["Other"]}}
    assert target_shape(str(target), **served).architectures == ("Other",)
    text = [torch.arange(20)]
    (states,) = Target(str(target), "float32", CPU, **served).hidden_states(text)
    assert asked == {(str(target), "v2")}
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32, rope_parameters=rope).eval()
    with torch.no_grad():
        (expected,) = model.model(text[0][None]).last_hidden_state
    torch.testing.assert_close(states, expected)
    (plain,) = Target(str(target), "float32", CPU).hidden_states(text)
    assert not torch.allclose(states, plain, atol=1e-3)


def test_an_override_that_transformers_would_ignore_is_refused(target: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^model\.hf_overrides: nonsense is no field of .*; serve and train on"
    ):
        target_shape(str(target), hf_overrides={"nonsense": 4, "vocab_size": 48})
    with pytest.raises(ConfigurationError, match=r"^model\.name_or_path: .* cannot be loaded \(Validation error"):
        target_shape(str(target), hf_overrides={"vocab_size": "many"})
