"""Test several real servers on one store: any of them serves any session, and no failure of Redis changes a text."""

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from agentspec import AgentClient
from agentspec.client.answers.reply import Reply
from agentspec.testing.redis_server import RedisServer
from agentspec.testing.server import ModelServer
from demo.agent import Agent
from demo.tasks import FIRST_HELD_OUT_SEED, make_task
from tests.end_to_end.conftest import DRAFTER, ENVIRONMENT, MODEL, PRICED
from tests.end_to_end.test_restart import all_stored, complete, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.store]

OPTIONS = ("--max-model-len", "2048", "--max-num-seqs", "4")
FIRST_STEPS = 6
"""Decode steps within which a session that moved must be drafted from. A step takes some 10 ms here."""
SOON = 10.0
"""Seconds within which servers must read each other's turns and erasures. It takes some 20 ms on an idle machine."""
TASKS = (700, 701, 702, 703)
"""Numbers of the held-out tasks that the agents work on."""
HYBRID = {"method": "arctic", "model": str(DRAFTER), "num_speculative_tokens": 3, "enable_suffix_decoding": True}


@contextmanager
def running(*servers: ModelServer) -> Iterator[None]:
    """Start the servers side by side, and stop them."""
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            server.stop()


def new_server(
    folder: Path, name: str, store: str, *options: str, model: Path = MODEL, agentspec: bool = True
) -> ModelServer:
    """Return a server, not yet started, that records its steps in ``folder / f"{name}.jsonl"``."""
    recorded = ("--record", str(folder / f"{name}.jsonl")) if agentspec else ()
    return ModelServer(
        model,
        agentspec=agentspec,
        options=(*OPTIONS, *recorded, *options),
        name="demo",
        log=folder / f"{name}.log",
        environment={**ENVIRONMENT, "AGENTSPEC_STORE": store},
    )


def question(number: int) -> str:
    """Return a prompt with its own answer, although answers share phrases."""
    task = make_task(FIRST_HELD_OUT_SEED + 500 + number)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "user", "content": task.request}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


class Roaming:
    """Send the turns of one session to the servers in rotation, like a load balancer that knows no sessions."""

    def __init__(self, name: str, servers: Sequence[ModelServer], *, meet: bool = False) -> None:
        self.id = name
        self.meet = meet  # wait until the other servers have read each turn
        self.servers = list(servers)
        self.replies: list[Reply[Any]] = []
        self._messages: list[Any] = []

    def chat(self, message: str, **options: Any) -> Reply[Any]:
        """Ask the next server, with the conversation so far."""
        self._messages.append({"role": "user", "content": message})
        server = self.servers[len(self.replies) % len(self.servers)]
        heard = {other: followed(other, "delivered") for other in self.servers if self.meet and other is not server}
        with AgentClient(base_url=server.base_url, model="demo", api_key="none", store=None) as client:
            reply: Reply[Any] = client.chat(self._messages, session=self.id, **options)
        self._messages.append({"role": "assistant", "content": reply.text})
        self.replies.append(reply)
        for other, count in heard.items():
            if followed(other, "logs"):
                wait_for(lambda other=other, count=count: followed(other, "delivered") > count)  # type: ignore[misc]
        return reply


@dataclass
class Work:
    """Hold an agent's work on one task: its texts, and each turn's accepted tokens by source."""

    texts: list[str]
    accepted: list[Counter[str]]


def work(task: int, *servers: ModelServer, meet: bool = False) -> Work:
    """Let the demo's agent do a task, each turn on the next server."""
    session = Roaming(f"task-{task}", servers, meet=meet)
    agent = Agent(make_task(FIRST_HELD_OUT_SEED + task), session)  # type: ignore[arg-type]
    while not agent.done:
        agent.turn()
    counts = [reply.speculation.accepted_by_source if reply.speculation else {} for reply in session.replies]
    return Work([reply.text for reply in session.replies], [Counter(count) for count in counts])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Return what vLLM without the extension writes for each task. Its server stops afterwards."""
    plain = new_server(tmp_path_factory.mktemp("plain"), "plain", "memory://", agentspec=False)
    with running(plain):
        return {task: work(task, plain).texts for task in TASKS}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """Start a Redis server that is empty after it was killed and restarted."""
    with RedisServer({"appendonly": "no"}) as started:
        yield started


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[tuple[ModelServer, ModelServer]]:
    """Start two servers on one Redis server."""
    folder = tmp_path_factory.mktemp("pair")
    one, other = (new_server(folder, name, redis.url, *PRICED) for name in ("one", "other"))
    with running(one, other):
        yield one, other


def persisted(server: ModelServer) -> int:
    """Return the number of turns that the store has acknowledged."""
    count: int = server.stats()["store"]["writer"]["persisted"]
    return count


def followed(server: ModelServer, figure: str) -> int:
    """Return a figure of the follower, which reads other servers' turns and erasures."""
    count: int = server.stats()["store"]["follower"][figure]
    return count


def complete_and_store(server: ModelServer, prompt: str, session: str, salt: str | None = None) -> str:
    """Return a completion, once the store has acknowledged its turn."""
    text, _ = complete(server, prompt, session, salt=salt)
    wait_for(lambda: all_stored(server))
    return text


def meet(*servers: ModelServer) -> None:
    """Wait until the store has every turn, and no server has read one of another's for a second.

    The next turn that a server reads is then the next request's.
    """
    wait_for(lambda: all(map(all_stored, servers)))
    counts: list[int] = []
    while counts != (counts := [followed(server, "delivered") for server in servers]):
        time.sleep(1.0)


def said_before(figures: dict[str, Any]) -> int:
    """Return the tokens that a request accepted from earlier requests' text, in its session or another."""
    accepted: dict[str, int] = figures["accepted_by_source"]
    return accepted["session"] + accepted["global"]


def first_steps(server: ModelServer, session: str) -> list[dict[str, Any]]:
    """Return the first decode steps of a session's only request on a server, from the step record."""
    lines = [json.loads(line) for line in server.log.with_suffix(".jsonl").read_text().splitlines()]
    return [line for line in lines if line["session"] == session][:FIRST_STEPS]


def test_a_session_that_moved_drafts_from_its_first_steps(pair: tuple[ModelServer, ModelServer]) -> None:
    """The scope excludes the tenant's corpus, which drafts the same text and reaches the other server as soon.

    A step takes some 3 ms here, in which the loader's thread often waits for the interpreter's lock, so some sessions
    are late: about a quarter on an idle machine, and most on a busy one. Sessions move until three were in time.
    Without loading, all would be late.
    """
    one, other = pair
    sessions: list[str] = []

    def in_time(session: str) -> bool:
        return any(step["source"] == "session" and step["accepted"] > 0 for step in first_steps(other, session))

    while sum(map(in_time, sessions)) < 3:
        assert len(sessions) < 64, [first_steps(other, session) for session in sessions[:8]]
        number = len(sessions)
        sessions.append(f"moving-{number}")
        text = complete_and_store(one, question(10 + number), sessions[-1])
        again, _ = complete(other, question(10 + number), sessions[-1], scope="session")
        assert again == text
        wait_for(lambda: bool(first_steps(other, sessions[-1])))  # the record is written after the steps


def test_what_one_server_says_the_other_drafts_at_once(pair: tuple[ModelServer, ModelServer]) -> None:
    """The other server follows the tenant's corpus, so another session there drafts from it within a moment."""
    for number, (writer, reader) in enumerate((pair, pair[::-1])):
        complete(reader, question(4 + number), "warm")  # the tenant's log is followed from the first request on
        meet(*pair)
        prompt, before = question(1 + number), followed(reader, "delivered")
        text = complete_and_store(writer, prompt, f"said-{number}")
        wait_for(lambda count=before: followed(reader, "delivered") > count, SOON)  # type: ignore[misc] # noqa: B023
        again, figures = complete(reader, prompt, f"read-{number}")
        assert again == text
        assert figures["accepted_by_source"]["global"] > 20
        assert figures["accepted_by_source"]["session"] == 0


def test_the_agent_moves_turn_by_turn(pair: tuple[ModelServer, ModelServer], expected: dict[int, list[str]]) -> None:
    for server in pair:
        complete(server, question(9), "warm")  # so that both follow the tenant's log
    meet(*pair)
    done = work(TASKS[0], *pair, meet=True)
    assert done.texts == expected[TASKS[0]]
    assert len(done.texts) > 1
    # The last turn is in the session and in the tenant's corpus, and either draft may be more probable.
    assert all(turn["session"] + turn["global"] > 10 for turn in done.accepted[1:]), done.accepted
    assert sum(turn["session"] for turn in done.accepted) > 0, done.accepted


def test_an_erased_session_is_gone_everywhere_within_a_moment(pair: tuple[ModelServer, ModelServer]) -> None:
    """The salt excludes other sessions, whose answers share phrases with this one, so no draft may be left."""
    one, other = pair
    prompt, salt = question(3), "erased"
    text = complete_and_store(one, prompt, "erased", salt)
    complete(other, prompt, "erased", salt=salt)
    again, figures = complete(other, prompt, "erased", salt=salt)
    assert again == text
    assert said_before(figures) > 20
    wait_for(lambda: all_stored(other))
    before = followed(other, "erased")
    answer = httpx.delete(f"{one.base_url}/agentspec/sessions/erased", headers={"X-Cache-Salt": salt}, timeout=600)
    assert answer.status_code in (200, 202), answer.text
    wait_for(lambda: followed(other, "erased") > before, SOON)
    for session, scope in (("erased", "session"), ("another", "tenant")):
        again, figures = complete(other, prompt, session, scope=scope, salt=salt)
        assert again == text
        assert said_before(figures) == 0


def test_failures_change_no_text_and_the_loss_is_named(
    pair: tuple[ModelServer, ModelServer], redis: RedisServer, expected: dict[int, list[str]]
) -> None:
    one, other = pair
    one.kill()
    alone = work(TASKS[1], other)
    assert alone.texts == expected[TASKS[1]]
    one.start()
    # The restarted server knows the session that the other one served.
    back = work(TASKS[1], one, other)
    assert back.texts == expected[TASKS[1]]
    assert back.accepted[0]["session"] + back.accepted[0]["global"] > 10

    assert redis.process_id is not None
    wait_for(lambda: all_stored(one) and all_stored(other))
    os.kill(redis.process_id, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        frozen = work(TASKS[2], *pair)
        took = time.monotonic() - begin
    finally:
        os.kill(redis.process_id, signal.SIGCONT)
    assert frozen.texts == expected[TASKS[2]]
    assert took < 300
    for server in pair:
        wait_for(lambda server=server: all_stored(server), seconds=600)  # type: ignore[misc]

    held = {server: persisted(server) for server in pair}
    redis.kill()
    redis.start()
    after = work(TASKS[3], *pair)
    assert after.texts == expected[TASKS[3]]
    for server in pair:
        wait_for(lambda server=server: server.stats()["store"]["lost"] > 0)  # type: ignore[misc]
        assert server.stats()["store"]["lost"] <= held[server]
        wait_for(lambda server=server: "records that it had acknowledged" in server.log.read_text())  # type: ignore[misc]
        assert "agentspec_store_lost_records_total" in server.text("/metrics")
        assert not [name for name in server.stats()["counters"] if name.startswith("errors")]


def test_suffix_indexes_and_a_speculator_on_both_servers(
    tmp_path: Path, redis: RedisServer, expected: dict[int, list[str]]
) -> None:
    """With a draft model beside the suffix indexes, all sources are used, wherever a session goes."""
    options = ("--speculative-config", json.dumps(HYBRID), "--tenant", "hybrid")
    one, other = (new_server(tmp_path, name, redis.url, *options) for name in ("one", "other"))
    with running(one, other):
        before = {server: _accepted(server) for server in (one, other)}
        for task in TASKS:
            for first in (one, other):  # the second time, the other server begins, and the text is known
                second = other if first is one else one
                assert work(task, first, second).texts == expected[task]
        for server in (one, other):
            gained = _accepted(server) - before[server]
            assert all(gained[source] > 0 for source in ("model", "session", "global")), gained


def _accepted(server: ModelServer) -> Counter[str]:
    return Counter(server.stats()["accepted_by_source"])


def test_copies_of_a_model_share_one_sqlite_file_and_another_model_does_not(tmp_path: Path) -> None:
    """Engines of several processes share the file if they serve the same model, whatever folder it is in."""
    copy, changed = (Path(shutil.copytree(MODEL, tmp_path / name)) for name in ("copy", "changed"))
    config = json.loads((changed / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.01
    (changed / "config.json").write_text(json.dumps(config))
    store = f"sqlite:///{tmp_path / 'log.db'}"
    one, same = (
        new_server(tmp_path, name, store, *PRICED, model=model) for name, model in (("one", MODEL), ("same", copy))
    )
    prompt = question(6)
    with running(one, same):
        complete(same, question(7), "warm")
        text = complete_and_store(one, prompt, "on-one-file")
        again, figures = complete(same, prompt, "on-one-file")
        assert again == text
        assert said_before(figures) > 20
        meet(one, same)
        prompt, before = question(8), followed(same, "delivered")
        text = complete_and_store(one, prompt, "on-one-file-too")
        wait_for(lambda: followed(same, "delivered") > before, SOON)
        again, figures = complete(same, prompt, "another")
        assert again == text
        assert figures["accepted_by_source"]["global"] > 20
    other = new_server(tmp_path, "other", store, *PRICED, model=changed)
    with running(other):
        assert other.stats()["store"]["restored"] == 0
        _, figures = complete(other, prompt, "on-one-file-too")
        assert said_before(figures) == 0
