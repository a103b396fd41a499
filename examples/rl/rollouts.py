"""Sample n answers for each problem over several epochs, with offline vLLM and agentspec.

    python examples/rl/rollouts.py problems.jsonl --model MODEL --samples 8 --epochs 3 --out rollouts.jsonl

``problems.jsonl`` holds one object a line: ``{"id": "p1", "prompt": "..."}``, or ``"messages": [...]`` for a chat.
The problem is the session: later samples and epochs draft from earlier ones, and so does a later run of this script
with the same ``--store``. At T > 0 drafting changes the speed and not the distribution of the samples.

If every answer is a session of its own, make the problem its group (``extra_args={"group_id": ...}``). Both ways give
2.745 tokens a step on recorded rollouts.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentspec.errors import AgentSpecError
from agentspec.server_ext.vllm_launch import engine_options


def main() -> int:
    """Run all epochs. Print one row an epoch and write one JSON object a sample."""
    arguments = _arguments()
    try:
        problems = list(read_problems(Path(arguments.problems)))
        options = (
            {}
            if arguments.plain
            else engine_options(
                max_draft=arguments.max_draft,
                store=arguments.store,
                tenant=arguments.tenant,
                verify_cost=arguments.verify_cost,
            )
        )
    except (AgentSpecError, ValueError, OSError) as error:
        print(f"rollouts: {error}", file=sys.stderr)
        return 2
    from vllm import LLM  # slow, so only once the arguments are known to be good

    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        enforce_eager=arguments.enforce_eager,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        seed=arguments.seed,
        **options,
    )
    table = Table(title=f"{len(problems)} problems x {arguments.samples} samples")
    for column in ("epoch", "tokens", "steps", "tokens/step", "accept. rate", "tokens/s"):
        table.add_column(column, justify="right")
    with Path(arguments.out).open("a", encoding="utf-8") as out:
        for epoch in range(arguments.epochs):
            table.add_row(*run_epoch(llm, problems, epoch, arguments, out))
    Console().print(table)
    return 0


def read_problems(path: Path) -> Iterator[dict[str, Any]]:
    """Read the problems of a JSONL file. Raises ValueError naming the line and what it lacks."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(problem, dict) or "id" not in problem or not ("prompt" in problem or "messages" in problem):
            raise ValueError(f'{path}, line {number}: needs "id" and "prompt" (a text) or "messages" (a chat)')
        yield problem


def run_epoch(llm: Any, problems: list[dict[str, Any]], epoch: int, arguments: Any, out: Any) -> list[str]:
    """Sample every problem and write the samples. Return the epoch's row of the table."""
    from vllm import SamplingParams

    jobs = [(problem, sample) for problem in problems for sample in range(arguments.samples)]
    params = [
        SamplingParams(
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            extra_args={"session_id": str(problem["id"])},
        )
        for problem, _ in jobs
    ]
    before = engine_counts(llm)
    start = time.perf_counter()
    if "messages" in jobs[0][0]:
        outputs = llm.chat([problem["messages"] for problem, _ in jobs], params)
    else:
        outputs = llm.generate([problem["prompt"] for problem, _ in jobs], params)
    seconds = time.perf_counter() - start
    tokens = 0
    for (problem, sample), output in zip(jobs, outputs, strict=True):
        completion = output.outputs[0]
        tokens += len(completion.token_ids)
        line = {"id": problem["id"], "epoch": epoch, "sample": sample, "text": completion.text}
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
    drafted, accepted = (after - then for after, then in zip(engine_counts(llm), before, strict=True))
    steps = tokens - accepted
    rate = f"{accepted / drafted:.2f}" if drafted else "-"
    return [str(epoch), str(tokens), str(steps), f"{tokens / max(1, steps):.2f}", rate, f"{tokens / seconds:.0f}"]


def engine_counts(llm: Any) -> tuple[int, int]:
    """Return the tokens drafted and accepted since the engine started; zeros without agentspec."""
    try:
        answers = llm.collective_rpc("agentspec_rpc", args=("stats",))
    except Exception:  # plain vLLM does not know the method
        return 0, 0
    counters: dict[str, int] = next((answer["counters"] for answer in answers if answer), {})
    return counters.get("drafted", 0), counters.get("accepted", 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", help="JSONL file with the problems")
    parser.add_argument("--model", required=True)
    parser.add_argument("--samples", type=int, default=8, help="answers for each problem and epoch (default 8)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="rollouts.jsonl", help="samples are appended here (default rollouts.jsonl)")
    parser.add_argument("--store", help="where token logs live (default: a SQLite file in the user's data folder)")
    parser.add_argument("--tenant", help="whose rollouts these are, where one store serves several")
    parser.add_argument("--max-draft", type=int, help="longest draft, in tokens (default: what the engine can verify)")
    parser.add_argument(
        "--verify-cost", type=float, help="price of a draft token, as a share of a step (default: measured)"
    )
    parser.add_argument("--plain", action="store_true", help="vLLM without agentspec, for comparison")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    arguments = parser.parse_args()
    for name in ("samples", "epochs", "max_tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
