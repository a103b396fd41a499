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


def fence_for(text: str) -> str:
    """Return a fence for a code block with this text, which may hold shorter ones."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


def block_of(text: str, fence: str) -> str:
    """Return the text as a code block, in which it ends with a line end."""
    return f"{fence}\n{text}" + ("" if text.endswith("\n") else "\n") + fence


def text_of(answer: str) -> str:
    """Return the text of an answer's first code block, with the blocks in it; the whole answer without one."""
    lines = answer.splitlines(keepends=True)
    begin, open_fences = 0, list[str]()
    for number, line in enumerate(lines):
        language = line.lstrip("`")
        fence = line.removesuffix(language)
        if len(fence) < 3:
            continue
        if open_fences and not language.strip() and len(fence) >= len(open_fences[-1]):
            open_fences.pop()
            if not open_fences:
                return "".join(lines[begin:number])
        else:
            begin = begin if open_fences else number + 1
            open_fences.append(fence)
    return answer


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
        fence = fence_for(text)
        prompt = f"This is {options.file.name}:\n{block_of(text, fence)}\n"
        for instruction in options.instructions:
            prompt += f"Change it: {instruction}. Answer with the whole file in one code block."
            reply = session.chat(prompt, prediction=block_of(text, fence), temperature=0)
            if reply.finish_reason == "length":
                print(f"{instruction}: {describe(reply)}; the answer was cut off, so this is not the whole file")
                break
            edited = text_of(reply.text)
            changes = difflib.unified_diff(text.splitlines(), edited.splitlines(), "before", "after", lineterm="", n=0)
            print(f"{instruction}: {describe(reply)}", *changes, sep="\n")
            text, prompt = edited, ""


if __name__ == "__main__":
    main()
