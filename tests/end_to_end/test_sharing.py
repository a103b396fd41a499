"""Test who drafts from whose text on real servers: API keys, cache salts, LoRA adapters, a named tenant, scopes.

Beside each denial stands a hit with the same text, which shows that the text can be drafted.
"""

import hashlib
import importlib.util
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from agentspec.server_ext.identity import IDENTITY_KEY, Identity, RequestTagger
from agentspec.server_ext.identity.callers import Callers, Presented
from agentspec.server_ext.settings import Settings
from agentspec.testing.server import ModelServer
from tests.end_to_end.conftest import ENVIRONMENT, MODEL, OPTIONS, PRICED
from tests.end_to_end.mixed_load import code

pytestmark = [pytest.mark.engine, pytest.mark.store]

ADA, BOB, CAT, DAN = "key-of-ada", "key-of-bob", "key-of-cat", "key-of-dan"
ADMIN = "key-of-the-administrator"
SECRET = "secret of the tests' servers"
NOWHERE = {"session": 0, "group": 0, "global": 0, "public": 0}
KEEP_TO_SESSION: dict[str, Any] = {"vllm_xargs": {"agentspec_scope": "session"}}


def silent_adapter(folder: Path) -> Path:
    """Return a LoRA adapter for the demo's model that changes nothing: its answers are the model's own."""
    folder.mkdir()
    config = json.loads((MODEL / "config.json").read_text())
    width, rank = config["hidden_size"], 8
    heads = config["num_attention_heads"] * config["head_dim"]
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{layer}.lora_A.weight": torch.ones(rank, width), f"{layer}.lora_B.weight": torch.zeros(heads, rank)},
        folder / "adapter_model.safetensors",
    )
    lora = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(lora))
    return folder


def scale_out() -> tuple[str, ...]:
    """Return the option that opens the route for token ids, if this vLLM has it."""
    files = Path(importlib.util.find_spec("vllm").origin or "").parent.glob("entrypoints/*/cli_args.py")  # type: ignore[union-attr]
    return ("--enable-scale-out",) if any("enable_scale_out" in file.read_text() for file in files) else ()


def messages_take_xargs() -> bool:
    """Return whether vLLM's /v1/messages reads ``vllm_xargs``, as from 0.29 on."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    return "vllm_xargs" in AnthropicMessagesRequest.model_fields


@pytest.fixture(scope="module")
def shared_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModelServer]]:
    """Start three servers. Two check API keys: one has no tenant and two adapters, the other has tenant acme, and two
    of its keys belong to tenant rival. The third checks no keys and trusts a gateway's headers."""
    folder = tmp_path_factory.mktemp("sharing")
    keys = folder / "keys"
    keys.write_text("".join(f"{hashlib.sha256(key.encode()).hexdigest()} rival\n" for key in (CAT, DAN)))
    adapters = [f"{name}={silent_adapter(folder / name)}" for name in ("twin", "other")]
    options = {
        "keys": (
            *("--api-key", ADA, BOB, *scale_out()),
            *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *adapters),
        ),
        "acme": ("--api-key", ADA, BOB, CAT, DAN, "--tenant", "acme", "--api-keys-file", str(keys)),
        "gateway": ("--principal-header", "X-Principal", "--tenant-header", "X-Tenant"),
    }
    found = {
        name: ModelServer(
            MODEL,
            options=(*OPTIONS, *PRICED, *own),
            name="demo",
            log=folder / f"{name}.log",
            environment={
                **ENVIRONMENT,
                "AGENTSPEC_STORE": "memory://",
                "AGENTSPEC_SECRET": SECRET,
                "AGENTSPEC_ADMIN_KEY": ADMIN,
            },
        )
        for name, own in options.items()
    }
    try:
        for server in found.values():
            server.launch()
        for server in found.values():
            server.wait()
        yield found
    finally:
        for server in found.values():
            server.stop()


ROUTES: dict[str, tuple[str, Callable[[str], dict[str, Any]], tuple[str, ...]]] = {
    "completions": ("/v1/completions", lambda text: {"prompt": text}, ("cmpl-{}",)),
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}, ("chatcmpl-{}",)),
    "batch": (
        "/v1/chat/completions/batch",
        lambda text: {"messages": [[{"role": "user", "content": text}]]},
        ("chatcmpl-{}",),
    ),
    "responses": ("/v1/responses", lambda text: {"input": text}, ("{}", "{}_0", "resp_{}_0", "resp_{}")),
    "messages": ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}]}, ("chatcmpl-{}",)),
    "tokens": (
        "/inference/v1/generate",
        lambda text: {"token_ids": [ord(c) % 200 + 5 for c in text]},
        ("generate-tokens-{}",),
    ),
}
"""Routes into the engine: path, body for a prompt, and ids under which a request's figures may be kept."""


class Caller:
    """Ask for the same long answer each time, and return the sources that it was drafted from."""

    def __init__(self, server: ModelServer, seed: int, route: str = "completions") -> None:
        self.server = server
        self.path, self._body, self._ids = ROUTES[route]
        self.prompt = code(seed, 12)
        self.text: Any = None
        self._own = uuid.uuid4().hex[:8]

    def named(self, name: str) -> str:
        """Return a session or group name of this test alone."""
        return f"{name}-{self._own}"

    def ask(
        self,
        key: str | None,
        session: str,
        *,
        model: str = "demo",
        group: str = "problem",
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> dict[str, int]:
        """Return the tokens accepted from other requests' text, by source. Check that the answer is always the same."""
        number = uuid.uuid4().hex
        xargs = {"group_id": self.named(group), **body.pop("vllm_xargs", {})}
        request = {"model": model, **self._body(self.prompt), "temperature": 0, "max_tokens": 48, "ignore_eos": True}
        if self.path == "/v1/responses":
            request |= {"max_output_tokens": request.pop("max_tokens"), "request_id": number}
        if self.path == "/inference/v1/generate":
            sampling = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, "extra_args": xargs}
            request = {"model": model, "token_ids": request["token_ids"], "sampling_params": sampling}
        else:
            request["vllm_xargs"] = xargs
        sent = {"X-Session-ID": self.named(session), "X-Request-Id": number, **(headers or {})}
        sent |= {} if key is None else {"Authorization": f"Bearer {key}"}
        root = self.server.base_url.removesuffix("/v1")
        with httpx.Client(base_url=root, headers=sent, timeout=600) as client:
            reply = client.post(self.path, json={**request, **body})
            assert reply.status_code == 200, reply.text
            text = _text_of(reply.json())
            names = [name.format(number) for name in self._ids]
            answers = [client.get(f"/v1/agentspec/requests/{name}") for name in names]
        figures = [answer.json() for answer in answers if answer.status_code == 200]
        assert len(figures) == 1, (names, reply.text)
        self.text = self.text or text
        assert text == self.text
        return {source: figures[0]["accepted_by_source"][source] for source in NOWHERE}


def _text_of(answer: Any) -> Any:
    """Return a reply's texts and token ids."""
    if isinstance(answer, dict):
        return [answer.get("text"), answer.get("content"), answer.get("token_ids")] + [
            _text_of(value)
            for name, value in sorted(answer.items())
            if isinstance(value, list | dict) and name != "usage"
        ]
    return [_text_of(item) for item in answer] if isinstance(answer, list) else None


def forged(key: str, session: str, group: str = "g") -> dict[str, Any]:
    """Return this caller's identity by field, as the API server would write it. The forger even knows the secret."""
    shown = Presented([(b"authorization", f"Bearer {key}".encode())], verified=True)
    tagger = RequestTagger(Callers(Settings(store="memory://"), SECRET.encode()), "tenant")
    given = {"session_id": session, "group_id": group, "parent_session_id": "p", "weight_version": "w"}
    identity: list[Any] = tagger.tag(given, shown)[IDENTITY_KEY]
    by_field = {field.name: value for field, value in zip(fields(Identity), identity, strict=True)}
    assert [name for name, value in by_field.items() if value is None] == ["named_tenant"]
    return by_field | {"named_tenant": "acme"}


def test_each_key_shares_with_itself_alone(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["keys"], 901)
    assert caller.ask(ADA, "one") == NOWHERE
    assert caller.ask(ADA, "two", group="elsewhere")["global"] > 0
    assert caller.ask(ADA, "one", **KEEP_TO_SESSION)["session"] > 0
    assert caller.ask(BOB, "one") == NOWHERE
    assert caller.ask(BOB, "two", group="elsewhere")["global"] > 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_key_hits_and_another_does_not_by_every_route(shared_by: dict[str, ModelServer], route: str) -> None:
    caller = Caller(shared_by["keys"], 920 + len(route), route)
    caller.ask(ADA, "one")
    assert caller.ask(ADA, "one", **KEEP_TO_SESSION)["session"] > 0
    assert caller.ask(ADA, "two", group="elsewhere")["global"] > 0
    as_ada = forged(ADA, caller.named("one"), caller.named("problem"))
    claims: list[dict[str, Any]] = [
        {IDENTITY_KEY: list(as_ada.values())},
        {name: as_ada[name] for name in ("tenant", "session", "group", "principal", "caller")},
        {f"agentspec_{name}": as_ada[name] for name in ("tenant", "principal", "session")},
    ]
    headers = {"X-Principal": "ada", "X-Tenant": as_ada["tenant"]}
    headers["X-Agentspec-Identity"] = json.dumps(list(as_ada.values()))
    if route == "messages" and not messages_take_xargs():  # then a body has no claims and no scope
        assert caller.ask(BOB, "one", headers=headers) == NOWHERE
        return
    for number, claim in enumerate(claims):
        claimed = {"agentspec_scope": "session", **claim}
        assert caller.ask(BOB, f"one of {number}", vllm_xargs=claimed, headers=headers) == NOWHERE
    assert caller.ask(BOB, "one", **KEEP_TO_SESSION, headers=headers) == NOWHERE


def test_nobody_without_a_key_gets_in(shared_by: dict[str, ModelServer]) -> None:
    for path, _, _ in ROUTES.values():
        url = shared_by["keys"].base_url.removesuffix("/v1") + path
        assert httpx.post(url, json={}, timeout=600).status_code == 401
        assert httpx.post(url, json={}, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=600).status_code == 401


def test_sessions_are_listed_exported_imported_and_erased_by_their_principal(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["keys"], 911)
    name, url = caller.named("one"), f"{caller.server.base_url}/agentspec/sessions"
    caller.ask(ADA, "one")

    def call(key: str, method: str, path: str = "", **more: Any) -> httpx.Response:
        return httpx.request(method, url + path, headers={"Authorization": f"Bearer {key}"}, timeout=600, **more)

    def listed(key: str) -> list[str]:
        return [session["id"] for session in call(key, "GET").json()["sessions"]]

    until = time.monotonic() + 180
    while name not in listed(ADA):
        assert time.monotonic() < until
    assert name not in listed(BOB) and call(BOB, "GET", f"/{name}").status_code == 404
    export = call(ADA, "GET", f"/{name}")
    assert len(export.json()["turns"]) == 1
    assert caller.ask(BOB, "copy", **KEEP_TO_SESSION) == NOWHERE
    copy = caller.named("import")
    assert call(BOB, "PUT", f"/{copy}", content=export.content).json()["added"] == 1
    assert caller.ask(BOB, "import", **KEEP_TO_SESSION)["session"] > 0
    assert call(BOB, "DELETE", f"/{name}").status_code == 200  # Bob's own session of that name, which does not exist
    assert caller.ask(ADA, "one", **KEEP_TO_SESSION)["session"] > 0
    while (erased := call(ADA, "DELETE", f"/{name}")).status_code == 202:
        assert time.monotonic() < until
    assert erased.json()["complete"] and name not in listed(ADA)
    assert caller.ask(ADA, "one", group="none") == NOWHERE


def test_figures_are_told_to_their_principal_alone(shared_by: dict[str, ModelServer]) -> None:
    url = shared_by["keys"].base_url
    body = {"model": "demo", "prompt": "x", "max_tokens": 2}
    adas, bobs, admins = ({"Authorization": f"Bearer {key}"} for key in (ADA, BOB, ADMIN))
    name = httpx.post(f"{url}/completions", json=body, headers=adas, timeout=600).json()["id"]
    path = f"{url}/agentspec/requests/{name}"
    assert [httpx.get(path, headers=who, timeout=600).status_code for who in (adas, bobs, admins)] == [200, 404, 200]


def test_stats_and_log_name_no_session_and_no_key(shared_by: dict[str, ModelServer]) -> None:
    server = shared_by["keys"]
    caller = Caller(server, 907)
    caller.ask(ADA, "a-session-of-ada")
    stats = httpx.get(
        f"{server.base_url}/agentspec/stats", headers={"Authorization": f"Bearer {BOB}"}, timeout=600
    ).text
    one = f"{server.base_url}/agentspec/sessions/{caller.named('a-session-of-ada')}"
    for method in ("GET", "DELETE"):
        assert httpx.request(method, one, headers={"Authorization": f"Bearer {ADA}"}, timeout=600).is_success
    assert "DELETE /v1/agentspec/sessions/" in server.log.read_text()
    unkeyed = hashlib.sha256(ADA.encode()).hexdigest()
    for text in (stats, server.log.read_text()):
        for secret in (
            "a-session-of-ada",
            unkeyed[:16],
            SECRET,
            ADMIN,
            str(forged(ADA, caller.named("a-session-of-ada"))["session"]),
        ):
            assert secret not in text


@pytest.mark.parametrize("way", ["salt", "adapter"])
def test_a_salt_and_an_adapter_separate_further(shared_by: dict[str, ModelServer], way: str) -> None:
    caller = Caller(shared_by["keys"], 903 + len(way))
    caller.ask(ADA, "one")
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "salt": ({"cache_salt": "first"}, {"cache_salt": "second"}),
        "adapter": ({"model": "twin"}, {"model": "other"}),
    }
    for apart in ways[way]:
        assert caller.ask(ADA, "one", **apart) == NOWHERE
        assert caller.ask(ADA, "two", group="elsewhere", **apart)["global"] > 0


def test_keys_of_one_tenant_share_its_index_and_nothing_else(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["acme"], 905)
    assert caller.ask(ADA, "one") == NOWHERE
    bobs = caller.ask(BOB, "one")
    assert bobs["global"] > 0 and bobs["session"] == bobs["group"] == 0


def test_a_file_gives_keys_to_a_tenant(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["acme"], 908)
    assert caller.ask(ADA, "one") == NOWHERE
    assert caller.ask(CAT, "one") == NOWHERE  # tenant rival
    dans = caller.ask(DAN, "one")
    assert dans["global"] > 0 and dans["session"] == dans["group"] == 0


def test_a_gateways_headers_separate_principals_and_tenants(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["gateway"], 909)

    def ask(principal: str | None, tenant: str | None, session: str = "one", **more: Any) -> dict[str, int]:
        given = {"X-Principal": principal, "X-Tenant": tenant}
        headers = {name: value for name, value in given.items() if value is not None}
        return caller.ask(None, session, headers=headers, **more)

    assert ask("ada", "acme") == NOWHERE
    assert ask("ada", "acme", **KEEP_TO_SESSION)["session"] > 0
    bobs = ask("bob", "acme")
    assert bobs["global"] > 0 and bobs["session"] == bobs["group"] == 0
    assert ask("ada", "rival") == NOWHERE
    assert ask("ada", None) == NOWHERE
    assert ask("ada", None, "two", group="elsewhere")["global"] > 0  # Ada has her own tenant
    assert ask("bob", None) == NOWHERE


def test_who_does_not_come_through_the_gateway_shares_nothing(shared_by: dict[str, ModelServer]) -> None:
    server = shared_by["gateway"]
    caller = Caller(server, 910)
    caller.ask(None, "one", headers={"X-Principal": "ada"})
    body = {"model": "demo", "prompt": caller.prompt, "temperature": 0, "max_tokens": 48, "ignore_eos": True}
    for headers in ([], [("X-Principal", "ada"), ("X-Principal", "bob")], [("X-Principal", "")]):
        sent = httpx.Headers([("X-Session-ID", "one"), ("X-Request-Id", "nobodys"), *headers])
        for _ in range(2):
            reply = httpx.post(f"{server.base_url}/completions", json=body, headers=sent, timeout=600)
            assert reply.status_code == 200
        path = f"{server.base_url}/agentspec/requests/{reply.json()['id']}"
        assert httpx.get(path, headers=sent, timeout=600).status_code == 404
        figures = httpx.get(path, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=600).json()[
            "accepted_by_source"
        ]
        assert {source: figures[source] for source in NOWHERE} == NOWHERE


def test_a_request_can_narrow_its_scope(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["acme"], 906)
    caller.ask(ADA, "one")
    for scope in ("session", "none"):
        assert caller.ask(ADA, "two", vllm_xargs={"agentspec_scope": scope}) == NOWHERE
    assert caller.ask(ADA, "one", **KEEP_TO_SESSION)["session"] > 0
    assert caller.ask(ADA, "three", group="elsewhere", vllm_xargs={"agentspec_scope": "tenant"})["global"] > 0


def test_the_server_says_at_start_who_shares(shared_by: dict[str, ModelServer], fast: ModelServer) -> None:
    lines = {
        shared_by["keys"]: "shared within each API key",
        shared_by["acme"]: "all callers of tenant 'acme' share answers, but not sessions",
        fast: "shared by all callers, --api-key separates them",
    }
    for server, line in lines.items():
        said = [text for text in server.log.read_text().splitlines() if "agentspec: suffix index (" in text]
        assert said  # several lines if another test has restarted the server
        price = "measured" if server is fast else PRICED[1]
        assert all(text.endswith(f"tokens, price {price}; {line}") for text in said)
