"""session.forecast() on the demo's sessions says what the server then measures."""

from typing import Any

import pytest

from agentspec import AgentClient, Session
from agentspec.client.reply import Reply
from agentspec.testing.server import ModelServer
from demo.agent import Agent
from demo.tasks import FIRST_HELD_OUT_SEED, make_task

pytestmark = pytest.mark.engine


class Salted:
    """A session apart from what other tests have said to the server: a forecast knows its client's sessions only."""

    def __init__(self, session: Session) -> None:
        self.id = session.id
        self._session = session

    def chat(self, message: str, **options: Any) -> Reply[Any]:
        return self._session.chat(message, extra_body={"cache_salt": "forecast"}, **options)


def test_a_forecast_is_within_a_tenth_of_what_was_measured(fast: ModelServer) -> None:
    forecast, measured = 0, 0
    with AgentClient(base_url=fast.base_url, model="demo", api_key="none", store=None, tokenizer="server") as client:
        for number in range(4):
            session = client.session(f"forecast-{number}")
            agent = Agent(make_task(FIRST_HELD_OUT_SEED + number), Salted(session))  # type: ignore[arg-type]
            while not agent.done and len(agent.turns) < 3:
                agent.turn()
            found = session.forecast()
            assert found.measured is not None and found.measured_calls == found.calls == len(agent.turns)
            print(found)
            forecast, measured = forecast + found.steps, measured + found.measured.steps
            assert found.tokens_per_step == pytest.approx(found.measured.tokens_per_step, rel=0.1)
    assert forecast == pytest.approx(measured, rel=0.1)
