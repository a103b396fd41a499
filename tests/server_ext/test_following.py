"""Several engines on one store: what one says the others draft from, and what one erases none drafts from."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.cache.store import RecordReader, Retention, TurnRecord, open_store, snapshot_path
from agentspec.errors import StoreUnavailableError
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from tests.store.helpers import LOGS, wait_until
from tests.timing import assert_fast

TENANT = "t"
NS = LOGS.of(TENANT)


LIFE_SECONDS = "agentspec.cache.store.follower.LIFE_SECONDS"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may hold up a follower for a second, and the steps would get no drafts."""
    monkeypatch.setattr(LIFE_SECONDS, 30.0)


class Replica:
    """An engine on a store that others share; it takes steps as vLLM's worker makes it."""

    def __init__(self, url: str, snapshot: Path | None = None, preload: int = 100) -> None:
        self.store = open_store(url)
        settings = Settings(verify_cost=0.001)
        self.persistence = Persistence(self.store, LOGS, preload)
        self.engine = DraftingEngine(settings, self.persistence, 100_000, 16, snapshot=snapshot)
        self.cache = self.engine.cache
        self.texts: dict[str, list[int]] = {}
        self.count = 0
        self.engine.warm_up()

    def begin(
        self, prompt: list[int], session: str | None = "s", group: str | None = None, tenant: str = TENANT
    ) -> str:
        self.count += 1
        name = f"r{self.count}"
        identity = Identity(tenant=tenant, session=session, group=group, session_name=session)
        self.texts[name] = list(prompt)
        self.step(NewRequest(name, np.array(prompt, np.int32), identity))
        return name

    def step(self, *started: NewRequest) -> dict[str, list[int]]:
        """Take one step of all requests, none of which gets tokens. Return their drafts."""
        names = list(self.texts)
        width = max([len(text) for text in self.texts.values()], default=0) + 1
        table = np.zeros((max(len(names), 1), width), np.int32)
        for row, name in enumerate(names):
            table[row, : len(self.texts[name])] = self.texts[name]
        lengths = np.array([len(self.texts[name]) for name in names], np.int32)
        room, none = np.full(len(names), 4, np.int32), np.zeros(len(names), np.int32)
        batch = Batch(tuple(names), np.arange(len(names), dtype=np.int32))
        step = Step(batch, list(started), table, lengths, room, none, 0)
        return dict(zip(names, self.engine.propose(step), strict=True))

    def end(self, name: str, response: list[int]) -> None:
        self.texts[name] += response
        self.step()
        del self.texts[name]
        self.engine.finish(name)

    def say(self, prompt: list[int], response: list[int], session: str | None = "s", **names: str) -> None:
        self.end(self.begin(prompt, session, **names), response)

    def drafts(self, context: list[int], session: str | None = None, **names: str) -> list[int]:
        """What a request with this prompt is drafted, after steps that index what waits."""
        name = self.begin(context, session, **names)
        try:
            self.cache.catch_up()
            return self.step()[name]
        finally:
            del self.texts[name]
            self.engine.finish(name, 0)

    def follower(self, name: str) -> int:
        return int(self.persistence.stats()["follower"][name])

    def wait(self, condition: Callable[[], object]) -> None:
        """Take steps until the condition holds."""
        wait_until(lambda: (self.step(), condition())[1])

    def stop(self) -> None:
        """Close it when it has read what it said, so that its snapshot stands behind that."""
        assert self.persistence._writer.flush(60)
        wait_until(lambda: self.persistence.places().get(NS) == self.store.newest(NS))
        self.engine.close()

    def erase(self, session: str) -> None:
        self.engine.session("begin", f"job-{session}", "erase", session, [TENANT])
        answer: dict[str, Any] = {}  # it is told once
        wait_until(lambda: answer.update(self.engine.session("poll", f"job-{session}")) or answer)
        assert "error" not in answer, answer


Start = Callable[..., Replica]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    replicas: list[Replica] = []

    def start(**options: object) -> Replica:
        replicas.append(Replica(f"sqlite:///{tmp_path}/log.db", **options))  # type: ignore[arg-type]
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.engine.close()


def text(begin: int, count: int = 40) -> list[int]:
    return list(range(begin, begin + count))


def stored(replica: Replica) -> list[TurnRecord]:
    found = RecordReader().read(replica.store, NS)
    return [record for _, record in found if isinstance(record, TurnRecord)]


def meet(*replicas: Replica, session: str | None = "s", **names: str) -> None:
    """Let a request of the tenant be in each, so that all follow its log and hold the session."""
    for number, replica in enumerate(replicas):
        replica.say([1, 2, 3], text(90_000 + 100 * number), session, **names)
        wait_until(partial(replica.follower, "logs"))
        assert replica.persistence._writer.flush(60)


def test_what_one_says_the_other_drafts_from(start: Start) -> None:
    a, b = start(), start()
    meet(a, b)
    a.say([1, 2, 3], text(100))
    a.say([1, 2, 3], text(200), "elsewhere", group="g")
    b.wait(lambda: b.follower("applied") >= 2)
    assert b.drafts(text(100, 5), "s") == text(105, 4)
    assert b.cache.has_session(TENANT, "s") and not b.cache.has_session(TENANT, "elsewhere")
    assert b.drafts(text(200, 5)) == text(205, 4)  # from the tenant's corpus
    assert b.drafts(text(200, 5), tenant="u") == []
    assert a.follower("applied") <= 1 and a.follower("skipped") >= 2  # only what `meet` said
    wait_until(lambda: b.follower("learned") == b.follower("delivered") >= 2)


def test_a_turn_that_comes_while_its_session_waits_to_be_applied_is_in_it(start: Start) -> None:
    """Once applied, the session counts as loaded, so nobody would read the turn again."""
    a, b = start(), start()
    meet(a, b, session="other")

    def say(response: list[int]) -> None:
        before = b.follower("delivered")
        a.say([1, 2, 3], response)
        wait_until(lambda: b.follower("delivered") > before)

    say(text(100))
    b.persistence.load_again(TENANT, "s")
    wait_until(b.persistence.has_loaded)
    say(text(200))  # b is idle
    b.wait(lambda: not b.persistence.has_loaded())
    assert not b.cache.needs_load(TENANT, "s")
    b.texts["alone"] = text(200, 5)
    b.step(NewRequest("alone", np.array(text(200, 5), np.int32), Identity(tenant=TENANT, session="s", scope="session")))
    b.cache.catch_up()
    assert b.step()["alone"] == text(205, 4)


def test_a_step_does_not_wait_while_a_turn_of_another_process_is_put_into_the_cache(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(), start()
    meet(a, b)
    begun, go_on = threading.Event(), threading.Event()
    restore = b.cache.restore

    def slow(turn: FinishedTurn, *, held_only: bool = False) -> None:
        if held_only:
            begun.set()
            assert go_on.wait(60)
        restore(turn, held_only=held_only)

    monkeypatch.setattr(b.cache, "restore", slow)
    a.say([1, 2, 3], text(500), "large")
    assert a.persistence._writer.flush(60) and begun.wait(60)
    held = b.begin([1, 2, 3], "large")
    wait_until(lambda: b.persistence.has_loaded(), 60)
    begin = time.monotonic()
    b.step()
    assert time.monotonic() - begin < 30  # a step that waits goes on when the thread does, after a minute
    assert b.cache.needs_load(TENANT, "large")
    go_on.set()
    b.wait(lambda: not b.cache.needs_load(TENANT, "large"))
    b.end(held, text(600))
    assert b.drafts(text(500, 5), "large") == text(505, 4)


def test_a_group_that_is_held_is_followed(start: Start) -> None:
    a, b = start(), start()
    meet(a, b, session="x", group="g")
    b.wait(lambda: not b.cache.needs_load(TENANT, group="g"))
    a.say([1, 2, 3], text(100), "fresh", group="g")
    before = b.follower("applied")
    b.wait(lambda: b.follower("applied") > before)
    b.cache.catch_up()
    name = b.begin(text(100, 5), "another", group="g")
    b.cache.catch_up()
    draft = b.cache.propose([name], 4, cost=0.0)[0]
    assert (draft.token_ids.tolist(), draft.source) == (text(105, 4), "group")


def test_an_unknown_session_is_loaded_whole_when_a_request_names_it(start: Start) -> None:
    a, b = start(), start()
    meet(a, b, session="other")
    a.say([1, 2, 3], text(100))
    a.say([1, 2, 3, *text(100)], text(200))
    b.wait(lambda: b.follower("applied") >= 2)
    assert b.cache.needs_load(TENANT, "s")
    b.begin([5], "s")
    b.wait(lambda: not b.cache.needs_load(TENANT, "s"))
    a.say([1, 2, 3, *text(100), *text(200)], text(300))
    b.wait(lambda: b.follower("applied") >= 3)
    assert b.drafts(text(300, 5), "s") == text(305, 4)
    assert len(b.store.sessions(NS)) == 2


def test_a_tenants_corpus_is_loaded_at_its_first_request(start: Start) -> None:
    a = start()
    a.say([1, 2, 3], text(100))
    assert a.persistence._writer.flush(60)
    b = start()
    time.sleep(0.1)
    assert b.cache.needs_load(TENANT)  # nobody has asked
    b.begin([4, 5, 6])
    b.wait(lambda: not b.cache.needs_load(TENANT))
    assert b.drafts(text(100, 5)) == text(105, 4)
    assert b.cache.needs_load("u")


def test_a_large_session_is_there_whole_with_the_step_that_takes_it(start: Start, tmp_path: Path) -> None:
    a = start()
    said = np.random.default_rng(1).integers(0, 90_000, (6, 20_000)).tolist()
    for part in said:
        a.say(part[:19_000], part[19_000:])
    assert a.persistence._writer.flush(60)
    b = start(preload=0)
    name = b.begin([1, 2, 3])
    wait_until(b.persistence.has_loaded)
    b.step()
    assert b.persistence.stats()["adopted_sessions"] == 1
    b.texts[name] += said[2][5_000:5_010]  # long before all of it could have been indexed
    b.step()
    assert b.cache.stats().pending < 10_000  # the tenant's corpus, and the request's own text
    draft = b.cache.propose([name], 4)[0]
    assert (draft.token_ids.tolist(), draft.source) == (said[2][5_010:5_014], "session")
    b.wait(lambda: not b.cache.needs_load(TENANT, "s"))
    again = b.begin([1])
    b.texts[again] += said[5][19_500:19_510]
    b.cache.catch_up()
    assert b.step()[again] == said[5][19_510:19_514]


def test_what_was_read_of_a_session_that_is_erased_here_is_dropped(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower has a turn of another engine in hand, and learns from it, while the session is erased."""
    a, b = start(), start()
    meet(a, b)
    read, goes_on = threading.Event(), threading.Event()
    learn = a.cache.learn_from

    def slowly(turn: FinishedTurn) -> int:
        read.set()
        assert goes_on.wait(60)
        return learn(turn)

    monkeypatch.setattr(a.cache, "learn_from", slowly)
    b.say([1, 2, 3], text(100), "gone")
    assert b.persistence._writer.flush(60)
    assert read.wait(60)
    a.erase("gone")
    goes_on.set()
    b.say([1, 2, 3], text(200), "stays")
    a.wait(lambda: a.drafts(text(200, 5)))
    assert a.drafts(text(100, 5)) == []
    b.wait(lambda: not b.drafts(text(100, 5)))  # a turn from before it knows of the erasure would be erased, too
    b.say([1, 2, 3], text(300), "gone")  # used again
    a.wait(lambda: a.drafts(text(300, 5)))


def test_an_erasure_reaches_the_others_at_once(start: Start, tmp_path: Path) -> None:
    a, b = start(), start(snapshot=tmp_path / "b.snapshot")
    meet(a, b)
    a.say([1, 2, 3], text(100))
    b.wait(lambda: b.drafts(text(100, 5), "s"))
    assert b.engine._keeper is not None and b.engine._keeper.save()
    running = b.begin([1, 2, 3], "s")
    a.erase("s")
    wait_until(lambda: b.follower("erased"))  # without a step or a request
    assert not b.cache.has_session(TENANT, "s")
    assert not (tmp_path / "b.snapshot").exists()
    assert b.drafts(text(100, 5)) == [] and a.drafts(text(100, 5)) == []
    b.end(running, text(300))  # it was running while its session was erased
    assert b.drafts(text(300, 5)) == []
    assert b.persistence._writer.flush(60)
    assert [record for record in stored(a) if record.session == "s"] == []
    a.say([1, 2, 3], text(500))  # the name may be used again, here at once
    b.wait(lambda: b.drafts(text(500, 5)) == text(505, 4))
    assert a.drafts(text(500, 5), "s") == text(505, 4)


def test_an_erasure_is_known_to_the_others_within_a_moment(start: Start) -> None:
    a, b = start(), start()
    meet(a, b)

    def measure() -> dict[str, float]:
        a.say([1, 2, 3], text(100))
        assert a.persistence._writer.flush(60)
        before, begin = b.follower("erased"), time.monotonic()
        a.erase("s")
        wait_until(lambda: b.follower("erased") > before)
        return {"seconds": time.monotonic() - begin}

    assert_fast(measure, seconds=2.0)  # some 20 ms


def test_a_turn_that_was_on_its_way_is_erased_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = start(), start()
    meet(a, b, session="other")
    append = b.store.append

    def late(*args: object, **options: object) -> list[str]:
        a.erase("s")
        wait_until(lambda: b.follower("erased"))
        return append(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(b.store, "append", late)
    b.say([1, 2, 3], text(100))
    wait_until(lambda: b.follower("erased"))
    monkeypatch.undo()
    a.wait(lambda: a.follower("erased") == 1)  # the second tombstone, by the other replica
    assert [record for record in stored(a) if record.session == "s"] == []
    assert a.drafts(text(100, 5)) == [] and b.drafts(text(100, 5)) == []


def test_an_erasure_is_known_as_this_processs_own_also_where_it_is_read_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for another's, and what was said in the session just then was erased again."""
    a = start()
    a.say([1, 2, 3], text(100))
    assert a.persistence._writer.flush(60)
    wait_until(lambda: a.persistence.places().get(NS) == a.store.newest(NS))
    erase_session = a.store.erase_session

    def slow(*args: Any, **options: Any) -> Any:
        erased = erase_session(*args, **options)
        time.sleep(0.3)
        return erased

    monkeypatch.setattr(a.store, "erase_session", slow)
    a.erase("s")
    wait_until(lambda: a.persistence.places()[NS] == a.store.newest(NS))
    assert a.follower("erased") == 0


def test_a_turn_that_ends_just_before_its_session_is_erased_is_not_stored_behind_that(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = start()
    meet(a)
    name, goes_on, finish = a.begin([1, 2, 3]), threading.Event(), a.cache.finish
    a.persistence.submit(lambda store: goes_on.wait(60))  # the erasure waits behind it
    a.engine.session("begin", "job", "erase", "s", [TENANT])

    def finished(request_id: str, **options: Any) -> FinishedTurn | None:
        turn = finish(request_id, **options)
        goes_on.set()
        wait_until(lambda: a.engine.session("poll", "job"))
        return turn

    monkeypatch.setattr(a.cache, "finish", finished)
    a.end(name, text(100))
    assert a.persistence._writer.flush(60)
    assert stored(a) == [] and a.drafts(text(100, 5)) == []


def test_a_turn_that_was_on_its_way_is_erased_again_also_when_the_store_fails_then(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(), start()
    meet(a, b, session="other")
    append, erase, failures = b.store.append, b.store.erase_session, [0]

    def late(*args: Any, **options: Any) -> list[str]:
        a.erase("s")
        wait_until(lambda: b.follower("erased"))
        return append(*args, **options)

    def fails(*args: Any, **options: Any) -> Any:
        failures[0] += 1
        if failures[0] < 3:
            raise StoreUnavailableError("away")
        return erase(*args, **options)

    monkeypatch.setattr(b.store, "append", late)
    monkeypatch.setattr(b.store, "erase_session", fails)
    b.say([1, 2, 3], text(100))
    wait_until(lambda: b.follower("erased"))
    wait_until(lambda: failures[0])
    wait_until(lambda: not [record for record in stored(a) if record.session == "s"])


def test_an_erasure_is_known_to_the_others_also_where_the_store_holds_nothing_of_the_session_but_its_tombstone(
    start: Start,
) -> None:
    a, b = start(), start()
    meet(a, b)
    a.erase("s")
    wait_until(lambda: b.follower("erased"))
    running = b.begin([1, 2, 3], "s")
    a.erase("s")
    wait_until(lambda: b.follower("erased") == 2)
    b.end(running, text(100))
    assert b.persistence._writer.flush(60)
    assert stored(a) == [] and b.drafts(text(100, 5)) == []


def test_what_was_loaded_but_not_applied_is_erased_too(start: Start) -> None:
    a, b = start(), start()
    for number in range(100, 3000, 100):
        a.say([1, 2, 3], text(number))
    assert a.persistence._writer.flush(60)
    b.begin([1], "other")
    wait_until(
        lambda: b.persistence.apply_loaded(b.cache, 0.0) == 1
    )  # the rest of the batch waits in the engine's hands
    a.erase("s")
    wait_until(lambda: b.follower("erased"))
    for number in range(100, 3000, 100):
        assert b.drafts(text(number, 5)) == []


def test_a_restarted_engine_drafts_nothing_that_was_erased_meanwhile(start: Start, tmp_path: Path) -> None:
    first = start(snapshot=tmp_path / "snapshot")
    first.say([1, 2, 3], text(100))
    first.say([1, 2, 3], text(200), "kept")
    first.stop()
    assert (tmp_path / "snapshot").exists()
    other = start()
    other.erase("s")
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.drafts(text(200, 5)) == text(205, 4)
    assert again.drafts(text(100, 5)) == []
    assert not (tmp_path / "snapshot").exists()
    other.say([1, 2, 3], text(300), "more")
    again.wait(lambda: again.drafts(text(300, 5)) == text(305, 4))


# An erasure ends while the snapshot that still holds its session is renamed; then the process is killed.
_KILLED = """
import os, signal, sys
from pathlib import Path
from agentspec.cache import SuffixCache
from tests.server_ext.test_following import NS, Replica, text

folder = Path(sys.argv[1])
replica = Replica(f"sqlite:///{folder}/log.db", snapshot=folder / "snapshot")
replica.say([1, 2, 3], text(100))
replica.say([1, 2, 3], text(200), "kept")
replica.persistence._writer.flush(60)
while replica.persistence.places().get(NS) != replica.store.newest(NS):
    pass
save = SuffixCache.save

def renamed_too_late(cache, path, **names):
    save(cache, path, **names)
    content = path.read_bytes()
    replica.erase("s")
    assert not path.exists()
    path.write_bytes(content)
    os.kill(os.getpid(), signal.SIGKILL)

SuffixCache.save = renamed_too_late
replica.engine._keeper.save()
"""


def test_a_kill_between_a_snapshots_renaming_and_its_check_brings_nothing_back(start: Start, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False, cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert np.array(text(100), np.int32).tobytes() in (tmp_path / "snapshot").read_bytes()
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.drafts(text(100, 5)) == [] and again.drafts(text(100, 5), "s") == []
    assert again.drafts(text(200, 5)) == text(205, 4)
    assert not (tmp_path / "snapshot").exists()


def test_what_is_said_after_an_erasure_is_kept_though_the_log_was_not_followed_before(start: Start) -> None:
    before, again = start(), start()
    before.say([1, 2, 3], text(100))
    assert before.persistence._writer.flush(60)
    again.erase("s")
    name = again.begin([1, 2, 3], "s")
    wait_until(lambda: again.follower("logs") == 2)  # that of callers without keys, and the tenant's
    again.end(name, text(200))
    assert again.persistence._writer.flush(60)
    assert [record.response.tolist() for record in stored(again)] == [text(200)]


@pytest.mark.parametrize("followed", [False, True])
def test_a_snapshot_older_than_an_erasure_brings_nothing_back_of_a_session_that_is_used_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followed: bool
) -> None:
    """Whether or not a request had its log followed before the snapshot was checked."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    here.say([1, 2, 3], text(100))
    here.say([1, 2, 3], text(300), "stays")
    here.stop()
    elsewhere.erase("s")
    elsewhere.say([1, 2, 3], text(200))
    assert elsewhere.persistence._writer.flush(60)
    check = Persistence.catch_up_erasures

    def late(persistence: Persistence, cache: SuffixCache, places: Mapping[str, str]) -> bool:
        if followed:
            persistence._begin_following(NS, TENANT)
        return check(persistence, cache, places)

    monkeypatch.setattr(Persistence, "catch_up_erasures", late)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.has_session(TENANT, "stays") and not again.cache.has_session(TENANT, "s")
    again.begin([4, 5], "s")
    again.wait(lambda: not again.cache.needs_load(TENANT, "s"))
    assert again.drafts(text(200, 5), "s") == text(205, 4)
    assert again.drafts(text(100, 5), "s") == []


def test_nothing_is_drafted_from_a_snapshot_before_it_is_known_what_was_erased(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start waits for the store for so long only; then requests come."""
    from agentspec.cache.store import SQLiteStore
    from agentspec.server_ext.persistence.warm_restart import SnapshotKeeper

    first, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    first.say([1, 2, 3], text(100))
    first.say([1, 2, 3], text(300), "stays")
    first.stop()
    elsewhere.erase("s")
    asked, answers, tombstones = threading.Event(), threading.Event(), SQLiteStore.tombstones

    def slow(*args: Any, **more: Any) -> dict[str, str]:
        asked.set()
        assert answers.wait(60)
        return tombstones(*args, **more)

    monkeypatch.setattr(SQLiteStore, "tombstones", slow)
    monkeypatch.setattr(SnapshotKeeper, "wait_loaded", lambda *_: asked.wait(60) and b"")
    monkeypatch.setattr(Persistence, "warm_up", lambda *_: 0)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.has_session(TENANT, "s")
    assert again.drafts(text(100, 5)) == again.drafts(text(300, 5)) == []
    answers.set()
    again.wait(lambda: again.drafts(text(300, 5)))
    assert again.drafts(text(100, 5)) == [] and again.engine.stats()["steps_held_back"] > 0


def test_a_snapshot_older_than_what_the_store_keeps_is_deleted(start: Start, tmp_path: Path) -> None:
    """By then the tombstones of sessions that were erased since may be gone, too."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    here.say([1, 2, 3], text(100))
    here.stop()
    elsewhere.erase("s")
    elsewhere.store.trim(Retention(days=1e-9))
    assert not elsewhere.store.tombstones(NS)
    month_ago = time.time() - 31 * 86_400
    os.utime(tmp_path / "snapshot", (month_ago, month_ago))
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.tenants() == [] and not (tmp_path / "snapshot").exists()
    assert again.drafts(text(100, 5), "s") == []


def test_snapshots_of_models_that_are_not_served_any_more_are_deleted_with_age(start: Start, tmp_path: Path) -> None:
    def snapshot(store: str, log: str) -> Path:
        path = snapshot_path(f"sqlite:///{tmp_path}/{store}", log, 0)
        assert path is not None
        path.write_bytes(b"text")
        return path

    old, young, of_another_store = snapshot("log.db", "0.1"), snapshot("log.db", "0.2"), snapshot("other.db", "0.1")
    month_ago = time.time() - 31 * 86_400
    for path in (old, of_another_store):
        os.utime(path, (month_ago, month_ago))
    start(snapshot=snapshot("log.db", NS))
    wait_until(lambda: not old.exists())
    assert young.exists() and of_another_store.exists()


def test_a_snapshot_is_not_used_where_retention_may_have_taken_a_tombstone(start: Start, tmp_path: Path) -> None:
    """Retention by size or number takes tombstones that are younger than the snapshot."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100))
    here.stop()
    elsewhere.erase("s")
    elsewhere.say([1, 2, 3], text(300), "stays")
    assert elsewhere.persistence._writer.flush(60)
    elsewhere.store.trim(Retention(records=1))
    assert not elsewhere.store.tombstones(NS)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert not again.cache.has_session(TENANT, "s")
    assert again.drafts(text(100, 5), "s") == again.drafts(text(100, 5)) == []


def test_a_snapshot_is_used_as_long_as_what_came_after_it_is_in_the_store(start: Start, tmp_path: Path) -> None:
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100), "stays")
    here.stop()
    elsewhere.erase("s")
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.has_session(TENANT, "stays") and not again.cache.has_session(TENANT, "s")
    assert again.drafts(text(100, 5), "stays") == text(105, 4)


def test_running_requests_make_way_where_their_tenant_has_to_be_forgotten(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start waits for the store for so long only; nothing is drafted until the snapshot's text is gone."""
    from agentspec.server_ext.persistence.warm_restart import SnapshotKeeper

    first = start(snapshot=tmp_path / "snapshot")
    first.say([1, 2, 3], text(100))
    first.stop()
    asked, answers = threading.Event(), threading.Event()

    def unknown(store: Any, namespace: str, after: str) -> str:
        asked.set()
        assert answers.wait(60)
        return "trimmed"

    monkeypatch.setattr("agentspec.cache.store.SQLiteStore.history", unknown)
    monkeypatch.setattr(SnapshotKeeper, "wait_loaded", lambda *_: asked.wait(60) and b"")
    monkeypatch.setattr(Persistence, "warm_up", lambda *_: 0)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    running = again.begin(text(100, 5), "other")
    assert again.step()[running] == [] and not again.engine._keeper.is_loaded()  # type: ignore[union-attr]
    answers.set()
    again.wait(lambda: again.engine._keeper.is_loaded())  # type: ignore[union-attr]
    assert not again.cache.has_session(TENANT, "s") and again.drafts(text(100, 5)) == []
    assert "1 running requests go on without drafts" in caplog.text
    again.end(running, [7, 8])
    again.say([1, 2, 3], text(400), "next")
    assert again.drafts(text(400, 5)) == text(405, 4)


def test_a_snapshot_is_not_used_while_the_store_cannot_tell_what_was_erased(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentspec.cache.store import SQLiteStore

    first = start(snapshot=tmp_path / "snapshot")
    first.say([1, 2, 3], text(100))
    first.stop()

    def away(*_: object, **__: object) -> dict[str, str]:
        raise StoreUnavailableError("away")

    monkeypatch.setattr(SQLiteStore, "tombstones", away)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.tenants() == [] and again.drafts(text(100, 5)) == []


def test_an_engine_drafts_nothing_while_it_cannot_know_what_was_erased(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = start()
    meet(a)
    a.say([1, 2, 3], text(100))
    name = a.begin(text(100, 5))
    a.cache.catch_up()
    assert a.step()[name] == text(105, 4)
    follower = a.persistence._follower
    assert follower is not None
    monkeypatch.setattr(follower, "is_current", lambda: False)
    assert a.step()[name] == []
    assert a.engine.stats()["steps_held_back"] == 1
    monkeypatch.undo()
    assert a.step()[name] == text(105, 4)


CHILD = """
import sys, time
from tests.server_ext.test_following import Replica, text
replica = Replica(sys.argv[1])
wait = replica.store.wait
def slow(*args):
    found = wait(*args)
    time.sleep(0.3 if found else 0)
    return found
replica.store.wait = slow
name = replica.begin(text(100, 5), "probe")
while True:
    draft = replica.step()[name]
    print(int(draft[:4] == text(105, 4)), flush=True)
    replica.cache.catch_up()
    time.sleep(0.002)
"""


def test_a_snapshot_that_cannot_be_deleted_keeps_a_session_nowhere_else(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file system may have become read-only. Whoever erases is told, and a start on it is not held back."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100))
    here.say([1, 2, 3], text(300), "stays")
    assert here.persistence._writer.flush(60)
    wait_until(lambda: here.persistence.places().get(NS) == here.store.newest(NS))
    assert here.engine._keeper is not None and here.engine._keeper.save()
    unlink = Path.unlink

    def read_only(path: Path, missing_ok: bool = False) -> None:
        if path == tmp_path / "snapshot":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(AssertionError, match="snapshot: cannot be deleted, and holds what was erased: Read-only"):
        here.erase("s")
    assert [record.session for record in stored(here)] == ["stays"]
    wait_until(lambda: not elsewhere.cache.has_session(TENANT, "s"))
    elsewhere.erase("other")
    wait_until(lambda: here.follower("erased") == 1)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.engine._keeper is not None and again.engine._keeper.is_loaded()
    assert again.cache.has_session(TENANT, "stays") and not again.cache.has_session(TENANT, "s")


def test_what_retention_took_while_a_process_could_not_read_it_may_have_been_an_erasure(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIFE_SECONDS, 1.0)
    here, elsewhere = start(), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100))
    assert here.persistence._writer.flush(60)
    wait_until(lambda: here.persistence.places()[NS] == here.store.newest(NS))
    away = threading.Event()

    def wait(*_: object) -> list[str]:
        if not away.is_set():
            raise StoreUnavailableError("away")
        return type(here.store).wait(here.store, *_)  # type: ignore[arg-type]

    monkeypatch.setattr(here.store, "wait", wait)
    wait_until(lambda: here.persistence.stats()["follower"]["state"] == "open")
    elsewhere.erase("s")
    elsewhere.say([1, 2, 3], text(300), "stays")
    assert elsewhere.persistence._writer.flush(60)
    while elsewhere.store.trim(Retention(records=1)).more:
        pass
    assert not elsewhere.store.tombstones(NS)
    here.begin([4, 5], "other")
    time.sleep(1.1)
    away.set()
    wait_until(lambda: not here.persistence.is_current())
    while not here.persistence.is_current():  # requests come all the time
        assert here.drafts(text(100, 5)) == []
        here.begin([4, 5], "other")
    assert not here.cache.has_session(TENANT, "s") and here.drafts(text(100, 5), "s") == []
    here.wait(lambda: here.drafts(text(300, 5)) == text(305, 4))


def test_a_process_that_was_frozen_drafts_nothing_of_what_was_erased_meanwhile(start: Start, tmp_path: Path) -> None:
    a = start()
    a.say([1, 2, 3], text(100))
    assert a.persistence._writer.flush(60)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"sqlite:///{tmp_path}/log.db"], stdout=subprocess.PIPE, bufsize=0
    )
    try:
        assert child.stdout is not None
        while child.stdout.readline() != b"1\n":  # until it drafts what the other has said
            assert child.poll() is None
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        os.set_blocking(child.stdout.fileno(), False)
        while child.stdout.read(65_536):
            pass
        os.set_blocking(child.stdout.fileno(), True)
        a.erase("s")
        time.sleep(1.1)
        os.kill(child.pid, signal.SIGCONT)
        child.stdout.readline()  # of a step that it was in the middle of
        lines = [child.stdout.readline() for _ in range(300)]
        assert child.poll() is None
        assert lines.count(b"0\n") == 300, lines
    finally:
        child.kill()
        child.wait()
