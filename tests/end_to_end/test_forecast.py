"""Test that session.forecast() on the demo's sessions predicts what the server then measures."""

from typing import Any

import pytest

from agentspec import AgentClient, Session
from agentspec.client.answers.reply import Reply
from agentspec.testing.server import ModelServer
from demo.agent import Agent
from demo.tasks import FIRST_HELD_OUT_SEED, make_task

pytestmark = pytest.mark.engine


class Salted:
    """Keep a session apart from other tests' text on the server: a forecast knows its client's sessions only."""

    def __init__(self, session: Session, salt: str) -> None:
        self.id = session.id
        self._session, self._salt = session, salt

    def chat(self, message: str, **options: Any) -> Reply[Any]:
        return self._session.chat(message, extra_body={"cache_salt": self._salt}, **options)


def error_of_forecasts(server: ModelServer, salt: str) -> float:
    """Return the largest error of forecasts, as a share: of a session's tokens a step, or of all steps."""
    forecast, measured, errors = 0, 0, []
    with AgentClient(base_url=server.base_url, model="demo", api_key="none", store=None, tokenizer="server") as client:
        for number in range(4):
            session = client.session(f"{salt}-{number}")
            agent = Agent(make_task(FIRST_HELD_OUT_SEED + number), Salted(session, salt))  # type: ignore[arg-type]
            while not agent.done and len(agent.turns) < 3:
                agent.turn()
            found = session.forecast()
            assert found.measured is not None and found.measured_calls == found.calls == len(agent.turns)
            print(found)
            forecast, measured = forecast + found.steps, measured + found.measured.steps
            errors.append(abs(found.tokens_per_step / found.measured.tokens_per_step - 1))
    return max(*errors, abs(forecast / measured - 1))


def test_a_forecast_is_what_is_then_measured(priced: ModelServer) -> None:
    """The server has the price that forecasts assume. A measured price would depend on the machine's load."""
    assert error_of_forecasts(priced, "forecast") <= 0.02
