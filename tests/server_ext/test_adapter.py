"""Test how the adapter is put into vLLM: its patches, what it refuses, and that no other module imports vLLM."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams

import agentspec
from agentspec.errors import ConfigurationError, UnsupportedEngineError
from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.identity import RequestTagger, identify
from agentspec.server_ext.identity.callers import Callers, Presented
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.vllm_adapter import frontend, patches, startup, worker
from agentspec.server_ext.vllm_adapter.frontend.senders import process_inputs
from agentspec.server_ext.vllm_adapter.patches import MARK, init_device
from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH


def test_api_ids_lose_the_engines_decoration() -> None:
    assert vllm_adapter.api_request_id("chatcmpl-abc-12345678") == "chatcmpl-abc"
    assert vllm_adapter.api_request_id("1_cmpl-abc-0-deadbeef") == "cmpl-abc"
    assert vllm_adapter.api_request_id("resp_abc_0-deadbeef") == "resp_abc"
    assert vllm_adapter.api_request_id("resp_a_1_12-deadbeef") == "resp_a_1"
    assert vllm_adapter.api_request_id("1_chatcmpl-job_7_0-deadbeef", batch=True) == "chatcmpl-job_7"
    assert vllm_adapter.api_request_id("job_7_0-deadbeef", batch=True) == "job_7"  # a response's, chosen by its caller
    for kind in ("decision", "generative-scoring"):
        assert vllm_adapter.api_request_id(f"{kind}-abc-1-deadbeef") == f"{kind}-abc"
    assert vllm_adapter.api_request_id("chatcmpl-job_7-deadbeef") == "chatcmpl-job_7"
    for given in ("", "a\nb", "c\n", "5", "-1"):  # X-Request-Id or request_id of callers
        assert vllm_adapter.api_request_id(f"cmpl-{given}-0-deadbeef") == f"cmpl-{given}"
        assert vllm_adapter.api_request_id(f"chatcmpl-{given}-deadbeef") == f"chatcmpl-{given}"


def test_pipeline_parallel_is_refused_with_the_remedy() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(UnsupportedEngineError, match="tensor parallelism"):
        vllm_adapter.check_engine(config)


@pytest.mark.parametrize(
    ("name", "sent"), [("\ud800", None), ("usable", "usable"), ("x" * 300, "x" * 300), (None, None)]
)
def test_vllms_own_session_id_can_be_sent_to_the_engine(name: str | None, sent: str | None) -> None:
    """Otherwise a lone surrogate, in the body or in vllm_xargs, would give HTTP 500."""
    params = SamplingParams(extra_args={"session_id": name})
    request = SimpleNamespace(sampling_params=params, session_id=name, cache_salt=None, lora_request=None)
    speculative = SimpleNamespace(method="custom_class", model=PROPOSER_PATH)
    processor = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculative),
        agentspec=RequestTagger(Callers(Settings(store="memory://"), b"the secret of these tests"), "tenant"),
    )
    found = process_inputs(lambda processor: request, processor)
    assert found.session_id == sent
    msgspec.msgpack.encode((found.session_id, found.sampling_params.extra_args))


def test_the_description_of_a_request_that_vllm_logs_names_no_caller() -> None:
    """vLLM logs it when an engine ends, with the sampling parameters but without the prompt."""
    from vllm.v1.core.sched.output import NewRequestData

    vllm_adapter.register()

    def described(extra: dict[str, Any], params: Any = SamplingParams) -> str:
        made = params(extra_args=extra)
        request = NewRequestData("id", [1], [], made, None, ([1],), 0, None)
        shown: str = request.anon_repr()
        assert made.extra_args is extra and request.sampling_params is made  # the engine still needs them
        return shown

    tagger = RequestTagger(Callers(Settings(store="memory://"), b"the secret of these tests"), "tenant")
    names = {"session_id": "a secret session", "group_id": "a secret group", "parent_session_id": "a secret parent"}
    sender = Presented((), prediction=(4711, 4712), quotable=b"a quoted text")
    tagged = tagger.tag({**names, "kept": "whole"}, sender)
    shown = described(tagged)
    assert "'kept': 'whole'" in shown and "'session_id': '...'" in shown
    for hidden in ("secret", "4711", "quoted", identify(tagged).session):
        assert str(hidden) not in shown
    assert "theirs" in described({"session_id": "theirs"})  # an engine without agentspec logs as it did


def test_only_our_own_method_is_recognised() -> None:
    def config(method: str, model: str | None) -> Any:
        return SimpleNamespace(speculative_config=SimpleNamespace(method=method, model=model))

    assert vllm_adapter.uses_agentspec(config("custom_class", PROPOSER_PATH))
    assert not vllm_adapter.uses_agentspec(config("custom_class", "other.Class"))
    assert not vllm_adapter.uses_agentspec(config("ngram", None))
    assert not vllm_adapter.uses_agentspec(SimpleNamespace(speculative_config=None))


class TestPatches:
    def test_all_of_them_find_what_they_replace(self) -> None:
        for patch in vllm_adapter.current_patches():
            if not patch.adds:
                assert inspect.isfunction(patch.original()), patch.name
            assert patch.why

    def test_no_method_is_wrapped_twice(self) -> None:
        ours = vllm_adapter.current_patches()

        def methods() -> list[Any]:
            return [inspect.getattr_static(patch._find_owner(), patch.name) for patch in ours]

        vllm_adapter.install(ours)
        first = methods()
        vllm_adapter.install(ours)
        assert all(one is other for one, other in zip(first, methods(), strict=True) if not isinstance(one, property))
        for patch, method in zip(ours, first, strict=True):
            if patch.adds:
                continue
            wrapped: Any = method.fget if isinstance(method, property) else method
            replacements = []
            while wrapped is not patch.original():
                replacements.append(vars(wrapped)[MARK])
                wrapped = wrapped.__wrapped__
            assert replacements.count(patch.replacement) == 1, patch.name
            assert len(replacements) == sum((other.owner, other.name) == (patch.owner, patch.name) for other in ours)

    def test_a_method_that_is_missing_is_named(self) -> None:
        patch = vllm_adapter.Patch("runner", "vllm.config:VllmConfig", "gone", lambda original: None, "to see")
        with pytest.raises(UnsupportedEngineError, match=r"VllmConfig\.gone"):
            patch.install()

    def test_another_wrap_on_top_does_not_hide_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The replay wraps a method that the adapter wraps, too."""
        owner = SimpleNamespace(answer=lambda: 1)
        monkeypatch.setattr(vllm_adapter.Patch, "_find_owner", lambda self: owner)
        ours, theirs = (
            vllm_adapter.Patch("worker", "", "answer", lambda original, n=n: 10 * original() + n, "") for n in (2, 3)
        )
        for patch in (ours, theirs, ours, theirs):
            patch.install()
        assert owner.answer() == 123

    def test_the_runner_is_patched_only_where_agentspec_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed: list[Any] = []
        monkeypatch.setattr(patches, "install", installed.extend)
        for method in ("ngram", "custom_class"):
            config = TestStart.config(speculative_config=SimpleNamespace(method=method, model=PROPOSER_PATH))
            init_device(lambda worker: installed.append("runner made"), SimpleNamespace(vllm_config=config))
        assert installed[:2] == ["runner made", installed[1]] and installed[-1] == "runner made"
        assert {patch.process for patch in installed[1:-1]} == {"runner"}


class TestStart:
    """Test that the proposer that vLLM's ``custom_class`` constructs ends a start that cannot work."""

    @staticmethod
    def config(**changes: Any) -> Any:
        values = {
            "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
            "speculative_config": SimpleNamespace(num_speculative_tokens=16),
            "additional_config": {},
        }
        return SimpleNamespace(**{**values, **changes})

    def test_without_the_plugin_it_says_how_to_load_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        vllm_adapter.install(vllm_adapter.current_patches())
        vllm_adapter.AgentSpecProposer(self.config())
        monkeypatch.setattr(GPUModelRunner, "__init__", inspect.unwrap(GPUModelRunner.__init__))
        with pytest.raises(UnsupportedEngineError, match="VLLM_PLUGINS"):
            vllm_adapter.AgentSpecProposer(self.config())

    def test_wrong_settings_are_named(self) -> None:
        with pytest.raises(ConfigurationError, match="tenannt"):
            vllm_adapter.AgentSpecProposer(self.config(additional_config={"agentspec": {"tenannt": "a"}}))
        with pytest.raises(ConfigurationError, match="num_speculative_tokens"):
            vllm_adapter.AgentSpecProposer(
                self.config(speculative_config=SimpleNamespace(num_speculative_tokens=1_000))
            )


def test_the_tables_name_every_file() -> None:
    root = Path(vllm_adapter.__file__).parent
    for package in (vllm_adapter, frontend, startup, worker):
        folder = Path(package.__file__ or "").parent
        members = {path.stem for path in folder.iterdir() if not path.name.startswith("_")}
        assert set(re.findall(r"^``(\w+)``", package.__doc__ or "", re.MULTILINE)) == members
    map_of_files = (Path(__file__).parents[2] / "docs/architecture.md").read_text().partition("vllm_adapter/    ")[2]
    described = re.findall(r"^ {6,8}(\w+)/? ", map_of_files.partition("    step.py")[0], re.MULTILINE)
    assert sorted(described) == sorted(path.stem for path in root.rglob("[!_]*") if "__pycache__" not in path.parts)


def test_nothing_else_imports_vllm() -> None:
    """Only the adapter imports vLLM's internals. The modules that run an engine import its public interface."""
    allowed = {"testing/replay_worker.py", "testing/server.py", "train/generate.py"}
    root = Path(agentspec.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            if any(name.split(".")[0] == "vllm" for name in names):
                found.add(path.relative_to(root).as_posix())
    assert found - allowed == {name for name in found if name.startswith("server_ext/vllm_adapter/")} != set()
    assert allowed <= found, "no longer needed"
