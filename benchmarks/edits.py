"""Replay the commits of git repositories as edits by a model, and draft what its responses quote from the prompt.

    python benchmarks/edits.py --repo DIR --repo DIR --tokenizer NAME [--calls 350] [--others 4] [--traces OUT] [--json]

A call's prompt is a file before a commit, and the commit's subject. The file is shown as it is (plain), with a number
in front of each line (numbered), or as a string in the JSON of a tool's result (result). With `--others` that many
other files follow it, in the same form. The response is the edit: the arguments of `str_replace` calls as JSON (json),
the same between tags (tags), a unified diff (diff), the JSON of an `apply_patch` call (patch), or the whole file
(whole). A session is a file. Each session is replayed with agentspec's defaults, at a given price, with and without the
quotes that the server adds (`quote_tokens`). `--traces` writes the calls for `drafting.py --limits defaults`, which
replays them with the other drafters.
"""

import argparse
import base64
import difflib
import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import exit_status, positive, print_json
from trace_files import Tokens

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.cache.types import MAX_QUOTABLE
from agentspec.errors import ConfigurationError
from agentspec.server_ext.api.quotes import Quotes
from agentspec.simulate import Call, simulate

COSTS = (0.01, 0.03)
ENDINGS = (".py", ".md", ".rst", ".toml", ".cfg")
LONGEST, LONGEST_WHOLE = 30_000, 12_000  # characters of a file
COMMITS = 700  # newest commits that are read
END = 2
LINE = (
    "{workload:14} price {price:<5} quotes {quotes!s:5} {tokens:8,} tokens in {steps:7,} steps "
    "({tokens_per_step:.3f}), throughput {throughput:.3f}"
)

TAGS = "<function=str_replace>\n{}</function>"
TAG = "<parameter={}>\n{}</parameter>\n"


VIEWS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "numbered": lambda text: "".join(f"{number:6}\t{line}" for number, line in enumerate(text.splitlines(True), 1)),
    "result": lambda text: json.dumps({"output": text, "metadata": {"exit_code": 0}}, ensure_ascii=False),
}
"""Functions that show a file in each form."""


@dataclass(frozen=True)
class Edit:
    """Hold one edit of a file. response: the edit itself, in the form ``kind``.

    shown: the file before the edit, then the other files, all in one form.
    """

    file: str
    subject: str
    shown: Sequence[str]
    kind: str
    response: str

    @property
    def prompt(self) -> str:
        return f"File {self.file}:\n" + "".join(f"```\n{text}```\n" for text in self.shown) + f"{self.subject}\n"

    @property
    def body(self) -> bytes:
        """Return the parts of a client's HTTP body that quoting depends on."""
        shown = [{"role": "tool", "content": text} for text in self.shown]
        if self.kind == "diff":
            return json.dumps({"messages": [{"role": "system", "content": "Answer with a ```diff."}, *shown]}).encode()
        tool = {"name": "apply_patch" if self.kind == "patch" else "str_replace"}
        return json.dumps({"messages": shown, "tools": [{"type": "function", "function": tool}]}).encode()


class QuotingCache(SuffixCache):
    """Start requests that may quote `quotable`, which is set before each start."""

    quotable: Any = ()

    def start(self, request_id: str, prompt: Any, **names: Any) -> None:
        super().start(request_id, prompt, quotable=self.quotable, **names)


class Tekken:
    """Encode text as Mistral's tokenizer does, from mistral_common's file."""

    def __init__(self, file: Path) -> None:
        import tiktoken

        read = json.loads(file.read_text(encoding="utf-8"))
        self._special = read["config"]["default_num_special_tokens"]
        tokens = read["vocab"][: read["config"]["default_vocab_size"] - self._special]
        ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in tokens}
        pattern = read["config"]["pattern"]
        self._encoding = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [token + self._special for token in self._encoding.encode_ordinary(text)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, action="append", required=True, metavar="DIR", help="a git repository")
    parser.add_argument("--tokenizer", required=True, help="transformers' folder or hub id, or a tekken….json")
    parser.add_argument("--calls", type=positive, default=350, help="of each repository (%(default)s)")
    parser.add_argument("--others", type=int, default=0, metavar="N", help="other files that the prompt shows, too")
    parser.add_argument("--traces", type=Path, metavar="OUT", help="write the calls into this folder")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    options = parser.parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Replay the commits and print. Raises ConfigurationError for a repository without a commit to replay."""
    tokenizer = open_tokenizer(options.tokenizer)
    edits: dict[str, list[Edit]] = {}
    for repo in options.repo:
        pick, seen = random.Random(1), dict[str, str]()
        for name, before, after, subject in itertools.islice(changes(repo), options.calls):
            seen[name] = before
            rest = sorted(seen.keys() - {name})
            files = [before, *(seen[other] for other in pick.sample(rest, min(options.others, len(rest))))]
            shown_as = {view: [show(text) for text in files] for view, show in VIEWS.items()}
            for form, response in responses(name, before, after):
                for view, shown in shown_as.items():
                    edit = Edit(f"{repo.name}/{name}", subject, shown, form, response)
                    edits.setdefault(f"{view}_{form}", []).append(edit)
    if not edits:
        folders = ", ".join(map(str, options.repo))
        raise ConfigurationError(f"--repo {folders}: no commit changes a file of {', '.join(ENDINGS)}")
    rows = []
    for kind, of_kind in edits.items():
        calls = [call_of(number, edit, tokenizer) for number, edit in enumerate(of_kind, 1)]
        if options.traces:
            write(options.traces, kind, calls)
        for cost in COSTS:
            for quoting in (False, True):
                rows.append(replay(kind, of_kind, calls, cost, Quotes(tokenizer, MAX_QUOTABLE) if quoting else None))
                if not options.json:
                    print(LINE.format(**rows[-1]), flush=True)
    if options.json:
        print_json(rows)


def open_tokenizer(name: str) -> Any:
    """Return the tokenizer of a file of Mistral's, a folder, or a model on the hub."""
    if name.endswith(".json"):
        return Tekken(Path(name))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def changes(repo: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield each file that a commit changed: its name, its text before and after, the commit's subject.

    Raises ConfigurationError where git cannot read the repository.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise ConfigurationError(f"--repo {repo}: git {words[0]} fails: {done.stderr.strip()}")
        return done.stdout

    log = git("log", "--no-merges", "--reverse", "--pretty=%H%x09%s", f"-n{COMMITS}")
    for commit, subject in (line.split("\t", 1) for line in log.splitlines()):
        for line in git("diff-tree", "--no-commit-id", "-r", "--name-status", commit).splitlines():
            what, name = line.split("\t", 1)
            if what == "M" and name.endswith(ENDINGS):
                before, after = git("show", f"{commit}^:{name}"), git("show", f"{commit}:{name}")
                if before and after and before != after and len(before) <= LONGEST:
                    yield name, before, after, subject


def responses(name: str, before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield an edit in each form."""
    old, new = before.splitlines(True), after.splitlines(True)
    calls = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(2):
        (_, a, _, c, _), (_, _, b, _, d) = group[0], group[-1]
        calls.append({"path": f"{name}\n", "old_string": "".join(old[a:b]), "new_string": "".join(new[c:d])})
    as_json = [{"name": "str_replace", "arguments": {**call, "path": name}} for call in calls]
    yield "json", "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in as_json)
    yield "tags", "\n".join(TAGS.format("".join(TAG.format(*argument) for argument in call.items())) for call in calls)
    patch = "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))
    yield "diff", f"```diff\n{patch}```"
    yield "patch", json.dumps({"name": "apply_patch", "arguments": {"patch": patch}}, ensure_ascii=False)
    if len(after) <= LONGEST_WHOLE:
        yield "whole", f"```\n{after}```"


def call_of(number: int, edit: Edit, tokenizer: Any) -> Call:
    """Return an edit as a call of the simulation."""
    texts = (edit.prompt, edit.response)
    prompt, response = (np.array(tokenizer.encode(text, add_special_tokens=False), np.int32) for text in texts)
    return Call(
        line=number, session=edit.file, turn=0, group=None, tenant=None, prompt=prompt, response=ended(response)
    )


def ended(response: Tokens) -> Tokens:
    """Return a response with the token that ends it."""
    return np.append(response, np.int32(END))


def replay(
    kind: str, edits: Sequence[Edit], calls: Sequence[Call], cost: float, quotes: Quotes | None
) -> dict[str, Any]:
    """Replay the calls. quotes: finds what each may quote, as the server does; None: they quote nothing."""
    cache = QuotingCache(policy=DraftPolicy(cost=cost))

    def asked() -> Iterator[Call]:
        for edit, call in zip(edits, calls, strict=True):
            if quotes is not None:
                cache.quotable = quotes.read(edit.body, "")
            yield call

    figures = simulate(asked(), cache)
    throughput = figures.tokens / (figures.steps + cost * figures.drafted)
    return {
        "workload": kind,
        "price": cost,
        "quotes": quotes is not None,
        "tokens": figures.tokens,
        "steps": figures.steps,
        "tokens_per_step": round(figures.tokens_per_step, 4),
        "throughput": round(throughput, 4),
    }


def write(folder: Path, kind: str, calls: Sequence[Call]) -> None:
    """Write calls for `drafting.py`: NAME.tok.npz, and the load.py that reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("load_edits.py"), folder / "load.py")
    sessions = {session: number for number, session in enumerate(dict.fromkeys(call.session for call in calls))}
    parts = {name: [getattr(call, name) for call in calls] for name in ("prompt", "response")}
    arrays: dict[str, Any] = {f"{name}_ends": np.cumsum([len(part) for part in each]) for name, each in parts.items()}
    arrays["session"] = [sessions[call.session] for call in calls]
    arrays |= {name: np.concatenate(each) for name, each in parts.items()}
    np.savez_compressed(folder / f"{kind}.tok.npz", **arrays)


if __name__ == "__main__":
    sys.exit(main())
