"""Test vLLM's own drafters beside the suffix index: how they are configured, when they run, for how many tokens."""

import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.server_ext import UNFORCED
from agentspec.server_ext.fusion.calibrator import UNKNOWN
from agentspec.server_ext.fusion.draft_model import TokenChoices
from agentspec.server_ext.vllm_adapter.startup.native_methods import adopt
from agentspec.server_ext.vllm_adapter.worker import native_drafters, runner
from agentspec.server_ext.vllm_adapter.worker.native_drafters import NativeDrafter, as_model_draft
from agentspec.server_ext.vllm_adapter.worker.skipped_passes import SkippedPasses
from agentspec.server_ext.vllm_adapter.worker.step_reader import ForwardPass


class Native:
    """Stand in for a drafter of vLLM's. It drafts 7, 8, 9, …"""

    def __init__(self) -> None:
        self.num_speculative_tokens = 0
        self.block_size = 16
        self.parallel_drafting = self.supports_mm_inputs = self.uses_mrope = False
        self.empty_runs = 0
        self._enable_probabilistic_draft_probs = False
        self.use_local_argmax_reduction = self.use_heterogeneous_vocab = False
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden, get_top_tokens=lambda h: h.argmax(dim=-1))
        self.vocab_mapping = SimpleNamespace(constrain_draft_logits=lambda x: x, map_draft_to_target_ids=lambda x: x)

    def dummy_run(self, num_tokens: int) -> None:
        self.empty_runs += num_tokens


class Runner:
    """Stand in for vLLM's model runner with a drafter that drafts ``tokens`` tokens."""

    def __init__(self, method: str, tokens: int = 3, *, data_parallel: int = 1) -> None:
        spec = SimpleNamespace(
            method=method,
            num_speculative_tokens=tokens,
            parallel_drafting=False,
            use_eagle=lambda: method == "eagle3",
            uses_draft_model=lambda: method == "draft_model",
            use_dflash=lambda: False,
        )
        adopt(spec, 16)
        parallel = SimpleNamespace(data_parallel_size=data_parallel, decode_context_parallel_size=1)
        self.vllm_config = SimpleNamespace(
            speculative_config=spec,
            parallel_config=parallel,
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            kv_transfer_config=None,
        )
        self.drafter = Native()
        self.effective_drafter_max_model_len = 100
        self.input_batch = SimpleNamespace(
            req_ids=["a", "b"], num_computed_tokens_cpu=np.array([20, 20]), token_ids_cpu=np.zeros((2, 30), np.int32)
        )
        self.ran: list[int] = []
        self._draft_probs: Any = None
        self._draft_prob_req_ids: Any = None
        self._draft_token_ids: Any = None

    def forward(self, longest: int = 50) -> ForwardPass:
        # Some row has more than one token, that is, a prompt, so the drafter may not rest.
        scheduled = SimpleNamespace(num_spec_tokens_to_schedule=16, total_num_scheduled_tokens=9)
        result = ForwardPass(scheduled, [[1], [2]], common_attn_metadata=SimpleNamespace(max_seq_len=longest))
        result.input_batch = self.input_batch

        def native() -> torch.Tensor:
            self.ran.append(scheduled.num_spec_tokens_to_schedule)
            self._draft_probs = "of these tokens"
            return torch.arange(7, 7 + self.ran[-1]).repeat(2, 1)

        result.native = native
        return result


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_drafters, "tensor_parallel_group", lambda: None)
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    for name in ("propose", "_greedy_sample"):
        monkeypatch.setattr(Native, name, getattr(SpecDecodeBaseProposer, name), raising=False)


def ask(drafter: NativeDrafter, forward: ForwardPass, rows: Sequence[int], tokens: int) -> list[list[int]]:
    bound = drafter.bind(forward)
    answer = bound.launch(rows, np.full((len(rows), tokens), UNFORCED, np.int64))()
    bound.close()
    drafted: list[list[int]] = answer.tokens.tolist()
    return drafted


@pytest.mark.usefixtures("one_rank")
class TestRuns:
    @pytest.mark.parametrize("method", ["eagle3", "draft_model"])
    def test_it_drafts_as_many_tokens_as_it_is_asked_for(self, method: str) -> None:
        holder = Runner(method)
        drafter = NativeDrafter(holder)
        assert drafter.choices == TokenChoices(0, 3)
        forward = holder.forward()
        assert ask(drafter, forward, [1], 2) == [[7, 8]]
        assert holder.ran == [2]
        assert forward.scheduler_output.num_spec_tokens_to_schedule == 16, "the scheduler's own again"
        assert holder._draft_probs is None, "the rejection sampler must not take these tokens for sampled ones"

    def test_one_with_a_kv_cache_takes_in_every_step(self) -> None:
        holder = Runner("eagle3")
        NativeDrafter(holder).bind(holder.forward()).close()
        assert holder.ran == [0]

    def test_one_with_a_kv_cache_rests_where_its_pass_can_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        skipped: list[Any] = []
        monkeypatch.setattr(SkippedPasses, "may_skip", lambda *_: True)
        monkeypatch.setattr(SkippedPasses, "skip", lambda _, forward: skipped.append(forward))
        holder = Runner("eagle3")
        drafter = NativeDrafter(holder)
        bound = drafter.bind(holder.forward())
        assert bound.choices == TokenChoices(1, 3, may_rest=True)
        bound.rest()
        bound.close()
        drafter.bind(holder.forward()).close()
        ask(drafter, holder.forward(), [0], 1)
        assert len(skipped) == 2
        assert holder.ran == [1]

    def test_what_waits_is_dropped_after_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forgot: list[bool] = []
        monkeypatch.setattr(SkippedPasses, "forget", lambda _: forgot.append(True))
        holder = Runner("eagle3")
        drafter, forward = NativeDrafter(holder), holder.forward()
        forward.native = list
        drafter.bind(forward).close()
        assert not forgot
        forward.native = None
        with pytest.raises(AssertionError):
            drafter.bind(forward).close()
        assert forgot

    def test_one_without_a_kv_cache_rests(self) -> None:
        holder = Runner("ngram")
        drafter = NativeDrafter(holder)
        assert drafter.choices == TokenChoices(3, 3, may_rest=True)
        drafter.bind(holder.forward()).close()
        assert holder.ran == []
        assert ask(drafter, holder.forward(), [0], 3) == [[7, 8, 9]]
        assert ask(drafter, holder.forward(longest=1000), [0], 3) == [[7, 8, 9]], "no text is too long for it"

    def test_one_that_makes_all_its_tokens_in_a_pass_of_its_own_is_asked_for_all(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        holder = Runner("eagle3")
        holder.vllm_config.speculative_config.parallel_drafting = True
        assert NativeDrafter(holder).choices == TokenChoices(3, 3)
        monkeypatch.setattr(Native, "propose", lambda *_: None)
        assert NativeDrafter(Runner("eagle3")).choices == TokenChoices(3, 3)

    def test_it_drafts_its_likeliest_tokens_also_for_sampled_requests(self) -> None:
        """vLLM would sample them, and these are accepted more rarely where their probabilities are not told."""
        holder = Runner("eagle3")
        holder.drafter._enable_probabilistic_draft_probs = True
        NativeDrafter(holder)
        assert not holder.drafter._enable_probabilistic_draft_probs

    def test_it_does_not_run_over_the_end_of_its_texts(self) -> None:
        holder = Runner("eagle3")
        drafter = NativeDrafter(holder)
        assert drafter.bind(holder.forward(longest=97)).choices == TokenChoices(0, 3)
        bound = drafter.bind(holder.forward(longest=98))
        assert bound.choices == TokenChoices(0, 0)
        bound.close()
        assert holder.ran == []
        assert holder.drafter.empty_runs == 0

    def test_data_parallel_ranks_run_the_same_passes(self) -> None:
        holder = Runner("eagle3", data_parallel=2)
        drafter = NativeDrafter(holder)
        assert drafter.choices == TokenChoices(3, 3)
        drafter.bind(holder.forward()).close()
        assert holder.ran == [3]
        drafter.bind(holder.forward(longest=99)).close()
        assert (holder.ran, holder.drafter.empty_runs) == ([3], 1)

    @pytest.mark.parametrize(("ranks", "empty_runs"), [(1, 0), (2, 3)])
    def test_after_some_errors_it_is_left_alone(self, ranks: int, empty_runs: int) -> None:
        """Other data-parallel ranks still wait for this one in their passes, so it runs empty ones."""
        holder = Runner("eagle3", data_parallel=ranks)
        drafter, forward = NativeDrafter(holder), holder.forward()
        tried = []

        def fail() -> None:
            tried.append(1)
            raise RuntimeError("no memory")

        forward.native = fail
        for _ in range(8):
            try:
                drafter.bind(forward).close()
            except RuntimeError:
                continue
        assert (len(tried), holder.drafter.empty_runs) == (native_drafters._FAILURES, empty_runs)

    def test_the_other_ranks_draft_what_the_first_asks_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[int] = []

        class Link:
            def __init__(self, group: Any, positions: int) -> None:
                pass

            def tell_number(self, number: int) -> None:
                told.append(number)

            def hear_number(self) -> int:
                return told[-1]

        monkeypatch.setattr(native_drafters, "tensor_parallel_group", lambda: "two ranks")
        monkeypatch.setattr(native_drafters, "RankLink", Link)
        first, second = Runner("eagle3"), Runner("eagle3")
        leader, follower = NativeDrafter(first), NativeDrafter(second)
        ask(leader, first.forward(), [0], 2)
        follower.follow(second.forward())
        leader.bind(first.forward()).close()
        follower.follow(second.forward())
        assert first.ran == second.ran == [2, 0]
        assert told == [2, 0]
        broken = second.forward()
        broken.native = None
        with pytest.raises(AssertionError):
            follower.follow(broken)
        assert follower.out_of_step is not None


def test_tokens_without_probabilities_get_one_for_all() -> None:
    answer = as_model_draft([[3, 4], [5]], np.full((2, 2), UNFORCED, np.int64))
    assert answer.tokens.tolist() == [[3, 4], [5, 0]]
    assert answer.probabilities.tolist() == [[UNKNOWN, UNKNOWN], [UNKNOWN, 0.0]]


@pytest.mark.usefixtures("one_rank")
class TestProbabilities:
    """Test the probabilities of drafted tokens. vLLM's drafters choose the largest logit."""

    @staticmethod
    def asked(tokens: int, *, at_once: bool = False, **options: bool) -> Any:
        """Return a drafter's answer whose logits at row i and position k make token i + k + 1 likely."""
        holder = Runner("eagle3")
        native: Any = holder.drafter
        for name, value in options.items():
            setattr(native, name, value)
        drafter, forward = NativeDrafter(holder), holder.forward()
        logits = torch.zeros(2, tokens, 8)
        for i in range(2):
            for k in range(tokens):
                logits[i, k, i + k + 1] = 4.0 - k

        def propose() -> torch.Tensor:
            if at_once:
                return native._greedy_sample(logits.reshape(2 * tokens, 8)).view(2, tokens)
            return torch.stack([native._greedy_sample(logits[:, k]) for k in range(tokens)], dim=1)

        forward.native = propose
        answers = [drafter.bind(forward).launch([1], np.full((1, tokens), UNFORCED, np.int64))() for _ in range(2)]
        assert np.array_equal(answers[0].probabilities, answers[1].probabilities), "each step has its own"
        return answers[0]

    @pytest.mark.parametrize("at_once", [False, True])
    def test_they_are_those_of_the_drafters_logits(self, at_once: bool) -> None:
        answer = self.asked(3, at_once=at_once)
        assert answer.tokens.tolist() == [[2, 3, 4]]
        wanted = [np.exp(logit) / (np.exp(logit) + 7) for logit in (4, 3, 2)]
        assert np.allclose(answer.probabilities, [wanted])
        assert np.array_equal(answer.top_probabilities, answer.probabilities)

    def test_a_draft_that_was_chosen_otherwise_in_part_has_none(self) -> None:
        holder = Runner("eagle3")
        native: Any = holder.drafter
        drafter, forward = NativeDrafter(holder), holder.forward()
        forward.native = lambda: native._greedy_sample(torch.eye(2, 8)).repeat(2, 1).T
        answer = drafter.bind(forward).launch([1], np.full((1, 2), UNFORCED, np.int64))()
        assert (answer.tokens.tolist(), answer.probabilities.tolist()) == ([[1, 1]], [[UNKNOWN, UNKNOWN]])

    @pytest.mark.parametrize("option", ["use_local_argmax_reduction", "use_heterogeneous_vocab"])
    def test_one_that_chooses_in_another_way_keeps_its_way(self, option: str) -> None:
        answer = self.asked(2, **{option: True})
        assert answer.tokens.tolist() == [[2, 3]]
        assert answer.probabilities.tolist() == [[UNKNOWN, UNKNOWN]]

    def test_a_family_with_a_way_of_its_own_keeps_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Native, "_greedy_sample", lambda native, hidden: hidden.argmin(dim=-1))
        answer = self.asked(2)
        assert answer.tokens.tolist() == [[0, 0]]
        assert answer.probabilities.tolist() == [[UNKNOWN, UNKNOWN]]


class TestTime:
    """Test when drafters are asked: vLLM asks some before the sampled tokens, which indexes need, are on the host."""

    @staticmethod
    def drafted(sampled: Any) -> tuple[list[Any], Any]:
        """Return what the engine drafted for, in order with vLLM's bookkeeping, and the runner's drafts after it."""
        order: list[Any] = []
        holder = Runner("eagle3")

        def draft(_: Any, forward: ForwardPass) -> list[list[int]]:
            order.append(forward.sampled)
            return [[5], []]

        holder.agentspec = SimpleNamespace(waiting=None, draft=draft)  # type: ignore[attr-defined]
        holder._draft_token_ids = runner.propose_draft_token_ids(pytest.fail, holder, "output", sampled)

        def bookkeeping(_: Any) -> tuple[Any, ...]:
            order.append("bookkeeping")
            return None, None, None, [[1], [2]], None

        runner.bookkeeping_sync(bookkeeping, holder)
        return order, holder._draft_token_ids

    def test_a_tensor_waits_for_the_bookkeeping(self) -> None:
        assert self.drafted(torch.tensor([[1], [2]])) == (["bookkeeping", [[1], [2]]], [[5], []])

    def test_lists_are_drafted_for_at_once(self) -> None:
        assert self.drafted([[3], [4]])[0] == [[[3], [4]], "bookkeeping"]


def test_the_store_is_read_when_vllm_loads_the_drafter() -> None:
    loaded: list[Any] = []
    runner.load_native(lambda target: loaded.append("weights"), SimpleNamespace(load=loaded.append), "target")  # type: ignore[arg-type]
    assert loaded == ["weights", "target"]


THREADS = """
import numpy
import torch
from agentspec.server_ext.vllm_adapter.worker.native_drafters import limit_numba_threads
limit_numba_threads()
import numba
@numba.njit(parallel=True)
def count(values):
    for i in numba.prange(len(values)):
        values[i] += 1
count(numpy.zeros(3))
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


def test_ngram_leaves_the_workers_threads_alone() -> None:
    command, environment = [sys.executable, "-c", THREADS], {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("NUMBA_NUM_THREADS", None)  # earlier tests have set it in this process
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
