"""Write what vLLM's drafter drafts in one engine of this process as JSON, for ``test_skipped_passes``.

Usage: python skipped_passes_run.py MODEL DRAFTER {always|seldom} JOB OUT

DRAFTER is vLLM's speculative config, as JSON. "always": it drafts in every step. "seldom": in every seventh, and rests
in between where it may. Beside it only a stand-in drafts: right, wrong or not at all, the same in both modes.
JOB is a JSON object of engine arguments.

OUT gets {"drafts": {"request length": [[token, probability], ...]}, "texts", "steps", "rests", "late"}; "late": passes
that read only kept tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.server_ext import UNFORCED
from agentspec.server_ext.vllm_adapter import api_request_id
from agentspec.server_ext.vllm_adapter.worker import skipped_passes
from agentspec.server_ext.vllm_adapter.worker.runner import RunnerExtension
from agentspec.server_ext.vllm_adapter.worker.step_reader import ForwardPass
from agentspec.server_ext.vllm_launch import engine_options
from tests.end_to_end.mixed_load import code

EVERY = 7


class Recorder:
    """Take the engine's place in ``RunnerExtension``, and ask the drafter in every step or seldom."""

    def __init__(self, *, seldom: bool) -> None:
        self.drafts: dict[str, list[Any]] = {}
        self.steps = self.rests = self.late = 0
        self._seldom = seldom

    def draft(self, extension: RunnerExtension, engine: Any, runner: Any, forward: ForwardPass) -> list[list[int]]:
        assert extension.draft_model is not None
        bound = extension.draft_model.bind(forward)
        assert bound.choices is not None
        rows = [row for row, sampled in enumerate(forward.sampled) if sampled]
        lengths = runner.input_batch.num_tokens_no_spec.tolist()
        ids = [api_request_id(name) for name in runner.input_batch.req_ids]
        self.steps += 1
        if self._seldom and self.steps % EVERY and bound.choices.may_rest:
            self.rests += 1
            bound.rest()
        else:
            answer = bound.launch(rows, np.full((len(rows), bound.positions), UNFORCED, np.int64))()
            for at, row in enumerate(rows):
                drafted = zip(answer.tokens[at].tolist(), answer.probabilities[at].tolist(), strict=True)
                self.drafts[f"{ids[row]} {lengths[row]}"] = list(drafted)
        return [self._stand_in(forward.sampled[row][-1], lengths[row]) for row in range(len(forward.sampled))]

    @staticmethod
    def _stand_in(newest: int, length: int) -> list[int]:
        """Return a draft that depends on the newest token and the text's length only, and is sometimes right."""
        return [newest] * (length % 3) + [length % 50] * (length % 2)


def main() -> None:
    """Write ten texts, of which four run at a time."""
    model, drafter, mode, job, out = sys.argv[1:]
    recorder = Recorder(seldom=mode == "seldom")
    RunnerExtension._draft = lambda *args: recorder.draft(*args)  # type: ignore[method-assign]
    run_pass = skipped_passes._Pass.__call__

    def count_late(self: Any, tokens: int, rows: Any, queries: Any, ends: Any, following: Any) -> Any:
        recorder.late += tokens == 0 and len(rows) < len(self.metadata.seq_lens)
        return run_pass(self, tokens, rows, queries, ends, following)

    skipped_passes._Pass.__call__ = count_late  # type: ignore[method-assign]
    from vllm import LLM, SamplingParams

    options = engine_options(speculative_config=json.loads(drafter), store="memory://")
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4, **json.loads(job), **options
    )
    prompts = [code(seed, 6 + 3 * seed) for seed in range(10)]
    params = [SamplingParams(temperature=0, max_tokens=40 + 9 * i, ignore_eos=True) for i in range(len(prompts))]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    figures = {"steps": recorder.steps, "rests": recorder.rests, "late": recorder.late, "texts": texts}
    Path(out).write_text(json.dumps({"drafts": recorder.drafts, **figures}))


if __name__ == "__main__":
    main()
