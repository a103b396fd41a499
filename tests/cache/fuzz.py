"""Random operations on core and oracle side by side, many and fast: python -m tests.cache.fuzz --operations 10000000

Append, propose, step, merge drafts, finish, abort, restore, evict, remove, save and load come in random order, on
texts that repeat themselves and each other; every answer of the core must be that of the oracle.
"""

import argparse
import itertools
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentspec.cache import SCOPES, Budget, DraftPolicy, FinishedTurn, HistoryWindow
from agentspec.cache.arguments import MAX_VOCAB
from tests.cache.streams import LARGEST, Pair, fibonacci

TENANTS = (None, "t", "t", "u")
SESSIONS = (None, "a", "a", "b", "c")
GROUPS = (None, None, "g", "h")
PARENTS = (None, None, None, "a", "b", "c", "d")
OWNERS = (None, "t", "x", "y", "y")
CHANCES = (0.0, 1.0, 1.0, 0.999, 0.999, 0.9, 0.4)
ROOMS = (0, 1, 1, 2, 2, 3, 4, 32)  # mostly short drafts: the oracle is slow
WINDOWS = (None, "1 weights", "3 weights", "2 epochs", "1 tokens", "30 tokens", "300 tokens")
ALPHABETS = ([3], [0, 1], [0, 1, LARGEST], list(range(12)), list(range(5000)))


class Fuzzer:
    """Call core and oracle at random. `run` counts operations; a step is an append and a propose for each request."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.alphabet = self.rng.choice(ALPHABETS)
        self.policy = self.draw_policy()
        self.limits = self.draw_limits()
        self.time_share = self.rng.choice([1.0, 1.0, 0.6, 0.1])  # share of the steps that have time beside drafting
        # Where the alphabet has more tokens, prompts hold placeholders that the model cannot say.
        self.vocab_size = {12: 10, 5000: 4000}.get(len(self.alphabet), MAX_VOCAB)
        window = self.rng.choice(WINDOWS)
        history = HistoryWindow.parse(window) if window else None
        self.pair = Pair(self.policy, vocab_size=self.vocab_size, history=history, **self.limits)
        self.texts: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        self.turns: list[FinishedTurn] = []
        self.said: list[list[int]] = [[1, 2, 1]]
        self.number = 0
        self.done: Counter[str] = Counter()

    def draw_policy(self) -> DraftPolicy:
        rng = self.rng
        depth, factor = rng.choice([4, 64]), rng.choice([1.0, 4.0])
        return rng.choice(
            [
                DraftPolicy(cost=rng.choice([0.0, 0.01, 0.1, 0.5])),
                DraftPolicy(
                    cost=0.01, max_draft=rng.choice([0, 1, 7]), prior_weight=rng.choice([1.0, 8.0]), memory=3.0
                ),
                DraftPolicy(cost=0.01, min_match=2),
                DraftPolicy(cost=0.02, rerank=False, memory=5.0),
                DraftPolicy.fixed(max_depth=depth, max_spec_factor=factor),
            ]
        )

    def draw_limits(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "max_tokens": rng.choice([300, 1500, 3000]),
            "per_tenant": Budget(rng.choice([None, 400, 2000])),
            "per_session": Budget(rng.choice([None, 100, 800])),
        }

    def run(self, operations: int) -> None:
        names = [
            "start",
            "extend",
            "propose",
            "step",
            "merge_drafts",
            "finish",
            "abort",
            "restore",
            "load",
            "remove",
            "free",
            "evict",
            "reload",
            "publish",
            "begin_period",
        ]
        weights = [10, 30, 20, 30, 20, 9, 1, 4, 1, 0.5, 0.3, 1, 0.05, 0.1, 1]
        for name in self.rng.choices(names, weights, k=operations):
            if name in ("extend", "propose", "step", "merge_drafts", "finish", "abort") and not self.texts:
                name = "start"
            if name == "start" and len(self.texts) >= 6:
                name = "finish"
            getattr(self, name)()
            if name not in ("extend", "propose", "step"):
                self.done[name] += 1

    def fresh(self) -> list[int]:
        """Return a little text, mostly a piece of what was said before."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.6:
            text = rng.choice(self.said)
            at = rng.randrange(len(text) + 1)
            return text[at : at + rng.randrange(12)]
        if kind < 0.7:
            return fibonacci(rng.randrange(30), self.alphabet[0], self.alphabet[-1])
        if kind < 0.75:
            return [rng.choice(self.alphabet)] * rng.randrange(40)
        return rng.choices(self.alphabet, k=rng.randrange(6))

    def verified(self, request: str) -> list[int]:
        draft = self.drafts.pop(request, [])
        return draft[: self.rng.randrange(len(draft) + 1)] + self.sayable(self.fresh()[: self.rng.randrange(1, 5)])

    def prediction(self) -> list[int]:
        """Return a prediction: mostly none, or else a text that was said, changed a little."""
        if self.rng.random() < 0.7:
            return []
        said = self.sayable(self.rng.choice(self.said))
        at = self.rng.randrange(len(said) + 1)
        return said[:at] + self.sayable(self.fresh()) + said[at + self.rng.randrange(3) :]

    def sayable(self, tokens: list[int]) -> list[int]:
        return [token % self.vocab_size for token in tokens]

    def start(self) -> None:
        rng = self.rng
        base = rng.choice(self.said)
        prompt = (base if rng.random() < 0.5 else base[: rng.randrange(len(base) + 1)]) + self.fresh()
        self.number += 1
        names = (rng.choice(SESSIONS), rng.choice(GROUPS), rng.choice(TENANTS))
        scope = rng.choice(SCOPES) if rng.random() < 0.3 else "tenant"
        ends = rng.choices(self.alphabet, k=rng.randrange(3))
        owners = (rng.choice(OWNERS), rng.choice(OWNERS))
        more = (scope, ends, *owners, rng.choice(PARENTS), self.prediction(), self.prediction())
        self.pair.start(f"r{self.number}", prompt, names[0], names[2], names[1], *more)
        self.texts[f"r{self.number}"] = prompt

    def extend(self) -> None:
        request = self.rng.choice(list(self.texts))
        new = self.verified(request)
        self.pair.extend(request, new)
        self.done["append"] += 1
        self.texts[request] = self.texts[request] + new

    def propose(self) -> None:
        request = self.rng.choice(list(self.texts))
        self.drafts[request] = self.pair.propose([request], self.rng.choice(ROOMS))[0]
        self.done["propose"] += 1
        if self.rng.random() < 0.05:
            self.pair.check_candidates(request)

    def step(self) -> None:
        rng = self.rng
        batch = rng.sample(list(self.texts), rng.randrange(1, len(self.texts) + 1))
        num_verified = [rng.randrange(len(self.drafts.get(request, [])) + 1) for request in batch]
        for request in batch:
            text = self.texts[request]
            if rng.random() < 0.03:  # the engine takes tokens back
                text = text[: max(len(text) - rng.choice([1, 1, 2, 5, 40]), 1)]
            self.texts[request] = text + self.verified(request)
        max_draft = [rng.choice(ROOMS) for _ in batch]
        self.done["append"] += len(batch)
        self.done["propose"] += len(batch)
        texts = [self.texts[request] for request in batch]
        result = self.pair.step(batch, texts, max_draft, num_verified, has_time=rng.random() < self.time_share)
        self.drafts.update(zip(batch, result.lists(), strict=True))

    def merge_drafts(self) -> None:
        """Merge drafts, mostly into requests with a draft, and often with its first tokens at other probabilities."""
        rng = self.rng
        batch = rng.choices(list(self.texts), k=rng.randrange(1, len(self.texts) + 1))
        offers = []
        for request in batch:
            draft = self.drafts.get(request, [])
            tokens = draft[: rng.choice([0, 0, 1, len(draft)])] + self.sayable(self.fresh()[: rng.choice([0, 1, 1, 3])])
            offers.append([(token, rng.choice(CHANCES)) for token in tokens])
        cost = rng.choice([None, 0.0, 0.0, 0.2])
        result = self.pair.merge_drafts(batch, offers, [rng.choice(ROOMS) for _ in batch], cost)
        self.drafts.update(zip(batch, result.lists(), strict=True))
        if rng.random() < 0.1:
            self.pair.check_candidates(rng.choice(batch))

    def finish(self) -> None:
        request = self.rng.choice(list(self.texts))
        name = ("w", self.number) if self.rng.random() < 0.6 else None
        turn = self.pair.finish(request, self.rng.choice([None, None, 3]), name)
        self.said = [*self.said[-30:], self.texts.pop(request)[-200:]]
        self.drafts.pop(request, None)
        if turn is not None:
            self.turns = [*self.turns[-30:], turn]
        self.pair.check_stats()

    def abort(self) -> None:
        request = self.rng.choice(list(self.texts))
        self.pair.abort(request)
        del self.texts[request]
        self.drafts.pop(request, None)

    def restore(self) -> None:
        """Restore a turn, mostly as it was finished; some in another session, renamed, made by hand or orphaned."""
        rng = self.rng
        if not self.turns:
            return
        turn = rng.choice(self.turns)
        for change in rng.choices(
            ("none", "session", "family", "name", "owner", "hand-made", "cut"), [6, 2, 1, 2, 2, 1, 1], k=2
        ):
            if change == "session":
                turn = replace(turn, session=rng.choice(SESSIONS), tenant=rng.choice(TENANTS))
            elif change == "family":
                turn = replace(turn, family=rng.choice(PARENTS))
            elif change == "name":
                turn = replace(turn, writer=rng.choice(["", "w", "x"]), number=rng.randrange(40))
            elif change == "owner":
                turn = replace(turn, owner=rng.choice(OWNERS))
            elif change == "hand-made":
                turn = replace(turn, parent=0)
            elif change == "cut":
                turn = replace(turn, prompt_tail=turn.prompt_tail[: rng.randrange(len(turn.prompt_tail) + 1)])
        if rng.random() < 0.3:
            self.pair.learn_from(turn)
        self.pair.restore(turn, held_only=rng.random() < 0.4)
        self.pair.check_stats()

    def load(self) -> None:
        rng = self.rng
        session, group = rng.choice(["a", "b", "c"]), rng.choice(["g", "h"])
        names = ((session, None, None), (None, group, None), (None, None, session), (None, None, None))
        self.pair.check_loaded(rng.choice(TENANTS), *rng.choices(names, [6, 3, 3, 3])[0])

    def remove(self) -> None:
        if self.rng.random() < 0.9:
            self.pair.remove_session(self.rng.choice(TENANTS), self.rng.choice(["a", "b", "c"]))
        else:
            self.pair.forget_tenant(self.rng.choice(TENANTS))
        self.pair.check_stats()

    def free(self) -> None:
        self.pair.free_session(self.rng.choice(TENANTS), self.rng.choice(["a", "b", "c"]))
        self.pair.check_stats()

    def evict(self) -> None:
        self.limits = self.draw_limits()
        self.pair.resize(**self.limits)
        for _ in range(self.rng.randrange(4)):
            self.pair.catch_up(self.rng.choice([1, 50, 500, 2**62]))
        self.pair.check_stats()

    def begin_period(self) -> None:
        self.rng.choice([self.pair.begin_weights, self.pair.begin_epoch])()

    def publish(self) -> None:
        """Publish a public corpus, early or late in a run; a second one replaces it."""
        texts = self.rng.choices(self.said, k=self.rng.randrange(4))
        self.pair.publish([*texts, self.fresh()])
        self.pair.check_stats()

    def reload(self) -> None:
        """Save and load the core. End the running requests first, as they are not part of a snapshot."""
        while self.texts:
            self.abort()
        self.pair.reload(self.folder, **self.limits)
        self.pair.check_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=5000, help="calls before a new world is begun")
    options = parser.parse_args()
    done: Counter[str] = Counter()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for world in itertools.count():
            if done.total() >= options.operations:
                break
            fuzzer = Fuzzer(options.seed * 1_000_003 + world, Path(folder))
            try:
                fuzzer.run(options.world)
            except BaseException:
                print(f"seed {options.seed}, world {world}, after {dict(fuzzer.done)}")
                raise
            done += fuzzer.done
            if world % 20 == 19:
                print(f"{done.total():,} operations, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{done.total():,} operations agree: {dict(done)}")


if __name__ == "__main__":
    main()
