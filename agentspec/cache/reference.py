"""The index in plain Python: the specification of csrc/text_index.cpp, its oracle in the tests, and the fallback.

An index is an append-only log of tokens with a boundary between documents. A look-up finds where the end of a context
occurred before, the way a suffix tree would: it takes the longest k of LEVELS for which the context's last k tokens
occurred, of those places the newest WINDOW, and of these the ones that agree with the context over the most tokens.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

LEVELS = (32, 16, 8, 4, 3, 2, 1)
WINDOW = 32
CAP = 256
BOUNDARY = -1


@dataclass(slots=True)
class Match:
    """Where a context occurred: positions of the tokens that followed it, newest first; `length` tokens agree."""

    length: int = 0
    positions: list[int] = field(default_factory=list)


class ReferenceIndex:
    def __init__(self) -> None:
        self.text: list[int] = []
        self._pending: list[tuple[int, int]] = []  # ranges of positions that are still to be indexed
        self._grams: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self.text)

    @property
    def pending(self) -> int:
        return sum(end - begin for begin, end in self._pending)

    def append(self, tokens: Sequence[int], findable: bool = True) -> None:
        """Adds tokens to the log; those that are not findable are context only."""
        begin = len(self.text)
        self.text.extend(tokens)
        if findable and len(tokens):
            self._pending.append((begin, len(self.text)))

    def append_boundary(self) -> None:
        self.append([BOUNDARY], findable=False)

    def advance(self, budget: int) -> int:
        """Indexes at most `budget` pending positions, oldest first; returns how many."""
        done = 0
        while self._pending and done < budget:
            begin, end = self._pending.pop(0)
            stop = min(end, begin + budget - done)
            for position in range(begin, stop):
                self._insert(position)
            if stop < end:
                self._pending.insert(0, (stop, end))
            done += stop - begin
        return done

    def _insert(self, position: int) -> None:
        before = self.text[max(position - LEVELS[0], 0) : position]
        for k in LEVELS:
            gram = tuple(before[-k:])
            if len(gram) == k and BOUNDARY not in gram:
                self._grams[gram].append(position)

    def look_up(self, context: Sequence[int]) -> Match:
        for k in LEVELS:
            gram = tuple(context[-k:])
            if len(gram) == k and gram in self._grams:
                newest = self._grams[gram][: -WINDOW - 1 : -1]
                lengths = [self._agreement(position, context) for position in newest]
                longest = max(lengths)
                return Match(longest, [p for p, length in zip(newest, lengths, strict=True) if length == longest])
        return Match()

    def _agreement(self, position: int, context: Sequence[int]) -> int:
        limit = min(position, len(context), CAP)
        for length in range(limit):
            if self.text[position - 1 - length] != context[-1 - length]:
                return length
        return limit

    def follow(self, token: int, match: Match) -> Match:
        """The match after one more token of context, from the places of `match` that were followed by it."""
        moved = [p + 1 for p in match.positions if self.text[p] == token]
        moved = [p for p in moved if p < len(self.text) and self.text[p] != BOUNDARY]
        return Match(min(match.length + 1, CAP), moved) if moved else Match()

    def best_successor(self, match: Match) -> tuple[int, int]:
        """The token that followed at most of the matched places (the newest of equals), and at how many."""
        counts = Counter(self.text[position] for position in match.positions)
        return max(counts.items(), key=lambda item: item[1])  # the first of equals: Counter keeps the order
