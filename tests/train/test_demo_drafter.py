"""Test the demo's committed drafter: it loads, is small, and drafts what the demo's model writes."""

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from agentspec.server_ext.speculator import load_speculator
from agentspec.train.conversations import Joiner
from agentspec.train.evaluate import measure
from agentspec.train.hidden_states import HiddenStates, Target, extract, target_shape
from demo.drafter_data import MODEL, session_calls
from demo.sessions import session
from demo.tasks import FIRST_HELD_OUT_SEED

DRAFTER = MODEL.with_name("drafter")


def as_array(tokens: list[int]) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def test_it_fits_the_demo_s_model_and_the_repository() -> None:
    shape = target_shape(str(MODEL))
    speculator = load_speculator(DRAFTER, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    assert speculator.config.n_predict == 3
    assert speculator.config.base_model_archs == shape.architectures
    assert sum(file.stat().st_size for file in DRAFTER.iterdir()) < 4e6


def test_it_drafts_for_tasks_that_it_has_not_seen(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    joiner = Joiner()
    for seed in range(FIRST_HELD_OUT_SEED + 500, FIRST_HELD_OUT_SEED + 503):
        prompt: list[int] = []
        for call in session_calls(tokenizer, session(seed), str(seed)):
            prompt += call["prompt_token_ids"]
            joiner.add(str(seed), as_array(prompt), as_array(call["response_token_ids"]))
            prompt += call["response_token_ids"]
    conversations = joiner.conversations()
    assert len(conversations) == 3
    extract(conversations, tmp_path, lambda: Target(str(MODEL), "float32", torch.device("cpu")), lambda _: None)
    with HiddenStates(conversations, tmp_path) as data:
        measured = measure(load_speculator(DRAFTER, dtype=torch.float32), data).as_dict()
    reported = json.loads((DRAFTER / "report.json").read_text())["held_out"]["trained"]
    assert measured["mean_acceptance_length"] > 0.8 * reported["mean_acceptance_length"] > 1.5
