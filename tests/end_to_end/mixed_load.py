"""Make the mixed load of the identity test: plain API calls for each condition that could make a drafter go wrong."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai

from demo.tasks import FIRST_HELD_OUT_SEED, extract_code, feedback, make_task, run_tests

MAX_MODEL_LEN = 1024

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["one", "two"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what the server wrote: the text, its token ids and its prompt's (to tell ties from errors)."""

    text: str
    token_ids: list[int]
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Case:
    """Hold one conversation or completion; ``run`` returns every answer in order."""

    name: str
    run: Callable[[openai.OpenAI], list[Answer]] = field(repr=False)


def chat_answer(client: openai.OpenAI, messages: list[Any], session: str, **options: Any) -> Answer:
    """Run one chat turn at temperature 0."""
    reply = client.chat.completions.create(
        model="demo",
        messages=messages,
        temperature=0,
        extra_headers={"X-Session-ID": session},
        extra_body={"return_token_ids": True},
        **options,
    )
    choice: Any = reply.choices[0]
    return Answer(choice.message.content or "", choice.token_ids, reply.prompt_token_ids)


@functools.cache
def judged(seed: int, code: str) -> str:
    """Return the feedback on the code. It is the same each time, also if the code loops on a busy machine."""
    return feedback(run_tests(make_task(FIRST_HELD_OUT_SEED + seed), code))


def chat(seed: int) -> Case:
    """Return an agent's session: write, test, feed back, correct. Turns extend one prompt (prefix-cache hits)."""

    def run(client: openai.OpenAI) -> list[Answer]:
        task = make_task(FIRST_HELD_OUT_SEED + seed)
        messages: list[Any] = [{"role": "user", "content": task.request}]
        answers: list[Answer] = []
        for _ in range(3):
            answer = chat_answer(client, messages, f"identity-{seed}", max_tokens=200)
            answers.append(answer)
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": judged(seed, extract_code(answer.text))},
            ]
        return answers

    return Case(f"chat-{seed}", run)


def completion(name: str, prompt: str | list[int], **options: Any) -> Case:
    """Return one completion with the given options; ``prompt`` is text or token ids."""

    def run(client: openai.OpenAI) -> list[Answer]:
        body = {"return_token_ids": True, **options.get("extra_body", {})}
        defaults = {"temperature": 0, "max_tokens": 64, "extra_headers": {"X-Session-ID": name.split("-")[0]}}
        reply = client.completions.create(model="demo", prompt=prompt, **{**defaults, **options, "extra_body": body})
        choices: list[Any] = sorted(reply.choices, key=lambda choice: choice.index)
        return [Answer(choice.text, choice.token_ids, choice.prompt_token_ids) for choice in choices]

    return Case(name, run)


def structured(number: int) -> Case:
    """Return a chat whose answer a grammar restricts: drafts are cut to what the grammar allows."""

    def run(client: openai.OpenAI) -> list[Answer]:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        messages = [{"role": "user", "content": f"Give item {number}."}]
        return [chat_answer(client, messages, "structured", max_tokens=80, response_format=form) for _ in range(2)]

    return Case(f"structured-{number}", run)


def aborted(seed: int) -> Case:
    """Return a stream that the caller leaves after 20 characters, which are its answer."""

    def run(client: openai.OpenAI) -> list[Answer]:
        task = make_task(FIRST_HELD_OUT_SEED + seed)
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": task.request}],
            temperature=0,
            max_tokens=300,
            stream=True,
            extra_headers={"X-Session-ID": f"identity-{seed}"},
        )
        text = ""
        for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if len(text) > 20:
                break
        stream.close()
        return [Answer(text[:20], [], [])]

    return Case(f"abort-{seed}", run)


def code(seed: int, lines: int) -> str:
    """Return Python-like text with repetition, for raw completions."""
    draw = random.Random(seed)
    names = [draw.choice(["total", "count", "value", "items", "left"]) + str(draw.randrange(10)) for _ in range(4)]
    return "".join(f"    {draw.choice(names)} = {draw.choice(names)} + {draw.choice(names)}\n" for _ in range(lines))


def mixed_load() -> list[Case]:
    """Return more than 50 requests: sessions, long prompts, full contexts, samples, stops, grammars, aborts."""
    endless = {"ignore_eos": True}
    cases = [chat(seed) for seed in range(8)]  # 3 requests each
    cases += [aborted(seed) for seed in range(3)]
    cases += [completion(f"chunked-{i}", code(i, 40), max_tokens=96) for i in range(6)]
    cases += [completion(f"repeated-{i}", code(1, 30), max_tokens=96) for i in range(3)]
    for i in range(4):  # ends near max_model_len, which a draft must not exceed
        prompt = [300 + (k * 7 + i) % 40 for k in range(MAX_MODEL_LEN - 5 - 9 * i)]
        left = MAX_MODEL_LEN - len(prompt)  # without a limit, vLLM 0.29 stops at 16 tokens
        cases.append(completion(f"end-{i}", prompt, max_tokens=left, extra_body=endless))
    # vLLM refuses n > 1 at temperature 0; this takes the sampling path and still decides for the likeliest.
    cases += [completion(f"samples-{i}", code(30 + i, 8), n=3, temperature=1e-4) for i in range(2)]
    cases += [completion(f"stop-{i}", code(40 + i, 8), stop=["total", "count"]) for i in range(4)]
    cases += [completion(f"short-{i}", code(45 + i, 8), max_tokens=i + 1) for i in range(3)]
    cases += [structured(i) for i in range(3)]
    random.Random(0).shuffle(cases)
    # Four at once outgrow the blocks of the KV cache, so some are preempted. They come first, so none waits.
    crowd = [completion(f"preempted-{i}", code(60 + i, 6), max_tokens=420, extra_body=endless) for i in range(8)]
    return crowd + cases
