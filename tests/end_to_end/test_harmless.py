"""Rollouts that draft train as well as rollouts that don't: log probabilities, and new weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentspec.testing.server import CPU_ENVIRONMENT
from demo.tasks import make_task
from tests.end_to_end.conftest import ENVIRONMENT, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.rl, pytest.mark.timeout(900)]


def prompts(count: int) -> list[list[int]]:
    """Chats of the demo's tasks, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chats = [[{"role": "user", "content": make_task(1_000_200 + i).request}] for i in range(count)]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        for chat in chats
    ]


def run(
    folder: Path,
    method: str,
    rounds: list[dict[str, Any]],
    model: Path = MODEL,
    seed: int = 0,
    in_process: bool = True,
) -> list[dict[str, Any]]:
    """The answers of an engine of its own to some rounds."""
    out = folder / f"{method}.json"
    script = Path(__file__).with_name("offline_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model), method, json.dumps({"rounds": rounds, "seed": seed}), str(out)],
        env={
            **os.environ,
            **CPU_ENVIRONMENT,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process)),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def recomputed(prompt: list[int], tokens: list[int], temperature: float, model: Any) -> torch.Tensor:
    """Log probabilities of the tokens behind the prompt, by transformers in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])
    return chosen[:, 0]


def test_log_probabilities_are_those_of_a_recomputation(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    asked, n, temperatures = prompts(4), 8, (1.0, 0.7, 1.0, 0.7)
    rounds = [
        {"prompts": asked, "n": n, "temperature": temperature, "max_tokens": 64, "logprobs": True, "ignore_eos": True}
        for temperature in temperatures
    ]
    found = run(tmp_path, "agentspec", rounds)
    rejected = sum(got["drafted"] - got["accepted"] for got in found)
    assert rejected > 30, "drafts must have been rejected, too"
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for temperature, got in zip(temperatures, found, strict=True):
        assert got["accepted"] > 300
        for number, answer in enumerate(got["answers"]):
            expected = recomputed(asked[number // n], answer["tokens"], temperature, model)
            assert len(answer["logprobs"]) == 64
            assert (expected - torch.tensor(answer["logprobs"])).abs().max() < 1e-4


@pytest.mark.parametrize("in_process", [True, False])
def test_what_generate_returned_is_in_the_history_and_soon_in_the_store(in_process: bool, tmp_path: Path) -> None:
    few = {"prompts": prompts(3), "n": 4, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    found = run(tmp_path, "agentspec", [few, few], in_process=in_process)
    assert [each["written"] for each in found] == [12, 12]
    if in_process:  # all end with the last step. A process of its own takes that in before it answers anything else
        assert [each["finished"] for each in found] == [12, 12]


def test_new_weights_with_the_old_policys_history(tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    for file in MODEL.iterdir():
        if file.name != "model.safetensors":
            (new / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: (value + 0.12 * value.float().std().nan_to_num() * torch.randn(value.shape, generator=generator)).to(
            value.dtype
        )
        for name, value in load_file(MODEL / "model.safetensors").items()
    }
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    greedy = {"prompts": prompts(8), "temperature": 0.0, "max_tokens": 80}
    old, again, trained, later = run(tmp_path, "agentspec", [greedy, greedy, {**greedy, "weights": str(new)}, greedy])
    fresh = run(tmp_path, "plain", [greedy], new)[0]
    assert again["answers"] == old["answers"] and again["accepted"] > old["accepted"]
    assert trained["answers"] == fresh["answers"] == later["answers"]
    assert [each["weight_updates"] for each in (old, again, trained, later)] == [0, 0, 1, 0]
    changed = sum(a != b for a, b in zip(trained["answers"], old["answers"], strict=True))
    assert changed >= 4, "the new weights must say something else"
    assert trained["accepted"] > 0 and trained["drafted"] > trained["accepted"], "the old text must have been drafted"
