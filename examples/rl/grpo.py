"""Train the demo's model by GRPO with TRL, unmodified: AGENTSPEC=1 alone makes its rollouts draft.

    AGENTSPEC=1 python examples/rl/grpo.py --steps 12 --figures figures.jsonl
    AGENTSPEC=0 python examples/rl/grpo.py --steps 12       # the same without drafts

TRL makes the vLLM engine itself and sends no ids; samples of one prompt draft from each other all the same. Needs
``pip install trl``. The reward can be verified: a function must parse, have the name asked for, and be short.
"""

import argparse
import ast
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Score each completion: 1 for code that parses, 1 for the name asked for, and less for each character."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        text = completion[0]["content"]
        block = re.search(r"```\w*\n(.*?)(```|$)", text, re.DOTALL)
        asked = set(re.findall(r"\w+", prompt[-1]["content"]))
        try:
            tree = ast.parse(block[1] if block else text)
            score = 1.0 + any(isinstance(node, ast.FunctionDef) and node.name in asked for node in ast.walk(tree))
        except (SyntaxError, ValueError):
            score = 0.0
        scores.append(score - 0.001 * len(text))
    return scores


def main() -> None:
    """Train, and write a line of figures for each step."""
    arguments = _arguments()
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ROOT))
    from demo.tasks import make_task

    requests = [make_task(1_000_200 + number).request for number in range(arguments.prompts)]
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": request}] for request in requests]})
    lines: list[dict[str, Any]] = []
    rollout_seconds: list[float] = []

    class Figures(TrainerCallback):  # type: ignore[misc]
        """Note after each step what TRL logged and what drafting did in it."""

        before = (0, 0, 0.0)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "reward" not in logs:
                return
            now = (*drafting(trainer.vllm_generation.llm), sum(rollout_seconds))
            line = {
                "step": state.global_step,
                "drafted": now[0] - self.before[0],
                "accepted": now[1] - self.before[1],
                "rollout_seconds": now[2] - self.before[2],
                "reward": logs["reward"],
                "tokens": logs["completions/mean_length"] * arguments.generations,
                "logp_difference": logs.get("sampling/sampling_logp_difference/mean"),
                "seconds": time.perf_counter() - begin,
            }
            self.before = now
            lines.append(line)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=arguments.cpu,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=1024,
            max_completion_length=arguments.max_tokens,
            num_generations=arguments.generations,
            per_device_train_batch_size=arguments.generations,
            max_steps=arguments.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            learning_rate=1e-5,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        trainer = GRPOTrainer(
            model=arguments.model, reward_funcs=reward, args=config, train_dataset=chats, callbacks=[Figures()]
        )
        timed(trainer.vllm_generation, rollout_seconds)
        begin = time.perf_counter()
        trainer.train()
    if arguments.figures is not None:
        arguments.figures.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for line in lines:
        print(
            f"step {line['step']}: reward {line['reward']:.3f}, {line['tokens']:.0f} tokens, "
            f"{line['drafted']} drafted, {line['accepted']} accepted"
        )


def timed(generation: Any, seconds: list[float]) -> None:
    """Note how long each of the trainer's rollouts takes."""
    generate = generation.generate

    def measured(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return generate(*given, **named)
        finally:
            seconds.append(time.perf_counter() - begin)

    generation.generate = measured


def drafting(llm: Any) -> tuple[int, int]:
    """Return the tokens drafted and accepted since the engine started; zeros without agentspec."""
    for answer in llm.collective_rpc("agentspec_rpc", args=("stats",)):
        if answer is not None:
            return answer["counters"].get("drafted", 0), answer["counters"].get("accepted", 0)
    return 0, 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "demo" / "model"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4, help="different prompts (default 4)")
    parser.add_argument("--generations", type=int, default=8, help="samples of a prompt in a step (default 8)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, help="write a JSON line for each step")
    parser.add_argument("--gpu", dest="cpu", action="store_false", help="train on the GPU; default: the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
