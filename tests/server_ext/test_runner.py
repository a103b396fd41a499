"""Test the extension on vLLM's model runner, without a running engine: what it reads of a step, and what it returns."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import SpeculatorError
from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.fusion.draft_model import Int64, ModelDraft
from agentspec.server_ext.identity import LENGTH_KEY
from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH
from agentspec.server_ext.vllm_adapter.worker import runner
from agentspec.server_ext.vllm_adapter.worker.draft_models import BoundModel, ModelDrafter
from agentspec.server_ext.vllm_adapter.worker.step_reader import (
    ForwardPass,
    end_tokens,
    is_told_later,
    never_drafted,
    returned_tokens,
)


def finished(output: list[int], **params: Any) -> CachedRequestState:
    """Return a request as vLLM's model runner keeps it."""
    return CachedRequestState(
        req_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=SamplingParams(**params),
        generator=None,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=output,
    )


@pytest.mark.parametrize("ignored", [True, False])
def test_a_draft_ends_before_the_end_of_a_grammar_behind_which_the_response_goes_on(ignored: bool) -> None:
    """The backend guidance refuses tokens behind it in one call, and vLLM ends the request with an error."""
    choice = StructuredOutputsParams(choice=["yes"])
    params = SamplingParams(ignore_eos=ignored, stop_token_ids=[9], structured_outputs=choice)
    params.update_from_generation_config({"eos_token_id": [2, 5]}, 2)
    assert end_tokens(params) == ({9} if ignored else {2, 5, 9})
    assert never_drafted(params) == ({2, 5, 9} if ignored else set())
    for other in (SamplingParams(ignore_eos=ignored), None):
        assert never_drafted(other) == set()


class TestReturnedTokens:
    def test_accepted_drafts_past_max_tokens_are_cut(self) -> None:
        assert returned_tokens(finished([5, 6, 7, 8], max_tokens=3)) == 3

    def test_accepted_drafts_past_a_stop_token_are_cut(self) -> None:
        assert returned_tokens(finished([5, 9, 7, 8], max_tokens=10, stop_token_ids=[9])) == 2

    def test_accepted_drafts_past_the_end_token_are_cut(self) -> None:
        state = finished([5, 2, 7, 8], max_tokens=10)
        state.sampling_params.update_from_generation_config({}, 2)
        assert returned_tokens(state) == 2

    def test_the_end_token_is_text_when_it_is_ignored(self) -> None:
        state = finished([5, 2, 7, 8], max_tokens=10, ignore_eos=True)
        state.sampling_params.update_from_generation_config({}, 2)
        assert returned_tokens(state) == 4

    def test_a_stop_before_min_tokens_does_not_count(self) -> None:
        state = finished([9, 5, 9, 8], max_tokens=10, min_tokens=2, stop_token_ids=[9])
        assert returned_tokens(state) == 3

    @pytest.mark.parametrize(("least", "begins", "end"), [(0, 50, 8), (6, 50, 8), (9, 50, 9), (0, 9, 8), (0, 200, 0)])
    def test_accepted_drafts_past_a_repetition_that_vllm_detects_are_cut(
        self, least: int, begins: int, end: int
    ) -> None:
        output = [*range(100, 100 + begins), *[7, 8] * 60]
        repetition = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
        state = finished(output, max_tokens=200, min_tokens=begins + least, repetition_detection=repetition)
        assert returned_tokens(state) == min(begins + end, 200)

    def test_a_repetition_may_end_with_the_first_token_of_the_longest_step(self) -> None:
        repetition = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
        for behind in (MAX_DRAFT - 1, MAX_DRAFT):  # tokens that were verified behind it
            output = [*range(100, 150), *([7, 8] * 80)[: 8 + behind]]
            state = finished(output, max_tokens=300, repetition_detection=repetition)
            assert returned_tokens(state) == 58


def test_the_length_of_a_response_is_waited_for_where_a_stop_text_may_have_ended_it() -> None:
    """A response of one token is not kept, and if its caller has left, the API server may never hear of it."""

    def told_later(output: list[int], **params: Any) -> bool:
        return is_told_later(finished(output, extra_args={LENGTH_KEY: True}, **params))

    assert told_later([5, 6], stop=["end"])
    assert not told_later([5], stop=["end"]) and not told_later([], stop=["end"])
    assert not is_told_later(finished([5, 6], stop=["end"]))


def test_the_mended_expansion_fills_its_result_in_place_of_a_copy() -> None:
    vllm_adapter.register()
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)
    values = torch.tensor([0.5, 7.0, -1.0])
    result = rejection_sampler.expand_batch_to_tokens(values, counts, 5, replace_from=-1, replace_to=1)
    assert result.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    whole = rejection_sampler.expand_batch_to_tokens(torch.tensor([3, 4], dtype=torch.int32), counts[1:], 5)
    assert whole.tolist() == [3, 3, 4, 4, 4]


def test_a_worker_that_shuts_down_closes_the_extension_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(runner, "note_saved", lambda: order.append("saved"))
    extension = SimpleNamespace(close=lambda: order.append("extension"), engine=object())
    wrapper = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(agentspec=extension)))
    runner.shut_down(lambda wrapper: order.append("worker"), wrapper)
    assert order == ["extension", "saved", "worker"]
    extension.engine = None  # as on every rank but the first
    runner.shut_down(lambda wrapper: None, wrapper)
    assert order[3:] == ["extension"]
    runner.shut_down(lambda wrapper: order.append("early"), SimpleNamespace(worker=None))  # before a worker was made
    assert order[-1] == "early"

    def broken() -> None:
        raise OSError("the store's disk is full")

    extension.close = broken
    with pytest.raises(OSError, match="full"):
        runner.shut_down(lambda wrapper: order.append("worker"), wrapper)
    assert order[-1] == "worker"


class Extension:
    """Stand in for a RunnerExtension."""

    def __init__(self, vllm_config: Any, native: Any = None) -> None:
        self.vllm_config = vllm_config
        self.waiting = None
        self.lengths: dict[str, int] = {}
        self.engine = SimpleNamespace(
            stats=lambda: {"steps": 7},
            request=lambda name, caller, call, admin: {"asked": (name, caller, call, admin)},
            note_lengths=self.lengths.update,
        )
        self.finished: list[tuple[str, Any]] = []
        self.begun_or_idle: list[Any] = []
        self.passes: list[ForwardPass] = []

    def draft(self, holder: Any, forward: ForwardPass) -> list[list[int]]:
        self.passes.append(forward)
        return [[3]]

    def begin(self, holder: Any, requests: Any) -> None:
        self.begun_or_idle.append(requests)

    def finish_if_idle(self) -> None:
        self.begun_or_idle.append("idle")

    def finish(self, request_id: str, state: Any) -> None:
        self.finished.append((request_id, state))


class TestRunner:
    """Test that the engine is an attribute of the model runner, where each wrapped method finds it."""

    @staticmethod
    def made(monkeypatch: pytest.MonkeyPatch, method: str = "custom_class") -> Any:
        """Return a runner whose constructor was wrapped."""
        monkeypatch.setattr(runner, "RunnerExtension", Extension)
        config = SimpleNamespace(speculative_config=SimpleNamespace(method=method, model=PROPOSER_PATH))
        holder = SimpleNamespace()

        def construct(self: Any, vllm_config: Any, device: str) -> None:
            self.vllm_config, self.drafter, self.input_batch = vllm_config, SimpleNamespace(), f"batch on {device}"

        runner.init_runner(construct, holder, config, device="cpu")
        return holder

    def test_every_way_in_reaches_the_runners_own_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        holder = self.made(monkeypatch)
        assert holder.drafter.extension is holder.agentspec
        assert runner.propose_draft_token_ids(pytest.fail, holder, "output", [[1]]) == [[3]]
        (forward,) = holder.agentspec.passes
        assert (forward.scheduler_output, forward.sampled) == ("output", [[1]])
        assert forward.input_batch == "batch on cpu"
        runner.on_request_state_removed(lambda *_: None, holder, "a", None)
        assert holder.agentspec.finished == [("a", None)]
        for begun, count in (["new"], 3), ([], 1), ([], 0):
            output = SimpleNamespace(scheduled_new_reqs=begun, total_num_scheduled_tokens=count)
            assert runner.update_states(lambda *_: "corrections", holder, output) == "corrections"
        assert holder.agentspec.begun_or_idle == [["new"], "idle"]  # steps without a begin or an end are not told
        assert runner.input_fits_in_drafter(pytest.fail, holder, object())
        worker = SimpleNamespace(model_runner=holder)
        assert vllm_adapter.worker_rpc(worker, "stats") == {"steps": 7}
        answer = vllm_adapter.worker_rpc(worker, "request", "a", caller="p", admin=True, call="call")
        assert answer == {"asked": ("a", "p", "call", True)}
        assert vllm_adapter.worker_rpc(worker, "lengths", {"a": 3}) is None and holder.agentspec.lengths == {"a": 3}

    def test_a_runner_of_another_method_stays_vllms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        holder = self.made(monkeypatch, "ngram")
        assert not hasattr(holder, "agentspec")
        assert runner.propose_draft_token_ids(lambda *_: "theirs", holder, "output", [[1]]) == "theirs"
        assert not runner.input_fits_in_drafter(lambda *_: False, holder, object())
        assert vllm_adapter.worker_rpc(SimpleNamespace(model_runner=holder), "stats") is None

    def test_what_goes_wrong_in_a_step_costs_drafts_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        extension = object.__new__(runner.RunnerExtension)
        vars(extension).update(
            settings=SimpleNamespace(enabled=True),
            engine=SimpleNamespace(metrics=SimpleNamespace(counters=Counter())),
            draft_model=None,
            _cpu_limits=None,
            _reported=False,
            _reader=None,
        )
        for _ in range(2):
            assert extension.draft(object(), ForwardPass(None, [[1], [2]])) == [[], []]
        assert extension.drafted_nothing
        assert extension.engine is not None
        assert extension.engine.metrics.counters["errors_adapter"] == 2
        assert sum("goes on without its drafts" in record.message for record in caplog.records) == 1

    def test_of_a_request_whose_state_cannot_be_read_nothing_is_kept(self) -> None:
        """It ends nevertheless: vLLM goes on, and the engine forgets it."""
        engine = Mock(metrics=SimpleNamespace(counters=Counter()))
        extension = object.__new__(runner.RunnerExtension)
        vars(extension).update(engine=engine, _reported=False)
        extension.finish("r", SimpleNamespace(output_token_ids=[1, 2]))  # as where vLLM has renamed a field
        engine.finish.assert_called_once_with("r", 0, None, may_be_shorter=False)
        assert engine.metrics.counters["errors_adapter"] == 1

    @pytest.mark.parametrize("parallel", [False, True])
    @pytest.mark.parametrize("ends", [False, True])
    def test_a_draft_model_that_cannot_begin_or_end_leaves_the_drafts_of_the_indexes(
        self, parallel: bool, ends: bool
    ) -> None:
        class Bound(BoundModel):
            def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
                pytest.fail("it was asked")

            def close(self) -> None:
                with drafter.together():
                    raise ValueError("no such layer")

        class Broken(ModelDrafter):
            def load(self, target: Any) -> None:
                pytest.fail("the weights were read")

            def bind(self, forward: ForwardPass) -> BoundModel:
                if ends:
                    return Bound()
                raise ValueError("no such layer")

        drafter = Broken()
        drafter.parallel = parallel
        extension = object.__new__(runner.RunnerExtension)
        vars(extension).update(
            settings=SimpleNamespace(enabled=True),
            engine=SimpleNamespace(
                metrics=SimpleNamespace(counters=Counter()),
                propose=lambda step, model: [[3], [4]] if ends or not model else [],
            ),
            draft_model=drafter,
            _cpu_limits=None,
            _reported=False,
            _reader=SimpleNamespace(
                read=lambda *_: SimpleNamespace(batch=SimpleNamespace(rows=np.arange(2, dtype=np.int32)))
            ),
        )
        forward = ForwardPass(None, [[1], [2]])
        if parallel:  # the other ranks wait for the model, and vLLM must not wait with them
            with pytest.raises(SpeculatorError, match="restart the server"):
                extension.draft(object(), forward)
        else:
            assert extension.draft(object(), forward) == [[3], [4]]
            assert extension.engine is not None
            assert extension.engine.metrics.counters["errors_adapter"] == 1


class TestLog:
    def loggers(self, monkeypatch: pytest.MonkeyPatch) -> tuple[logging.Logger, logging.Logger]:
        """Return agentspec's logger and vLLM's as they are in an engine, without the tests' handlers."""
        own, of_vllm = logging.getLogger("agentspec"), logging.getLogger("vllm")
        for logger, level, handlers in ((own, logging.NOTSET, []), (of_vllm, logging.INFO, [logging.NullHandler()])):
            monkeypatch.setattr(logger, "handlers", handlers)
            monkeypatch.setattr(logger, "level", level)
            monkeypatch.setattr(logger, "propagate", False)
        return own, of_vllm

    def test_it_is_vllms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own, of_vllm = self.loggers(monkeypatch)
        runner.log_as_vllm()
        runner.log_as_vllm()
        assert own.handlers == of_vllm.handlers and own.level == logging.INFO

    def test_one_that_somebody_configured_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own, _ = self.loggers(monkeypatch)
        mine = logging.NullHandler()
        own.addHandler(mine)
        runner.log_as_vllm()
        assert own.handlers == [mine] and own.level == logging.NOTSET
