"""Test the record of vLLM's methods: the installed version is as recorded, and what is patched is there in each."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentspec.server_ext import vllm_adapter
from agentspec.server_ext.vllm_adapter.patches import NEWEST_VERSION, OLDEST_VERSION, PATCHES

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_methods.py"
ADAPTER = Path(vllm_adapter.__file__).parent
PUBLIC = {"vllm", "vllm.config", "vllm.platforms", "vllm.sampling_params", "vllm.engine.arg_utils"}
"""Modules whose names are vLLM's API."""
REJECTION_SAMPLER = "vllm/v1/sample/rejection_sampler.py"


@pytest.fixture(scope="module")
def methods() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("vllm_methods", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copied(tmp_path: Path, methods: ModuleType) -> Path:
    """Return a folder with the installed vLLM's Python files."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent
    for file in source.rglob("*.py"):
        target = tmp_path / "vllm" / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    version, _ = methods.open_vllm(None)
    (tmp_path / f"vllm-{version}.dist-info").mkdir()
    return tmp_path


def check(*arguments: str) -> tuple[int, list[str]]:
    """Return the exit status and the printed lines of the script's check."""
    ran = subprocess.run([sys.executable, str(SCRIPT), "check", *arguments], capture_output=True, text=True)
    assert not ran.stderr, ran.stderr
    return ran.returncode, ran.stdout.splitlines()


def test_the_installed_vllm_is_as_recorded() -> None:
    status, lines = check()
    assert (status, len(lines)) == (0, 1), lines


def test_changes_are_named_and_comments_are_none(copied: Path) -> None:
    file = copied / REJECTION_SAMPLER
    text = file.read_text()
    marker = "def expand_batch_to_tokens("
    assert text.count(marker) == 1
    file.write_text("# A comment.\n" + text)
    assert check(str(copied))[0] == 0
    file.write_text(text.replace(marker, "def expand_batch_to_token("))
    status, lines = check(str(copied))
    assert status == 1
    assert lines[1:] == ["missing  vllm.v1.sample.rejection_sampler:expand_batch_to_tokens"]
    file.write_text(text.replace(marker, f"{marker}\n    another,"))
    assert check(str(copied))[1][1:] == ["changed  vllm.v1.sample.rejection_sampler:expand_batch_to_tokens"]


def test_a_folder_without_a_version_is_not_taken_for_the_installed_vllm(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    ran = subprocess.run([sys.executable, str(SCRIPT), "check", str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 1 and f"{tmp_path} does not say which version of vLLM it holds" in ran.stderr


def test_what_is_patched_was_recorded_in_each_of_its_versions(methods: ModuleType) -> None:
    record = methods.load_record()
    releases = {version: tuple(map(int, version.split(".")[:2])) for version in record}
    assert {(0, minor) for minor in range(OLDEST_VERSION[1], NEWEST_VERSION[1] + 1)} <= set(releases.values())
    for patch in PATCHES:
        for version, release in releases.items():
            if not patch.adds and patch.since <= release <= patch.until:
                assert record[version][methods.name_of(patch)] is not None, (version, patch.name)


def test_an_unknown_version_is_compared_with_the_newest_before_it(methods: ModuleType) -> None:
    record: dict[str, dict[str, str]] = {version: {} for version in ("0.9.0", "0.10.0", "0.10.2")}
    assert [methods.reference(found, record) for found in ("0.10.1+cpu", "0.11.0", "0.8.0")] == [
        "0.10.0",
        "0.10.2",
        "0.9.0",
    ]


def adapter_nodes() -> list[ast.AST]:
    """Return all syntax nodes of the adapter."""
    return [node for file in sorted(ADAPTER.rglob("*.py")) for node in ast.walk(ast.parse(file.read_text()))]


def test_what_the_adapter_imports_was_recorded(methods: ModuleType) -> None:
    imported = {
        f"{node.module}:{alias.name}"
        for node in adapter_nodes()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        if node.module not in PUBLIC and node.module != "vllm.entrypoints.cli.main"
        for alias in node.names
    }
    assert len(imported) > 8
    assert [name for name in imported if not any(seen.startswith(name) for seen in methods.watched())] == []


def test_methods_that_the_adapter_replaces_on_one_drafter_were_recorded(methods: ModuleType) -> None:
    """PATCHES lists methods replaced on a class. This test finds those replaced on one of vLLM's drafter objects."""
    _, read = methods.open_vllm(None)
    watched = set(methods.watched())
    assigned = {
        target.attr
        for node in adapter_nodes()
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    base = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
    replaced = set()
    for drafter in (base, "vllm.v1.spec_decode.ngram_proposer:NgramProposer"):
        body = methods.find(read, drafter).body
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        replaced |= {f"{drafter}.{name}" for name in defined & assigned}
    assert {f"{base}._greedy_sample", f"{base}.load_model"} <= replaced <= watched
