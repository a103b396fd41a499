"""Read mutated input of callers and operators: ``python -m tests.server_ext.fuzz --count 10000000``.

Exports, headers with ``extra_args``, settings and files of API keys. Each may be refused with the error that its reader
documents; nothing else may happen, and no error may quote what was marked as a secret.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException

from agentspec.errors import ConfigurationError
from agentspec.server_ext.api.session_exports import _import, _parse, _tokenised
from agentspec.server_ext.identity import IDENTITY_KEY, Identity, RequestTagger, identify
from agentspec.server_ext.identity.callers import NOBODY, ApiKeysFile, Callers, Presented
from agentspec.server_ext.settings import Settings, load_settings

SECRET = "hunter2-hunter2"
URL = f"redis://me:{SECRET}@cache:6379/0"

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1.5, float("nan"), float("inf"), "", " ", "x", "\ud800", "é" * 300),
    *("a\nb", "\x00", [], [[[]]], {}, {"a": {"b": []}}, [None], [2**40], ["tenant"], "tenant", "0" * 16, "0" * 32, URL),
)
_TURN = {
    "writer": "ab" * 8,
    "number": 3,
    "kept": 0,
    "parent": "0" * 16,
    "block": "f" * 16,
    "created": 1.0,
    "prompt": [1, 2, 3],
    "response": [4, 5],
    "weights": "v1",
}
_EXPORT = {"version": 1, "id": "s", "log": "0" * 40, "turns": [_TURN, {**_TURN, "number": 4}]}
_EXTRA = {
    "session_id": "s",
    "group_id": "g",
    "parent_session_id": "p",
    "weight_version": "w",
    "agentspec_scope": "session",
    IDENTITY_KEY: list(astuple(Identity("t", "s", "g", principal="p", caller="c", session_name="s", group_name="g"))),
}
_HEADERS = ((b"authorization", b"Bearer ada"), (b"x-principal", b"ada"), (b"x-tenant", b"acme"), (b"x-other", b"1"))
_SETTINGS = {"store": URL, "tenant": "t", "scope": "session", "max_bytes": 1_000_000, "principal_header": "X-A"}
_DIGEST = "0123456789abcdef" * 4
_KEYS_FILE = f"# keys\n{_DIGEST} acme\n{_DIGEST[::-1]} rival corp\n"
_MINE = Identity(session="a" * 32, session_name="s")
_TAGGER = RequestTagger(
    Callers(
        Settings(store="memory://", principal_header="X-Principal", tenant_header="X-Tenant"), b"secret of the tests"
    ),
    "tenant",
)
_TEXTS = {"version": 1, "messages": [{"role": "user", "content": "hello"}], "texts": ["abc", "de"]}
_ENGINE = SimpleNamespace(
    get_tokenizer=lambda: SimpleNamespace(
        encode=lambda text, add_special_tokens: [ord(c) % 1000 for c in text],
        apply_chat_template=lambda messages, **_: "".join(f"{m['role']}: {m['content']}" for m in messages),
    )
)
_FILE = Path(tempfile.gettempdir()) / f"agentspec-fuzz-{random.randrange(2**64):x}"


def fuzz(count: int, seed: int) -> Counter[str]:
    """Read ``count`` mutated inputs, and count the outcomes."""
    chance, outcomes = random.Random(seed), Counter[str]()
    readers: tuple[Callable[[random.Random], str], ...] = (_read_export, _read_request, _read_settings, _read_keys)
    try:
        for _ in range(count):
            reader = chance.choice(readers)
            outcomes[f"{reader.__name__[6:]}: {reader(chance)}"] += 1
    finally:
        _FILE.unlink(missing_ok=True)
    return outcomes


def _read_export(chance: random.Random) -> str:
    if chance.random() < 0.3:
        body = json.dumps(_odd(chance, _TEXTS)).encode()
    elif chance.random() < 0.5:
        body = _changed(chance, json.dumps(_EXPORT).encode())
    else:
        turns = [_odd(chance, _TURN), _TURN] if chance.random() < 0.7 else _EXPORT["turns"]
        body = json.dumps(_odd(chance, {**_EXPORT, "turns": turns})).encode()
    try:
        session = _tokenised(_parse(body), _ENGINE, "x", "log")
        return f"{len(_import(session, _MINE, 1000))} records"
    except HTTPException as error:
        assert error.status_code == 400 and len(str(error.detail)) < 400, error.detail
        return "refused"


def _read_request(chance: random.Random) -> str:
    headers = [(name, _changed(chance, value) if chance.random() < 0.3 else value) for name, value in _HEADERS]
    headers = chance.choices(headers, k=chance.randrange(6))
    presented = Presented(headers, chance.choice((None, True, False)))
    salt = chance.choice((None, "", "salt", "\ud800"))
    tagged = _TAGGER.tag(
        _odd(chance, _EXTRA), presented, session_id=chance.choice((None, "x", "a\nb")), cache_salt=salt
    )
    identity = identify(tagged)
    known = sum(name == b"x-principal" for name, _ in headers) == 1 and presented.verified is not False
    assert known or identity.principal == NOBODY, (headers, identity)
    assert identity.principal != "q" and identity.caller != "c"  # these are the caller's claims
    identify(_odd(chance, _EXTRA))
    return "nobody" if identity.principal == NOBODY else f"scope {identity.scope}"


def _read_settings(chance: random.Random) -> str:
    config: Any = {"agentspec": _odd(chance, _SETTINGS)}
    try:
        load_settings(chance.choice((config, _odd(chance, config), chance.choice(_ODD))), environ={})
        return "read"
    except ConfigurationError as error:
        assert SECRET not in str(error), error
        return "refused"


def _read_keys(chance: random.Random) -> str:
    _FILE.write_bytes(_changed(chance, _KEYS_FILE.encode()))
    try:
        ApiKeysFile(_FILE).tenant_of("key")
        return "read"
    except ConfigurationError as error:
        assert _DIGEST[5:40] not in str(error), error
        return "refused"


def _odd(chance: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which some values are odd or missing."""
    changed = dict(given)
    for _ in range(chance.randrange(3)):
        changed[chance.choice([*given, "further"])] = chance.choice(_ODD)
    if chance.random() < 0.1:
        changed.pop(chance.choice(list(changed)))
    return changed


def _changed(chance: random.Random, given: bytes) -> bytes:
    """Return a copy in which some bytes are changed, missing or doubled."""
    changed = bytearray(given)
    for _ in range(chance.randint(0, 3)):
        place = chance.randrange(len(changed) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            changed[place : place + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del changed[place : place + chance.randrange(20)]
        elif kind == 2:
            changed[place:place] = changed[place : place + chance.randrange(40)]
        else:
            changed[place:place] = chance.choice((b"9" * 30, b"[" * 50, b'"', b"\\", b",", b"\xff", b"-", b"\n"))
    return bytes(changed)


def main() -> None:
    """Fuzz, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    for outcome, count in sorted(fuzz(options.count, options.seed).items()):
        print(f"{count:>12,} {outcome}")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
