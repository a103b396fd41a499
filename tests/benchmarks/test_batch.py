"""Test the simulated server: step times from published figures, the order of turns, and what a step verifies."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import batch  # isort: skip
import batch_replay  # isort: skip
import trace_files  # isort: skip
from agentspec.cache import DraftPolicy


class Oracle:
    """Draft the next two tokens of the recording, and one wrong token behind them."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def start(self, slot: int, turn: batch_replay.Turn) -> None:
        self.order.append(turn.name)

    def draft(self, rows: Sequence[batch_replay.Row], drafted: int) -> None:
        for row in rows:
            row.draft = [*row.turn.text[row.done : row.done + 2].tolist(), -1]

    def finish(self, row: batch_replay.Row) -> None:
        assert row.done == len(row.turn.text)


class Nothing(Oracle):
    """Never draft."""

    def draft(self, rows: Sequence[batch_replay.Row], drafted: int) -> None:
        for row in rows:
            row.draft = []


def recording(turns: int = 2, count: int = 2) -> list[dict[str, object]]:
    """Return calls of 4 response tokens: `count` sessions whose turns are mixed in the file."""
    return [
        {
            "session": session,
            "turn": turn,
            "group": 0,
            "prompt": np.array([1, 2], np.int32),
            "response": np.array([5, 6, 7, 2], np.int32),
        }
        for turn in range(turns)
        for session in range(count)
    ]


def test_a_and_b_are_the_line_through_the_published_times() -> None:
    assert batch.Model("m", ((1, 5.1), (11, 6.1), (21, 7.1))).step() == pytest.approx((5.0, 0.1))
    for model in batch.MODELS:
        a, b = model.step()
        assert all(a + b * rows == pytest.approx(ms, rel=0.06) for rows, ms in model.published)
        assert 0 < model.price(1) < model.price(128) < 1


def test_the_turns_of_a_session_run_in_order_and_the_next_session_takes_a_free_place() -> None:
    drafter = Nothing()
    batch_replay.replay(recording(count=3), 2, 4 * 8, drafter)
    assert drafter.order == ["0-0-0", "0-1-0", "0-0-1", "0-1-1", "0-2-0", "1-0-0", "0-2-1", "1-0-1"]


def test_a_recording_that_ends_starts_again_with_other_tokens() -> None:
    source = batch_replay.sessions(recording(count=1))
    first, again = next(source)[0], next(source)[0]
    assert first.begin == again.begin == 2 and first.end_token == first.text[-1] == 2
    assert again.end_token == again.text[-1] != 2
    assert not set(first.text.tolist()) & set(again.text.tolist())


def test_a_step_verifies_all_drafts_and_gives_what_is_right_and_one_more() -> None:
    # 4 tokens: one without a draft, then two accepted and the one after them. 3 tokens are drafted each time.
    counts = batch_replay.replay(recording(), 2, 16, Oracle())
    assert counts == batch_replay.Counts(steps=4, rows=8, tokens=16, drafted=12, drafted_rows=4)
    assert counts.milliseconds(10.0, 1.0) == 4 * 10.0 + (8 + 12) * 1.0


def test_no_drafts_are_the_same_server_without_speculation() -> None:
    counts = batch_replay.replay(recording(), 2, 16, Nothing())
    row = batch.figures("w", 2, batch.MODELS[0], "none", "", counts)
    assert (row["tokens"], row["drafted"], row["ratio"]) == (16, 0, 1.0)
    assert (row["ratio_async_3"], row["ratio_async_30"]) == (0.97, 0.7)


@pytest.mark.parametrize("priced", [True, False])
def test_the_serving_index_drafts_what_repeats_and_counts_repeat_to_the_digit(traces: Path, priced: bool) -> None:
    recorded = list(trace_files.records(traces, "chat_mtbench"))

    def run() -> batch_replay.Counts:
        policy = DraftPolicy() if priced else DraftPolicy.fixed()
        step = batch.MODELS[0].step() if priced else None
        return batch_replay.replay(recorded, 4, 400, batch_replay.IndexDrafter(policy, 4, 17, step))

    counts = run()
    assert counts.drafted > 0 and counts.tokens > counts.rows
    assert run() == counts
