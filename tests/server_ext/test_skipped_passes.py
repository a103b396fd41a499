"""Test skipped passes of vLLM's drafter, made up for later: nothing is lost or comes twice, no block is missing."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from agentspec.server_ext.vllm_adapter.worker import skipped_passes
from agentspec.server_ext.vllm_adapter.worker.skipped_passes import MOST_KEPT, SkippedPasses
from agentspec.server_ext.vllm_adapter.worker.step_reader import ForwardPass

torch.set_num_threads(1)  # the tensors are small

BLOCK = 8
BLOCKS_A_ROW = 400


def token(name: str, position: int) -> int:
    """Return the token of a request at a position of its text."""
    return 1_000 * int(name[1:]) + position


class Native:
    """Stand in for a drafter of vLLM's. Check that it takes in each text from its beginning on, without a gap."""

    def __init__(self, room: int) -> None:
        self.block_size = BLOCK
        self.max_num_tokens = room
        self.net_num_new_slots_per_request = 0
        self.pass_hidden_states_to_model = True
        self.parallel_drafting = self.supports_mm_inputs = self.uses_mrope = False
        self.taken: dict[str, int] = {}
        """position behind the tokens taken in, by request"""
        self.passes: list[tuple[int, list[str], int]] = []
        """tokens asked for, requests and tokens taken in"""
        self.names: dict[int, str] = {}
        """request by the first of its blocks"""

    def propose(
        self,
        num_speculative_tokens: Any,
        target_token_ids: Any,
        target_positions: Any,
        target_hidden_states: Any,
        next_token_ids: Any,
        token_indices_to_sample: Any,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Any = None,
        slot_mappings: Any = None,
    ) -> Any:
        metadata, rows = common_attn_metadata, []
        assert torch.equal(metadata.query_start_loc, metadata.query_start_loc_cpu)
        assert metadata.num_actual_tokens == len(target_token_ids) <= self.max_num_tokens
        assert metadata.max_query_len == metadata.query_start_loc.diff().max()
        assert metadata.num_reqs == len(metadata.seq_lens) == len(metadata.block_table_tensor) == len(next_token_ids)
        for i in range(metadata.num_reqs):
            begin, end = metadata.query_start_loc[i : i + 2].tolist()
            length = int(metadata.seq_lens[i])
            assert metadata.seq_lens_cpu_upper_bound[i] == length <= metadata.max_seq_len
            if num_rejected_tokens_gpu is not None:
                rejected = int(num_rejected_tokens_gpu[i])
                assert token_indices_to_sample[i] == end - 1 - rejected
                end, length = end - rejected, length - rejected
            name = self.names[int(metadata.block_table_tensor[i, 0])]
            positions = list(range(length - (end - begin), length))
            assert positions[0] == self.taken.get(name, 0), "a gap, or what was taken in before"
            assert target_positions[begin:end].tolist() == positions
            assert target_token_ids[begin:end].tolist() == [token(name, at) for at in positions]
            if self.pass_hidden_states_to_model:
                states = [[token(name, at) + 0.5] * target_hidden_states.shape[1] for at in positions]
                assert target_hidden_states[begin:end].tolist() == states
            blocks = metadata.block_table_tensor[i].tolist()
            wanted = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in positions]
            assert metadata.slot_mapping[begin:end].tolist() == wanted
            assert next_token_ids[i] == token(name, length)
            self.taken[name] = length
            rows.append(name)
        self.passes.append((num_speculative_tokens, rows, len(target_token_ids)))
        return torch.full((len(rows), num_speculative_tokens), 7)


class Engine:
    """Stand in for vLLM's model runner: compute texts step by step, and ask its drafter after each."""

    def __init__(self, *, room: int = 2_000, prefix_caching: bool = True, takes: str = "states", **config: Any) -> None:
        parallel = {"data_parallel_size": 1, "decode_context_parallel_size": 1, **config.pop("parallel", {})}
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
            kv_transfer_config=config.pop("kv_transfer_config", None),
        )
        self.drafter = Native(room)
        for name, value in config.items():
            setattr(self.drafter, name, value)
        self.requests: dict[str, int] = {}
        """tokens of each request's text that were computed"""
        self.use_aux_hidden_state_outputs = takes == "states of layers"
        self.drafter.pass_hidden_states_to_model = takes != "nothing"
        model = SimpleNamespace()
        if takes == "states of its own":
            model.get_mtp_target_hidden_states = lambda: self.own_states
        self.get_model = lambda: model
        self.own_states: Any = None
        self.takes = takes
        self.skipped = SkippedPasses(self, self.drafter)

    def start(self, name: str) -> None:
        self.requests[name] = 0
        self.drafter.taken.pop(name, None)
        self.drafter.names[BLOCKS_A_ROW * int(name[1:])] = name

    def preempt(self, name: str) -> None:
        """Take the request's blocks away, so its text is computed from the beginning again."""
        self.requests[name] = 0
        self.drafter.taken.pop(name, None)

    def step(self, rows: dict[str, tuple[int, int]], tokens: int | None = None) -> bool:
        """Compute tokens of each request. Return whether the drafter rested.

        rows: by request, the tokens computed, and how many draft tokens beside them are rejected. tokens: how many the
        drafter is asked for; None: to rest, where it may.
        """
        names, drafted = list(rows), [taken - 1 + wrong for taken, wrong in rows.values()]
        prefill = [self.requests[name] == 0 for name in names]
        drafts = [0 if begins else count for begins, count in zip(prefill, drafted, strict=True)]
        begins = np.array([self.requests[name] for name in names], np.int32)
        queries = [taken + wrong for taken, wrong in rows.values()]
        starts = torch.tensor([0, *np.cumsum(queries).tolist()], dtype=torch.int32)
        positions = np.concatenate([np.arange(b, b + q) for b, q in zip(begins, queries, strict=True)])
        of = np.repeat(names, queries)
        right = np.concatenate([np.arange(taken + wrong) < taken for taken, wrong in rows.values()])
        ids = [token(n, p) if r else -5 for n, p, r in zip(of, positions.tolist(), right, strict=True)]
        blocks = torch.tensor([[BLOCKS_A_ROW * int(n[1:]) + at for at in range(BLOCKS_A_ROW)] for n in names])
        row_of = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(queries))
        at = torch.from_numpy(positions.astype(np.int64))
        lengths = torch.tensor([b + q for b, q in zip(begins.tolist(), queries, strict=True)], dtype=torch.int32)
        metadata = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(names),
            num_actual_tokens=len(ids),
            max_query_len=max(queries),
            max_seq_len=int(lengths.max()),
            block_table_tensor=blocks.to(torch.int32),
            slot_mapping=blocks[row_of, at // BLOCK] * BLOCK + at % BLOCK,
        )
        sampled = [[1] if p else [1] * taken for p, (taken, _) in zip(prefill, rows.values(), strict=True)]
        forward = ForwardPass(SimpleNamespace(total_num_scheduled_tokens=len(ids)), sampled)
        texts = np.stack([token(name, 0) + np.arange(BLOCK * BLOCKS_A_ROW) for name in names])
        forward.input_batch = SimpleNamespace(req_ids=names, num_computed_tokens_cpu=begins, token_ids_cpu=texts)
        states = torch.tensor(ids)[:, None].repeat(1, 2) + 0.5
        layers = [states[:, :1], states[:, 1:]]
        forward.hidden_states = torch.zeros(len(ids), 2) if self.takes == "states of its own" else states
        forward.aux_hidden_states, self.own_states = layers, states
        if any(drafts):
            forward.spec_decode_metadata = SimpleNamespace(num_draft_tokens=drafts)
        if tokens is None and self.skipped.may_skip(forward):
            self.skipped.skip(forward)
            states.fill_(-1)
            for name, (taken, _) in rows.items():
                self.requests[name] += taken
            return True
        self.skipped.prepare(forward)
        rejected = torch.tensor([wrong for _, wrong in rows.values()]) if any(drafts) else None
        drafted_tokens = self.drafter.propose(
            num_speculative_tokens=tokens or 0,
            target_token_ids=torch.tensor(ids),
            target_positions=at,
            target_hidden_states=states,
            next_token_ids=torch.tensor([token(n, self.requests[n] + rows[n][0]) for n in names]),
            token_indices_to_sample=None if rejected is None else starts[1:] - 1 - rejected,
            common_attn_metadata=metadata,
            sampling_metadata=None,
            num_rejected_tokens_gpu=rejected,
        )
        assert drafted_tokens.shape == (len(names), tokens or 0)
        for name, (taken, _) in rows.items():
            self.requests[name] += taken
        return False


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-in count as vLLM's drafter."""
    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", Native.propose)


def test_the_next_pass_takes_in_what_was_left_out() -> None:
    engine = Engine()
    engine.start("r1")
    engine.start("r2")
    assert not engine.step({"r1": (BLOCK, 0), "r2": (BLOCK + 1, 0)}), "prompts are taken in at once"
    assert engine.step({"r1": (1, 0), "r2": (2, 3)})
    assert engine.step({"r1": (3, 1), "r2": (1, 0)})
    assert engine.drafter.passes == [(0, ["r1", "r2"], 2 * BLOCK + 1)]
    assert not engine.step({"r2": (1, 4), "r1": (1, 0)}, 3), "rows may change their places"
    assert engine.drafter.passes[1:] == [(3, ["r2", "r1"], (2 + 1 + 1) + (1 + 3 + 1))]
    assert not engine.step({"r1": (1, 2), "r2": (1, 0)}, 3)
    assert engine.drafter.passes[2:] == [(3, ["r1", "r2"], 4)], "nothing was kept: vLLM's own call, unchanged"


def test_no_pass_that_fills_a_block_is_left_out() -> None:
    """With prefix caching, another request may use the block in the next step."""
    engine = Engine()
    engine.start("r1")
    engine.step({"r1": (BLOCK + 2, 0)})
    rested = [engine.step({"r1": (1, 0)}) for _ in range(3 * BLOCK)]
    full = [(BLOCK + 2 + i) // BLOCK > (BLOCK + 1 + i) // BLOCK for i in range(1, 3 * BLOCK + 1)]
    assert rested == [not fills for fills in full]
    assert len(engine.drafter.passes) == 1 + 3


def test_without_prefix_caching_the_number_of_kept_tokens_is_the_limit() -> None:
    engine = Engine(prefix_caching=False)
    engine.start("r1")
    engine.step({"r1": (3, 0)})
    most = 0
    for _ in range(MOST_KEPT):
        engine.step({"r1": (5, 2)})
        most = max(most, engine.skipped._kept)
    assert most == MOST_KEPT // 5 * 5
    assert len(engine.drafter.passes) == 1 + MOST_KEPT * 5 // (most + 5)


def test_what_does_not_fit_beside_a_prompt_is_taken_in_before_it() -> None:
    engine = Engine(room=50, prefix_caching=False)
    engine.start("r1")
    engine.step({"r1": (3, 0)})
    for _ in range(4):
        assert engine.step({"r1": (6, 0)})
    engine.start("r2")
    engine.step({"r1": (1, 0), "r2": (40, 0)}, 2)
    assert engine.drafter.passes[1:] == [(0, ["r1"], 24), (2, ["r1", "r2"], 41)]


def test_requests_that_are_left_out_for_a_step_keep_their_tokens() -> None:
    engine = Engine()
    for name in ("r1", "r2", "r3", "r4"):
        engine.start(name)
    engine.step({"r1": (2, 0), "r2": (2, 0), "r3": (2, 0), "r4": (1, 0)})
    assert engine.step({"r2": (1, 0), "r1": (2, 0)})
    assert engine.step({"r4": (3, 0), "r3": (2, 0), "r2": (1, 1)})
    del engine.requests["r3"]
    engine.step({"r1": (1, 0)}, 2)
    assert engine.skipped._kept == 5, "those of r2 and r4 alone"
    engine.step({"r1": (1, 0), "r4": (1, 0), "r2": (1, 0)}, 2)
    assert engine.drafter.taken == {"r1": 6, "r2": 5, "r3": 2, "r4": 5}
    assert engine.skipped._kept == 0


def test_a_preempted_request_begins_anew() -> None:
    engine = Engine()
    engine.start("r1")
    engine.step({"r1": (2, 0)})
    assert engine.step({"r1": (2, 0)})
    engine.preempt("r1")
    engine.step({"r1": (5, 0)})
    assert engine.drafter.taken["r1"] == 5
    assert engine.skipped._kept == 0


@pytest.mark.parametrize("takes", ["states", "states of layers", "states of its own", "nothing"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_any_traffic(seed: int, prefix_caching: bool, takes: str) -> None:
    """Requests come, go, wait and are preempted; drafts are rejected; the drafter rests and is asked at random."""
    rng = random.Random(f"{seed} {takes}")
    engine = Engine(room=rng.choice([150, 2_000]), prefix_caching=prefix_caching, takes=takes)
    running: list[str] = []
    rests = 0
    for number in range(600):
        if len(running) < 5 and rng.random() < 0.1:
            running.append(f"r{number}")
            engine.start(running[-1])
        if running and rng.random() < 0.03:
            del engine.requests[running.pop(rng.randrange(len(running)))]
        if running and rng.random() < 0.02:
            engine.preempt(rng.choice(running))
        rng.shuffle(running)
        present = [name for name in running if rng.random() < 0.95]
        rows = {}
        for name in present:
            begins = engine.requests[name] == 0
            rows[name] = (rng.randrange(1, 20), 0) if begins else (rng.randrange(1, 5), rng.choice([0, 0, 3]))
        if not rows:
            continue
        rests += engine.step(rows, rng.choice([None, None, None, None, 2]))
        assert engine.skipped._kept <= MOST_KEPT
        for name in present:
            if prefix_caching:
                computed, taken = engine.requests[name], engine.drafter.taken.get(name, 0)
                assert taken >= computed // BLOCK * BLOCK, "a full block that the drafter has not written"
    assert rests > 30


@pytest.mark.parametrize(
    "config",
    [
        {"parallel_drafting": True},
        {"supports_mm_inputs": True},
        {"uses_mrope": True},
        {"constant_draft_positions": True},
        {"kv_transfer_config": "prefill elsewhere"},
        {"parallel": {"data_parallel_size": 2}},
        {"parallel": {"decode_context_parallel_size": 2}},
        {"parallel": {"prefill_context_parallel_size": 2}},
    ],
)
def test_where_others_depend_on_the_passes_none_is_left_out(config: dict[str, Any]) -> None:
    skipped = Engine(**config).skipped
    assert not skipped.able
    assert not skipped.may_skip(ForwardPass(None, [[1]]))


@pytest.mark.parametrize("changed", ["propose", "metadata"])
def test_in_an_unknown_version_none_is_left_out(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Engine().skipped.able
    if changed == "propose":
        monkeypatch.setattr(skipped_passes, "_PARAMETERS", ("other",))
    else:
        monkeypatch.setattr(skipped_passes, "_METADATA", ("query_start_loc_cpu", "not there"))
    assert not Engine().skipped.able


def test_a_drafter_with_a_way_of_its_own_leaves_none_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", lambda *args: None)
    assert not Engine().skipped.able
