"""Run a ``vllm.LLM`` of this process one step at a time, so that each answer is seen as soon as it is finished."""

import operator
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from agentspec.awaiting import awaited
from agentspec.errors import AgentSpecError, ConfigurationError, InvalidInputError, RolloutError, first_line
from agentspec.server_ext.persistence.model_key import overrides_text
from agentspec.server_ext.vllm_adapter.frontend.chats import templated
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import RPC_METHOD, api_request_id
from agentspec.server_ext.vllm_adapter.startup.launch import missing_folder, refusals, without_vllm
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec

DRAFT_FIGURES = "per_request_spec_decode_metrics"
"""Option by which vLLM gives each output figures of its drafts."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Say how to sample. seed: for this request alone; None: the engine's seed. stop: texts that end an answer."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold a finished answer. tokens: token ids. logprobs: one for each token.

    steps: engine steps that gave it tokens. drafted, accepted: numbers of draft tokens; accepted ones behind the
    answer's end count, too.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str | None
    steps: int
    drafted: int
    accepted: int


def sampling_params(sampling: Sampling, extra: dict[str, Any] | None = None) -> Any:
    """Return vLLM's ``SamplingParams``. Raises ConfigurationError for values that this vLLM refuses."""
    try:
        from vllm import SamplingParams
    except ImportError as error:
        raise without_vllm(error) from error
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            seed=sampling.seed,
            logprobs=0,
            extra_args=extra,
        )
    except refusals() as error:
        raise ConfigurationError(f"vLLM refuses how to sample: {first_line(error)}") from error


@cache
def has_draft_figures() -> bool:
    """Return whether vLLM can give each output figures of its drafts: from 0.29 on. Without vLLM: True."""
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError:
        return True
    return DRAFT_FIGURES in {field.name for field in fields(EngineArgs)}


class OfflineEngine:
    """Start, step and abort requests. llm: a ``vllm.LLM``.

    model: the model's name, as the caller of ``start`` gave it. loaded: revision, number formats, quantization and
    overrides of its config with which vLLM loaded it, because they change its answers, and whether its weights are
    random.
    """

    def __init__(self, llm: Any) -> None:
        self.llm, self._engine = llm, llm.llm_engine
        self._steps: Counter[str] = Counter()  # of the open requests
        self.max_running: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        model = self._engine.vllm_config.model_config
        self.model: str = model.model
        self.loaded: dict[str, Any] = {
            "revision": model.revision,
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "kv_cache_dtype": self._engine.vllm_config.cache_config.cache_dtype,
            "hf_overrides": overrides_text(model.hf_overrides),
            "random_weights": str(self._engine.vllm_config.load_config.load_format) == "dummy",
        }
        self._max_model_len: int = model.max_model_len
        self._vocabulary: int = model.get_vocab_size()
        _end_waiting_at_death(self._engine.engine_core)

    @classmethod
    def start(cls, model: str, **options: Any) -> "OfflineEngine":
        """Make the engine. options: as ``vllm.LLM`` takes them. Without a seed it gets a random one.

        vLLM's default seed is always the same, so an engine that is started again would repeat its samples.

        Raises ConfigurationError for a model or an option that vLLM refuses, and if vLLM is not installed.
        """
        try:
            from vllm import LLM
        except ImportError as error:
            raise without_vllm(error) from error
        try:
            seed = secrets.randbits(31) if options.get("seed") is None else options["seed"]
            engine = cls(LLM(model, **{**options, "seed": seed}))
        except AgentSpecError:
            raise
        except refusals(OSError, TypeError, RuntimeError, AttributeError) as error:
            why = f"{first_line(error)}{missing_folder(model)}"
            raise ConfigurationError(f"model {model}: vLLM refuses it or its options: {why}") from error
        engine.model = model  # with HF_HUB_OFFLINE vLLM's own has the folder of the files in place of a hub id
        return engine

    def tokenise(
        self, prompt: "str | Sequence[int] | Sequence[dict[str, Any]]", tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids of a text, of a chat's messages by the model's template, or of token ids.

        tools: definitions that the template writes into a chat's prompt. Raises InvalidInputError for a prompt that the
        tokenizer or its chat template refuses, or that does not fit.
        """
        tokenizer = self.llm.get_tokenizer()
        try:
            if isinstance(prompt, str):
                ids = tokenizer.encode(prompt)
            elif prompt and isinstance(prompt[0], dict):
                messages = templated(prompt)  # type: ignore[arg-type]
                ids = tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            else:
                ids = [operator.index(token) for token in prompt]  # type: ignore[arg-type]
        except Exception as error:  # each template refuses in its own way
            raise InvalidInputError(f"the tokenizer or its chat template refuses its prompt: {error}") from None
        if not 0 < len(ids) < self._max_model_len:
            raise InvalidInputError(
                f"its prompt has {len(ids)} tokens, but the model takes 1 to {self._max_model_len - 1} (max_model_len)"
            )
        last = max(tokenizer.max_token_id, self._vocabulary - 1)  # vLLM's own upper limit; vLLM checks no lower one
        for token in (min(ids), max(ids)):
            if not 0 <= token <= last:
                raise InvalidInputError(f"its prompt has the token {token}, which the model does not know")
        return [int(token) for token in ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        text: str = self.llm.get_tokenizer().decode(tokens)
        return text

    def add(self, request_id: str, prompt: list[int], sampling: Sampling, extra: dict[str, Any]) -> None:
        """Start a request. prompt: token ids. extra: its ``extra_args``, such as the id of its group."""
        with _death_as_rollout_error():
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling_params(sampling, extra))

    def step(self) -> list[Answer]:
        """Run one engine step. Return the answers that it finished. Raises RolloutError if the engine died."""
        with _death_as_rollout_error():
            outputs = self._engine.step()  # of each request that got tokens
            self._steps.update(output.request_id for output in outputs)
            return [self._answer(output) for output in outputs if output.finished]

    def begin_epoch(self) -> None:
        """Tell agentspec in the engine, if it drafts there, that an epoch begins (setting ``history_window``)."""
        if uses_agentspec(self._engine.vllm_config):
            with _death_as_rollout_error():
                self.llm.collective_rpc(RPC_METHOD, args=("new_epoch",))

    def settle(self) -> None:
        """Run one more step of an engine that has nothing left to do, so that it notes the last answers as finished.

        Until then these are neither drafted from nor in the store. An engine core in a process of its own runs this
        step itself.
        """
        self._engine.step()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without an answer."""
        self._engine.abort_request(list(request_ids))
        for request_id in request_ids:
            self._steps.pop(request_id, None)

    def update_weights(self, update: Callable[[Any, int], Any], epoch: int) -> Any:
        """Let ``update`` load weights: call it with the ``vllm.LLM`` and the epoch. Return its result.

        An awaitable is awaited. Then vLLM's prefix cache is reset, because the former weights computed it. Raises
        RolloutError if vLLM does not reset it, because requests run, and if the engine's process dies meanwhile.
        """
        with _death_as_rollout_error():
            returned = awaited(update(self.llm, epoch))
            if not self.llm.reset_prefix_cache():
                raise RolloutError("vLLM keeps the prefix cache of the weights before, because requests run: end them")
            return returned

    def close(self) -> None:
        """End the engine, once the store has every finished turn."""
        self._engine.engine_core.shutdown()

    def _answer(self, output: Any) -> Answer:
        """Return vLLM's finished output as an answer."""
        completion = output.outputs[0]
        tokens = [int(token) for token in completion.token_ids]
        drafted, accepted = self._drafts_of(output.request_id, getattr(completion, "spec_decode_metrics", None))
        return Answer(
            output.request_id,
            tokens,
            [float(step[token].logprob) for step, token in zip(completion.logprobs or [], tokens, strict=False)],
            completion.text,
            completion.finish_reason,
            self._steps.pop(output.request_id),
            drafted,
            accepted,
        )

    def _drafts_of(self, request_id: str, figures: Any) -> tuple[int, int]:
        """Return how many tokens were drafted and accepted. figures: vLLM's; None: ask agentspec in the engine."""
        if figures is not None:
            counts = figures.to_dict()
            return counts.get("num_draft_tokens", 0), counts.get("num_accepted_draft_tokens", 0)
        if has_draft_figures() or not uses_agentspec(self._engine.vllm_config):
            return 0, 0
        asked = ("request", api_request_id(request_id))
        workers = self.llm.collective_rpc(RPC_METHOD, args=asked, kwargs={"admin": True})
        counts = next((answer for answer in workers if answer is not None), None)
        return (0, 0) if counts is None else (counts["drafted"], counts["accepted"])


@contextmanager
def _death_as_rollout_error() -> Iterator[None]:
    """Raise RolloutError where the block finds that the engine's process has died."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise RolloutError("the engine's process died; its log may say why. Run it again to go on") from error


def _end_waiting_at_death(core: Any) -> None:
    """End what waits for an engine core in another process when that process is killed: a step, or another call.

    core: vLLM's client. It notices the death and shuts itself down, but its ``get_output``, and ``call_utility`` behind
    ``collective_rpc`` and ``reset_prefix_cache``, would wait for ever.
    """
    if not hasattr(core, "outputs_queue"):  # an engine core in this process
        return
    from vllm.v1.engine.exceptions import EngineDeadError

    shut_down = core.shutdown

    def shut_down_and_tell(*given: Any, **named: Any) -> None:
        shut_down(*given, **named)
        core.outputs_queue.put_nowait(RuntimeError("the engine was shut down"))
        for answer in list(core.utility_results.values()):
            if not answer.done():
                answer.set_exception(EngineDeadError())

    core.shutdown = shut_down_and_tell
