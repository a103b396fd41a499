"""Write the data for the demo's draft model, as recorded calls (the format of ``agentspec simulate``).

The training data are whole agent sessions from ``demo/sessions.py``, on which the demo's model was trained too: its
greedy choice is the session's next token at 99.8 % of the positions. The held-out data are real agent loops on tasks
from FIRST_HELD_OUT_SEED on, with the model's own greedy replies in vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentspec.files import replacing
from demo.sessions import Message, session
from demo.tasks import FIRST_HELD_OUT_SEED, Task, extract_code, feedback, make_task, run_tests
from demo.tokenizer import ROLES, encode, token_id

MODEL = Path(__file__).with_name("model")
MAX_TURNS = 5
MAX_REPLY_TOKENS = 400


def write_training(out: Path, sessions: int) -> None:
    """Write ``sessions`` sessions as calls, of the seeds from 0 on."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    with replacing(out) as part, part.open("w", encoding="utf-8") as file:
        for seed in range(min(sessions, FIRST_HELD_OUT_SEED)):
            for call in session_calls(tokenizer, session(seed), f"training-{seed}"):
                file.write(json.dumps(call) + "\n")


def session_calls(tokenizer: Tokenizer, messages: list[Message], name: str) -> Iterator[dict[str, Any]]:
    """Yield one call for each reply that the model is trained to write."""
    prompt: list[int] = []
    turn = 0
    for message in messages:
        ids, _ = encode(tokenizer, [message])
        if not message.learn:
            prompt += ids
            continue
        role = token_id(tokenizer, ROLES[message.role])  # the template ends the prompt with it
        yield _call(name, turn, [*prompt, role], ids[1:])
        prompt = []
        turn += 1


def write_held_out(out: Path, tasks: int) -> None:
    """Run the tasks from FIRST_HELD_OUT_SEED on as agent loops in vLLM, greedily, and write their calls."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(str(MODEL), dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=32)
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_REPLY_TOKENS)
    loops = {f"held-out-{number}": make_task(FIRST_HELD_OUT_SEED + number) for number in range(tasks)}
    chats: dict[str, list[dict[str, str]]] = {
        name: [{"role": "user", "content": task.request}] for name, task in loops.items()
    }
    calls: list[dict[str, Any]] = []
    for turn in range(MAX_TURNS):
        names = list(chats)
        outputs = engine.chat([chats[name] for name in names], sampling, use_tqdm=False) if names else []
        for name, output in zip(names, outputs, strict=True):
            reply = output.outputs[0]
            calls.append({**_call(name, turn, output.prompt_token_ids, reply.token_ids), "continues": False})
            if not _go_on(loops[name], chats[name], reply.text):
                del chats[name]
    with replacing(out) as part:
        part.write_text("".join(json.dumps(call) + "\n" for call in calls), encoding="utf-8")
    engine.llm_engine.engine_core.shutdown()


def _go_on(task: Task, chat: list[dict[str, str]], reply: str) -> bool:
    """Append the reply and the feedback on failed tests. Return False when every test passed."""
    results = run_tests(task, extract_code(reply))
    chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": feedback(results)}]
    return not all(result.passed for result in results)


def _call(session: str, turn: int, prompt: list[int], response: list[int]) -> dict[str, Any]:
    return {
        "session": session,
        "turn": turn,
        "continues": turn > 0,
        "prompt_token_ids": list(prompt),
        "response_token_ids": list(response),
    }
