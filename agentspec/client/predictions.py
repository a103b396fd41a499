"""Predict answers: by a text that the caller gives or, if a session's answers are edits, by its last answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import openai

from agentspec.client.messages import encodable
from agentspec.errors import InvalidInputError
from agentspec.protocol import MAX_PREDICTION

_LEAST_TEXT = 200  # characters: no shorter answer is worth a prediction
_LEAST_PART = 0.5  # least share of an edit's tokens that were in the answer before it
_PAIRS = 2  # most of the latest edits that are looked at
_LONGEST = 2_000  # most tokens of an answer that are looked at


_REFUSED: dict[str, Callable[[Any], object]] = {
    "tools": bool,
    "functions": bool,
    "audio": bool,
    "logprobs": bool,
    "n": lambda n: n and n > 1,
    "presence_penalty": lambda penalty: penalty and penalty > 0,
    "frequency_penalty": lambda penalty: penalty and penalty > 0,
    "modalities": lambda modalities: modalities and list(modalities) != ["text"],
}
"""Options beside which OpenAI's API refuses a prediction, each with a test of its value."""


def as_prediction(given: object) -> object:
    """Return a prediction in the API's form; None for None, and for the OpenAI client's values of an option not given.

    A text is put into the form, and the form itself stays as it is. Raises InvalidInputError for any other value.
    """
    if isinstance(given, str):
        return {"type": "content", "content": encodable(given)}
    if isinstance(given, openai.NotGiven | openai.Omit):
        return None
    if given is None or isinstance(given, Mapping):
        return given
    raise InvalidInputError(f"prediction: a text or the API's own form is needed, not {type(given).__name__}")


def openai_refuses(request: Mapping[str, Any]) -> bool:
    """Return whether OpenAI's API would refuse a prediction beside the request's other options."""
    return any(test(request[name]) for name, test in _REFUSED.items() if name in request)


def check_predict(given: object) -> bool:
    """Return whether answers are to be predicted. Raises InvalidInputError for anything but "auto", "off" and None."""
    if given not in ("auto", "off", None):
        raise InvalidInputError(f"predict: 'auto' or 'off' is needed, not {given!r}")
    return given == "auto"


def likely_answer(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the last answer, or its beginning, if the next one will probably be an edit of it; else None.

    It probably will be if the latest answers were edits of each other. Rejected tokens cost money on some servers, so
    without a former edit there is no prediction. messages: the history and the new messages.
    """
    answers = [message.get("content") for message in messages if message["role"] == "assistant"]
    texts = [text for text in answers if isinstance(text, str)][-_PAIRS - 1 :]
    if len(texts) < 2 or len(texts[-1]) < _LEAST_TEXT:
        return None
    parts = [kept_part(before, after) for before, after in pairwise(texts)]
    if sum(parts) / len(parts) < _LEAST_PART:
        return None
    return texts[-1].encode()[:MAX_PREDICTION].decode(errors="ignore")  # bytes, because no token is shorter


def kept_part(before: str, after: str) -> float:
    """Return the tokens that a server would accept if ``before`` predicted ``after``, as a share of the longer text."""
    from agentspec.cache import SOURCES, SuffixCache  # imported here: most clients predict nothing
    from agentspec.client.forecast import approximate_tokens

    predicted, left = (approximate_tokens(text)[:_LONGEST] for text in (before, after))
    longer = max(len(predicted), len(left))
    cache = SuffixCache()
    cache.start("edit", [], scope="none", prediction=predicted)
    cache.catch_up()
    source, accepted = SOURCES.index("prediction"), 0
    while left:
        (draft,) = cache.propose(["edit"], len(left))
        right = 0
        for token, expected, origin in zip(draft.token_ids.tolist(), left, draft.sources.tolist(), strict=False):
            if token != expected:
                break
            right += 1
            accepted += origin == source
        cache.extend("edit", left[: right + 1])
        left = left[right + 1 :]
    return accepted / longer if longer else 0.0
