"""Run requests with streamed input on an engine of this process, and write their texts as JSON, for ``test_identity``.

Usage: python streamed_input_run.py MODEL {plain|agentspec} OUT

Twelve requests run at a time, each with four pieces of input, in three rounds, so that later requests draft from
earlier ones. A third of the requests end by stop tokens. OUT gets {"said": {request: [token ids]}, "accepted"}.
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
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from agentspec.server_ext.vllm_launch import engine_options

ROUNDS, REQUESTS, PIECES = 3, 12, 4


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

    async def ask(name: str, number: int) -> None:
        stops = number % 3 == 1
        params = SamplingParams(
            temperature=0,
            max_tokens=40 if stops else (6, 12, 20, 1)[number % 4],
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            stop_token_ids=list(range(300, 420)) if stops else None,
            min_tokens=5 if stops and number % 2 else 0,
        )

        async def pieces() -> AsyncIterator[StreamingInput]:
            for piece in range(PIECES):
                ids = [300 + (j * 7 + number % 2 + piece) % (9 + number % 3) for j in range(40 + 60 * (piece % 2))]
                yield StreamingInput(prompt={"prompt_token_ids": ids}, sampling_params=params)
                await asyncio.sleep(0.05 * (number % 3) + (0.4 if piece == 1 else 0.0))

        said[name] = []
        async for output in engine.generate(pieces(), params, request_id=name):
            said[name] += [token for completion in output.outputs for token in completion.token_ids]

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
