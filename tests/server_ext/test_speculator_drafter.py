"""Test the speculator as the adapter runs it: real torch on the CPU, vLLM's step as plain data."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.errors import SpeculatorError
from agentspec.server_ext import UNFORCED, vllm_adapter
from agentspec.server_ext.arctic_methods import NOTHING
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.speculator import SpeculatorConfig, build_speculator, save_speculator
from agentspec.server_ext.step import Batch, NewRequest, Step
from agentspec.server_ext.vllm_adapter.worker import draft_models
from agentspec.server_ext.vllm_adapter.worker.draft_models import SpeculatorDrafter
from agentspec.server_ext.vllm_adapter.worker.runner import RunnerExtension
from agentspec.server_ext.vllm_adapter.worker.step_reader import ForwardPass
from tests.server_ext.plain_engine import in_memory

HIDDEN, VOCABULARY = 16, 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = SpeculatorConfig("lstm", hidden_size=HIDDEN, inner_size=24, n_predict=3, vocab_size=VOCABULARY)
    speculator = build_speculator(config)
    speculator.reset_parameters()
    save_speculator(speculator, tmp_path / "speculator")
    return tmp_path / "speculator"


def drafter(folder: Path, hidden: int = HIDDEN, **settings: Any) -> SpeculatorDrafter:
    """Return the drafter, loaded for a target of this hidden size."""
    target = SimpleNamespace(
        get_hidden_size=lambda: hidden, get_vocab_size=lambda: VOCABULARY, dtype=torch.float32, parameters=None
    )
    given = Settings(store="memory://", speculator=str(folder), **settings)
    result = SpeculatorDrafter(given, target)
    result.load(torch.nn.Linear(2, 2))
    return result


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without vLLM's tensor-parallel group."""
    monkeypatch.setattr(draft_models, "tensor_parallel_group", lambda: None)


def forward(sampled: list[list[int]], drafted: list[int] | None) -> ForwardPass:
    """Return a pass whose rows verified `drafted` draft tokens. Each row and position has its own state."""
    rows = sum(n + 1 for n in drafted) if drafted is not None else len(sampled)
    states = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(7))
    metadata = None if drafted is None else SimpleNamespace(num_draft_tokens=drafted)
    return ForwardPass(None, sampled, sample_hidden_states=states, spec_decode_metadata=metadata)


def test_the_state_that_produced_the_newest_token_is_taken() -> None:
    one_each = forward([[5], [], [6]], None)
    assert one_each.positions([0, 2]) == [0, 2]
    with_drafts = forward([[5, 6], [], [7], [1, 2, 3, 4]], [2, 0, 3, 3])
    assert with_drafts.positions([0, 2, 3]) == [1, 4, 11]  # two of row 0, none of row 2, all of row 3
    assert with_drafts.newest([0, 2, 3]) == [6, 7, 4]


def test_it_drafts_what_the_loop_drafts_for_each_row(folder: Path) -> None:
    ours = drafter(folder)
    given = forward([[5, 6], [], [7], [1, 2, 3, 4]], [2, 0, 3, 3])
    proposals = np.array([[UNFORCED] * 3, [9, UNFORCED, UNFORCED], [UNFORCED] * 3])
    answer = ours.bind(given).launch([3, 0, 0], proposals)()
    states = given.sample_hidden_states[[11, 1, 1]]
    expected = ours.loop(states, torch.tensor([4, 6, 6]), torch.from_numpy(proposals))
    assert answer.tokens.tolist() == expected.tokens.tolist()
    assert answer.top_probabilities == pytest.approx(expected.top_probabilities.numpy())
    assert answer.tokens[1, 0] == 9
    assert answer.tokens[0].tolist() == answer.top[0].tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_its_precision_can_be_chosen(folder: Path, dtype: str) -> None:
    ours = drafter(folder, speculator_dtype=dtype)
    assert str(next(ours.loop.speculator.parameters()).dtype) == f"torch.{dtype}"
    answer = ours.bind(forward([[1]], None)).launch([0], np.full((1, 3), UNFORCED))()
    assert answer.tokens.shape == (1, 3)


def test_one_that_does_not_fit_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(SpeculatorError, match=r"16.*32"):
        drafter(folder, hidden=32)
    with pytest.raises(SpeculatorError, match="num_speculative_tokens"):
        drafter(folder, speculator_tokens=5)


class Server:
    """Decode one request greedily. The target's text is the speculator's own, or another."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.drafter = drafter(folder)
        given = Settings(store="memory://", speculator=str(folder), verify_cost=0.02, **settings)
        self.proposer = DraftingEngine(given, in_memory(given, VOCABULARY))
        self.states = torch.randn(600, HIDDEN, generator=torch.Generator().manual_seed(9))

    def text(self, length: int) -> list[int]:
        """Return a text in which the speculator's first drafted token is always right."""
        text = [1]
        while len(text) < length:
            drafted = self.drafter.loop(self.states[len(text) : len(text) + 1], torch.tensor(text[-1:]), None)
            text.append(int(drafted.tokens[0, 0]))
        return text

    def decode(self, request_id: str, text: list[int]) -> tuple[int, int]:
        """Decode the text behind its first two tokens. Return (steps, drafted)."""
        tokens = np.zeros((1, len(text) + 32), np.int32)
        length, draft, steps, drafted = 2, [0][:0], 0, 0
        batch = Batch((request_id,), np.zeros(1, np.int32))
        while length < len(text) - 20:
            accepted = 0
            while accepted < len(draft) and draft[accepted] == text[length + accepted]:
                accepted += 1
            new = text[length : length + accepted + 1]
            # State i predicts the token behind i tokens of text.
            given = ForwardPass(
                None,
                [new],
                sample_hidden_states=self.states[length + 1 : length + len(draft) + 2],
                spec_decode_metadata=SimpleNamespace(num_draft_tokens=[len(draft)]),
            )
            length += len(new)
            tokens[0, :length] = text[:length]
            lengths, room, verified = (np.array([value], np.int32) for value in (length, 16, len(draft)))
            started = [] if steps else [NewRequest(request_id, text[:2], Identity(None, "s"))]
            seconds = 1e3 if steps else None  # beside so long a step the model's time is negligible
            step = Step(batch, started, tokens, lengths, room, verified, len(draft), seconds=seconds)
            bound = self.drafter.bind(given)
            (draft,) = self.proposer.propose(step, bound)
            bound.close()
            steps, drafted = steps + 1, drafted + len(draft)
        self.proposer.finish(request_id)
        self.proposer.finish_if_idle()
        return steps, drafted


def test_what_the_model_drafts_is_verified_and_counted(folder: Path) -> None:
    server = Server(folder)
    text = server.text(300)
    steps, _ = server.decode("a", text)
    assert steps < 0.75 * (len(text) - 22)
    figures = server.proposer.request("a")
    assert figures is not None
    assert figures["accepted_by_source"]["model"] > 50
    stats = server.proposer.stats()
    assert stats["model"]["runs"] > 50
    assert not stats["model"]["given_up"]
    assert not [name for name in stats["counters"] if name.startswith("errors")]


def test_alone_it_drafts_no_more_than_it_predicts(folder: Path) -> None:
    server = Server(folder, arctic_suffix_rule=NOTHING)
    text = server.text(200)
    for name in ("a", "b"):
        server.decode(name, text)
    figures = server.proposer.request("b")
    assert figures is not None
    assert figures["drafted"] == figures["drafted_by_source"]["model"] > 0


def test_a_model_that_fails_costs_its_drafts_and_is_given_up(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(folder)
    text = server.text(150)

    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    server.drafter.loop = broken
    server.drafter.loop.positions = 3
    steps, _ = server.decode("a", text)
    again, _ = server.decode("b", text)
    assert again < steps, "the suffix indexes go on drafting"
    stats = server.proposer.stats()
    assert stats["model"]["given_up"]
    assert stats["counters"]["errors_model"] == 5
    assert sum("broken on purpose" in (record.exc_text or "") for record in caplog.records) == 1


def test_steps_of_many_rows_may_be_left_without_drafts(folder: Path) -> None:
    server = Server(folder, disable_by_batch_size=1)
    text = server.text(100)
    assert server.decode("a", text)[1] > 0
    server.proposer.settings = Settings(store="memory://", disable_by_batch_size=1)
    tokens = np.tile(np.arange(40, dtype=np.int32), (2, 1)) % VOCABULARY
    rows, lengths, room, verified = (np.array(two, np.int32) for two in ([0, 1], [30, 30], [8, 8], [0, 0]))
    started = [NewRequest(name, [*range(10), *range(20)], Identity()) for name in ("x", "y")]
    step = Step(Batch(("x", "y"), rows), started, tokens, lengths, room, verified, 0)
    assert server.proposer.propose(step) == [[], []]


class SleepingWeights:
    """Stand in for vLLM's sleep: zero all weights, and restore them after level 1 only."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.kept: dict[str, torch.Tensor] = {}

    def suspend(self, level: int) -> None:
        self.kept = {name: weight.clone() for name, weight in self.weights.items()} if level == 1 else {}
        for weight in self.weights.values():
            weight.zero_()

    def resume(self, tags: list[str] | None) -> None:
        if tags is None or "weights" in tags:
            for name, weight in self.kept.items():
                self.weights[name].copy_(weight)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("waking", [[None], [["weights"], ["kv_cache"]]])
def test_a_speculator_drafts_as_before_after_vllms_own_sleep_and_waking(
    level: int, waking: list[list[str] | None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 2 discards all weights, and vLLM and its caller restore only the target's."""
    from vllm.v1.worker.gpu_worker import Worker

    vllm_adapter.install([patch for patch in vllm_adapter.current_patches() if patch.name in ("sleep", "wake_up")])
    for name, answer in (("synchronize", None), ("get_memory_info", (0, 0)), ("is_available", False)):
        monkeypatch.setattr(torch.accelerator, name, lambda answer=answer: answer)
    given, proposals, target = forward([[5]], None), np.full((1, 3), UNFORCED), torch.nn.Linear(2, 2)
    extension = object.__new__(RunnerExtension)
    extension.draft_model, extension._weights_lost = drafter(folder), False
    loop = extension.draft_model.loop
    assert loop is not None
    before = extension.draft_model.bind(given).launch([0], proposals)()

    worker = object.__new__(Worker)
    worker.model_runner = SimpleNamespace(
        agentspec=extension, model=target, get_model=lambda: target, get_draft_model=lambda: None
    )
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=[])
    worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers, worker._sleep_saved_parameters = {}, {}, {}
    names = {f"{i}": parameter.data for i, parameter in enumerate(loop.speculator.parameters())}
    worker._sleep_mode_backend = SleepingWeights(names)

    worker.sleep(level)
    asleep = extension.draft_model.bind(given).launch([0], proposals)()
    assert asleep.tokens.tolist() != before.tokens.tolist()
    for tags in waking:
        worker.wake_up(tags)
    after = extension.draft_model.bind(given).launch([0], proposals)()
    assert after.tokens.tolist() == before.tokens.tolist()
    assert after.probabilities.tolist() == before.probabilities.tolist()
    assert (extension.draft_model.loop is loop) == (level == 1)  # weights that sleep kept are not read again
