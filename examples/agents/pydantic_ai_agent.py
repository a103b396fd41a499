"""Keep a pydantic-ai agent as it is: an address and one header are all that it takes to draft from its session.

    pip install "pydantic-ai-slim[openai]"
    agentspec serve MODEL
    python examples/agents/pydantic_ai_agent.py --model MODEL

Any framework that sets headers does the same: one id for each conversation, in X-Session-ID.
"""

from __future__ import annotations

import argparse
import os
import uuid

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--session", default=f"pydantic-ai-{uuid.uuid4().hex[:8]}")
    options = parser.parse_args()

    key = os.environ.get("OPENAI_API_KEY", "none")  # a server without keys takes any
    model = OpenAIChatModel(options.model, provider=OpenAIProvider(base_url=options.base_url, api_key=key))
    agent = Agent(
        model,
        instructions="Answer in one sentence.",
        model_settings={"extra_headers": {"X-Session-ID": options.session}, "max_tokens": 128, "temperature": 0},
    )
    history = None
    for question in ("What is a hare?", "Say it again, with a rhyme."):
        result = agent.run_sync(question, message_history=history)
        history = result.all_messages()
        print(result.output)
    print(f"session {options.session}: {result.usage.output_tokens} tokens in the last turn")


if __name__ == "__main__":
    main()
