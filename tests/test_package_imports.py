"""Test that packages of agentspec import each other only in the directions in docs/architecture.md."""

import ast
from pathlib import Path

import agentspec

ROOT = Path(agentspec.__file__).parent
BASE = {
    "addresses",
    "awaiting",
    "draft_figures",
    "errors",
    "files",
    "identifiers",
    "json_lines",
    "problems",
    "protocol",
}
ALLOWED = {
    "cache": BASE,
    "simulate": BASE | {"cache"},
    "report": BASE | {"cache"},
    "client": BASE | {"cache", "simulate"},
    "server_ext": BASE | {"cache"},
    "train": BASE | {"cache", "simulate", "server_ext"},
    "rollout": BASE | {"cache", "server_ext"},
    "testing": BASE | {"cache", "server_ext"},
    "cli": BASE | {"cache", "simulate", "report", "server_ext", "train", "rollout"},
}


def imported(package: Path) -> set[str]:
    """Return the other parts of agentspec that a package's modules import, inside functions too."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = (
                    [f"agentspec.{alias.name}" for alias in node.names] if node.module == "agentspec" else [node.module]
                )
            found.update(name.split(".")[1] for name in names if name.startswith("agentspec."))
    return found - {package.name, "__version__"}


def test_every_package_has_a_direction() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == ALLOWED.keys()


def test_packages_import_in_one_direction() -> None:
    wrong = {name: imported(ROOT / name) - allowed for name, allowed in ALLOWED.items()}
    assert not any(wrong.values()), wrong
