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

from agentspec import AgentClient, Budget, Progress, Reply

TASK = 'Write a Python function slugify(text): lower-case words joined by "-". Answer with one code block.'
TESTS = """
assert slugify("Hello World") == "hello-world", slugify("Hello World")
assert slugify("  a,  b! ") == "a-b", slugify("  a,  b! ")
assert slugify("") == "", slugify("")
print("passed")
"""
CODE_BLOCK = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)


def critic(answer: Reply) -> str | None:
    """Run the tests on an answer. Return the next message to the model, or None when all tests passed."""
    found = CODE_BLOCK.search(answer.text)
    program = (found.group(1) if found else answer.text) + TESTS
    run = [sys.executable, "-I", "-c", program]
    try:
        result = subprocess.run(run, capture_output=True, text=True, errors="replace", timeout=10)
    except subprocess.TimeoutExpired:
        failure = "it ran for more than 10 seconds"
    except ValueError as error:  # the program contains a NUL
        failure = str(error)
    else:
        if result.returncode == 0 and result.stdout.splitlines()[-1:] == ["passed"]:
            return None
        failure = (result.stderr.strip().splitlines() or ["the program ended before the tests did"])[-1]
    return f"The tests fail: {failure}\nCorrect the function. Answer with one code block."


def describe(progress: Progress) -> None:
    """Print one line of figures about an attempt."""
    attempt = progress.attempt
    line = f"{attempt.name}: {attempt.reason or (attempt.feedback or 'all tests pass').splitlines()[0]}"
    if attempt.reply is not None and (speculation := attempt.reply.speculation) is not None:
        sources = ", ".join(f"{name} {count}" for name, count in speculation.accepted_by_source.items() if count)
        line += f" ({speculation.tokens} tokens in {speculation.steps} steps; accepted from {sources or 'nothing'})"
    print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--session", help="go on with the session of this name, which is kept (default: a new one)")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()

    with AgentClient(base_url=options.base_url, model=options.model) as client:
        result = client.session(options.session).refine(
            TASK,
            critic,
            attempts=options.turns,
            budget=Budget(seconds=600),
            on_progress=describe,
            temperature=0,
            max_tokens=512,
        )
    print(f"stopped: {result.stopped}, {result.spent.tokens} tokens, {result.spent.seconds:.1f} s")
    return 0 if result.done else 1


if __name__ == "__main__":
    raise SystemExit(main())
