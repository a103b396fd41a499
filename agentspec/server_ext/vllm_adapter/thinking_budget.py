"""End thinking beside drafts where vLLM ends it without: ``thinking_token_budget``, and the budget of /v1/messages.

vLLM counts the thinking of a request in a state machine that reads one token a step. Given drafts, it overlooks that
thinking ended inside of one, so it ends it again in the answer. In a step without any draft it takes the batch's first
row for that of the request. Here the same machine reads each response token by token, and a copy of it reads the draft.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_READ = "agentspec_read"
"""Key in the machine's state: how many tokens of the response it has read."""
_FORCED = 1e9
"""The logit that vLLM gives to a token that must come next."""


def update_state(
    original: Callable[..., None],
    holder: Any,
    output_token_ids: Sequence[list[int]],
    spec_token_ids: Sequence[list[int]] | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Find out which tokens must come next, behind each response and inside of each draft.

    holder: vLLM's ThinkingBudgetStateHolder, which gets them as ``agentspec_forced``: a token by row and by the number
    of draft tokens before it.
    """
    if not holder.in_spec_mode:
        original(holder, output_token_ids, spec_token_ids, *args, **kwargs)
        return
    drafts = spec_token_ids or []
    holder.agentspec_forced = {
        row: _forced(holder, state, output_token_ids[row], drafts[row] if row < len(drafts) else [])
        for row, state in holder._state.items()
        if row < len(output_token_ids)
    }


def apply_to_logits(
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


def _forced(holder: Any, state: dict[str, Any], output: list[int], draft: list[int]) -> dict[int, int]:
    """Return the tokens that must come next, by the number of draft tokens before them."""
    for _ in _read(holder, state, output):
        pass
    places = [(0, _end_token(holder, state))]
    if draft:
        ahead = dict(state)
        read = _read(holder, ahead, [*output, *draft])
        places += [(at - len(output), _end_token(holder, ahead)) for at in read]
    return {at: token for at, token in places if token is not None}


def _read(holder: Any, state: dict[str, Any], text: list[int]) -> Iterator[int]:
    """Let the machine read a response. Yield the number of tokens it has read whenever it has looked at them."""
    at = state.get(_READ, -1)
    longest = max(len(holder.think_start_token_ids), len(holder.think_end_token_ids))
    while at < len(text):
        at = _next_look(holder, state, text, at)
        state.update({_READ: at, "output_tok_ids": text[:at], "spec_token_ids": [], "force_index": []})
        holder._update_think_state(state)
        # vLLM's search for a mark begins here. It would go through the whole response in each look.
        state["scan_offset"] = max(state.get("scan_offset", 0), at + 1 - longest)
        yield at


def _next_look(holder: Any, state: dict[str, Any], text: list[int], at: int) -> int:
    """Return how far the machine can read in one look without missing a mark. A look costs time for the whole text."""
    at += 1
    last = len(text)
    if state["start_thinking"] >= 0:
        last = min(last, state["prev_output_length"] + state["check_count_down"] - 1)
    marks = {*holder.think_start_token_ids, *holder.think_end_token_ids}
    while 0 < at < last and not state["in_end"] and marks.isdisjoint(text[at - 1 : at + 1]):
        at += 1
    return at


def _end_token(holder: Any, state: dict[str, Any]) -> int | None:
    """Return the token of the end of thinking that must come next; None: any may."""
    end, said = holder.think_end_token_ids, state["end_count"]
    return end[said] if state["in_end"] and state["force_index"] and said < len(end) else None
