"""Rebuild the whole prompts of stored turns. A stored turn holds only the tokens that were new to its session."""

import numpy as np

from agentspec.cache.core import HASH_BLOCK, context_hashes
from agentspec.cache.store.records import TurnRecord
from agentspec.cache.types import Int32Array


class SessionContexts:
    """Hold the contexts of one session while its turns are read, oldest first.

    A turn continues the earlier context whose hash it names as its parent. If there is no such context, for example
    because retention removed the oldest turns, the turn begins a text whose beginning is missing.
    """

    def __init__(self) -> None:
        self._texts: list[Int32Array] = []
        self._missing: list[int] = []  # for each text, how many tokens its beginning lacks
        self._places: dict[int, list[tuple[int, int]]] = {}  # hash of a context -> texts that have it, its length there

    def add(self, turn: TurnRecord) -> Int32Array | None:
        """Add a turn. Return its whole prompt, int32 [P], or None if the prompt's beginning is missing."""
        place = self._find(turn) if turn.kept else None
        if place is None:
            kept, missing = np.empty(0, np.int32), turn.kept
        else:
            kept, missing = self._texts[place[0]][: place[1]], self._missing[place[0]]
        prompt = np.concatenate([kept, turn.prompt_tail])
        context = np.concatenate([prompt, turn.response])
        if place is not None and place[1] == len(self._texts[place[0]]):
            index = place[0]  # the turn continues the text's end, so all places in the text stay valid
            self._texts[index] = context
        else:
            index = len(self._texts)
            self._texts.append(context)
            self._missing.append(missing)
            if not missing:
                self._places.setdefault(turn.block, []).append((index, turn.kept // HASH_BLOCK * HASH_BLOCK))
        self._note(turn, index, len(context))
        return None if missing else prompt

    def _find(self, turn: TurnRecord) -> tuple[int, int] | None:
        if turn.parent in self._places:
            return self._places[turn.parent][0]
        start, count = turn.kept // HASH_BLOCK * HASH_BLOCK, turn.kept % HASH_BLOCK
        for index, length in self._places.get(turn.block, ()):
            rest = self._texts[index][length : length + count]
            if len(rest) == count and int(context_hashes(rest, turn.block, start)[-1]) == turn.parent:
                return index, length + count
        return None

    def _note(self, turn: TurnRecord, index: int, length: int) -> None:
        """Note the places of the turn's own tokens: block boundaries, the end of its prompt and its own end."""
        own = np.concatenate([turn.prompt_tail, turn.response])
        hashes = context_hashes(own, turn.parent, turn.kept)
        ends = {len(turn.prompt_tail), len(own), *range(HASH_BLOCK - turn.kept % HASH_BLOCK, len(own) + 1, HASH_BLOCK)}
        for end in sorted(ends - {0}):
            self._places.setdefault(int(hashes[end - 1]), []).append((index, length - len(own) + end))
