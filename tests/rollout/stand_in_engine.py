"""Stand in for vLLM with an engine that answers at once."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentspec.rollout import Journal, OfflineEngine, Plan, Problem, RolloutGenerator, Sample
from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH

pytest.importorskip("vllm")


class Engine:
    """Answer ``batch`` requests a step, with two tokens each, and record what was asked."""

    def __init__(self, batch: int = 2, fail_after: int | None = None, drafts: bool = False) -> None:
        scheduler, model = SimpleNamespace(max_num_seqs=batch), SimpleNamespace(max_model_len=8)
        model.get_vocab_size = lambda: 100
        model.model, model.revision, model.dtype, model.quantization = "m", None, torch.float32, None
        model.hf_overrides = {}
        spec = SimpleNamespace(method="custom_class", model=PROPOSER_PATH) if drafts else None
        self.vllm_config = SimpleNamespace(
            scheduler_config=scheduler,
            model_config=model,
            speculative_config=spec,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            load_config=SimpleNamespace(load_format="auto"),
        )
        self.told: list[tuple[int, tuple[str, ...]]] = []  # (requests so far, what the worker was told)
        self.resets: list[int] = []  # requests so far, at each reset of the prefix cache
        self.batch, self.fail_after = batch, fail_after
        self.open: deque[str] = deque()
        self.asked: list[tuple[str, Any]] = []
        self.most_open = 0
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.asked.append((request_id, params))
        self.open.append(request_id)
        self.most_open = max(self.most_open, len(self.open))

    def step(self) -> list[Any]:
        if self.fail_after is not None and len(self.asked) - len(self.open) >= self.fail_after:
            raise RuntimeError("the engine died")
        assert self.open, "there is no request"
        finished = [self.open.popleft() for _ in range(min(self.batch, len(self.open)))]
        figures = SimpleNamespace(to_dict=lambda: {"num_accepted_draft_tokens": 1, "num_draft_tokens": 4})
        completion = SimpleNamespace(
            token_ids=[5, 6],
            logprobs=[{5: SimpleNamespace(logprob=-0.5)}, {6: SimpleNamespace(logprob=-1)}],
            text="five six",
            finish_reason="stop",
            spec_decode_metrics=figures,
        )
        return [SimpleNamespace(finished=True, request_id=name, outputs=[completion]) for name in finished]

    def abort_request(self, request_ids: list[str]) -> None:
        self.open = deque(name for name in self.open if name not in request_ids)


class Tokenizer:
    """Encode each word as one token; the chat template joins the messages."""

    max_token_id = 98

    def encode(self, text: str) -> list[int]:
        if not text.isprintable():
            raise TypeError("no text")  # as tokenizers raises for half a surrogate pair
        return [len(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], tools: Any, **_: Any) -> list[int]:
        if messages[-1]["role"] == "system":
            raise ValueError("no user message")
        names = [tool["name"] for tool in tools or ()]
        return self.encode(" ".join([*names, *(message["content"] for message in messages)]))


class LLM:
    def __init__(self, engine: Engine) -> None:
        self.llm_engine = engine

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def reset_prefix_cache(self) -> bool:
        self.llm_engine.resets.append(len(self.llm_engine.asked))
        return True

    def collective_rpc(self, method: str, args: tuple[Any, ...], kwargs: Any = None) -> list[Any]:
        if args[0] == "request":
            return [None, {"drafted": 8, "accepted": 5} if (args[1:], kwargs) == (("r",), {"admin": True}) else None]
        self.llm_engine.told.append((len(self.llm_engine.asked), args))
        return []


PROBLEMS = [
    Problem("a", "one two", {"answer": "five six"}),
    Problem("b", [{"role": "user", "content": "x"}]),
    Problem("c", [7, 8]),
]


def run(path: Path, plan: Plan, engine: Engine | None = None, **options: Any) -> tuple[list[Any], list[Sample]]:
    with Journal(path) as journal:
        samples = RolloutGenerator(OfflineEngine(LLM(engine or Engine())), journal, **options)
        figures = list(samples.run(PROBLEMS, plan))
        return figures, list(journal.samples())
