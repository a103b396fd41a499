"""Run one ``vllm.LLM`` on the demo's model in this process, and write its answers as JSON, for ``test_harmless``.

Usage: python offline_run.py MODEL {plain|agentspec} JOB OUT

JOB is a JSON object with the engine's seed, its store and a list of rounds: {"seed": 0, "store": "memory://",
"rounds": [{"prompts": [[token ids]], "n": 8, "temperature": 1.0, "max_tokens": 64}, ...]}. A round with "weights"
first loads that folder's weights; one with "sleep" first sleeps at that level and wakes. OUT gets the rounds' answers,
each a list of {"tokens", "logprobs"}, what each round added to COUNTERS, and how many turns were in the store soon
after ("written"). The engine is alive when the process ends.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

COUNTERS = ("drafted", "accepted", "weight_updates", "finished")
SOON = 10.0
"""Seconds in which a finished turn must be in the store."""


def main() -> object:
    """Run the rounds one after the other on one engine. Return it."""
    from vllm import LLM, SamplingParams

    from agentspec.server_ext.vllm_launch import engine_options

    model, method, given, out = sys.argv[1:]
    job = json.loads(given)
    options = {} if method == "plain" else engine_options(store=job["store"], verify_cost=0.02)
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=128,
        seed=job["seed"],
        logprobs_mode="processed_logprobs",
        **options,
    )
    rounds: list[dict[str, Any]] = []
    before = dict.fromkeys((*COUNTERS, "written"), 0)
    for each in job["rounds"]:
        if "sleep" in each:
            llm.sleep(level=each["sleep"])
            llm.wake_up()
        if "weights" in each:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": each["weights"]})
            llm.reset_prefix_cache()
        params = SamplingParams(
            n=each.get("n", 1),
            temperature=each["temperature"],
            max_tokens=each["max_tokens"],
            ignore_eos=each.get("ignore_eos", False),
            logprobs=0 if each.get("logprobs") else None,
            detokenize=False,
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in each["prompts"]], params, use_tqdm=False)
        answers = [_answer(completion) for output in outputs for completion in output.outputs]
        now = _counts(llm, before["written"] + len(answers)) if method == "agentspec" else before
        rounds.append({"answers": answers, **{name: now[name] - before[name] for name in before}})
        before = now
    Path(out).write_text(json.dumps(rounds))
    return llm


def _answer(completion: Any) -> dict[str, Any]:
    tokens = list(completion.token_ids)
    steps = completion.logprobs or []
    return {"tokens": tokens, "logprobs": [step[token].logprob for step, token in zip(steps, tokens, strict=False)]}


def _counts(llm: Any, turns: int) -> dict[str, int]:
    stats = _stats(llm)
    counts = {name: stats["counters"].get(name, 0) for name in COUNTERS}
    end = time.monotonic() + SOON
    while stats["store"]["writer"]["persisted"] < turns and time.monotonic() < end:
        time.sleep(0.05)
        stats = _stats(llm)
    return {**counts, "written": stats["store"]["writer"]["persisted"]}


def _stats(llm: Any) -> Any:
    return llm.collective_rpc("agentspec_rpc", args=("stats",))[0]


if __name__ == "__main__":
    engine = main()
