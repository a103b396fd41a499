"""Test what the extension saves vLLM in steps without drafts, and at the ends of requests."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH
from agentspec.server_ext.vllm_adapter.worker import cheap_steps
from agentspec.server_ext.vllm_adapter.worker.cheap_steps import metadata_without_drafts


@pytest.mark.parametrize("ends", [[4, 104, 105, 209], [1, 2, 3, 4]])
def test_metadata_of_a_step_without_drafts_is_what_vllm_computes(ends: list[int]) -> None:
    import numpy as np
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    scheduled = np.array(ends, dtype=np.int32)
    runner: Any = object.__new__(GPUModelRunner)
    runner.device = torch.device("cpu")
    runner.input_ids = SimpleNamespace(gpu=torch.arange(500, dtype=torch.int32))
    runner._arange_scratch = np.arange(500, dtype=np.int32)
    runner.arange_np = np.arange(500, dtype=np.int32)
    calculate = GPUModelRunner._calc_spec_decode_metadata
    theirs = getattr(calculate, "__wrapped__", calculate)(runner, np.zeros(4, dtype=np.int32), scheduled)
    ours = metadata_without_drafts(scheduled, runner.device)
    assert vars(ours).keys() == vars(theirs).keys()
    for name, value in vars(theirs).items():
        mine = getattr(ours, name)
        assert (mine.tolist() == value.tolist()) if isinstance(value, torch.Tensor) else (mine == value), name


class TestTakingDrafts:
    """Test what the scheduler is told after a step: nothing, if no row has a draft."""

    @staticmethod
    def take(*, nothing: bool, asynchronous: bool = False) -> Any:
        holder = SimpleNamespace(agentspec=SimpleNamespace(drafted_nothing=nothing), use_async_scheduling=asynchronous)
        return cheap_steps.take_draft_token_ids(lambda self: "vLLM's answer", holder)

    def test_nothing_when_no_row_has_a_draft(self) -> None:
        assert self.take(nothing=True) is None

    def test_the_drafts_when_there_are_some(self) -> None:
        assert self.take(nothing=False) == "vLLM's answer"

    def test_they_are_asked_for_again_behind_a_step_without_any(self) -> None:
        scheduler, asked = SimpleNamespace(spec_decode_metrics_level="none"), []
        spec = SimpleNamespace(method="custom_class", model=PROPOSER_PATH)
        core = SimpleNamespace(
            scheduler=scheduler, output_queue=None, vllm_config=SimpleNamespace(speculative_config=spec)
        )
        for nothing in (True, False, True):
            output = SimpleNamespace()
            setattr(output, cheap_steps._NO_DRAFTS, nothing)
            cheap_steps.update_from_output(lambda *_: {}, scheduler, None, output)
            cheap_steps.post_step(lambda core, executed, at=nothing: asked.append(at), core, True)
        assert asked == [False]

    def test_under_asynchronous_scheduling_it_stays_vllms(self) -> None:
        assert self.take(nothing=True, asynchronous=True) == "vLLM's answer"

    def test_a_runner_of_another_method_is_left_alone(self) -> None:
        holder = SimpleNamespace(use_async_scheduling=False)
        assert cheap_steps.take_draft_token_ids(lambda self: "theirs", holder) == "theirs"


class TestFinishedRequests:
    """Test that an engine in the caller's process at once takes the step that tells the worker of ended requests."""

    @staticmethod
    def extra_steps(*, finished: bool = True, running: bool = False, method: str = "custom_class", **core: Any) -> int:
        steps: list[int] = []
        spec = SimpleNamespace(method=method, model=PROPOSER_PATH)
        scheduler = SimpleNamespace(has_finished_requests=lambda: finished, has_unfinished_requests=lambda: running)
        of_caller = {"batch_queue": None, "vllm_config": SimpleNamespace(speculative_config=spec)}
        engine = SimpleNamespace(scheduler=scheduler, step=lambda: steps.append(1), **(of_caller | core))
        cheap_steps.post_step(lambda core, executed: None, engine, True)
        return len(steps)

    def test_the_last_ones_end_at_once(self) -> None:
        assert self.extra_steps() == 1

    def test_others_end_with_the_next_step(self) -> None:
        assert self.extra_steps(running=True) == self.extra_steps(finished=False) == 0

    def test_an_engine_core_of_its_own_steps_by_itself(self) -> None:
        assert self.extra_steps(output_queue=object()) == self.extra_steps(batch_queue=object()) == 0

    def test_an_engine_of_another_method_is_left_alone(self) -> None:
        assert self.extra_steps(method="draft_model") == 0


class TestFiguresOfDrafts:
    """Test the figures of requests. vLLM sends them with an end that its engine core knows of."""

    @staticmethod
    def sent(level: str, stop: list[str]) -> bool:
        """Return whether the output of a request that goes on has its figures."""
        figures = object()
        request = SimpleNamespace(sampling_params=SimpleNamespace(stop=stop), spec_decode_metrics=figures)
        scheduler = SimpleNamespace(spec_decode_metrics_level=level, requests={"r": request})
        ended, output = (SimpleNamespace(request_id=name, spec_decode_metrics=None) for name in ("ended", "r"))
        outputs = {0: SimpleNamespace(outputs=[ended, output])}
        cheap_steps.update_from_output(lambda scheduler, step, result: outputs, scheduler, None, None)
        assert ended.spec_decode_metrics is None
        return output.spec_decode_metrics is figures

    def test_a_stop_text_may_end_a_request_in_each_output(self) -> None:
        assert self.sent("summary", ["."])

    def test_others_wait_for_their_end(self) -> None:
        assert not self.sent("summary", []) and not self.sent("none", ["."])


class TestAskingForDrafts:
    """Test that the engine core asks the worker for drafts, unless the runner's output says that there are none."""

    @staticmethod
    def asks(*, nothing: bool, rows: int = 2, asynchronous: bool = False, ours: bool = True) -> bool:
        holder = SimpleNamespace(use_async_scheduling=asynchronous)
        if ours:
            holder.agentspec = SimpleNamespace(drafted_nothing=nothing)
        output = SimpleNamespace(req_ids=["r"] * rows)
        sent = pickle.loads(pickle.dumps(cheap_steps.sample_tokens(lambda runner, grammar: output, holder, None)))
        core = SimpleNamespace(scheduler=SimpleNamespace(), output_queue=None)
        taken = cheap_steps.update_from_output(lambda scheduler, step, result: result, core.scheduler, None, sent)
        assert taken is sent
        asked: list[bool] = []
        cheap_steps.post_step(lambda core, executed: asked.append(executed), core, True)
        return bool(asked)

    def test_not_when_no_row_has_a_draft(self) -> None:
        assert not self.asks(nothing=True)

    def test_when_some_row_has_one(self) -> None:
        assert self.asks(nothing=False)

    def test_under_asynchronous_scheduling_as_vllm_does(self) -> None:
        assert self.asks(nothing=True, asynchronous=True)

    def test_after_an_output_without_rows_as_vllm_does(self) -> None:
        """That output may be a constant of vLLM's, which all engines of the process share."""
        assert self.asks(nothing=True, rows=0)

    def test_a_runner_of_another_method_is_left_alone(self) -> None:
        assert self.asks(nothing=True, ours=False)


class TestRowsFilledUp:
    """Test the table of draft tokens by batch size. Without one, vLLM fills up a row with one token left to compute."""

    @staticmethod
    def table(*, method: str = "custom_class", configured: list[int] | None = None) -> list[int] | None:
        def init(scheduler: Any, vllm_config: Any) -> None:
            scheduler.vllm_config = vllm_config
            scheduler.scheduler_config = SimpleNamespace(max_num_seqs=3)
            scheduler.num_spec_tokens = 128
            scheduler.dynamic_sd_lookup = configured

        scheduler = SimpleNamespace()
        spec = SimpleNamespace(method=method, model=PROPOSER_PATH)
        cheap_steps.init_scheduler(init, scheduler, vllm_config=SimpleNamespace(speculative_config=spec))
        table: list[int] | None = scheduler.dynamic_sd_lookup
        return table

    def test_every_batch_size_may_draft_as_much_as_configured(self) -> None:
        assert self.table() == [128] * 4

    def test_a_configured_table_stays(self) -> None:
        assert self.table(configured=[0, 5, 3, 1]) == [0, 5, 3, 1]

    def test_a_scheduler_of_another_method_is_left_alone(self) -> None:
        assert self.table(method="draft_model") is None
