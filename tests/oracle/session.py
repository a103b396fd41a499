"""Specify how the turns of a session are kept: as a tree, whose branches are found by hashes of their context.

Implemented by csrc/cache/session and context_hash.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate

from tests.oracle.index import BOUNDARY, OVERLAP, SuffixIndex

BLOCK = 64  # tokens between two boundaries
SEARCHED = 1024  # newest documents in which a context is searched for
WORD = 2**64


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB % WORD
    return value ^ value >> 31


FACTORS = [_mix((i + 1) * 0x9E3779B97F4A7C15 % WORD) | 1 for i in range(BLOCK)]


@dataclass(frozen=True, slots=True)
class Context:
    """Name the first `length` tokens of a conversation by their 64-bit hash, which is 0 for no tokens."""

    hash: int = 0
    length: int = 0

    def add(self, token: int) -> "Context":
        number = token + 1 if token >= 0 else -1 - token  # a placeholder is -2 - token
        total = (self.hash + number * FACTORS[self.length % BLOCK]) % WORD
        return Context(total if (self.length + 1) % BLOCK else _mix(total), self.length + 1)

    def walk(self, tokens: list[int]) -> list["Context"]:
        """Return this context and those after each of the tokens."""
        return list(accumulate(tokens, Context.add, initial=self))


@dataclass(slots=True)
class Turn:
    """Hold what a finished request adds.

    kept: tokens of its context that the session held already. parent: hash of that context. block: hash of it up to its
    last block boundary. record: the turn's name in the store; 0: none.
    """

    kept: int
    parent: int
    block: int
    prompt_tail: list[int]
    response: list[int]
    record: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """Hold a known prefix of a context: its length, and the position behind it in the text."""

    length: int
    position: int


@dataclass(frozen=True, slots=True)
class Document:
    """Hold where a document begins.

    context: what it continues. parent: position behind that context; None: it isn't in the text. start: position of the
    boundary in front. begin: its first own token. missing: tokens at the front of its context that aren't in the text.
    """

    context: Context
    parent: int | None
    start: int
    begin: int
    missing: int


@dataclass(slots=True)
class Turns:
    """Hold the turns of one conversation in one growing text.

    A turn that continues the text's end goes on in its document. Any other begins a document, behind a boundary and
    the last tokens of the context that it continues. places: ends of contexts, by hash: at block boundaries, behind the
    first token of each document, and at turns' ends. None marks a block boundary whose text isn't there although text
    of its block is. records: ends of the turns that came from or went to the store.
    """

    index: SuffixIndex = field(default_factory=SuffixIndex)
    documents: list[Document] = field(default_factory=list)
    places: dict[int, int | None] = field(default_factory=dict)
    records: dict[int, int] = field(default_factory=dict)
    newest: Context = Context()

    def find(self, prompt: list[int]) -> Prefix | None:
        """Return the longest prefix of a prompt that the session knows; the text of its beginning may be missing."""
        return self._longest(Context().walk(prompt), self.places.get(0), prompt, WORD)

    def missing_at(self, position: int) -> int:
        return next(document.missing for document in reversed(self.documents) if document.begin <= position)

    def context_of(self, turn: Turn) -> list[int]:
        parent = self._parent_of(turn)
        return [] if parent is None else self._before(parent)

    def find_parent(self, turn: Turn) -> Turn:
        """Let a turn without a parent's hash continue the newest turn, if its `kept` fits."""
        if turn.kept == 0 or turn.parent != 0:
            return turn
        if turn.kept == self.newest.length:
            return replace(turn, parent=self.newest.hash)
        return replace(turn, kept=0)

    def append(self, turn: Turn) -> bool:
        """Append what is new in a turn. Return whether anything was."""
        tokens = turn.prompt_tail + turn.response
        contexts = Context(turn.parent, turn.kept).walk(tokens)
        self.newest = contexts[-1]
        prefix = self._longest(contexts, self._parent_of(turn), tokens, turn.kept)
        known = prefix.length - turn.kept if prefix else 0
        is_new = known < len(tokens)
        if is_new:
            if prefix is None or prefix.position != len(self.index):
                self._begin_document(prefix, contexts[known], contexts[known + 1])
                if prefix is None and turn.kept % BLOCK:
                    self.places.setdefault(turn.block, None)
            begin = len(self.index) - known
            self.index.append(tokens[known:])
            for count in range(known + 1, len(tokens) + 1):
                if contexts[count].length % BLOCK == 0:
                    self._set_place(contexts[count], begin + count)
        end = len(self.index) if is_new or prefix is None else prefix.position
        self._set_place(self.newest, end)
        if turn.record:
            self.records[turn.record] = end
        return is_new

    def trim(self, tokens: int) -> None:
        """Cut the text to its newest `tokens` tokens, and forget the places and records of the rest."""
        text, documents = self.index.text, self.documents
        if tokens >= len(text):
            return
        cut = len(text) - tokens
        self.index.clear()
        self.documents = []
        ends = [document.start for document in documents[1:]] + [len(text)]
        first: int | None = None
        for document, end in zip(documents, ends, strict=True):
            if end <= cut:
                continue
            context, begin, parent = document.context, document.begin, document.parent
            start = max(document.start, cut)
            if begin < cut:
                context = context.walk(text[begin:cut])[-1]
                start, begin, parent = cut, cut, None
            first = begin if first is None else first
            known = parent is not None and parent >= first
            parent = parent - cut if parent is not None and known else None
            missing = context.length if parent is None else self.missing_at(parent)
            self.index.append(text[start:begin], findable=False)
            self.index.append(text[begin:end])
            self.documents.append(Document(context, parent, start - cut, begin - cut, missing))
        if first is None:
            first = len(text) + 1
        self.places = {key: at - cut for key, at in self.places.items() if at is not None and at >= first}
        self.records = {key: at - cut for key, at in self.records.items() if at > first}

    def _longest(
        self, contexts: list[Context], position: int | None, tokens: list[int], most_missing: int
    ) -> Prefix | None:
        """Return the longest known context, searched for from the last known block boundary on.

        contexts[i] is the context in front of tokens[i]. position: where contexts[0] ends in the text, if known.
        most_missing: tokens at the front of a context whose text may be missing.
        """
        for at in range(len(tokens), 0, -1):
            if contexts[at].length % BLOCK == 0 and contexts[at].hash in self.places:
                place = self._position_of(contexts[at], most_missing)
                prefix = self._furthest(contexts[at:], place, tokens[at:], most_missing)
                if prefix:
                    return prefix
        return self._furthest(contexts, position, tokens, most_missing)

    def _position_of(self, context: Context, most_missing: int) -> int | None:
        position = self.places.get(context.hash)
        return None if position is None or self.missing_at(position) > most_missing else position

    def _furthest(
        self, contexts: list[Context], position: int | None, tokens: list[int], most_missing: int
    ) -> Prefix | None:
        """Return the furthest known end before the next block boundary, in the text behind each place on the way."""
        best: Prefix | None = None
        limit = min(len(tokens), BLOCK - 1 - contexts[0].length % BLOCK)
        for at in range(limit + 1):
            if at > 0:
                position = self._position_of(contexts[at], most_missing)
            if position is None:
                continue
            same = 0
            while at + same < limit and self.index.text[position + same : position + same + 1] == [tokens[at + same]]:
                same += 1
            if best is None or contexts[at].length + same > best.length:
                best = Prefix(contexts[at].length + same, position + same)
        return best

    def _parent_of(self, turn: Turn) -> int | None:
        """Return the position behind the context that a turn continues; None if it isn't in the text.

        It is a known place, or lies in the text behind the last block boundary, or in a document that begins after it.
        """
        position = self.places.get(turn.parent)
        if position is not None:
            return position
        block = Context(turn.block, turn.kept // BLOCK * BLOCK)
        position = self.places.get(turn.block)
        candidates = [] if position is None else [(block, position)]
        newest = reversed(self.documents[-SEARCHED:])
        candidates += [(d.context, d.begin) for d in newest if block.length <= d.context.length < turn.kept]
        for context, begin in candidates:
            behind = self.index.text[begin : begin + turn.kept - context.length]
            if BOUNDARY not in behind and context.walk(behind)[-1] == Context(turn.parent, turn.kept):
                return begin + len(behind)
        return None

    def _before(self, position: int) -> list[int]:
        """Return the tokens before a position back to a boundary, at most OVERLAP."""
        tokens = self.index.text[max(position - OVERLAP, 0) : position]
        while BOUNDARY in tokens:
            tokens = tokens[tokens.index(BOUNDARY) + 1 :]
        return tokens

    def _set_place(self, context: Context, position: int) -> None:
        """Note where a context ends. The first place stays, unless nothing is known in front of it."""
        known = self.places.get(context.hash)
        if known is None or not self._before(known):
            self.places[context.hash] = position

    def _begin_document(self, prefix: Prefix | None, context: Context, behind: Context) -> None:
        """Begin a document that continues a context. prefix: its end, if known. behind: the context one token later."""
        start = len(self.index)
        if start > 0:
            self.index.append_boundary()
        if prefix:
            self.index.append(self._before(prefix.position), findable=False)
        begin = len(self.index)
        missing = self.missing_at(prefix.position) if prefix else context.length
        self.documents.append(Document(context, prefix.position if prefix else None, start, begin, missing))
        if not prefix:
            self._set_place(context, begin)
        self._set_place(behind, begin + 1)
