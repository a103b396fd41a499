"""Test the benchmarks of several replicas: they draft from shared text only, and play every request."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import replica_process  # isort: skip
import replicas  # isort: skip
import store  # isort: skip
from agentspec.testing.replay_types import ReplayError


def test_replicas_that_share_draft_as_one_and_others_do_not(traces: Path) -> None:
    """Each recording has three sessions of one turn, with the same answer."""
    one = replicas.replay(traces, "chat_mtbench", 1, "by session", "sqlite", shared=True)
    shared = replicas.replay(traces, "chat_mtbench", 3, "by session", "sqlite", shared=True)
    apart = replicas.replay(traces, "chat_mtbench", 3, "by session", "sqlite", shared=False)
    assert one.tokens == shared.tokens == apart.tokens == 27
    assert shared.accepted_by_source["group"] > 0 == apart.accepted_by_source["group"]
    assert one.steps <= shared.steps < apart.steps


def test_a_turn_goes_where_the_spread_says() -> None:
    around, stay = replicas.SPREADS["turn by turn"], replicas.SPREADS["by session"]
    assert [around(2, turn) % 4 for turn in range(4)] == [2, 3, 0, 1]
    assert [stay(2, turn) % 4 for turn in range(4)] == [2, 2, 2, 2]


def test_a_row_says_whether_its_target_is_met() -> None:
    assert store.at_least("f", 3.0, 2.0) == store.Row("f", 3.0, "at least 2", True)
    assert store.at_most("f", 3.0, 2.0) == store.Row("f", 3.0, "at most 2", False)


def test_a_replica_plays_whole_requests(tmp_path: Path) -> None:
    text = np.tile(np.random.default_rng(0).integers(5, 90, 50), 400).astype(np.int32)  # drafts are long and right
    replica = replica_process.Replica(f"sqlite:///{tmp_path}/log.db", 0, text, 2)
    served = replica.serve(time.monotonic(), 3.0)
    assert list(served) == ["first", "own", "second", "copy"]
    assert all(found["finished"] > 0 for found in served.values())
    assert served["first"]["tokens"] == served["own"]["tokens"]
    assert served["second"]["tokens"] == served["copy"]["tokens"]
    for found in served.values():
        assert found["steps"] == len(found["calls"]) < found["tokens"] / 4
    replica.close()


def test_a_replica_whose_process_ends_is_an_error_and_no_wait(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], traces: Path
) -> None:
    process = replica_process.Process("nonsense://", 0, np.zeros(8, np.int32), 1)
    with pytest.raises(ReplayError, match="a replica's process has ended in listen"):
        process.begin("listen", np.zeros(8, np.int32), 4, 1.0)()
    process.close()
    assert "nonsense" in capfd.readouterr().err

    def fail(*_: object) -> Iterator[store.Row]:
        yield store.Row("f", 1.0)
        raise ReplayError("it has ended")

    for part in ("bytes_a_token", "restored", "shared_by"):
        monkeypatch.setattr(store, part, fail)
    assert store.main(["--traces", str(traces)]) == 1
    assert "error: it has ended" in capfd.readouterr().err


def test_a_delay_is_measured_from_one_replica_to_another(tmp_path: Path) -> None:
    known = 32
    text = np.random.default_rng(1).integers(5, 100_000, 64).astype(np.int32)
    one, other = (replica_process.Replica(f"sqlite:///{tmp_path}/log.db", n, text, 1) for n in range(2))
    heard: list[float | None] = []
    for replica in (one, other):
        replica.listen(text[::-1].copy(), known, 0.2)  # the tenant's log is followed from here on
    listening = threading.Thread(target=lambda: heard.append(other.listen(text, known, 10.0)))
    listening.start()
    said = one.say(text)
    listening.join()
    assert heard[0] is not None and heard[0] > said - 0.01
    assert one.listen(text[1:], 8, 0.1) is not None  # its own text
    for replica in (one, other):
        replica.close()
