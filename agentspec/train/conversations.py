"""Whole conversations as token ids: what the target really saw, with the responses marked."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.store import Chain, RecordReader, Store, TurnRecord
from agentspec.simulate import Call, open_tokenizer, read_calls

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One session's text as the target saw it.

    ``tokens``: int32 [T]. ``responses``: (start, end) of each response in it, in order, ``start`` at least 1, so that
    the position before it exists, whose hidden state produced its first token.
    """

    session: str
    tokens: Int32
    responses: tuple[tuple[int, int], ...]

    @property
    def response_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(end - start for start, end in self.responses)


@dataclass(slots=True)
class _Open:
    """A conversation that may still go on."""

    session: str
    parts: list[Int32]
    length: int
    responses: list[tuple[int, int]] = field(default_factory=list)

    def closed(self) -> Conversation:
        return Conversation(self.session, np.concatenate(self.parts), tuple(self.responses))


class Joiner:
    """Joins the calls of a session whose prompts repeat what went before, so that the target reads them once.

    A call whose prompt does not begin with the session's text so far (an edited history, reasoning left out) starts
    another conversation of the same session.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._closed: list[Conversation] = []

    def add(self, session: str, prompt: Int32, response: Int32) -> None:
        """A session's next call: ``prompt`` int32 [P], all that the target saw, and ``response`` int32 [R]."""
        if len(prompt) == 0 or len(response) < 2:  # nothing can be drafted behind its first token
            return
        before = self._open.get(session)
        if before is not None and not _continues(before, prompt):
            self._closed.append(before.closed())
            before = None
        if before is None:
            before = self._open[session] = _Open(session, [], 0)
        before.parts += [prompt[before.length :], response]
        before.responses.append((len(prompt), len(prompt) + len(response)))
        before.length = len(prompt) + len(response)

    def conversations(self) -> list[Conversation]:
        """All of them, in an order that depends on the data alone."""
        return self._closed + [conversation.closed() for conversation in self._open.values()]


def from_records(path: Path, tokenizer: str | None) -> list[Conversation]:
    """Conversations of a file of recorded calls. Raises InvalidInputError naming file, line and field."""
    encode = None if tokenizer is None else open_tokenizer(tokenizer)
    return from_calls(read_calls(path, tokenizer=encode))


def from_calls(calls: Iterable[Call]) -> list[Conversation]:
    """Conversations of recorded calls; sessions of different tenants are different sessions."""
    joiner = Joiner()
    for call in calls:
        joiner.add(call.session if call.tenant is None else f"{call.tenant}/{call.session}", call.prompt, call.response)
    return joiner.conversations()


def from_store(store: Store, namespace: str, newest: int | None, tenant: str | None = None) -> list[Conversation]:
    """Return the conversations of one log that all of its tenant's callers share.

    tenant: the one that the operator named. Turns of other tenants in the log (an API key's own, a cache salt's, a LoRA
    adapter's), turns under scope "session", and turns whose context the log does not have from its beginning are left
    out.
    """
    joiner = Joiner()
    for session, prompt, response in _stored_calls(store, namespace, newest, tenant):
        joiner.add(session, prompt, response)
    return joiner.conversations()


def cut(conversation: Conversation, max_length: int) -> Conversation:
    """The conversation's first ``max_length`` tokens, with the responses that are whole in them."""
    if len(conversation.tokens) <= max_length:
        return conversation
    whole = tuple((start, end) for start, end in conversation.responses if end <= max_length)
    return Conversation(conversation.session, conversation.tokens[: whole[-1][1] if whole else 0], whole)


def _stored_calls(
    store: Store, namespace: str, newest: int | None, tenant: str | None
) -> Iterator[tuple[str, Int32, Int32]]:
    chains: dict[str, Chain] = {}
    contexts: dict[str, Int32] = {}
    for number, (entry, record) in enumerate(RecordReader().read(store, namespace, newest=newest)):
        alone = not entry.session  # of no session: a text of its own
        name = f"(none) {number}" if alone else entry.session
        chain = Chain() if alone else chains.setdefault(entry.session, Chain())
        if not isinstance(record, TurnRecord):
            chain.lose()  # damaged: what its session says next may hang in the air
            continue
        shared = record.scope != "session" and record.tenant in (None, tenant)
        linked = chain.link(record)
        context = contexts.get(name, np.empty(0, np.int32))[: linked.kept]
        prompt = np.concatenate([context, linked.prompt_tail])
        if not alone:
            contexts[name] = np.concatenate([prompt, linked.response])
        if chain.missing == 0 and shared:
            yield name, prompt, linked.response


def _continues(before: _Open, prompt: Int32) -> bool:
    if len(prompt) < before.length:
        return False
    at = 0
    for part in before.parts:
        if not np.array_equal(prompt[at : at + len(part)], part):
            return False
        at += len(part)
    return True
