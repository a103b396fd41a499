"""Run by ``test_tensor_parallel``: greedy texts of two rounds, on two ranks, as JSON in a file.

Usage: python tensor_parallel_run.py MODEL {plain|agentspec|arctic|broken} OUT

"broken" is arctic with a speculator that fails on the first rank; then OUT holds the error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from agentspec.server_ext.vllm_launch import engine_options
from tests.end_to_end.conftest import DRAFTER
from tests.end_to_end.mixed_load import code

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "agentspec": engine_options(store="memory://", tenant="tp", verify_cost=0.02),
    "arctic": {
        "speculative_config": {
            "method": "arctic",
            "model": str(DRAFTER),
            "num_speculative_tokens": 3,
            "enable_suffix_decoding": True,
        },
        "additional_config": {"agentspec": {"store": "memory://", "tenant": "tp"}},
    },
}
OPTIONS["broken"] = OPTIONS["arctic"]


def break_speculator(worker: Any) -> None:
    """Make the first rank's draft loop fail. Runs in every worker, with the builtins alone."""

    class Broken:
        positions = 3

        def __call__(self, *inputs: object) -> object:
            raise RuntimeError("broken on purpose")

    extension = worker.model_runner.agentspec
    if extension.engine is not None:
        extension.draft_model.loop = Broken()


def main() -> None:
    """Two rounds over the same prompts; with agentspec the second drafts from the first."""
    from vllm import LLM, SamplingParams

    model, method, out = sys.argv[1:]
    options = OPTIONS[method]
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        tensor_parallel_size=2,
        **options,
    )
    prompts = [code(seed, 10) for seed in range(4)]
    texts: list[str] = []
    if method == "broken":
        llm.collective_rpc(break_speculator)
    for _ in range(2):
        params = [
            SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, extra_args={"session_id": f"s{i}"})
            for i in range(len(prompts))
        ]
        try:
            texts += [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
        except Exception as error:
            if method != "broken":
                raise
            Path(out).write_text(json.dumps({"texts": texts, "error": type(error).__name__}))
            return
    answers: list[Any] = []
    if method != "plain":
        answers = llm.collective_rpc("agentspec_rpc", args=("stats",))
    Path(out).write_text(json.dumps({"texts": texts, "stats": answers}))


if __name__ == "__main__":
    main()
