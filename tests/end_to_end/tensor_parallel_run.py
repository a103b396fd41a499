"""Write the greedy texts of two rounds on two ranks as JSON, for ``test_tensor_parallel``.

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
    """Run two rounds over the same prompts; with agentspec the second drafts from the first.

    With a speculator, further prompts follow until it has run often enough.
    """
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
    sessions = [
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, extra_args={"session_id": f"s{i}"})
        for i in range(4)
    ]

    def say(first_seed: int) -> list[str]:
        prompts = [code(seed, 10) for seed in range(first_seed, first_seed + len(sessions))]
        return [output.outputs[0].text for output in llm.generate(prompts, sessions, use_tqdm=False)]

    def stats() -> list[Any]:
        found: list[Any] = llm.collective_rpc("agentspec_rpc", args=("stats",))
        return found

    if method == "broken":
        llm.collective_rpc(break_speculator)
    answer: dict[str, Any] = {}
    try:
        answer["texts"] = say(0) + say(0)
        if method in ("arctic", "broken"):  # a busy machine decides how often the model runs
            for seed in range(4, 100, 4):
                if any(answer is not None and answer["model"]["runs"] > 5 for answer in stats()):
                    break
                say(seed)
        if method != "plain":
            answer["stats"] = stats()
    except Exception as error:
        if method != "broken":
            raise
        answer["error"] = type(error).__name__
    Path(out).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
