"""Run requests with streamed input on an engine of this process, and write their texts as JSON, for ``test_identity``.

Usage: python streamed_input_run.py MODEL {plain|agentspec} OUT

First two requests run whose prompts hold what the model says, so that they draft at once. The first turn of one ends by
a stop token, of the other by a repetition. Then twelve requests run at a time, each with four pieces of input, in three
rounds, so that later requests draft from earlier ones. A third of them end by stop tokens. OUT gets
{"said": {request: [token ids]}, "accepted"}.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from agentspec.server_ext.vllm_launch import engine_options

ROUNDS, REQUESTS, PIECES = 3, 12, 4

LOOP = [339, 20, 20]
"""Tokens that the model repeats behind ``prompt_of_a_loop``."""


def prompt_of_a_loop(times: int) -> list[int]:
    """Return a prompt that ends with this many of the loops that the model goes on with."""
    numbers = [300 + j * 7 % 9 for j in range(9)]
    turned = (numbers[2:] + numbers[:2]) * 2
    before = [*numbers * 12, *[301] * 39, *turned, 495, *[310, 311, 312, 313, 314] * 6, 225, 20, 30]
    return [*before, *LOOP * times, *LOOP[:2]]


async def main() -> None:
    """Run the rounds one after the other on one engine."""
    model, method, out = sys.argv[1:]
    options = {} if method == "plain" else engine_options(store="memory://", verify_cost=0.01)
    arguments = AsyncEngineArgs(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=32,
        gpu_memory_utilization=0.3,
        **options,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    said: dict[str, list[int]] = {}

    def greedy(max_tokens: int, **more: Any) -> SamplingParams:
        kind = RequestOutputKind.DELTA
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind, **more)

    async def answer(name: str, *inputs: tuple[list[int], SamplingParams, float]) -> None:
        """Note what is answered. inputs: tokens, their parameters, and the pause behind them in seconds."""

        async def pieces() -> AsyncIterator[StreamingInput]:
            for ids, params, pause in inputs:
                yield StreamingInput(prompt={"prompt_token_ids": ids}, sampling_params=params)
                await asyncio.sleep(pause)

        said[name] = []
        async for output in engine.generate(pieces(), inputs[-1][1], request_id=name):
            said[name] += [token for completion in output.outputs for token in completion.token_ids]

    async def ask(name: str, number: int) -> None:
        params = greedy((6, 12, 20, 1)[number % 4])
        if number % 3 == 1:
            params = greedy(40, stop_token_ids=list(range(300, 420)), min_tokens=5 if number % 2 else 0)
        inputs = []
        for piece in range(PIECES):
            ids = [300 + (j * 7 + number % 2 + piece) % (9 + number % 3) for j in range(40 + 60 * (piece % 2))]
            inputs.append((ids, params, 0.05 * (number % 3) + (0.4 if piece == 1 else 0.0)))
        await answer(name, *inputs)

    other = [350 + j * 13 % 31 for j in range(40)]
    # The step that samples the stop token drafts behind it. The next turn ends before that draft does.
    stopped = greedy(40, stop_token_ids=LOOP[:1])
    await answer("stopped", (prompt_of_a_loop(4), stopped, 0.0), (LOOP, greedy(2), 0.0), (other[:8], greedy(24), 0.0))
    # The draft that holds the end of the repetition goes on behind it.
    detection = RepetitionDetectionParams(min_pattern_size=3, max_pattern_size=3, min_count=4)
    repeated = greedy(40, repetition_detection=detection)
    await answer("repeated", (prompt_of_a_loop(15), repeated, 0.0), (other, greedy(24), 0.0))
    for turn in range(ROUNDS):
        asked = [ask(f"{turn}-{number}", number) for number in range(REQUESTS)]
        await asyncio.wait_for(asyncio.gather(*asked), 120)
    stats: Any = [{"counters": {"accepted": 0}}]
    if method != "plain":
        stats = await engine.collective_rpc("agentspec_rpc", None, ("stats",))
    Path(out).write_text(json.dumps({"said": said, "accepted": stats[0]["counters"]["accepted"]}))
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
