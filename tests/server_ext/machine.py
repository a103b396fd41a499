"""Stand in for a machine: how long decode steps take on it, and how fast it decodes by a price of drafts."""

import functools
import random

from agentspec.server_ext.pricing.step_cost import StepCost


class Machine:
    """Take steps of ``base + per_row * rows + per_token * drafted`` seconds, with noise (a share of a step) and pauses.

    surcharge: what a step with any draft costs by itself, in seconds.
    """

    def __init__(
        self, per_token: float, noise: float = 0.05, base: float = 0.01, per_row: float = 0.001, surcharge: float = 0.0
    ) -> None:
        self.random = random.Random(7)
        self.per_token, self.noise, self.base, self.per_row = per_token, noise, base, per_row
        self.surcharge = surcharge
        self.pace = 1.0
        self.pauses = 0.0

    def seconds(self, rows: int, drafted: int) -> float:
        step = self.base + self.per_row * rows + self.per_token * drafted + (self.surcharge if drafted else 0.0)
        if self.random.random() < self.pauses:
            return step * self.random.uniform(3, 500)
        return step * self.pace * max(0.2, self.random.gauss(1.0, self.noise))

    def true_cost(self, rows: int) -> float:
        return self.per_token * rows / (self.base + self.per_row * rows)

    def run(self, cost: StepCost, steps: int, rows: int = 1, longest: int = 16, share: float = 0.7) -> None:
        """Observe steps in which each row has a draft of up to ``longest`` tokens, ``share`` of the time."""
        for _ in range(steps):
            of = [self.random.randint(0, longest) if self.random.random() < share else 0 for _ in range(rows)]
            cost.observe(rows, sum(of), self.seconds(rows, sum(of)))


@functools.cache
def drafted_for(chance: float, price: float) -> tuple[int, float]:
    """Return the draft length up to 16 with the most tokens for the price, and the tokens that its step yields.

    chance: the probability that a token is right. Most is the largest tokens / (1 + price * length).
    """
    brings = [1.0]
    for length in range(1, 17):
        brings.append(brings[-1] + chance**length)
    return max(enumerate(brings), key=lambda item: item[1] / (1 + price * item[0]))


def tokens_per_second(machine: Machine, rows: int, price: float | None, steps: range = range(200, 1000)) -> float:
    """Return the speed of decoding at a price; None: at the price that is measured meanwhile. Only ``steps`` count."""
    luck, cost = random.Random(3), StepCost()
    tokens = elapsed = 0.0
    for number in range(steps.stop):
        if number == steps.start:
            tokens = elapsed = 0.0
        now = round(cost.at(rows).cost if price is None else price, 3)
        drafts = [drafted_for(chance, now) for chance in luck.choices((0.3, 0.6, 0.8, 0.95), k=rows)]
        drafted = sum(length for length, _ in drafts)
        seconds = machine.seconds(rows, drafted)
        tokens += sum(expected for _, expected in drafts)
        elapsed += seconds
        cost.observe(rows, drafted, seconds)
    return tokens / elapsed
