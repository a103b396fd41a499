"""Edit a file in steps: each answer is the whole file again, which the one before it predicts.

    agentspec serve MODEL
    python examples/agents/editor.py --model MODEL FILE "rename total to count" "add a docstring"

The server drafts the file from the prediction, so only what was changed takes time. The program prints the changes
and leaves the file as it is.
"""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path

from agentspec import AgentClient, Reply

CODE_BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


def describe(reply: Reply) -> str:
    """Return what the prediction brought, in a line."""
    details = reply.usage.completion_tokens_details if reply.usage else None
    if details is None or details.accepted_prediction_tokens is None:
        return "the server takes no predictions"
    steps = f" in {reply.speculation.steps} steps" if reply.speculation else ""
    tokens = reply.usage.completion_tokens if reply.usage else 0
    return f"{tokens} tokens{steps}, {details.accepted_prediction_tokens} of them from the prediction"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("file", type=Path)
    parser.add_argument("instructions", nargs="+")
    options = parser.parse_args()

    text = options.file.read_text(encoding="utf-8")
    with AgentClient(base_url=options.base_url, model=options.model, store=None) as client:
        session = client.session(f"editor:{options.file.name}")
        prompt = f"This is {options.file.name}:\n```\n{text}```\n"
        for instruction in options.instructions:
            prompt += f"Change it: {instruction}. Answer with the whole file in one code block."
            reply = session.chat(prompt, prediction=f"```\n{text}```", temperature=0)
            found = CODE_BLOCK.search(reply.text)
            edited = found.group(1) if found else reply.text
            changes = difflib.unified_diff(text.splitlines(), edited.splitlines(), "before", "after", lineterm="", n=0)
            print(f"{instruction}: {describe(reply)}", *changes, sep="\n")
            text, prompt = edited, ""


if __name__ == "__main__":
    main()
