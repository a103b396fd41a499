"""The target's hidden states of every response, computed once and kept on disk.

A response of R tokens gives R rows: row i is the hidden state after the final norm that produced its token i. What a
speculator starts from when token i is the newest is therefore row i, and the target's distribution of token i + 1 is
its head applied to row i + 1.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentspec.errors import InvalidInputError
from agentspec.train.conversations import Conversation
from agentspec.train.files import whole
from agentspec.train.target import Target

_SHARD_ROWS = 32_768
_FORWARD_TOKENS = 8_192
"""Tokens of one forward pass, padding included, unless one conversation alone is longer."""


@dataclass(frozen=True, slots=True)
class Response:
    """Where a response's rows are. ``session``: whose it is. Rows ``start`` to ``start + length`` of that shard."""

    session: str
    shard: int
    start: int
    length: int


def plan(conversations: Sequence[Conversation]) -> list[list[int]]:
    """Which conversations (by index) go into which shard, longest first so that a batch has little padding."""
    order = sorted(range(len(conversations)), key=lambda i: (-len(conversations[i].tokens), i))
    shards: list[list[int]] = []
    room = 0
    for i in order:
        if room <= 0:
            shards.append([])
            room = _SHARD_ROWS
        shards[-1].append(i)
        room -= conversations[i].response_tokens
    return shards


def extract(
    conversations: Sequence[Conversation],
    folder: Path,
    open_target: Callable[[], Target],
    progress: Callable[[int], None],
) -> None:
    """Write the shards that ``folder`` lacks; ``progress`` is told how many tokens were done, or were there already.

    The target is only loaded where something is missing. A shard appears under its name when it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target: Target | None = None
    for number, members in enumerate(plan(conversations)):
        file = _file(folder, number)
        chosen = [conversations[i] for i in members]
        if file.exists():
            progress(sum(len(conversation.tokens) for conversation in chosen))
            continue
        if target is None:
            target = open_target()
        _write(chosen, file, target, progress)


class HiddenStates:
    """The rows of all responses, read by mapping the shards. A context manager; ``close`` unmaps."""

    def __init__(self, conversations: Sequence[Conversation], folder: Path) -> None:
        self.responses: list[Response] = []
        self._opened = ExitStack()
        self._shards: list[tuple[Any, Any]] = []
        for number, members in enumerate(plan(conversations)):
            shard = self._opened.enter_context(safe_open(_file(folder, number), framework="pt"))
            self._shards.append((shard.get_slice("hidden"), shard.get_slice("tokens")))
            at = 0
            for conversation in (conversations[i] for i in members):
                for start, end in conversation.responses:
                    self.responses.append(Response(conversation.session, number, at, end - start))
                    at += end - start

    def rows(self, response: Response, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Hidden states [last - first, H] in the target's dtype and tokens int64 of those rows of a response."""
        hidden, tokens = self._shards[response.shard]
        span = slice(response.start + first, response.start + last)
        return hidden[span], tokens[span].long()

    def close(self) -> None:
        """Unmap the shards."""
        self._opened.close()

    def __enter__(self) -> "HiddenStates":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(conversations: Sequence[Conversation], file: Path, target: Target, progress: Callable[[int], None]) -> None:
    hidden: list[Tensor] = []
    tokens: list[Tensor] = []
    for batch in _batches(conversations):
        _check_vocabulary(batch, target.vocab_size)
        states = target.hidden_states([torch.from_numpy(conversation.tokens).long() for conversation in batch])
        for conversation, state in zip(batch, states, strict=True):
            for start, end in conversation.responses:
                hidden.append(state[start - 1 : end - 1].cpu())
                tokens.append(torch.from_numpy(conversation.tokens[start:end].copy()))
        progress(sum(len(conversation.tokens) for conversation in batch))
    with whole(file) as partial:
        save_file({"hidden": torch.cat(hidden), "tokens": torch.cat(tokens)}, partial)


def _batches(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    """Neighbours in order of length, as many as fit into one forward pass."""
    batch: list[Conversation] = []
    for conversation in conversations:
        if batch and (len(batch) + 1) * len(batch[0].tokens) > _FORWARD_TOKENS:  # the first is the longest
            yield batch
            batch = []
        batch.append(conversation)
    if batch:
        yield batch


def _check_vocabulary(conversations: Sequence[Conversation], size: int) -> None:
    for conversation in conversations:
        highest = int(conversation.tokens.max())
        if highest >= size:
            raise InvalidInputError(
                f"session {conversation.session!r}: token {highest} is outside the target's vocabulary of {size}; "
                "give data of this target's tokenizer"
            )


def _file(folder: Path, number: int) -> Path:
    return folder / f"hidden-{number:05d}.safetensors"
