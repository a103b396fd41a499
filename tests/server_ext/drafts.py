"""Make requests and drafts of a step by hand."""

from itertools import chain

import numpy as np

from agentspec.cache import StepDrafts
from agentspec.cache.types import SOURCES
from agentspec.server_ext.figures.metrics import RequestFigures
from agentspec.server_ext.figures.response_count import ResponseCount
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.step import AcceptanceLength, RequestState

VOCABULARY = 1000


def request(name: str = "r", prompt_length: int = 0, session: str | None = None) -> RequestState:
    """Return a request that has just begun."""
    response = ResponseCount(RequestFigures(), prompt_length)
    return RequestState(name, Identity(session=session), response, AcceptanceLength(0, 0))


def drafts_of(tokens: list[list[int]], chances: list[list[float]]) -> StepDrafts:
    """Return drafts of these tokens, one list a row, with the probability of each."""
    counts = np.zeros((len(tokens), len(SOURCES)), np.int32)
    return StepDrafts(
        token_ids=np.array(list(chain(*tokens)), np.int32),
        offsets=np.concatenate(([0], np.cumsum([len(row) for row in tokens]))).astype(np.int32),
        sources=np.zeros(sum(map(len, tokens)), np.uint8),
        probabilities=np.array(list(chain(*chances)), np.float32),
        match_lengths=np.zeros(len(tokens), np.int32),
        accepted=counts,
        drafted=counts,
    )
