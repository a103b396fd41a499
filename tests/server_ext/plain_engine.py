"""Help the tests of the engine-side logic without vLLM: a real suffix index, a real store, plain steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.cache import HistoryWindow, Scope
from agentspec.cache.store import TurnRecord, open_store
from agentspec.cache.store.codec import decode
from agentspec.server_ext.engine import DraftingEngine, make_cache
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from tests.store.helpers import LOGS

TEXT = list(range(100, 160))
NONE = np.zeros(0, dtype=np.int32)


def in_memory(settings: Settings, vocab_size: int = 1000, max_draft: int = 16) -> Persistence:
    """Return the persistence of an engine whose store is in memory."""
    return Persistence(make_cache(settings, vocab_size, max_draft), open_store("memory://"), LOGS, 0)


class Engine:
    """Decode requests whose output is given, and verify drafts against it greedily."""

    def __init__(
        self,
        url: str = "memory://",
        tenant: str | None = None,
        record: Path | None = None,
        scope: Scope = "tenant",
        snapshot: Path | None = None,
        history_window: HistoryWindow | None = None,
    ) -> None:
        settings = Settings(
            tenant=tenant, store=url, record=str(record) if record else None, history_window=history_window
        )
        self.store = open_store(url)
        self.persistence = Persistence(make_cache(settings, 1000, 16), self.store, LOGS, 100)
        self.proposer = DraftingEngine(settings, self.persistence, snapshot=snapshot)
        self.proposer.warm_up()
        self.tenant, self.named_tenant, self.scope = tenant, tenant, scope

    def run(
        self,
        request_id: str,
        prompt: Sequence[int],
        output: Sequence[int],
        session: str | None = None,
        group: str | None = None,
        *,
        parent: str | None = None,
        final: bool = False,
        detailed: Any = False,
    ) -> int:
        """Decode ``output``. Return the number of steps."""
        tokens = np.zeros((1, len(prompt) + len(output) + 32), dtype=np.int32)
        full = [*prompt, *output]
        length, draft, steps = len(prompt), [0][:0], 0
        batch = Batch((request_id,), np.zeros(1, np.int32))
        while length < len(full):
            accepted = 0
            while accepted < len(draft) and length + accepted < len(full) - 1:
                if draft[accepted] != full[length + accepted]:
                    break
                accepted += 1
            new = length + accepted + 1
            tokens[0, :new] = full[:new]
            identity = Identity(
                self.tenant,
                session,
                group,
                self.scope,
                parent_session=parent,
                named_tenant=self.named_tenant,
                final=final,
            )
            started = [] if steps else [NewRequest(request_id, prompt, identity, detailed=detailed)]
            step = Step(
                started=started,
                batch=batch,
                tokens=tokens,
                lengths=np.array([new], np.int32),
                max_draft_tokens=np.array([max(0, len(full) - new - 1)], np.int32),
                num_verified_draft_tokens=np.array([len(draft)], np.int32),
                num_draft_tokens=len(draft),
            )
            (draft,) = self.proposer.propose(step)
            length, steps = new, steps + 1
        self.proposer.finish(request_id, len(output))
        self.proposer.finish_if_idle()  # as if vLLM had no further step
        return steps

    def turns(self) -> list[TurnRecord]:
        """Return the stored turns."""
        assert self.persistence._writer.flush(60)
        records = (decode(entry.payload) for log in self.store.namespaces("") for entry in self.store.read(log))
        return [record for record in records if isinstance(record, TurnRecord)]


class Rows:
    """Step rows by hand, whose tokens never repeat or always do."""

    def __init__(self, **settings: object) -> None:
        given = Settings(store="memory://", **settings)  # type: ignore[arg-type]
        self.proposer = DraftingEngine(given, in_memory(given))
        self.tokens = np.zeros((4, 500), dtype=np.int32)
        self.lengths = np.zeros(4, dtype=np.int32)
        self.costs: list[float | None] = []
        self.batch = Batch((), np.zeros(0, np.int32))
        step = self.proposer.cache.step

        def noted(*args: Any, cost: float | None = None, **names: Any) -> Any:
            self.costs.append(cost)
            return step(*args, cost=cost, **names)

        self.proposer.cache.step = noted  # type: ignore[method-assign]

    def step(self, ids: tuple[str, ...], drafted: int = 0, seconds: float | None = None) -> list[list[int]]:
        """Take a step. Every row gets one more token, and ``drafted`` tokens if that is not 0."""
        rows = [int(request_id) for request_id in ids]
        if self.batch.request_ids != ids:
            self.batch = Batch(ids, np.array(rows, np.int32))
        started = []
        for row, request_id in zip(rows, ids, strict=True):
            if not self.proposer.knows(request_id, 3):
                self.tokens[row, :3] = [900 + row, 910 + row, 920 + row]
                self.lengths[row] = 3
                started.append(NewRequest(request_id, self.tokens[row, :3].tolist(), Identity()))
            for _ in range(drafted + 1):
                self.tokens[row, self.lengths[row]] = 100 * row + self.lengths[row]
                self.lengths[row] += 1
        step = Step(
            started=started,
            batch=self.batch,
            tokens=self.tokens,
            lengths=self.lengths[rows],
            max_draft_tokens=np.full(len(rows), 8, np.int32),
            num_verified_draft_tokens=np.full(len(rows), drafted, np.int32),
            num_draft_tokens=drafted * len(rows),
            seconds=seconds,
        )
        drafts = self.proposer.propose(step)
        if started:
            self.proposer._turnover.advance(60.0, step.started, step)  # however slow this machine is
            self.proposer._leave_batch()
        return drafts

    def repeat(self) -> list[list[int]]:
        """Take a step of the batch as it is, in which each row is given 30 tokens that repeat."""
        for row in self.batch.rows.tolist():
            length = int(self.lengths[row])
            self.tokens[row, length : length + 30] = 100 * row + np.tile([7, 8, 9], 10)
            self.lengths[row] += 30
        none, room = np.zeros(len(self.batch), np.int32), np.full(len(self.batch), 8, np.int32)
        return self.proposer.propose(
            Step(self.batch, (), self.tokens, self.lengths[self.batch.rows], room, none, num_draft_tokens=0)
        )

    def tokens_and_steps(self, request_id: str) -> tuple[int, int]:
        figures = self.proposer.request(request_id)
        assert figures is not None
        return figures["tokens"], figures["steps"]
