"""Test that modules of the server extension import each other in one direction only."""

import ast
from pathlib import Path

import agentspec.server_ext

ROOT = Path(agentspec.server_ext.__file__).parent
PACKAGE = "agentspec.server_ext"


def imports() -> dict[str, set[str]]:
    """Return, for every module, the modules of the package that it imports anywhere, functions included."""
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join([PACKAGE, *parts]).removesuffix(".__init__")] = path
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            wanted: list[str] = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
            for target in wanted:
                module = target if target in names else target.rpartition(".")[0]
                if module in names and module != name:
                    found[name].add(module)
    return found


def parts() -> dict[str, set[str]]:
    """Return the imports with the adapter as one module."""
    adapter = f"{PACKAGE}.vllm_adapter"
    graph: dict[str, set[str]] = {}
    for name, wanted in imports().items():
        part, of = [adapter if one.startswith(adapter) else one for one in (name, PACKAGE)]
        graph.setdefault(part, set()).update(adapter if one.startswith(adapter) else one for one in wanted - {of})
    return {name: wanted - {name} for name, wanted in graph.items()}


def test_there_are_no_circles() -> None:
    graph = parts()
    while graph:
        free = [name for name, wanted in graph.items() if not wanted & graph.keys()]
        assert free, f"these import each other: {sorted(graph)}"
        for name in free:
            del graph[name]


def test_steps_stand_below_the_engine_and_fusion() -> None:
    graph = imports()
    below, reached = {f"{PACKAGE}.step"}, set[str]()
    while below:
        name = below.pop()
        reached.add(name)
        below |= graph[name] - reached
    assert not [name for name in reached if "fusion" in name or "engine" in name or "vllm" in name]
