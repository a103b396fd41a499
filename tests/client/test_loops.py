"""Loops: what they keep, what they may spend, and in which state they leave the session."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest

from agentspec import (
    AgentClient,
    AgentSpecError,
    AsyncAgentClient,
    Budget,
    InvalidInputError,
    LoopResult,
    Progress,
    Reply,
    SessionBusyError,
    Stage,
)

from .fake_server import FakeServer

Loop = Callable[..., LoopResult[Any]]


def _synchronous(server: FakeServer, loop: str, *arguments: Any, **options: Any) -> tuple[LoopResult[Any], list[Any]]:
    with AgentClient(base_url=server.url, model="small", store=None, max_retries=0) as client:
        session = client.session("s")
        result = getattr(session, loop)(*arguments, **options)
        return result, session.messages


def _in_asyncio(server: FakeServer, loop: str, *arguments: Any, **options: Any) -> tuple[LoopResult[Any], list[Any]]:
    async def main() -> tuple[LoopResult[Any], list[Any]]:
        async with AsyncAgentClient(base_url=server.url, model="small", store=None, max_retries=0) as client:
            session = client.session("s")
            result = await getattr(session, loop)(*arguments, **options)
            return result, session.messages

    return asyncio.run(main())


@pytest.fixture(params=[_synchronous, _in_asyncio], ids=["sync", "asyncio"])
def run(request: pytest.FixtureRequest, server: FakeServer) -> Callable[..., tuple[LoopResult[Any], list[Any]]]:
    """Runs a loop of a session named "s", and returns its result and the session's messages."""
    return lambda loop, *arguments, **options: request.param(server, loop, *arguments, **options)


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def release(server: FakeServer, count: int) -> None:
    """Let the server answer once so many calls wait for it."""
    assert server.hold is not None
    while len(server.chats) < count:
        time.sleep(0.01)
    server.hold.set()


def calls(*named: tuple[str, str]) -> dict[str, Any]:
    """An answer with these tool calls."""
    return {
        "tool_calls": [
            {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(named)
        ]
    }


def short(answer: Reply[Any]) -> str | None:
    """A critic."""
    return None if answer.text.endswith("3") else f"not 3 but {answer.text}"


class Number(pydantic.BaseModel):
    """An answer that the fake server never gives."""

    value: int


class TestRefine:
    def test_goes_on_until_the_critic_is_content(self, run: Any, server: FakeServer) -> None:
        seen: list[Progress] = []
        result, messages = run("refine", "count", short, on_progress=seen.append, temperature=0)
        assert (result.stopped, result.text, result.done) == ("done", "answer 3", True)
        assert [attempt.feedback for attempt in result.attempts] == ["not 3 but answer 1", "not 3 but answer 2", None]
        assert [message["content"] for message in messages if message["role"] == "user"] == [
            "count",
            "not 3 but answer 1",
            "not 3 but answer 2",
        ]
        assert [progress.attempt for progress in seen] == list(result.attempts)
        assert [progress.spent.tokens for progress in seen] == [3, 6, 9]
        assert result.spent.requests == 3 and result.spent.prompt_tokens == 21 and result.spent.seconds > 0
        assert all(chat.body["temperature"] == 0 for chat in server.chats)

    def test_ends_after_its_attempts(self, run: Any) -> None:
        result, messages = run("refine", "count", short, attempts=2)
        assert (result.stopped, result.text) == ("attempts", "answer 2")
        assert len(messages) == 4

    def test_keeps_what_a_call_raised(self, run: Any, server: FakeServer) -> None:
        server.failures = [500]
        result, messages = run("refine", "count", short)
        assert result.stopped == "error" and result.best is None and messages == []
        assert isinstance(result.attempts[0].error, openai.InternalServerError)
        with pytest.raises(openai.InternalServerError):
            _ = result.text

    def test_keeps_what_the_critic_raised(self, run: Any) -> None:
        def critic(answer: Reply) -> str | None:
            raise ZeroDivisionError

        result, messages = run("refine", "count", critic)
        assert result.stopped == "error"
        assert isinstance(result.attempts[0].error, ZeroDivisionError) and result.attempts[0].reply is not None
        assert len(messages) == 2

    @pytest.mark.parametrize("found", [True, 1, ["x"], [{"no": "role"}]])
    def test_keeps_the_attempt_whose_critic_returned_no_message(self, run: Any, found: Any) -> None:
        result, messages = run("refine", "count", lambda reply: found)
        assert result.stopped == "error" and len(messages) == 2
        assert result.attempts[0].reply is not None and str(result.attempts[0].error).startswith("critic: ")

    def test_a_critic_that_exits_ends_no_program(self, run: Any) -> None:
        """It may run what the model wrote."""

        def critic(answer: Reply) -> str | None:
            exec("raise SystemExit(3)")
            return None

        result, _ = run("refine", "count", critic)
        assert result.stopped == "error" and str(result.attempts[0].error) == "SystemExit: 3"

    @pytest.mark.parametrize(
        ("arguments", "options", "field"),
        [
            (("count", short), {"attempts": 0}, "attempts"),
            (("count", short), {"stream": True}, "stream"),
            (("count", short), {"messages": []}, "messages"),
        ],
    )
    def test_wrong_use_raises(self, run: Any, arguments: Any, options: Any, field: str) -> None:
        with pytest.raises(InvalidInputError, match=f"^{field}"):
            run("refine", *arguments, **options)


class TestBudget:
    def test_of_requests(self, run: Any, server: FakeServer) -> None:
        result, messages = run("refine", "count", short, budget=Budget(requests=2))
        assert (result.stopped, len(server.chats), len(messages)) == ("requests", 2, 4)
        assert result.text == "answer 2"

    def test_of_tokens_limits_each_call_to_what_is_left(self, run: Any, server: FakeServer) -> None:
        result, _ = run("refine", "count", short, budget=Budget(tokens=5))
        assert [chat.body["max_completion_tokens"] for chat in server.chats] == [5, 2]
        assert result.stopped == "tokens" and result.spent.tokens == 6  # the fake always counts 3

    def test_of_tokens_keeps_a_lower_limit_of_the_caller(self, run: Any, server: FakeServer) -> None:
        run("refine", "count", short, budget=Budget(tokens=50), attempts=1, max_tokens=4)
        assert server.chats[0].body["max_tokens"] == 4 and "max_completion_tokens" not in server.chats[0].body

    def test_of_tokens_is_shared_by_calls_at_once(self, run: Any, server: FakeServer) -> None:
        server.hold = threading.Event()
        threading.Thread(target=release, args=(server, 3)).start()
        run("best_of", "count", 3, lambda reply: 1.0, budget=Budget(tokens=10))
        assert sorted(chat.body["max_completion_tokens"] for chat in server.chats) == [3, 3, 4]

    def test_of_tokens_is_shared_by_the_choices_of_a_call(self, run: Any, server: FakeServer) -> None:
        run("refine", "count", short, budget=Budget(tokens=50), attempts=1, n=4)
        run("refine", "count", short, budget=Budget(tokens=50), attempts=1, n=4, max_tokens=8)
        assert server.chats[0].body["max_completion_tokens"] == 12 and server.chats[1].body["max_tokens"] == 8
        # The fake counts 3 tokens, which leaves 1 for 2 choices.
        result, _ = run("refine", "count", lambda reply: "again", budget=Budget(tokens=4), n=2)
        assert result.stopped == "tokens" and len(server.chats) == 3

    def test_of_tokens_counts_answers_that_do_not_fit(self, run: Any, server: FakeServer) -> None:
        """They were generated; what was refused was not."""
        server.failures = [400]
        result, _ = run(
            "best_of", "count", 5, lambda reply: 1.0, budget=Budget(tokens=50), at_once=1, response_format=Number
        )
        limits = [chat.body["max_completion_tokens"] for chat in server.chats]
        assert limits == [10, 12, 12, 13, 13] and sum(limits[1:]) == result.spent.tokens == 50

    def test_of_seconds_cuts_a_call_off(self, run: Any, server: FakeServer) -> None:
        server.hold = threading.Event()
        begin = time.monotonic()
        result, messages = run("refine", "count", short, budget=Budget(seconds=0.3))
        assert time.monotonic() - begin < 9  # the server answers after ten
        server.hold.set()
        assert (result.stopped, messages, len(server.chats)) == ("seconds", [], 1)
        assert result.attempts[0].error is not None

    def test_of_seconds_lets_no_call_begin_afterwards(self, run: Any, server: FakeServer) -> None:
        def slow(reply: Reply) -> str:
            time.sleep(0.4)
            return "again"

        result, _ = run("refine", "count", slow, budget=Budget(seconds=0.3))
        assert result.stopped == "seconds" and len(server.chats) == 1

    @pytest.mark.parametrize(
        "limits",
        [{"requests": 0}, {"tokens": -1}, {"seconds": 0.0}, {"requests": "3"}, {"tokens": 2.5}, {"seconds": "1"}],
    )
    def test_must_be_positive(self, limits: Any) -> None:
        with pytest.raises(InvalidInputError, match=next(iter(limits))):
            Budget(**limits)


class TestBestOf:
    def test_only_the_best_becomes_part_of_the_session(self, run: Any, server: FakeServer) -> None:
        result, messages = run("best_of", "count", 4, lambda reply: float(reply.text[-1]), at_once=2)
        assert (result.stopped, result.text) == ("done", "answer 4")
        assert sorted(attempt.score for attempt in result.attempts) == [1, 2, 3, 4]
        assert [message["content"] for message in messages] == ["count", "answer 4"]
        tags = [chat.body["vllm_xargs"] for chat in server.chats]
        assert {tag["group_id"] for tag in tags} == {"s"}
        names = {tag["session_id"] for tag in tags}
        assert {name.rpartition(".")[2] for name in names} == {"1", "2", "3", "4"}
        (begin,) = {name.rpartition(".")[0] for name in names}
        assert begin.startswith("s.") and len(begin) == len("s.") + 8  # no session that somebody has named

    def test_keeps_the_errors_of_the_others(self, run: Any, server: FakeServer) -> None:
        server.failures = [500]
        result, messages = run("best_of", "count", 3, lambda reply: 1.0)
        assert result.stopped == "done" and len(messages) == 2
        assert sum(isinstance(attempt.error, openai.InternalServerError) for attempt in result.attempts) == 1
        assert len(result.attempts) == 3

    def test_changes_nothing_if_all_fail(self, run: Any, server: FakeServer) -> None:
        server.failures = [500] * 3
        result, messages = run("best_of", "count", 3, lambda reply: 1.0)
        assert (result.stopped, result.best, messages) == ("error", None, [])

    def test_a_budget_leaves_the_best_of_fewer(self, run: Any) -> None:
        result, messages = run("best_of", "count", 3, lambda reply: 1.0, budget=Budget(requests=2))
        assert result.stopped == "requests" and len(result.attempts) == 2 and len(messages) == 2

    @pytest.mark.parametrize("reward", [math.nan, "much"])
    def test_a_reward_that_cannot_be_compared_is_an_error(self, run: Any, reward: Any) -> None:
        def judged(reply: Reply) -> Any:
            return reward if reply.text == "answer 1" else float(reply.text[-1])

        result, messages = run("best_of", "count", 3, judged, at_once=1)
        assert (result.stopped, result.text, len(messages)) == ("done", "answer 3", 2)
        first, *others = result.attempts
        assert first.score is None and isinstance(first.error, ValueError)
        assert [attempt.score for attempt in others] == [2.0, 3.0]

    def test_at_most_at_once_calls_run_together(self, run: Any, server: FakeServer) -> None:
        running, most, lock = 0, 0, threading.Lock()

        def reward(reply: Reply) -> float:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.03)
            with lock:
                running -= 1
            return 0.0

        run("best_of", "count", 8, reward, at_once=3)
        assert most <= 3


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def fail() -> None:
    raise ValueError("out of paper")


def list_files() -> str:
    """List files, one of which has a name that is not UTF-8."""
    return b"caf\xe9.txt".decode(errors="surrogateescape")


def open_file() -> str:
    """Open that file."""
    raise FileNotFoundError(list_files())


class TestTools:
    @pytest.mark.parametrize("tool", [list_files, open_file])
    def test_what_no_request_can_carry_is_written_out(self, run: Any, server: FakeServer, tool: Any) -> None:
        server.answers = [calls((tool.__name__, "{}")), {"content": "done"}]
        result, messages = run("run_tools", "go", [tool])
        assert (result.stopped, result.text) == ("done", "done")
        assert messages[2]["content"].endswith("caf\\udce9.txt")

    def test_runs_calls_until_the_model_answers(self, run: Any, server: FakeServer) -> None:
        server.answers = [calls(("add", '{"a": 2, "b": 3}'), ("add", '{"a": 2}')), {"content": "5 and 3"}]
        result, messages = run("run_tools", "add", [add])
        assert (result.stopped, result.text) == ("done", "5 and 3")
        assert [run.answer for run in result.attempts[0].tools] == ["5", "3"]
        assert roles(messages) == ["user", "assistant", "tool", "tool", "assistant"]
        described = server.chats[0].body["tools"][0]["function"]
        assert described["name"] == "add" and described["description"] == "Add two numbers."
        assert described["parameters"]["required"] == ["a"]
        assert described["parameters"]["properties"]["b"]["default"] == 1

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (("fail", "{}"), "out of paper"),
            (("add", '{"a": "two"}'), "valid integer"),
            (("add", '{"a": 2, "c": 2}'), "Extra inputs"),
            (("add", '{"a": 2'), "Invalid JSON"),
            (("subtract", "{}"), "no tool 'subtract'; there are: add, fail"),
        ],
    )
    def test_tells_the_model_what_went_wrong(self, run: Any, server: FakeServer, call: Any, said: str) -> None:
        server.answers = [calls(call), {"content": "sorry"}]
        result, messages = run("run_tools", "add", [add, fail])
        assert result.stopped == "done"
        assert result.attempts[0].tools[0].error is not None
        assert messages[2]["content"].startswith("error: ") and said in messages[2]["content"]

    def test_parameters_may_have_the_names_of_pydantics_methods(self, run: Any, server: FakeServer) -> None:
        def tool(_x: int, model_dump: int, model_extra: int = 3, schema: int = 4) -> list[int]:
            return [_x, model_dump, model_extra, schema]

        server.answers = [calls(("tool", '{"_x": 1, "model_dump": 2, "schema": 5}')), {"content": "done"}]
        result, _ = run("run_tools", "go", [tool])
        assert result.attempts[0].tools[0].answer == "[1,2,3,5]"
        described = server.chats[0].body["tools"][0]["function"]["parameters"]
        assert list(described["properties"]) == ["_x", "model_dump", "model_extra", "schema"]
        assert described["required"] == ["_x", "model_dump"]

    def test_a_parameter_that_json_cannot_hold_is_refused(self, run: Any) -> None:
        def tool(call: Callable[[], int]) -> int:
            return call()

        with pytest.raises(InvalidInputError, match="tools: tool: its parameters cannot be described"):
            run("run_tools", "go", [tool])

    def test_leaves_no_call_unanswered_when_its_attempts_are_over(self, run: Any, server: FakeServer) -> None:
        server.answers = [calls(("add", '{"a": 2}'))]
        result, messages = run("run_tools", "add", [add], attempts=1)
        assert result.stopped == "attempts" and roles(messages) == ["user", "assistant", "tool"]

    def test_at_most_at_once_tools_run_together(self, run: Any, server: FakeServer) -> None:
        running, most, lock, two = 0, 0, threading.Lock(), threading.Barrier(2)

        def work() -> str:
            nonlocal running, most
            two.wait(30)
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1
            return "ok"

        server.answers = [calls(*[("work", "{}")] * 6), {"content": "done"}]
        run("run_tools", "work", [work], at_once=2)
        assert most == 2

    @pytest.mark.parametrize("tools", [[], [lambda: 1], [add, add], [print]])
    def test_refuses_what_cannot_be_a_tool(self, run: Any, tools: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"^tools"):
            run("run_tools", "add", tools)


class TestPipeline:
    def test_passes_answers_on(self, run: Any, server: FakeServer) -> None:
        stages = [
            Stage("plan", "Plan this:", system="Be brief."),
            Stage("code", lambda plan: [{"role": "user", "content": f"Do: {plan}"}], options={"temperature": 0.5}),
        ]
        result, messages = run("pipeline", "a game", stages, max_tokens=9)
        assert (result.stopped, result.text) == ("done", "answer 2")
        assert [attempt.name for attempt in result.attempts] == ["plan", "code"]
        assert [message["content"] for message in messages] == ["a game", "answer 2"]
        first, second = (chat.body for chat in server.chats)
        assert first["messages"][0]["role"] == "system" and first["messages"][1]["content"] == "Plan this:\n\na game"
        assert second["messages"] == [{"role": "user", "content": "Do: answer 1"}]
        assert (second["temperature"], second["max_tokens"], first["max_tokens"]) == (0.5, 9, 9)
        assert len({first["session_id"], second["session_id"], "s"}) == 3

    def test_a_stage_may_have_a_critic(self, run: Any) -> None:
        result, messages = run("pipeline", "a game", [Stage("count", "Count", critic=short), Stage("say", "Say")])
        assert [attempt.name for attempt in result.attempts] == ["count"] * 3 + ["say"]
        assert messages[-1]["content"] == "answer 4"

    @pytest.mark.parametrize(
        ("prompt", "error"), [(lambda plan: plan[99], IndexError), (lambda plan: None, InvalidInputError)]
    )
    def test_keeps_what_was_done_before_a_prompt_that_fails(self, run: Any, prompt: Any, error: type) -> None:
        result, messages = run("pipeline", "a game", [Stage("plan", "Plan this:"), Stage("code", prompt)])
        assert (result.stopped, result.best, messages) == ("error", None, [])
        assert [attempt.name for attempt in result.attempts] == ["plan", "code"]
        assert result.attempts[0].reply.text == "answer 1"
        assert isinstance(result.attempts[1].error, error)

    async def test_a_prompt_may_be_asynchronous(self, server: FakeServer) -> None:
        async def prompt(plan: str) -> str:
            await asyncio.sleep(0)
            return f"Do: {plan}"

        async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
            result = await client.session("s").pipeline("a game", [Stage("code", prompt)])
        assert (result.stopped, server.chats[0].body["messages"][0]["content"]) == ("done", "Do: a game")

    def test_stops_at_a_stage_without_an_answer(self, run: Any, server: FakeServer) -> None:
        stages = [Stage("count", "Count", critic=short, attempts=2), Stage("say", "Say")]
        result, messages = run("pipeline", "a game", stages)
        assert (result.stopped, messages, len(server.chats)) == ("attempts", [], 2)

    @pytest.mark.parametrize(
        ("answer", "why"),
        [({"content": None, "refusal": "I won't."}, "refused: I won't."), ({"content": " "}, "no text to pass on")],
    )
    def test_stops_at_an_answer_without_a_text(self, run: Any, server: FakeServer, answer: Any, why: str) -> None:
        server.answers = [{"content": "a plan"}, answer]
        stages = [Stage("plan", "Plan"), Stage("code", "Code"), Stage("check", "Check")]
        result, messages = run("pipeline", "a game", stages)
        assert (result.stopped, result.best, messages, len(server.chats)) == ("error", None, [], 2)
        assert [attempt.name for attempt in result.attempts] == ["plan", "code"]
        assert result.attempts[1].reply.message.get("refusal") == answer.get("refusal")
        with pytest.raises(AgentSpecError, match=f"stage 'code': .*{why}"):
            _ = result.text

    def test_lets_a_critic_mend_an_answer_without_a_text(self, run: Any, server: FakeServer) -> None:
        server.answers = [{"content": ""}]
        critic = lambda reply: None if reply.text else "Say something."  # noqa: E731
        result, messages = run("pipeline", "a game", [Stage("code", "Code", critic=critic)])
        assert (result.stopped, messages[-1]["content"]) == ("done", "answer 2")


class TestEndingEarly:
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
    from agentspec.client.loops import AsyncLoops, Loops

    for name in ("refine", "best_of", "run_tools", "pipeline"):
        one, other = inspect.signature(getattr(Loops, name)), inspect.signature(getattr(AsyncLoops, name))
        assert list(one.parameters) == list(other.parameters)
        assert [p.default for p in one.parameters.values()] == [p.default for p in other.parameters.values()]
