"""Ask for a function and its correction in two sessions, and print where the drafts of each answer came from.

    agentspec serve demo/model --dtype float32 --enforce-eager
    python examples/agents/two_sessions.py

The task is one that the demo's toy model was trained for. The second session drafts from what the first one said.
"""

import argparse

from agentspec import AgentClient

TASK = '''Write this Python function:
```python
def proud_tiger(pearl_fern, mild_otter):
    """List the values of pearl_fern, scaled by mild_otter."""
```
Name the result noble_crane and the loop variable royal_map.'''
FAILED = """1 of 3 tests fail. Fix default_second: mild_otter defaults to 8.
proud_tiger([21, 30], None) raised TypeError, expected [168, 240]."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", default="demo/model")
    options = parser.parse_args()

    with AgentClient(base_url=options.base_url, model=options.model) as client:
        for name in ("first session", "second session"):
            session = client.session()
            for message in (TASK, FAILED):
                drafts = session.chat(message, temperature=0).speculation
                if drafts is None:
                    raise SystemExit(f"{options.base_url} is not served by agentspec")
                sources = {source: count for source, count in drafts.accepted_by_source.items() if count}
                print(f"{name}: {drafts.tokens} tokens in {drafts.steps} steps; accepted from {sources}")


if __name__ == "__main__":
    main()
