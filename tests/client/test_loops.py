"""Test loops: what they keep, and what they may spend."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pydantic
import pytest

from agentspec import AgentClient, AgentSpecError, AsyncAgentClient, Budget, InvalidInputError, Progress, Reply, Stage
from agentspec.client.loops.budget import bounded_timeout

from .fake_server import FakeServer
from .loop_runs import add, join_threads, release, short


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
        assert isinstance(result.attempts[0].error, ZeroDivisionError)
        assert (result.best, result.text, len(messages)) == (result.attempts[0], "answer 1", 2)

    def test_an_attempt_lasts_until_its_verdict(self, run: Any) -> None:
        def critic(answer: Reply) -> str | None:
            time.sleep(0.05)
            return short(answer)

        result, _ = run("refine", "count", critic)
        seconds = [attempt.seconds for attempt in result.attempts]
        assert min(seconds) >= 0.05 and sum(seconds) <= result.spent.seconds

    def test_an_attempt_whose_call_failed_has_its_duration_too(self, run: Any, server: FakeServer) -> None:
        server.failures = [500]
        result, _ = run("refine", "count", short)
        assert 0 < result.attempts[0].seconds <= result.spent.seconds

    @pytest.mark.parametrize("found", [True, 1, ["x"], [{"no": "role"}]])
    def test_keeps_the_attempt_whose_critic_returned_no_message(self, run: Any, found: Any) -> None:
        result, messages = run("refine", "count", lambda reply: found)
        assert result.stopped == "error" and len(messages) == 2
        assert result.attempts[0].reply is not None and str(result.attempts[0].error).startswith("critic: ")

    def test_a_critic_that_exits_ends_no_program(self, run: Any) -> None:
        """A critic may run what the model wrote."""

        def critic(answer: Reply) -> str | None:
            exec("raise SystemExit(3)")
            return None

        result, _ = run("refine", "count", critic)
        error = result.attempts[0].error
        assert (result.stopped, str(error)) == ("error", "SystemExit: 3") and isinstance(error.__cause__, SystemExit)

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

    def test_of_tokens_leaves_the_last_one_to_a_call(self, run: Any, server: FakeServer) -> None:
        run("refine", "count", short, budget=Budget(tokens=4))
        assert [chat.body["max_completion_tokens"] for chat in server.chats] == [4, 1]

    def test_of_tokens_keeps_a_lower_limit_of_the_caller(self, run: Any, server: FakeServer) -> None:
        run("refine", "count", short, budget=Budget(tokens=50), attempts=1, max_tokens=4)
        assert server.chats[0].body["max_tokens"] == 4 and "max_completion_tokens" not in server.chats[0].body

    def test_of_tokens_limits_both_options_of_a_call_that_has_two(self, run: Any, server: FakeServer) -> None:
        """A stage may name one and the pipeline the other; then vLLM obeys max_completion_tokens."""
        stages = [Stage("plan", "Plan:", options={"max_tokens": 6})]
        run("pipeline", "a game", stages, budget=Budget(tokens=8), max_completion_tokens=500)
        body = server.chats[0].body
        assert (body["max_tokens"], body["max_completion_tokens"]) == (6, 8)

    def test_of_tokens_limits_what_extra_body_asks_for(self, run: Any, server: FakeServer) -> None:
        extra = {"n": 2, "max_completion_tokens": 500, "top_k": 5}
        run("refine", "count", short, budget=Budget(tokens=50), attempts=1, max_tokens=8, extra_body=extra)
        body = server.chats[0].body
        assert (body["n"], body["max_completion_tokens"], body["max_tokens"], body["top_k"]) == (2, 25, 8, 5)

    def test_of_more_tokens_than_the_models_context_sets_no_limit(self, run: Any, server: FakeServer) -> None:
        """A budget is for a whole loop, so it is naturally larger than one context."""
        server.max_model_len = 2048
        result, _ = run("refine", "count", short, budget=Budget(tokens=4_000))
        assert (result.stopped, result.spent.tokens) == ("done", 9)
        assert not any("max_completion_tokens" in chat.body for chat in server.chats) and len(server.chats) == 3
        assert sum(request.path == "/v1/models" for request in server.received) == 1

    def test_of_more_tokens_than_a_context_minds_the_model_that_the_call_names(self, server: FakeServer) -> None:
        server.max_model_len = 2048
        with AgentClient(base_url=server.url, model="large", store=None) as client:
            loop = client.session().refine("count", lambda reply: None, budget=Budget(tokens=4_000), model="small")
        assert loop.done and "max_completion_tokens" not in server.chats[0].body

    @pytest.mark.parametrize(("limit", "stopped"), [({}, "tokens"), ({"max_completion_tokens": 3}, "done")])
    def test_of_tokens_that_cuts_an_answer_off_says_so(
        self, run: Any, server: FakeServer, limit: dict[str, int], stopped: str
    ) -> None:
        """A limit of the caller's own is another matter."""
        server.finish_reason = "length"
        loops: list[Any] = [("run_tools", "add", [add]), ("pipeline", "plan", [Stage("plan", "Plan:")])]
        for loop, *given in [*loops, ("best_of", "count", 2, lambda reply: 1.0)]:
            result, _ = run(loop, *given, budget=Budget(tokens=6), **limit)
            assert (result.stopped, result.attempts[0].reply.finish_reason) == (stopped, "length")
        content, _ = run("refine", "count", lambda reply: None, budget=Budget(tokens=6), **limit)
        assert content.done, "the critic has accepted what there is"

    @pytest.mark.parametrize(("limit", "stopped"), [({}, "tokens"), ({"max_completion_tokens": 2}, "error")])
    def test_of_tokens_that_cuts_off_an_answer_in_a_format_says_so(
        self, run: Any, server: FakeServer, limit: dict[str, int], stopped: str
    ) -> None:
        server.finish_reason = "length"
        loops: list[Any] = [("run_tools", "add", [add]), ("refine", "count", short)]
        for loop, *given in [*loops, ("best_of", "count", 2, lambda reply: 1.0)]:
            server.answers = [{"content": '{"value": '}] * 2
            result, messages = run(loop, *given, budget=Budget(tokens=6), response_format=Number, **limit)
            assert (result.stopped, messages) == (stopped, [])
            assert isinstance(result.attempts[0].error, openai.LengthFinishReasonError)
            assert result.spent.tokens == 3 * len(result.attempts), "the server has told how many it generated"

    @pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
    def test_of_tokens_counts_answers_that_a_gateway_lost(self, run: Any, server: FakeServer, status: int) -> None:
        server.failures = [status] * 9
        result, _ = run("best_of", "count", 9, lambda reply: 1.0, budget=Budget(tokens=90), at_once=1)
        assert sum(chat.body["max_completion_tokens"] for chat in server.chats) == result.spent.tokens == 90

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
        """Such answers were generated, unlike refused ones."""
        server.failures = [400]
        result, _ = run(
            "best_of", "count", 5, lambda reply: 1.0, budget=Budget(tokens=50), at_once=1, response_format=Number
        )
        limits = [chat.body["max_completion_tokens"] for chat in server.chats]
        assert limits == [10, 12, 12, 13, 13] and sum(limits[1:]) == result.spent.tokens == 50

    def test_of_seconds_cuts_a_call_off(self, run: Any, server: FakeServer) -> None:
        server.hold = threading.Event()
        begin = time.monotonic()
        result, messages = run("refine", "count", short, budget=Budget(seconds=3))
        assert time.monotonic() - begin < 9  # the server answers after ten
        server.hold.set()
        assert (result.stopped, messages, len(server.chats)) == ("seconds", [], 1)
        assert result.attempts[0].error is not None

    def test_of_seconds_lets_no_call_begin_afterwards(
        self, run: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, passed = time.monotonic, [0.0]
        later = SimpleNamespace(monotonic=lambda: clock() + passed[0])
        monkeypatch.setattr("agentspec.client.loops.budget.time", later)

        def slow(reply: Reply) -> str:
            passed[0] = 61.0
            return "again"

        result, _ = run("refine", "count", slow, budget=Budget(seconds=60))
        assert result.stopped == "seconds" and len(server.chats) == 1

    @pytest.mark.parametrize(
        "limits",
        [
            {"requests": 0},
            {"tokens": -1},
            {"seconds": 0.0},
            {"requests": "3"},
            {"tokens": 2.5},
            {"seconds": "1"},
            {"requests": True},
        ],
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
        assert begin.startswith("s.") and len(begin) == len("s.") + 8  # not a name that a user chose

    def test_takes_the_first_of_equally_good_answers(self, run: Any) -> None:
        result, messages = run("best_of", "count", 3, lambda reply: 1.0, at_once=1)
        assert (result.best.number, messages[-1]["content"]) == (1, "answer 1")

    def test_says_which_budget_was_spent_where_no_answer_has_a_reward(self, run: Any) -> None:
        result, messages = run("best_of", "count", 2, lambda reply: None, budget=Budget(requests=1))
        assert (result.stopped, messages) == ("requests", [])

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

    @pytest.mark.parametrize("reward", [math.nan, "much", [1.0]])
    def test_a_reward_that_cannot_be_compared_is_an_error(self, run: Any, reward: Any) -> None:
        def judged(reply: Reply) -> Any:
            return reward if reply.text == "answer 1" else float(reply.text[-1])

        result, messages = run("best_of", "count", 3, judged, at_once=1)
        assert (result.stopped, result.text, len(messages)) == ("done", "answer 3", 2)
        first, *others = result.attempts
        assert first.score is None and isinstance(first.error, InvalidInputError)
        assert str(first.error).startswith("reward: ")
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
        assert [(attempt.name, attempt.number) for attempt in result.attempts] == [("plan", 1), ("code", 2)]
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

    def test_says_what_the_critic_of_an_answer_without_a_text_raised(self, run: Any, server: FakeServer) -> None:
        def critic(answer: Reply) -> str | None:
            raise ZeroDivisionError

        server.answers = [{"content": ""}]
        result, _ = run("pipeline", "a game", [Stage("code", "Code", critic=critic)])
        assert result.stopped == "error" and isinstance(result.attempts[0].error, ZeroDivisionError)

    def test_lets_a_critic_mend_an_answer_without_a_text(self, run: Any, server: FakeServer) -> None:
        server.answers = [{"content": ""}]
        critic = lambda reply: None if reply.text else "Say something."  # noqa: E731
        result, messages = run("pipeline", "a game", [Stage("code", "Code", critic=critic)])
        assert (result.stopped, messages[-1]["content"]) == ("done", "answer 2")


def test_no_further_answer_is_asked_for_once_progress_has_ended_the_loop(server: FakeServer) -> None:
    """The first answer's reward takes long, and the error of another one ends the loop at once."""
    go_on, told = threading.Event(), list[Progress]()

    def reward(reply: Reply) -> float:
        if reply.session is not None and reply.session.endswith(".1"):
            go_on.wait(60)
        return 1.0

    def stop(progress: Progress) -> None:
        told.append(progress)
        raise KeyError("of the test")

    with AgentClient(base_url=server.url, model="small", store=None) as client, pytest.raises(KeyError):
        client.session("s").best_of("task", 40, reward, at_once=2, on_progress=stop)
    go_on.set()
    join_threads()
    assert len(server.chats) <= 4
    assert len(told) == 1, "nobody waits for the first answer any more"


async def test_no_call_goes_on_once_progress_has_ended_an_asyncio_loop(server: FakeServer) -> None:
    begun = asyncio.Event()

    async def reward(reply: Reply) -> float:
        if reply.session is not None and reply.session.endswith(".1"):
            begun.set()
            try:
                await asyncio.sleep(3)
            finally:
                await asyncio.sleep(0.05)  # a function that cleans up takes a while to end
        await begun.wait()
        return 1.0

    def stop(progress: Progress) -> None:
        raise KeyError("of the test")

    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
        with pytest.raises(KeyError):
            await client.session("s").best_of("task", 40, reward, at_once=2, on_progress=stop)
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(server.chats) <= 4


def test_the_models_context_is_asked_for_again_after_a_passing_error(server: FakeServer) -> None:
    server.max_model_len = 4096
    with AgentClient(base_url=server.url, model="small", store=None, max_retries=0) as client:
        requests = client._requests
        assert requests.learn_context("small", TimeoutError()) is None
        assert requests.contexts == {}
        client.session("s").refine("task", lambda reply: None, budget=Budget(tokens=100_000))
        assert requests.contexts == {"small": 4096}


async def test_a_tool_that_awaits_something_cancelled_is_an_error_to_the_model(server: FakeServer) -> None:
    async def add(a: int, b: int) -> int:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        result: int = await future
        return result

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    server.answers = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
        result = await client.session("s").run_tools("task", [add])
    assert result.stopped == "done"
    assert "CancelledError" in result.attempts[0].tools[0].answer


def test_a_timeout_of_another_httpx_is_bounded_and_kept() -> None:
    bounded = bounded_timeout(httpx.Timeout(5.0, read=900.0), 600.0)
    assert isinstance(bounded, openai.Timeout)
    assert (bounded.connect, bounded.read) == (5.0, 600.0)
