"""Test that a session stays usable after loops that end early and functions that return awaitables."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentspec import AgentClient, AsyncAgentClient, Attempt, Budget, Progress, Reply, SessionBusyError, Stage
from agentspec.client.loops.budget import Account, BudgetSpentError

from .fake_server import FakeServer
from .loop_runs import add, calls, join_threads, short

INTERRUPTED = """
import os, signal, sys, threading
from agentspec import AgentClient

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
client = AgentClient(base_url=sys.argv[1], model="small", api_key="none", store=None)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
client.session("s").best_of("count", 3, lambda reply: 1.0)
"""
"""A program whose calls run when it is interrupted."""
HANGING = """
import asyncio, os, signal, sys, threading
from agentspec import AsyncAgentClient, Budget

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it

def hang(reply):
    if sys.argv[2] == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

async def main():
    client = AsyncAgentClient(base_url=sys.argv[1], model="small", api_key="none", store=None)
    result = await client.session("s").refine("go", hang, budget=Budget(seconds=2))
    print(result.stopped)

asyncio.run(main())
"""
"""An asyncio program whose critic, a plain function, never returns. It is interrupted, or its seconds are spent."""


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, which a shell's jobs in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestEndingEarly:
    def test_an_interrupted_program_does_not_wait_for_the_model(self) -> None:
        """Otherwise it would go on until all of its calls were answered."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
            command = [sys.executable, "-c", INTERRUPTED, url]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"

    @pytest.mark.parametrize(("how", "said"), [("interrupted", "KeyboardInterrupt"), ("spent", "seconds")])
    def test_an_asyncio_program_does_not_wait_for_a_function(self, how: str, said: str, server: FakeServer) -> None:
        """If Python joined the function's thread, the program would never end."""
        command = [sys.executable, "-c", HANGING, server.url, how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.stdout + ended.stderr).splitlines()[-1] == said

    def test_an_error_of_the_callback_frees_the_session(self, run: Any, server: FakeServer) -> None:
        def stop(progress: Progress) -> None:
            raise KeyboardInterrupt

        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            for loop, arguments in (
                ("refine", ("count", short)),
                ("best_of", ("count", 2, lambda reply: 1.0)),
                ("pipeline", ("count", [Stage("count", "Count")])),
            ):
                with pytest.raises(KeyboardInterrupt):
                    getattr(session, loop)(*arguments, on_progress=stop)
            before = len(session.messages)
            assert before == 2  # refine's first attempt is a turn of the session; the others commit nothing
            session.chat("go on")

    def test_tools_that_were_interrupted_are_answered(self, server: FakeServer) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        server.answers = [calls(("add", '{"a": 2}'), ("interrupt", "{}"), ("add", '{"a": 3}'))]
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            with pytest.raises(KeyboardInterrupt):
                session.run_tools("go", [add, interrupt], at_once=1)
            assert [message["content"] for message in session.messages[2:]][:2] == [
                "3",
                "error: cancelled before it ended",
            ]
            assert session.chat("go on").text  # the fake refuses unanswered tool calls

    def test_no_tool_begins_after_ctrl_c(self, server: FakeServer, default_interrupt: None) -> None:
        go_on, begun = threading.Event(), list[str]()

        def wait() -> None:
            begun.append("wait")
            os.kill(os.getpid(), signal.SIGINT)
            go_on.wait(60)

        def other() -> None:
            begun.append("other")

        server.answers = [calls(("wait", "{}"), ("other", "{}"))]
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            with pytest.raises(KeyboardInterrupt):
                session.run_tools("go", [wait, other], at_once=1)
            go_on.set()
            join_threads()
        assert begun == ["wait"]

    async def test_a_function_that_outlives_its_task_fails_in_no_thread(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on, failed = threading.Event(), threading.Event(), list[object]()
        monkeypatch.setattr(threading, "excepthook", failed.append)

        def critic(reply: Reply) -> str | None:
            begun.set()
            go_on.wait(60)
            return None

        async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
            task = asyncio.create_task(client.session("s").refine("count", critic))
            await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        go_on.set()
        join_threads()
        assert not failed

    @pytest.mark.parametrize(
        ("loop", "arguments"),
        [
            ("refine", ("count", short)),
            ("best_of", ("count", 2, lambda reply: 1.0)),
            ("pipeline", ("count", [Stage("count", "Count")])),
            ("run_tools", ("count", [add])),
        ],
    )
    async def test_a_cancelled_task_frees_the_session(self, server: FakeServer, loop: str, arguments: Any) -> None:
        server.hold = threading.Event()
        async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            task = asyncio.create_task(getattr(session, loop)(*arguments))
            while not server.chats:
                await asyncio.sleep(0.01)
            with pytest.raises(SessionBusyError):
                await session.chat("meanwhile")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.hold.set()
            assert session.messages == []
            await session.chat("go on")

    async def test_tools_of_a_cancelled_task_are_answered(self, server: FakeServer) -> None:
        async def wait() -> None:
            await asyncio.sleep(60)

        async def add(a: int) -> int:
            added.set()
            return a + 1

        added = asyncio.Event()
        server.answers = [calls(("wait", "{}"), ("add", '{"a": 3}'))]
        async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            task = asyncio.create_task(session.run_tools("go", [add, wait]))
            await added.wait()
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert session.messages[2]["content"] == "error: cancelled before it ended"
            assert session.messages[3]["content"] == "4"
            assert (await session.chat("go on")).text


async def test_functions_of_an_asyncio_loop_may_be_asynchronous(server: FakeServer) -> None:
    async def critic(reply: Reply) -> str | None:
        return short(reply)

    async def double(a: int) -> int:
        return 2 * a

    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
        assert (await client.session().refine("count", critic)).done
        server.answers = [calls(("double", json.dumps({"a": 4}))), {"content": "8"}]
        result = await client.session().run_tools("double", [double])
        assert result.attempts[0].tools[0].answer == "8"


async def test_any_callable_of_an_asyncio_loop_may_be_asynchronous(server: FakeServer) -> None:
    """Decorated functions, lambdas and objects return awaitables without being coroutine functions."""

    async def double(a: int) -> int:
        return 2 * a

    @functools.wraps(double)
    def traced(a: int) -> Any:
        return double(a)

    async def critic(reply: Reply) -> str | None:
        return short(reply)

    class Reward:
        async def __call__(self, reply: Reply) -> float:
            return 1.0

    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
        assert (await client.session().refine("count", lambda reply: critic(reply))).done
        assert (await client.session().best_of("count", 2, Reward())).attempts[0].score == 1.0
        server.answers = [calls(("double", json.dumps({"a": 4}))), {"content": "8"}]
        result = await client.session().run_tools("double", [traced])
        assert result.attempts[0].tools[0].answer == "8"


@pytest.mark.filterwarnings("error")
def test_a_synchronous_loop_refuses_what_returns_an_awaitable(server: FakeServer) -> None:
    async def critic(reply: Reply) -> str | None:
        return None

    with AgentClient(base_url=server.url, model="small", store=None) as client:
        result = client.session().refine("count", lambda reply: critic(reply))  # type: ignore[arg-type, return-value]
    assert result.stopped == "error" and "AsyncSession" in str(result.attempts[0].error)


def test_a_synchronous_loop_refuses_asynchronous_functions(server: FakeServer) -> None:
    async def critic(reply: Reply) -> str | None:
        return None

    with AgentClient(base_url=server.url, model="small", store=None) as client:
        result = client.session().refine("count", critic)  # type: ignore[arg-type]
    assert result.stopped == "error" and "AsyncSession" in str(result.attempts[0].error)


def test_both_clients_have_the_same_loops() -> None:
    from agentspec.client.loops.session_loops import AsyncLoops, Loops

    for name in ("refine", "best_of", "run_tools", "pipeline"):
        one, other = inspect.signature(getattr(Loops, name)), inspect.signature(getattr(AsyncLoops, name))
        assert list(one.parameters) == list(other.parameters)
        assert [p.default for p in one.parameters.values()] == [p.default for p in other.parameters.values()]


def test_no_call_begins_once_the_loop_has_ended() -> None:
    """A thread that outlives its loop, such as a tool's, would spend tokens that are no longer counted."""
    told: list[Progress] = []
    account = Account(Budget(requests=5), told.append, None, {})
    account.record(Attempt("attempt 1", account.begin({}).number))
    account.close()
    with pytest.raises(BudgetSpentError):
        account.begin({})
    account.record(Attempt("attempt 2", 2))
    assert account.result("done").spent.requests == 1 and [each.attempt.name for each in told] == ["attempt 1"]


def test_a_call_reserves_what_all_its_choices_may_take() -> None:
    account = Account(Budget(tokens=100), None, None, {})
    begun = account.begin({"n": 4, "max_tokens": 10})
    assert (begun.reserved, begun.options["max_tokens"]) == (40, 10)
    assert account.begin({"n": 2}, among=3).options["max_completion_tokens"] == 10  # a sixth of the 60 that are left
    account.end(begun, None, refused=True)
    assert account.begin({}).reserved == 80
    with pytest.raises(BudgetSpentError):
        account.begin({})


def test_progress_is_told_one_attempt_at_a_time() -> None:
    telling, told, twice = threading.Lock(), list[str](), list[str]()

    def tell(progress: Progress) -> None:
        (told if telling.acquire(blocking=False) else twice).append(progress.attempt.name)
        time.sleep(0.01)
        if not twice:
            telling.release()

    account = Account(None, tell, None, {})
    threads = [threading.Thread(target=account.record, args=(Attempt(f"{number}", number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(told), twice) == (8, [])
    assert [attempt.number for attempt in account.attempts] == list(range(8))
