"""Test steps read from a model runner: their content, and that cached parts are never out of date."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from agentspec.server_ext.identity import PREDICTION_KEY, QUOTABLE_KEY, RequestTagger, identify
from agentspec.server_ext.identity.callers import Callers
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Step
from agentspec.server_ext.vllm_adapter.worker import step_reader
from agentspec.server_ext.vllm_adapter.worker.step_reader import StepReader

LONGEST = 100


TAGGER = RequestTagger(Callers(Settings(tenant="t"), b"secret of the tests"), "tenant")


def extra_args(session: str) -> dict[str, Any]:
    """Return what the API server writes into a request of this session."""
    return TAGGER.tag({"session_id": session})


class Runner:
    """Stand in for vLLM's model runner: prompts of ten tokens and the tokens verified behind them."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(
            req_ids=[],
            req_id_to_index={},
            num_tokens_no_spec=np.zeros(8, dtype=np.int32),
            token_ids_cpu=np.zeros((8, LONGEST), dtype=np.int32),
        )
        self.requests: dict[str, Any] = {}
        self.known: set[tuple[str, int]] = set()
        self.reader = StepReader(4, LONGEST, lambda *request: request in self.known)

    def add(
        self,
        *names: str,
        max_tokens: int | None = None,
        prompt: Sequence[int] | None = range(10),
        structured: bool = False,
    ) -> None:
        for name in names:
            params = SamplingParams(
                max_tokens=max_tokens,
                extra_args=extra_args(f"of-{name}"),
                stop_token_ids=[7],
                structured_outputs=StructuredOutputsParams(regex="a*") if structured else None,
            )
            self.requests[name] = SimpleNamespace(prompt_token_ids=prompt, sampling_params=params, lora_request=None)
            row = len(self.input_batch.req_ids)
            self.input_batch.num_tokens_no_spec[row] = 10
            self.input_batch.token_ids_cpu[row, :10] = range(10)
            self.input_batch.req_ids.append(name)
            self.input_batch.req_id_to_index[name] = row

    def step(
        self,
        *given: int,
        new: bool = False,
        drafts: dict[str, list[int]] | None = None,
        prefilled: int = 0,
        limit: int = 4,
    ) -> Step:
        """Take a step that gives each row `given` tokens. Afterwards the engine knows the requests."""
        drafts = drafts or {}
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in self.input_batch.req_ids] if new else [],
            scheduled_spec_decode_tokens=drafts,
            num_spec_tokens_to_schedule=limit,
            total_num_scheduled_tokens=len(given) + sum(map(len, drafts.values())) + prefilled,
        )
        self.input_batch.num_tokens_no_spec[: len(given)] += np.array(given, dtype=np.int32)
        step = self.reader.read(self, output, [[7] * count for count in given])
        self.known.update((name, len(self.requests[name].prompt_token_ids)) for name in step.batch.request_ids)
        return step


@pytest.fixture
def runner() -> Runner:
    return Runner()


def test_a_first_step_starts_its_requests(runner: Runner) -> None:
    runner.add("a", "b")
    step = runner.step(1, 1, new=True, prefilled=18)
    assert [(new.request_id, list(new.prompt), new.identity) for new in step.started] == [
        ("a", list(range(10)), identify(extra_args("of-a"))),
        ("b", list(range(10)), identify(extra_args("of-b"))),
    ]
    assert [new.api_id for new in step.started] == ["a", "b"]
    assert [new.end_tokens for new in step.started] == [[7], [7]]
    assert step.batch.request_ids == ("a", "b")
    assert step.batch.rows.tolist() == [0, 1]
    assert step.lengths.tolist() == [11, 11]
    assert step.num_verified_draft_tokens.tolist() == [0, 0]
    assert step.max_draft_tokens.tolist() == [4, 4]
    assert (step.num_draft_tokens, step.seconds) == (0, None)
    assert step.tokens is runner.input_batch.token_ids_cpu


def test_requests_are_read_before_their_prompts_are_computed(runner: Runner) -> None:
    runner.add("a", "b")
    runner.add("embedded", prompt=None)
    runner.known.add(("a", 10))
    asked = [SimpleNamespace(req_id=name) for name in ("embedded", "b", "a")]
    (new,) = runner.reader.begun(runner, asked)
    assert (new.request_id, new.identity) == ("b", identify(extra_args("of-b")))
    assert np.shares_memory(new.prompt, runner.input_batch.token_ids_cpu[1, :10])
    assert list(new.prompt) == list(range(10))


def test_text_that_came_with_a_request_is_taken_out_of_what_vllm_may_print(runner: Runner) -> None:
    runner.add("a")
    extra = runner.requests["a"].sampling_params.extra_args
    extra |= {PREDICTION_KEY: [5, 6], QUOTABLE_KEY: np.array([7, 8], np.int32).tobytes()}
    (new,) = runner.reader.begun(runner, [SimpleNamespace(req_id="a")])
    assert (list(new.prediction), list(new.quotable)) == ([5, 6], [7, 8])
    assert extra == extra_args("of-a")


def test_a_number_that_is_no_token_ends_no_response(runner: Runner) -> None:
    """The cache would refuse such an end token, and with it the request."""
    runner.add("a")
    runner.requests["a"].sampling_params.stop_token_ids += [-1, 2**31, 2**70]
    step = runner.step(1, new=True, prefilled=9)
    assert [new.end_tokens for new in step.started] == [[7]]


def test_while_the_rows_stay_only_what_moves_is_new(runner: Runner) -> None:
    runner.add("a", "b")
    batch = runner.step(1, 1, new=True, prefilled=18).batch
    step = runner.step(1, 1)
    assert step.batch is batch
    assert list(step.started) == []
    assert step.lengths.tolist() == [12, 12]
    assert step.seconds is not None and 0 < step.seconds < 1
    step = runner.step(3, 1, drafts={"a": [5, 6, 7, -1]})
    assert step.batch is batch
    assert step.lengths.tolist() == [15, 13]
    assert step.num_verified_draft_tokens.tolist() == [3, 0]
    assert step.num_draft_tokens == 4
    assert runner.step(1, 1).num_verified_draft_tokens.tolist() == [0, 0]


def test_the_room_shrinks_towards_the_end_of_each_row(runner: Runner) -> None:
    runner.add("short", max_tokens=8)
    runner.add("long")
    runner.step(1, 1, new=True, prefilled=18)
    rooms = [runner.step(1, 1).max_draft_tokens.tolist() for _ in range(8)]
    assert rooms == [[4, 4], [4, 4], [3, 4], [2, 4], [1, 4], [0, 4], [0, 4], [0, 4]]


def test_drafts_that_were_taken_count_for_the_room(runner: Runner) -> None:
    runner.add("a", max_tokens=12)
    runner.step(1, new=True, prefilled=9)
    assert runner.step(5, drafts={"a": [1, 2, 3, 4]}).max_draft_tokens.tolist() == [4]  # 6 of 12
    assert runner.step(5, drafts={"a": [1, 2, 3, 4]}).max_draft_tokens.tolist() == [0]  # 11 of 12


def test_no_draft_may_pass_the_longest_context(runner: Runner) -> None:
    runner.add("a")
    runner.step(1, new=True, prefilled=9)
    runner.input_batch.num_tokens_no_spec[0] = LONGEST - 4
    runner.input_batch.req_ids = ["a"]
    runner.reader._kept = None
    assert [runner.step(1).max_draft_tokens.tolist() for _ in range(3)] == [[2], [1], [0]]


def test_fewer_drafts_than_usual_may_be_asked_for(runner: Runner) -> None:
    runner.add("a")
    runner.step(1, new=True, prefilled=9)
    assert runner.step(1, limit=2).max_draft_tokens.tolist() == [2]
    assert runner.step(1, limit=0).max_draft_tokens.tolist() == [0]
    assert runner.step(1, limit=9).max_draft_tokens.tolist() == [4]


def test_a_row_that_leaves_moves_the_others(runner: Runner) -> None:
    runner.add("a", "b", "c")
    runner.step(1, 1, 1, new=True, prefilled=27)
    runner.step(1, 2, 3, drafts={"b": [1], "c": [1, 2]})
    runner.input_batch.req_ids[:] = ["c", "b"]  # vLLM fills the hole with the last row
    runner.input_batch.num_tokens_no_spec[:2] = [14, 13]
    step = runner.step(1, 1)
    assert step.batch.request_ids == ("c", "b")
    assert step.lengths.tolist() == [15, 14]
    assert list(step.started) == []
    assert step.seconds is not None  # the engine went on without a gap


def test_a_prompt_that_is_still_read_is_left_out(runner: Runner) -> None:
    runner.add("a", "b")
    for _ in range(2):
        step = runner.step(1, 0, prefilled=50)
        assert step.batch.request_ids == ("a",)
        assert step.batch.rows.tolist() == [0]
        assert step.seconds is None
    step = runner.step(1, 1, prefilled=9)
    assert [new.request_id for new in step.started] == ["b"]
    assert step.batch.rows.tolist() == [0, 1]
    assert step.seconds is None
    assert runner.step(1, 1).seconds is not None


def test_a_prompt_of_embeddings_gets_no_drafts(runner: Runner) -> None:
    runner.add("a")
    runner.add("e", prompt=None)
    runner.add("b")
    for number in range(2):
        step = runner.step(1, 1, 1, new=number == 0)
        assert step.batch.request_ids == ("a", "b")
        assert step.batch.rows.tolist() == [0, 2]
        assert step.lengths.tolist() == [11 + number] * 2


def test_the_time_before_a_new_request_is_no_step(runner: Runner) -> None:
    """The engine may have been idle before."""
    runner.add("a")
    runner.step(1, new=True, prefilled=9)
    runner.step(1)
    runner.input_batch.req_ids.clear()
    runner.add("b")
    assert runner.step(1, new=True).seconds is None
    assert runner.step(1).seconds is not None


def test_an_id_that_is_used_again_is_another_request(runner: Runner) -> None:
    runner.add("a", max_tokens=50)
    runner.step(1, new=True, prefilled=9)
    runner.step(1)
    runner.known.clear()
    runner.input_batch.req_ids.clear()
    runner.add("a", max_tokens=3)
    step = runner.step(1, new=True, prefilled=9)
    assert [new.request_id for new in step.started] == ["a"]
    assert step.max_draft_tokens.tolist() == [1]


def test_streamed_input_starts_a_request_anew(runner: Runner) -> None:
    """vLLM turns the earlier text and the new input into the request's prompt. Its prefill may take several steps."""
    runner.add("a", "b")
    runner.step(1, 1, new=True, prefilled=18)
    runner.step(1, 1)
    runner.requests["a"].prompt_token_ids = range(30)
    runner.input_batch.num_tokens_no_spec[0] = 30
    runner.input_batch.token_ids_cpu[0, :30] = range(30)
    assert not runner.step(0, 1, new=True, prefilled=9).started
    (new,) = runner.step(1, 1, prefilled=10).started
    assert (new.request_id, list(new.prompt)) == ("a", list(range(30)))
    assert not runner.step(1, 1).started


def test_requests_with_structured_output_share_the_rows_of_a_bitmask(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 gives each such request as many rows as the longest draft of any has tokens, plus one."""
    monkeypatch.setattr(step_reader, "_MASK_ROWS", 8)
    runner.add("a", "b", structured=True)
    runner.add("c")
    assert runner.step(1, 1, 1, new=True, prefilled=27).max_draft_tokens.tolist() == [3, 3, 4]
    assert runner.step(1, 1, 1, limit=2).max_draft_tokens.tolist() == [2, 2, 2]
    runner.add("d", structured=True)
    assert runner.step(1, 1, 1, 1, new=True, prefilled=9).max_draft_tokens.tolist() == [1, 1, 4, 1]
