"""Run three minutes of the soak, and test what it would notice."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import soak
from soak_traffic import Said

from agentspec.cache.store import MemoryStore, NewEntry, encode
from agentspec.testing.server import ModelServer, ServerFailedError
from tests.store.helpers import turn

OPTIONS = argparse.Namespace(max_bytes=1_000_000, store_bytes=8_000_000, times=10.0)


def kept_promises() -> soak.Run:
    """Return what a run measures on a server that keeps its promises."""
    sample = {"resident_bytes": 1e9, "cache_bytes": 1e6, "store_bytes": 8e6}
    said = Said(tokens=1_000_000, drafts=[(float(second), 3.0) for second in range(40)])
    histogram = {"bounds": [0.0005, 0.001, 0.01], "counts": [10, 1, 0, 0]}
    stats = {
        "counters": {"started": 7},
        "seconds": {"beside": histogram},
        "store": {"writer": {"dropped": 0, "refused": 0, "trimmed": 9}},
    }
    return soak.Run("redis", [sample] * 30, said, stats, missing=0, left=0, spare_bytes=0, slow_pieces=0.0)


def unmet(run: soak.Run) -> list[str]:
    return [row["check"] for row in soak.checks(run, OPTIONS) if not row["met"]]


def test_every_broken_promise_is_noticed() -> None:
    assert unmet(kept_promises()) == []
    small, late = Said(tokens=1_000, drafts=kept_promises().said.drafts), kept_promises()
    late.stats["seconds"]["beside"]["counts"][2] = 1
    slow = kept_promises()
    slow.stats["seconds"]["beside"]["counts"] = [0, 5, 6, 0]  # usual work over 1 ms
    dropped, erring = kept_promises(), kept_promises()
    dropped.stats["store"]["writer"] |= {"refused": 1, "trimmed": 0}
    erring.stats["counters"]["errors_propose"] = 1
    worse = Said(tokens=1_000_000, drafts=[(float(second), 3.0 - 0.03 * second) for second in range(40)])
    grown: list[dict[str, Any]] = [
        {"resident_bytes": 1e9 + 1e7 * number, "cache_bytes": 1e6, "store_bytes": 8e6} for number in range(30)
    ]
    over = [{"resident_bytes": 1e9, "cache_bytes": 1.2e6, "store_bytes": 13e6}] * 30
    for run, count in (
        (dataclasses.replace(kept_promises(), said=small), 1),
        (dataclasses.replace(kept_promises(), said=worse), 1),
        (dataclasses.replace(kept_promises(), missing=1), 1),
        (dataclasses.replace(kept_promises(), left=1), 1),
        (dataclasses.replace(kept_promises(), samples=grown), 1),
        (dataclasses.replace(kept_promises(), samples=over), 2),
        (late, 2),
        (slow, 2),
        (dropped, 2),
        (erring, 1),
    ):
        assert len(unmet(run)) == count, unmet(run)


def test_few_repeated_answers_at_the_end_may_be_chance() -> None:
    mixed, low = [7.0, 30.0, 6.0, 31.0, 32.0, 5.0, 8.0], [7.0, 5.0, 6.0, 8.0, 7.0, 5.0, 6.0]
    drafts = [(0.0, rate) for rate in (*mixed, *mixed, *mixed, *low)]
    assert unmet(dataclasses.replace(kept_promises(), said=Said(tokens=1_000_000, drafts=drafts))) == []
    drafts = [(0.0, rate) for rate in (*mixed, *mixed, *mixed, *[1.0] * 7)]
    assert len(unmet(dataclasses.replace(kept_promises(), said=Said(tokens=1_000_000, drafts=drafts)))) == 1


def test_a_run_that_is_too_short_to_judge_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = kept_promises()
    for short in (
        dataclasses.replace(run, samples=run.samples[:2]),
        dataclasses.replace(run, said=Said(drafts=run.said.drafts[:7])),
    ):
        monkeypatch.setattr(soak, "soak", lambda *_, run=short: run)
        assert soak.main(["--minutes", ".1", "--store", "redis"]) == 1
        assert "error: redis: too few answers to compare; let it run longer" in capsys.readouterr().err
    for minutes in ("0", "-1", "nan", "inf", "an hour"):
        with pytest.raises(SystemExit):
            soak.main(["--minutes", minutes])
        assert "--minutes: must be a number above 0" in capsys.readouterr().err


def test_a_server_that_died_is_said_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = ModelServer(soak.MODEL, log=tmp_path / "server.log")
    server.log.write_text("out of memory\n")
    with pytest.raises(ServerFailedError, match=r"does not answer: .*\nout of memory"):
        soak._stats(server)


def test_lost_and_erased_sessions_are_found_in_the_store() -> None:
    store = MemoryStore()
    for number, name in enumerate(("a", "b", "c")):
        record = dataclasses.replace(turn(f"key-{name}", number), session_name=name, created=100.0 + number)
        store.append("ns", [NewEntry(record.session, encode(record))])
    finished = [(0.0, "trimmed"), (110.0, "a"), (110.0, "b"), (110.0, "aborted"), (110.0, "c")]
    said = Said(finished=finished, touched={"aborted", "c"}, erased=["gone"])
    assert soak.compare(store, said) == (0, 0)
    said.finished.append((111.0, "lost"))
    said.erased.append("c")
    assert soak.compare(store, said) == (1, 1)
    assert soak.compare(MemoryStore(), said) == (3, 0)  # an empty store has lost them all


@pytest.mark.engine
@pytest.mark.store
@pytest.mark.alone
def test_three_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--minutes", "3", "--max-bytes", "1000000", "--store-bytes", "1000000", "--times", "2", "--json"])
    rows = json.loads(capsys.readouterr().out)
    broken = {(row["store"], row["check"]): row["value"] for row in rows if not row["met"]}
    stalls = 0
    for store in ("redis", "sqlite"):
        broken.pop((store, "records that retention has removed"), None)  # a store's least limit takes eight minutes
        # Other work on two cores makes CPU times longer. Of two thousand steps, a few may take over 1 ms and three
        # times the usual.
        broken.pop((store, "steps with more than 1 ms of work beside drafting"), None)
        stalls += broken.pop((store, "of these, steps with more than 3 times the usual work"), 0)
    assert stalls <= 20
    assert not broken
