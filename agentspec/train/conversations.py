"""Join the calls of sessions into conversations: token ids with the responses marked."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from agentspec.cache.store import RecordReader, Store, TurnRecord
from agentspec.cache.store.contexts import SessionContexts
from agentspec.cache.types import Int32Array
from agentspec.simulate import open_tokenizer, read_calls


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold one session's text as the target saw it.

    ``tokens``: int32 [T]. ``responses``: (start, end) of each response in it, in order. ``start`` is at least 1: the
    hidden state of the position before it produced the response's first token.
    """

    session: str
    tokens: Int32Array
    responses: tuple[tuple[int, int], ...]

    @property
    def response_tokens(self) -> int:
        """Return the number of tokens in all responses."""
        return sum(end - start for start, end in self.responses)


@dataclass(slots=True)
class _Open:
    """Collect a conversation that may still continue. ``length``: tokens of its parts."""

    session: str
    parts: list[Int32Array] = field(default_factory=list)
    length: int = 0
    responses: list[tuple[int, int]] = field(default_factory=list)

    def begins(self, prompt: Int32Array) -> bool:
        """Return whether a prompt begins with all of the conversation."""
        at = 0
        for part in self.parts:
            if not np.array_equal(prompt[at : at + len(part)], part):
                return False
            at += len(part)
        return True

    def add(self, prompt: Int32Array, response: Int32Array) -> None:
        """Add a call whose prompt begins with all of the conversation."""
        self.parts += [prompt[self.length :], response]
        self.length = len(prompt) + len(response)
        self.responses.append((len(prompt), self.length))

    def closed(self) -> Conversation:
        return Conversation(self.session, np.concatenate(self.parts), tuple(self.responses))


class Joiner:
    """Join the calls of a session into conversations, so that the target reads repeated prompts once.

    A call whose prompt does not begin with the session's text so far (an edited history, reasoning left out) starts
    another conversation of the same session.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str | None, str], _Open] = {}  # by tenant and session
        self._closed: list[Conversation] = []

    def add(self, session: str, prompt: Int32Array, response: Int32Array, tenant: str | None = None) -> None:
        """Add a session's next call: the whole ``prompt``, int32 [P], and its ``response``, int32 [R].

        The conversation has the session's name, with the tenant's in front if there is one.
        """
        if len(prompt) == 0 or len(response) < 2:  # there is no token to draft behind the response's first
            return
        key, name = (tenant, session), session if tenant is None else f"{tenant}/{session}"
        before = self._open.setdefault(key, _Open(name))
        if not before.begins(prompt):
            self._closed.append(before.closed())
            before = self._open[key] = _Open(name)
        before.add(prompt, response)

    def conversations(self) -> list[Conversation]:
        """Return all conversations, in an order that depends on the data alone."""
        return self._closed + [conversation.closed() for conversation in self._open.values()]


def from_records(path: Path, tokenizer: str | None, revision: str | None = None) -> list[Conversation]:
    """Read the conversations of a file of recorded calls. Sessions of different tenants stay apart.

    revision: the tokenizer's, on the hub. Raises InvalidInputError naming file, line and field.
    """
    encode = None if tokenizer is None else open_tokenizer(tokenizer, "data.sources: tokenizer", revision)
    joiner = Joiner()
    for call in read_calls(path, tokenizer=encode):
        joiner.add(call.session, call.prompt, call.response, call.tenant)
    return joiner.conversations()


def from_store(store: Store, namespace: str, newest: int | None) -> list[Conversation]:
    """Return the conversations of a tenant's log that all of its callers share.

    They lack turns of scope "session", and turns whose earlier context the log no longer holds. namespace: name of the
    log. newest: number of newest records to read; None: all.
    """
    joiner, contexts = Joiner(), dict[str, SessionContexts]()
    for entry, record in RecordReader().read(store.read(namespace, newest=newest)):
        if not isinstance(record, TurnRecord):
            continue
        if entry.session:
            name, context = entry.session, contexts.setdefault(entry.session, SessionContexts())
        else:  # the turn has no session, so it is a conversation of its own
            name, context = f"(none) {entry.sequence}", SessionContexts()
        prompt = context.add(record)
        if prompt is not None and record.scope != "session":
            joiner.add(name, prompt, record.response)
    return joiner.conversations()


def cut(conversation: Conversation, max_length: int) -> Conversation:
    """Return the conversation up to its last response that ends within the first ``max_length`` tokens."""
    if len(conversation.tokens) <= max_length:
        return conversation
    whole = tuple((start, end) for start, end in conversation.responses if end <= max_length)
    return Conversation(conversation.session, conversation.tokens[: whole[-1][1] if whole else 0], whole)
