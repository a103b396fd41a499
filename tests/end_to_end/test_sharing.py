"""Who drafts from whose text on real servers: API keys, cache salts, LoRA adapters, a named tenant, scopes.

Each denial stands beside a hit with the same text, which shows that it could have been drafted from.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from agentspec.server_ext.identity import CALLER_KEY, principal_of
from agentspec.testing.server import ModelServer
from tests.end_to_end.conftest import ENVIRONMENT, MODEL, OPTIONS
from tests.end_to_end.mixed_load import code

pytestmark = pytest.mark.engine

ADA, BOB = "key-of-ada", "key-of-bob"
NOWHERE = {"session": 0, "group": 0, "global": 0}
KEEP_TO_SESSION: dict[str, Any] = {"vllm_xargs": {"agentspec_scope": "session"}}


def silent_adapter(folder: Path) -> Path:
    """A LoRA adapter for the demo's model that changes nothing: its answers are the model's own."""
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


@pytest.fixture(scope="module")
def shared_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModelServer]]:
    """Servers that check two API keys: one without a tenant, which also has two adapters, and one of tenant acme."""
    folder = tmp_path_factory.mktemp("sharing")
    adapters = [f"{name}={silent_adapter(folder / name)}" for name in ("twin", "other")]
    options = {
        "keys": ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *adapters),
        "acme": ("--tenant", "acme"),
    }
    found = {
        name: ModelServer(
            MODEL,
            options=(*OPTIONS, "--api-key", ADA, BOB, *own),
            name="demo",
            log=folder / f"{name}.log",
            environment={**ENVIRONMENT, "AGENTSPEC_STORE": "memory://"},
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


class Caller:
    """Asks for the same long answer each time, and says what it was drafted from."""

    def __init__(self, server: ModelServer, seed: int) -> None:
        self.server = server
        self.prompt = code(seed, 12)
        self.text: str | None = None

    def ask(
        self, key: str, session: str, *, model: str = "demo", group: str = "problem", **body: Any
    ) -> dict[str, int]:
        """Tokens accepted from what others said, by source. The text must always be the same."""
        xargs = {"group_id": group, **body.pop("vllm_xargs", {})}
        request = {"model": model, "prompt": self.prompt, "temperature": 0, "max_tokens": 48, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key}", "X-Session-ID": session}
        with httpx.Client(base_url=self.server.base_url, headers=headers, timeout=120) as client:
            reply = client.post("/completions", json={**request, **body, "vllm_xargs": xargs})
            assert reply.status_code == 200, reply.text
            answer = reply.json()
            figures = client.get(f"/agentspec/requests/{answer['id']}").json()
        text = answer["choices"][0]["text"]
        self.text = self.text or text
        assert text == self.text
        return {source: figures["accepted_by_source"][source] for source in NOWHERE}


def test_each_key_shares_with_itself_alone(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["keys"], 901)
    assert caller.ask(ADA, "one") == NOWHERE
    assert caller.ask(ADA, "two", group="elsewhere")["global"] > 0
    assert caller.ask(ADA, "one", **KEEP_TO_SESSION)["session"] > 0
    assert caller.ask(BOB, "one") == NOWHERE
    assert caller.ask(BOB, "two", group="elsewhere")["global"] > 0


def test_nobody_can_pass_for_another(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["keys"], 902)
    caller.ask(ADA, "one")
    assert caller.ask(ADA, "one", **KEEP_TO_SESSION)["session"] > 0
    for forged in ([principal_of(ADA), ""], principal_of(ADA), 1):
        xargs = {CALLER_KEY: forged, "agentspec_scope": "session"}
        assert caller.ask(BOB, f"one of {forged}", vllm_xargs=xargs) == NOWHERE
    assert caller.ask(BOB, "one", vllm_xargs={CALLER_KEY: [principal_of(ADA), ""]})["session"] == 0
    assert httpx.post(f"{caller.server.base_url}/completions", json={}).status_code == 401


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


def test_a_request_can_narrow_its_scope(shared_by: dict[str, ModelServer]) -> None:
    caller = Caller(shared_by["acme"], 906)
    caller.ask(ADA, "one")
    for scope in ("session", "none"):
        assert caller.ask(ADA, "two", vllm_xargs={"agentspec_scope": scope}) == NOWHERE
    assert caller.ask(ADA, "one", **KEEP_TO_SESSION)["session"] > 0
    assert caller.ask(ADA, "three", group="elsewhere", vllm_xargs={"agentspec_scope": "tenant"})["global"] > 0


def test_an_unknown_scope_is_a_clear_400(shared_by: dict[str, ModelServer]) -> None:
    server = shared_by["acme"]
    body = {"model": "demo", "prompt": "x", "max_tokens": 2, "vllm_xargs": {"agentspec_scope": "everyone"}}
    headers = {"Authorization": f"Bearer {ADA}"}
    response = httpx.post(f"{server.base_url}/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 400 and "agentspec_scope must be one of tenant" in response.text


def test_the_server_says_at_start_who_shares(shared_by: dict[str, ModelServer], fast: ModelServer) -> None:
    lines = {
        shared_by["keys"]: "each API key shares with itself alone",
        shared_by["acme"]: "drafts from tenant 'acme': API keys share answers, not sessions",
        fast: "shared by all callers; --api-key separates them",
    }
    for server, line in lines.items():
        assert f"agentspec: {line}" in server.log.read_text()
