"""Test that a predicted edit, and a response that quotes the prompt, take few steps and change no token."""

import json
from typing import Any

import openai
import pytest

from agentspec import AgentClient, Reply
from agentspec.testing.server import ModelServer
from demo.tasks import FIRST_HELD_OUT_SEED, make_task

pytestmark = pytest.mark.engine

TOKENS = 400


def test_a_predicted_edit_needs_a_third_of_the_steps(priced: ModelServer) -> None:
    """The penalty keeps the small model from repeating itself, as repeats are drafted from the request's own text."""
    task = make_task(FIRST_HELD_OUT_SEED).request
    with AgentClient(base_url=priced.base_url, model="demo", api_key="none", store=None) as client:

        def ask(salt: str, **options: Any) -> Reply:
            body = {"ignore_eos": True, "cache_salt": f"prediction-{salt}"}  # nothing is drafted from another call
            return client.chat(
                task, temperature=0, frequency_penalty=1.0, max_tokens=TOKENS, extra_body=body, **options
            )

        without = ask("without")
        half = len(without.text) // 2
        edited = without.text[:half] + "XYZ" + without.text[half + 6 :]
        predicted = ask("edited", prediction=edited)
        mistaken = ask("mistaken", prediction="something else " * 50)
        assert without.text == predicted.text == mistaken.text
        steps = [reply.speculation.steps for reply in (without, predicted, mistaken) if reply.speculation]
        assert steps[1] <= steps[0] / 3 and steps[2] < 1.1 * steps[0]
        assert predicted.usage is not None and predicted.usage.completion_tokens_details is not None
        details, figures = predicted.usage.completion_tokens_details, predicted.speculation
        assert figures is not None and figures.tokens == TOKENS
        assert details.accepted_prediction_tokens == figures.accepted_by_source["prediction"] > TOKENS / 2
        assert details.rejected_prediction_tokens == (
            figures.drafted_by_source["prediction"] - figures.accepted_by_source["prediction"]
        )
        with pytest.raises(openai.BadRequestError, match=r"prediction\.content"):
            ask("long", prediction="word " * 40_000)


@pytest.mark.parametrize("form", ["json", "plain", "patch"])
def test_a_file_is_drafted_from_a_view_with_line_numbers(priced: ModelServer, form: str) -> None:
    """A response format dictates the answer, so that the small model quotes the file as a large one does in an edit."""
    with AgentClient(base_url=priced.base_url, model="demo", api_key="none", store=None) as client:

        def ask(text: str, salt: str, **options: Any) -> Reply:
            body = {"cache_salt": f"quote-{form}-{salt}", **options}  # nothing is drafted from another call
            return client.chat(text, temperature=0, max_tokens=600, extra_body=body)

        file = ask(make_task(FIRST_HELD_OUT_SEED).request, "file").text.strip()
        numbered = "".join(f"{number:6}\t{line}\n" for number, line in enumerate(file.splitlines(), 1))
        schema = {"type": "json_schema", "json_schema": {"name": "edit", "schema": {"const": file}}}
        answer = {"json": json.dumps(file), "plain": file, "patch": f"-{file}".replace("\n", "\n-")}[form]
        grammar = {"grammar": f"root ::= {json.dumps(answer)}"}
        dictated = {"response_format": schema} if form == "json" else {"structured_outputs": grammar}
        task = "Answer with a ```diff." if form == "patch" else "Write it."
        read, unread = ask(f"{numbered}{task}", "read", **dictated), ask(task, "unread", **dictated)
    assert read.text == unread.text == answer
    assert read.speculation is not None and unread.speculation is not None
    assert read.speculation.accepted_by_source["quote"] > 50
    assert read.speculation.steps < unread.speculation.steps / 3
