"""Specify the suffix index: where a context occurred before.

Implemented by csrc/index.

An index is an append-only log of tokens and all its indexed positions, sorted by what precedes them. The context of
position p is text[p-1], text[p-2], ... back to a boundary or to the start of the text, however far. Contexts are
compared in this direction, and the first difference decides. A context that has ended comes first; tokens come in the
order of their numbers. Of two contexts that ended at the same depth, the smaller position comes first. So all
occurrences of a piece of text are neighbours, and the longest match of a context is next to where it would be inserted.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

BOUNDARY = -1  # between documents: ends every context, matches nothing, not even itself
OVERLAP = 8  # tokens of context kept in front of a text, so that its first tokens can be matched
WINDOW = 32  # occurrences that a match lists


@dataclass(slots=True)
class Match:
    """List where the end of a context occurred, by the positions of the tokens that followed. `length` tokens agree.

    All `count` occurrences are listed, newest first, if there are at most WINDOW; otherwise WINDOW of them, evenly
    spaced in the order of their contexts. A match of length 0 has no occurrences.
    """

    length: int = 0
    count: int = 0
    positions: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.positions) == self.count


class SuffixIndex:
    def __init__(self) -> None:
        self.text: list[int] = []
        self.version = 0  # changes whenever indexed positions change
        self._order: list[int] = []  # indexed positions, sorted
        self._indexed: set[int] = set()
        self._pending: list[tuple[int, int]] = []  # ranges of positions still to be indexed, oldest first

    def __len__(self) -> int:
        return len(self.text)

    @property
    def pending(self) -> int:
        return sum(end - begin for begin, end in self._pending)

    @property
    def indexed(self) -> int:
        return len(self._order)

    def append(self, tokens: list[int], findable: bool = True) -> None:
        """Add tokens to the log. With findable=False they are context only: no look-up returns them."""
        begin = len(self.text)
        self.text.extend(tokens)
        if findable and tokens:
            self._pending.append((begin, len(self.text)))

    def append_boundary(self) -> None:
        self.append([BOUNDARY], findable=False)

    def advance(self, budget: int) -> int:
        """Index at most `budget` pending positions, oldest first. Return how many."""
        done = 0
        while self._pending and done < budget:
            begin, end = self._pending[0]
            stop = min(end, begin + budget - done)
            for position in range(begin, stop):
                self._order.insert(self._rank(position), position)
                self._indexed.add(position)
            self._pending[:1] = [(stop, end)] if stop < end else []
            done += stop - begin
        self.version += done > 0
        return done

    def look_up(self, context: list[int], length: int | None = None) -> Match:
        """Return the longest match of the context, or the occurrences of exactly its last `length` tokens."""
        if length is None:
            low = self._bound(context, len(context), behind=False)
            neighbours = self._order[max(low - 1, 0) : low + 1]
            length = max((self._agreement(position, context, len(context)) for position in neighbours), default=0)
        if not 0 < length <= len(context):
            return Match()
        low = self._bound(context, length, behind=False)
        high = self._bound(context, length, behind=True)
        count = high - low
        if count == 0:
            return Match()
        if count > WINDOW:
            return Match(length, count, [self._order[low + k * count // WINDOW] for k in range(WINDOW)])
        return Match(length, count, sorted(self._order[low:high], reverse=True))

    def follow(self, token: int, match: Match) -> Match | None:
        """Return where `match` goes on with `token`, or None if the match does not list all its occurrences.

        A look-up of the context with `token` behind it gives the same, and also the occurrences whose preceding
        position is not indexed (the first findable token of a document).
        """
        if not match.complete:
            return None
        moved = [p + 1 for p in match.positions if self.text[p] == token and p + 1 in self._indexed]
        return Match(match.length + 1, len(moved), moved) if moved else Match()

    def remove(self, begin: int, end: int, budget: int) -> int:
        """Remove positions of whole documents from the index, newest first and at most `budget`. Return how many.

        If fewer than `budget` were removed, none is left. Pending positions of the range will never be indexed. The
        text of removed positions is overwritten with BOUNDARY.
        """
        end = min(end, len(self.text))
        self._forget_pending(begin, end)
        done, cleared = 0, end
        for position in range(end - 1, begin - 1, -1):
            if done == budget:
                break
            if position in self._indexed:
                del self._order[self._rank(position)]
                self._indexed.remove(position)
                done += 1
                cleared = position
        if done < budget:
            cleared = begin
        self.text[cleared:end] = [BOUNDARY] * (end - cleared)
        self.version += done > 0
        return done

    def clear(self) -> None:
        """Empty the index and raise its version."""
        version = self.version + 1
        self.__init__()  # type: ignore[misc]
        self.version = version

    def _forget_pending(self, begin: int, end: int) -> None:
        kept: list[tuple[int, int]] = []
        for first, last in self._pending:
            kept += [(first, min(last, begin)), (max(first, end), last)]
        self._pending = [(first, last) for first, last in kept if first < last]

    def _rank(self, position: int) -> int:
        """Return the rank of a position among the sorted ones, or the rank where it would be inserted."""

        def not_before(other: int) -> bool:
            depth = _agreement(self.text, other, self.text, position)
            left, right = _rank_before(self.text, other - depth), _rank_before(self.text, position - depth)
            return left > right or (left == right and other >= position)

        return self._first(not_before)

    def _bound(self, context: list[int], length: int, behind: bool) -> int:
        """Return the rank of the first position whose context comes after the last `length` tokens of `context`.

        Contexts that agree with all of them count as after, or with `behind` as before.
        """

        def after(position: int) -> bool:
            depth = self._agreement(position, context, length)
            if depth == length:
                return not behind
            return _rank_before(self.text, position - depth) >= _rank_before(context, len(context) - depth)

        return self._first(after)

    def _first(self, condition: Callable[[int], bool]) -> int:
        """Return the rank of the first sorted position that meets the condition. All behind it must meet it too."""
        return bisect_left(self._order, True, key=condition)

    def _agreement(self, position: int, context: list[int], length: int) -> int:
        return min(_agreement(self.text, position, context, len(context)), length)


def _agreement(a: list[int], i: int, b: list[int], j: int) -> int:
    """Count the equal tokens before a[i] and before b[j], up to a boundary. Compare a few singly, then whole pieces."""
    limit = min(i, j)
    for depth in range(min(limit, 8)):
        token = a[i - 1 - depth]
        if token != b[j - 1 - depth] or token == BOUNDARY:
            return depth
    depth, step = min(limit, 8), 8
    while depth < limit:
        step = min(step, limit - depth)
        piece = a[i - depth - step : i - depth]
        if piece == b[j - depth - step : j - depth] and BOUNDARY not in piece:
            depth += step
            step *= 2
        elif step > 1:
            step //= 2
        else:
            break
    return depth


def _rank_before(text: list[int], end: int) -> int:
    """Return the sort order of the token before `end`; 0 if the context ended."""
    return (text[end - 1] + 1) % 2**32 if end > 0 else 0
