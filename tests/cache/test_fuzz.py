"""Run random calls and long conversations on core and oracle, whose answers must be equal, and damage snapshots.

AGENTSPEC_FUZZ_EXAMPLES sets the number of seeds for a longer run; `python -m tests.cache.fuzz` and `python -m
tests.cache.mutations` go on for as long as wanted.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentspec.cache import DraftPolicy, FinishedTurn
from tests.cache import mutations
from tests.cache.fuzz import Fuzzer
from tests.cache.streams import LARGEST, Pair, fibonacci

ROOT = Path(__file__).parents[2]
SEEDS = int(os.environ.get("AGENTSPEC_FUZZ_EXAMPLES", "16"))


def target(rng: random.Random, history: list[int], alphabet: list[int]) -> Iterator[int]:
    """Yield what a model might say: mostly a copy of a piece of its history, now and then something new."""
    while True:
        if history and rng.random() < 0.8:
            at = rng.randrange(len(history))
            yield from history[at : at + rng.randrange(1, 50)]
        elif rng.random() < 0.1:
            yield from fibonacci(rng.randrange(80), alphabet[0], alphabet[-1])
        else:
            yield from rng.choices(alphabet, k=rng.randrange(1, 9))


class Conversations:
    """Run two requests at a time, verified as an engine does. This reaches deeper states than single calls."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.alphabet = rng.choice([[3], [0, 1], [0, 1, LARGEST], list(range(12)), list(range(5000))])
        policy = DraftPolicy(
            cost=rng.choice([0.0, 0.01, 0.1]), min_match=rng.choice([1, 1, 2]), memory=rng.choice([4.0, 200.0])
        )
        self.pair = Pair(policy, rng.choice([None, 3000, 12000]))
        self.last: dict[tuple[str | None, str | None], list[int]] = {}
        self.turns: list[FinishedTurn] = []
        self.drafted = self.accepted = 0

    def turn(self, number: int) -> None:
        """Decode two requests side by side until they end. They may have the same session."""
        rng = self.rng
        requests = {f"{number}-{i}": self.begin(f"{number}-{i}") for i in range(2)}
        texts = {name: list(prompt) for name, (_, prompt, _) in requests.items()}
        drafts: dict[str, list[int]] = {name: [] for name in requests}
        for _ in range(rng.randrange(2, 40)):
            num_verified = {name: rng.choice([len(draft)] * 4 + [len(draft) // 2]) for name, draft in drafts.items()}
            for name, (_, _, source) in requests.items():
                texts[name] += self.verify(drafts[name][: num_verified[name]], source)
            names = rng.sample(sorted(requests), rng.choice([1, 2, 2]))  # a request may miss a step
            result = self.pair.step(
                names,
                [texts[n] for n in names],
                [rng.choice([0, 8, 32, 32]) for _ in names],
                [num_verified[n] for n in names],
            )
            assert (result.accepted <= result.drafted).all()
            drafts = {name: [] for name in requests} | dict(zip(names, result.lists(), strict=True))
        for name, (key, _, _) in requests.items():
            self.end(name, key, texts[name])

    def begin(self, name: str) -> tuple[tuple[str | None, str | None], list[int], Iterator[int]]:
        rng = self.rng
        key = rng.choice([("t", "a"), ("t", "a"), ("t", "b"), (None, "a"), ("u", None), (None, None)])
        before = self.last.get(key, [])
        prompt = before[: rng.choice([len(before), rng.randrange(len(before) + 1)])] + rng.choices(
            self.alphabet, k=rng.randrange(60)
        )
        self.pair.start(name, prompt, key[1], key[0])
        history = prompt + [token for text in self.last.values() for token in text[-400:]]
        return key, prompt, target(rng, history, self.alphabet)

    def verify(self, draft: list[int], source: Iterator[int]) -> list[int]:
        verified = []
        for token in draft:
            verified.append(next(source))
            self.drafted += 1
            if verified[-1] != token:
                return verified
            self.accepted += 1
        return [*verified, next(source)]

    def end(self, name: str, key: tuple[str | None, str | None], text: list[int]) -> None:
        action = self.rng.random()
        if action < 0.1:
            self.pair.abort(name)
            return
        turn = self.pair.finish(name, self.rng.choice([None, None, 20]))
        self.last[key] = text
        if turn is not None:
            self.turns.append(turn)
            if action < 0.2:
                self.pair.restore(self.rng.choice(self.turns))
        if action > 0.95 and key[1] is not None:
            self.pair.remove_session(*key)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_core_and_oracle_agree_on_conversations(seed: int) -> None:
    conversations = Conversations(seed)
    for number in range(12):
        conversations.turn(number)
        conversations.pair.check_stats()
    assert conversations.accepted > 0  # otherwise the test compared too little


@pytest.mark.parametrize("seed", range(SEEDS))
def test_core_and_oracle_agree_on_random_calls(seed: int, tmp_path: Path) -> None:
    fuzzer = Fuzzer(10_000_019 + seed, tmp_path)
    fuzzer.run(600)
    fuzzer.reload()
    fuzzer.run(200)
    assert fuzzer.done["propose"] > 0


def test_core_and_oracle_agree_on_many_random_calls(tmp_path: Path) -> None:
    """With this seed, an index is sorted at once while dropped documents wait to be removed."""
    Fuzzer(2, tmp_path).run(5000)


def test_damaged_snapshots_are_refused_or_harmless() -> None:
    loaded = mutations.run(0, 400)
    assert 40 < loaded < 360  # otherwise no damage passed the checks, or all did


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_program_that_damages_snapshots_compiles() -> None:
    """Only scripts/fuzz_snapshots.sh builds the program, and no other test runs that."""
    source = ROOT / "tests/cache/fuzz_snapshots.cpp"
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
