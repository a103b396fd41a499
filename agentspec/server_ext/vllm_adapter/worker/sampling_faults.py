"""Correct sampling that drafts would change, in vLLM's rejection sampler and its thinking budget."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_READ = "agentspec_read"
"""Key in the state of vLLM's thinking machine: how many tokens of the response it has read."""
_FORCED = 1e9
"""The logit that vLLM gives to a token that must come next."""


# --- Log probabilities of tokens that a request names (logprob_token_ids). vLLM's rejection sampler returns none for
# --- them. If another request of the batch wants log probabilities, it raises an error, which ends the engine.


def named_logprobs(
    original: Callable[..., Any],
    sampler: Any,
    metadata: Any,
    draft_probs: Any,
    logits: Any,
    sampling_metadata: Any,
) -> Any:
    """Return the log probabilities of the named tokens at each verified position, as vLLM does without drafts."""
    named = sampling_metadata.logprob_token_ids
    if not named:
        return original(sampler, metadata, draft_probs, logits, sampling_metadata)
    target, positions = sampler.sampler, metadata.max_spec_len + 1

    def gather(logprobs: Any, _: int, sampled: Any) -> Any:
        spread = {row * positions + i: tokens for row, tokens in named.items() for i in range(positions)}
        return target.gather_specific_token_logprobs(logprobs, spread, sampled)

    most = sampling_metadata.max_num_logprobs or 0  # with None vLLM gathers nothing
    wanted = dataclasses.replace(sampling_metadata, logprob_token_ids=None, max_num_logprobs=most)
    target.gather_logprobs = gather
    try:
        return original(sampler, metadata, draft_probs, logits, wanted)
    finally:
        del target.gather_logprobs


# --- min_tokens. At the token behind a draft, vLLM's rejection sampler does not count the draft towards min_tokens, and
# --- may forbid the end of the response. So a response that should end there, behind an accepted draft, goes on.


def min_tokens_behind_drafts(
    original: Callable[..., Any],
    sampler: Any,
    metadata: Any,
    draft_probs: Any,
    logits: Any,
    sampling_metadata: Any,
) -> Any:
    """Count a draft towards ``min_tokens`` at the token behind it, so that the response can end there."""
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    processors = sampling_metadata.logitsprocs
    if any(isinstance(each, MinTokensLogitsProcessor) and each.min_toks for each in processors.non_argmax_invariant):
        counts = metadata.num_draft_tokens
        corrected = type(processors)(
            _behind_drafts(each, counts) if isinstance(each, MinTokensLogitsProcessor) else each
            for each in processors.all
        )
        sampling_metadata = dataclasses.replace(sampling_metadata, logitsprocs=corrected)
    return original(sampler, metadata, draft_probs, logits, sampling_metadata)


def _behind_drafts(processor: Any, num_draft_tokens: list[int]) -> Any:
    """Return a copy of vLLM's ``min_tokens`` processor that counts drafts at the token behind them."""
    behind, corrected = copy.copy(processor), copy.copy(processor)
    behind.min_toks = {row: (least - num_draft_tokens[row], *of) for row, (least, *of) in processor.min_toks.items()}
    behind.update_state(None)  # drops requests that have reached their minimum
    corrected.apply = behind.apply
    return corrected


# --- Sampling parameters of draft positions, on CPUs.


def expand_batch_to_tokens(
    original: Callable[..., Any],
    x: Any,
    cu_num_tokens: Any,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Any:
    """Repeat a value of each row for its tokens, in plain torch.

    The kernel of vLLM's CPU build fills a converted copy, so temperature, top-k and top-p of draft positions get lost.
    This replaces it for every drafter, agentspec's or not.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x if replace_from == replace_to else torch.where(x == replace_from, replace_to, x)
    return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)


# --- The end of thinking (thinking_token_budget, the budget of /v1/messages). vLLM counts a request's thinking in a
# --- state machine that reads one token a step. If thinking ends inside a draft, the machine overlooks that, and forces
# --- the end of thinking again in the answer. In a step without any draft it takes the batch's first row for the row of
# --- the request. Here the same machine reads each response token by token, and a copy of it reads the draft.


def update_thinking(
    original: Callable[..., None],
    holder: Any,
    output_token_ids: Sequence[list[int]],
    spec_token_ids: Sequence[list[int]] | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Find out which tokens must come next, behind each response and inside of each draft.

    holder: vLLM's ThinkingBudgetStateHolder, which gets them as ``agentspec_forced``: for each row, a dict from the
    number of draft tokens before the forced token to that token.
    """
    if not holder.in_spec_mode:
        original(holder, output_token_ids, spec_token_ids, *args, **kwargs)
        return
    drafts = spec_token_ids or []
    holder.agentspec_forced = {
        row: _forced_tokens(holder, state, output_token_ids[row], drafts[row] if row < len(drafts) else [])
        for row, state in holder._state.items()
        if row < len(output_token_ids)
    }


def force_end_of_thinking(
    original: Callable[..., Any],
    holder: Any,
    logits: Any,
    predict_bonus_token: bool,
    spec_token_ids: Sequence[list[int]] | None,
) -> Any:
    """Let the forced tokens win.

    logits: [rows, vocabulary] for the tokens behind the drafts and where there is no draft, [draft tokens, vocabulary]
    for those inside of them.
    """
    if not holder.in_spec_mode:
        return original(holder, logits, predict_bonus_token, spec_token_ids)
    counts = [len(draft) for draft in spec_token_ids or []]
    behind = predict_bonus_token or not any(counts)
    for row, forced in holder.agentspec_forced.items():
        count = counts[row] if row < len(counts) else 0
        for at, token in forced.items():
            if behind and at == count:
                logits[row, token] = _FORCED
            elif not behind and at < count:
                logits[sum(counts[:row]) + at, token] = _FORCED
    return logits


def _forced_tokens(holder: Any, state: dict[str, Any], output: list[int], draft: list[int]) -> dict[int, int]:
    """Return the tokens that must come next, by the number of draft tokens before them."""
    for _ in _read_response(holder, state, output):
        pass
    places = [(0, _end_token(holder, state))]
    if draft:
        ahead = dict(state)
        read = _read_response(holder, ahead, [*output, *draft])
        places += [(at - len(output), _end_token(holder, ahead)) for at in read]
    return {at: token for at, token in places if token is not None}


def _read_response(holder: Any, state: dict[str, Any], text: list[int]) -> Iterator[int]:
    """Let vLLM's machine read a response. Yield after each of its looks how many tokens it has read."""
    at = state.get(_READ, -1)
    longest = max(len(holder.think_start_token_ids), len(holder.think_end_token_ids))
    while at < len(text):
        at = _next_look(holder, state, text, at)
        state.update({_READ: at, "output_tok_ids": text[:at], "spec_token_ids": [], "force_index": []})
        holder._update_think_state(state)
        # vLLM's next search for a mark begins here. Without this each look would search the whole response.
        state["scan_offset"] = max(state.get("scan_offset", 0), at + 1 - longest)
        yield at


def _next_look(holder: Any, state: dict[str, Any], text: list[int], at: int) -> int:
    """Return up to which token the machine can read in one look without missing a mark.

    The fewer looks the better: each takes time for the whole text.
    """
    at += 1
    last = len(text)
    if state["start_thinking"] >= 0:
        last = min(last, state["prev_output_length"] + state["check_count_down"] - 1)
    marks = {*holder.think_start_token_ids, *holder.think_end_token_ids}
    while 0 < at < last and not state["in_end"] and marks.isdisjoint(text[at - 1 : at + 1]):
        at += 1
    return at


def _end_token(holder: Any, state: dict[str, Any]) -> int | None:
    """Return the token of the end-of-thinking mark that must come next; None: any token may."""
    end, said = holder.think_end_token_ids, state["end_count"]
    return end[said] if state["in_end"] and state["force_index"] and said < len(end) else None
