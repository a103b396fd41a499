"""Let a model write a function, run its tests and hand the failures back until they pass.

    agentspec serve MODEL
    python examples/agents/refine_loop.py --model MODEL

Each turn repeats most of the last one, so the server drafts it from the session. The code that the model writes runs in
a subprocess with a time limit but without a sandbox: use a model you trust.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from agentspec import AgentClient, Reply

TASK = 'Write a Python function slugify(text): lower-case words joined by "-". Answer with one code block.'
TESTS = """
assert slugify("Hello World") == "hello-world", slugify("Hello World")
assert slugify("  a,  b! ") == "a-b", slugify("  a,  b! ")
assert slugify("") == "", slugify("")
"""
CODE_BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def run_tests(answer: str) -> str:
    """Run the tests on an answer. Return the last line of the error, or "" when all tests passed."""
    found = CODE_BLOCK.search(answer)
    program = (found.group(1) if found else answer) + TESTS
    try:
        result = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "it ran for more than 10 seconds"
    lines = result.stderr.strip().splitlines()
    return "" if result.returncode == 0 else (lines or ["it failed without a message"])[-1]


def describe(turn: int, reply: Reply) -> str:
    """Return one line of figures about a reply."""
    line = f"turn {turn}: {reply.usage.completion_tokens if reply.usage else '?'} tokens"
    if (speculation := reply.speculation) is not None:
        sources = ", ".join(f"{name} {count}" for name, count in speculation.accepted_by_source.items())
        line += f" in {speculation.steps} steps, mean acceptance length {speculation.mean_acceptance_length:.2f}"
        line += f"; accepted {speculation.accepted} of {speculation.drafted} ({sources})"
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--session", help="go on with this session (default: a new one)")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()

    with AgentClient(base_url=options.base_url, model=options.model) as client:
        session = client.session(options.session)
        print(f"session {session.id}")
        message = TASK
        for turn in range(1, options.turns + 1):
            reply = session.chat(message, temperature=0, max_tokens=512)
            print(describe(turn, reply))
            failure = run_tests(reply.text)
            if not failure:
                print("all tests pass")
                return 0
            print(f"  {failure}")
            message = f"The tests fail: {failure}\nCorrect the function. Answer with one code block."
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
