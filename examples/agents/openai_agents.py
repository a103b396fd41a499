"""Give openai-agents a session of agentspec: its Runner keeps the history in it, and names it to the server.

pip install openai-agents
agentspec serve MODEL --enable-auto-tool-choice --tool-call-parser PARSER
python examples/agents/openai_agents.py --model MODEL
"""

from __future__ import annotations

import argparse
import asyncio

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, set_tracing_disabled

from agentspec import AsyncAgentClient


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    options = parser.parse_args()

    set_tracing_disabled(True)
    agent = Agent(
        name="poet",
        instructions="Answer in one sentence.",
        model=options.model,
        model_settings=ModelSettings(max_tokens=128, temperature=0),
    )
    async with AsyncAgentClient(base_url=options.base_url, model=options.model, store=None) as client:
        session = client.session("poet")
        provider = OpenAIProvider(openai_client=session.openai, use_responses=False)
        for question in ("What is a hare?", "Say it again, with a rhyme."):
            result = await Runner.run(
                agent, question, session=session, run_config=RunConfig(model_provider=provider), max_turns=2
            )
            print(result.final_output)
        print(f"{len(session.messages)} messages in session {session.id}")


if __name__ == "__main__":
    asyncio.run(main())
