"""Run an agent on real vLLM, with and without agentspec, and restart the server in the middle: ``python -m demo``.

With agentspec, the suffix index drafts together with the small draft model in ``demo/drafter``.

Writes ``demo_results/``: ``report.html`` (where each token was drafted), ``summary.json``, ``steps.jsonl`` (the
step-by-step record), ``replies.jsonl`` (the agent's record), the servers' logs, and the token logs (``server.db``) that
the restarted server reads.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from agentspec import AgentClient
from agentspec.addresses import bypass_proxies
from agentspec.report import read_run, render
from agentspec.testing.server import ModelServer, ServerFailedError
from demo.agent import Agent
from demo.report import Pair, print_table, write_summary
from demo.tasks import FIRST_HELD_OUT_SEED, make_task

HERE = Path(__file__).resolve().parent
OPTIONS = ("--max-model-len", "2048", "--max-num-seqs", "8")
DRAFTER = {
    "method": "arctic",
    "model": str(HERE / "drafter"),
    "num_speculative_tokens": 3,
    "enable_suffix_decoding": True,
}

WRITTEN = ("report.html", "summary.json", "steps.jsonl", "replies.jsonl", "plain.log", "agentspec.log", "server.db*")
"""Files that the demo writes. It first removes those of an earlier run."""


def main() -> int:
    """Run the demo. Returns 0 if all texts were identical and the restarted server drafted from restored turns."""
    arguments = _arguments()
    bypass_proxies(os.environ)
    console = Console(width=None if sys.stdout.isatty() else 150)
    results = Path(arguments.out)
    _prepare(results)
    plain = ModelServer(HERE / "model", agentspec=False, options=OPTIONS, name="demo", log=results / "plain.log")
    fast = ModelServer(
        HERE / "model",
        options=(
            *(*OPTIONS, "--record", str(results / "steps.jsonl")),
            *("--speculative-config", json.dumps(DRAFTER)),
        ),
        environment={"AGENTSPEC_STORE": f"sqlite:///{(results / 'server.db').resolve()}"},
        name="demo",
        log=results / "agentspec.log",
    )
    try:
        with _stopped_at_the_end(console, plain, fast):
            _start(console, "starting vLLM twice, without and with agentspec", plain, fast)
            pairs = _run(console, plain, fast, arguments.sessions, results / "replies.jsonl")
    except ServerFailedError as error:
        console.print(str(error), style="bold red", markup=False)  # the log that it quotes has brackets
        return 1
    print_table(pairs, console)
    figures = write_summary(pairs, results / "summary.json")
    console.print(
        f"speed-up [bold]{figures['speedup']:.2f}x[/], mean acceptance length "
        f"{figures['mean_acceptance_length']:.2f}, texts identical: {figures['identical']}, tokens accepted from "
        f"restored turns in the first turn after the restart: {figures['accepted_after_restart']}"
    )
    page = results / "report.html"
    page.write_text(render(read_run(results / "replies.jsonl"), "The demo, drafted"), encoding="utf-8")
    console.print(f"written: {results}/summary.json, {results}/steps.jsonl")
    console.print(f"where each token was drafted: open [bold]{page.resolve()}[/] in a browser", soft_wrap=True)
    return 0 if figures["identical"] and figures["accepted_after_restart"] > 0 else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--sessions", type=int, default=6, help="how many functions the agent asks for (default 6)")
    parser.add_argument("--out", default="demo_results", help="folder for the results (default demo_results)")
    arguments = parser.parse_args()
    if arguments.sessions < 2:
        parser.error("--sessions must be at least 2: the restart lies between the first and the last")
    if Path(arguments.out).exists() and not Path(arguments.out).is_dir():
        parser.error(f"--out {arguments.out} is a file: name a folder")
    found = _written(Path(arguments.out))
    if found and not (Path(arguments.out) / "plain.log").exists():  # the first file that a run writes
        parser.error(f"--out {arguments.out}: the demo would replace {found[0].name} there; name another folder")
    return arguments


def _prepare(results: Path) -> None:
    """Make the folder for the results, without what an earlier run wrote there. Other files stay."""
    results.mkdir(parents=True, exist_ok=True)
    for file in _written(results):
        file.unlink()


def _written(results: Path) -> list[Path]:
    """Return the files in the folder that have the names of what the demo writes."""
    return [file for pattern in WRITTEN for file in results.glob(pattern)]


@contextmanager
def _stopped_at_the_end(console: Console, *servers: ModelServer) -> Iterator[None]:
    """Stop the servers after the block, also when SIGTERM or a closed terminal (SIGHUP) ends the demo.

    They do not get the demo's signals. Another signal meanwhile does not wait for a server: it kills it.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with ExitStack() as at_end:  # calls all of these, in reverse, though one raises an exception
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # nohup ignores SIGHUP
                at_end.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        for server in servers:
            at_end.callback(server.stop)
        at_end.callback(console.print, "stopping the servers ...")
        yield


def _start(console: Console, what: str, *servers: ModelServer) -> None:
    start = time.monotonic()
    if not console.is_terminal:  # where the status shows nothing
        console.print(f"{what} ...")
    with console.status(f"{what} ...") as status:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait(tick=lambda _: status.update(f"{what} ... {time.monotonic() - start:.0f} s"))
    console.print(f"{what}: {time.monotonic() - start:.0f} s")


def _run(console: Console, plain: ModelServer, fast: ModelServer, sessions: int, record: Path) -> list[Pair]:
    """Run all sessions, each turn first without and then with agentspec. The server restarts in the middle one.

    record: file for the replies of the server with agentspec.
    """
    pairs: list[Pair] = []
    for server in (plain, fast):  # a server's first call pays for lazy set-up
        with _client(server) as client:
            client.chat("Hello.", max_tokens=8)
    with _client(plain) as slow_client, _client(fast, record) as fast_client:
        restarted = False
        for number in range(sessions):
            task = make_task(FIRST_HELD_OUT_SEED + number)
            name = f"session-{number + 1}"
            one, other = Agent(task, slow_client.session(name)), Agent(task, fast_client.session(name))
            while not (one.done and other.done):
                restart = not restarted and number >= sessions // 2 and len(one.turns) == 1
                if restart:
                    fast.stop()
                    _start(console, f"restarting the agentspec server in the middle of {name}", fast)
                    restarted = True
                with fast.paused():  # the servers share the cores
                    without = one.turn()
                with plain.paused():
                    pairs.append(Pair(without, other.turn(), after_restart=restart))
                _progress(console, pairs[-1])
    return pairs


def _client(server: ModelServer, record: Path | None = None) -> AgentClient:
    return AgentClient(base_url=server.base_url, model="demo", api_key="none", store="memory://", record=record)


def _progress(console: Console, pair: Pair) -> None:
    turn = pair.fast
    passed = sum(result.passed for result in turn.results)
    console.print(
        f"{turn.session} turn {turn.number}: {turn.tokens} tokens, {passed}/{len(turn.results)} tests pass, "
        f"{pair.plain.seconds:.1f} s without, {turn.seconds:.1f} s with agentspec"
    )


if __name__ == "__main__":
    sys.exit(main())
