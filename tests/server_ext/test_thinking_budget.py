"""Test that thinking ends beside drafts where vLLM's own state machine ends it at one token a step."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from agentspec.server_ext.vllm_adapter.worker import sampling_faults

VOCABULARY = 12
START = [10]


def holder_of(end: list[int], prompts: list[list[int]], budgets: list[int], longest: int) -> ThinkingBudgetStateHolder:
    """Return vLLM's state machine for requests whose drafts have at most `longest` tokens."""
    marks: Any = SimpleNamespace(reasoning_start_token_ids=START, reasoning_end_token_ids=end)
    holder = ThinkingBudgetStateHolder(marks, len(prompts), longest, torch.device("cpu"), False)
    added: list[Any] = [
        (row, SamplingParams(thinking_token_budget=budget), prompt, [])
        for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]
    holder.sync_batch(BatchUpdate(len(prompts), removed=[], moved=[], added=added))
    return holder


def forced(logits: torch.Tensor) -> list[int | None]:
    """Return the token that must come next in each row, or None."""
    return [int(row.argmax()) if row.max() > 0 else None for row in logits]


def by_vllm(end: list[int], prompt: list[int], budget: int, text: list[int]) -> list[int | None]:
    """Return what vLLM forces behind the prompt, and behind each token of the text, without speculation."""
    holder = holder_of(end, [prompt], [budget], 0)
    found = []
    for length in range(len(text) + 1):
        holder.update_state([text[:length]], [[]])
        found += forced(holder.apply_to_logits(torch.zeros((1, VOCABULARY)), False, [[]]))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_it_is_forced_where_vllm_forces_it_without_drafts(seed: int) -> None:
    """Three requests draft any number of tokens, right or wrong, in texts that think once or more often."""
    luck = random.Random(seed)
    end = [[11], [9, 11]][seed % 2]
    prompts = [luck.choice([[1, 2], [1, *START], [*START, 3, *end, 4], [*START, 5, 6]]) for _ in range(3)]
    budgets = [luck.randint(0, 12) for _ in prompts]
    texts = []
    for prompt, budget in zip(prompts, budgets, strict=True):
        text: list[int] = []
        while len(text) < 50:
            must = by_vllm(end, prompt, budget, text)[-1]
            kinds = [luck.randrange(9)], START, end
            text += luck.choices(kinds, [20, 1, 1])[0] if must is None else [must]
        texts.append(text[:50])
    expected = [by_vllm(end, *of) for of in zip(prompts, budgets, texts, strict=True)]
    assert any(token is not None for row in expected for token in row) or min(budgets) > 4
    holder = holder_of(end, prompts, budgets, 8)
    read = [0, 0, 0]
    while min(read) < 40:
        drafts = [texts[row][at : at + luck.choice([0, 0, 3, 8])] for row, at in enumerate(read)]
        outputs = [text[:at] for text, at in zip(texts, read, strict=True)]

        def never(*_: object) -> None:
            raise AssertionError("vLLM's own counting was asked")

        sampling_faults.update_thinking(never, holder, outputs, drafts)
        behind = sampling_faults.force_end_of_thinking(never, holder, torch.zeros((3, VOCABULARY)), any(drafts), drafts)
        ends = [at + len(draft) for at, draft in zip(read, drafts, strict=True)]
        assert forced(behind) == [row[at] for row, at in zip(expected, ends, strict=True)]
        if any(drafts):
            inside = torch.zeros((sum(map(len, drafts)), VOCABULARY))
            sampling_faults.force_end_of_thinking(never, holder, inside, False, drafts)
            spans = zip(expected, read, ends, strict=True)
            assert forced(inside) == [token for row, at, to in spans for token in row[at:to]]
        read = [
            min(40, at + luck.randint(0 if draft else 1, len(draft) + 1))
            for at, draft in zip(read, drafts, strict=True)
        ]


def test_an_engine_without_speculation_keeps_vllms_counting() -> None:
    holder = holder_of([11], [[1, *START]], [2], 0)
    calls = []
    sampling_faults.update_thinking(lambda *of: calls.append(of), holder, [[]], [[]], None)
    sampling_faults.force_end_of_thinking(lambda *of: calls.append(of), holder, torch.zeros((1, 2)), False, [[]])
    assert len(calls) == 2


@pytest.mark.parametrize("begin", [[1, *START], [1]], ids=["thinks", "answers"])
def test_a_step_searches_what_is_new_however_long_the_response_is(
    monkeypatch: pytest.MonkeyPatch, begin: list[int]
) -> None:
    holder = holder_of([11], [begin], [100_000], 8)
    searched: list[int] = []
    search = ThinkingBudgetStateHolder._find_last_sequence_index

    def counted(text: list[int], marks: list[int]) -> int:
        searched.append(len(text))
        return int(search(text, marks))

    monkeypatch.setattr(holder, "_find_last_sequence_index", counted)
    text = [3] * 500
    for length in range(400, 500):
        searched.clear()
        sampling_faults.update_thinking(lambda *_: None, holder, [text[:length]], [[3] * 8])
    assert sum(searched) < 50
