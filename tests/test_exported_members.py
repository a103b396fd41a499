"""Test the public names: they are complete, sorted, and named after the module that users import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import agentspec
import agentspec.client
import agentspec.errors


def test_all_is_sorted_and_importable() -> None:
    assert agentspec.__all__ == sorted(agentspec.__all__)
    for name in agentspec.__all__:
        assert getattr(agentspec, name) is not None
    assert set(agentspec.__all__) <= set(dir(agentspec))


@pytest.mark.parametrize("name", [name for name in agentspec.__all__ if name != "__version__"])
def test_every_public_name_says_where_it_is_from(name: str) -> None:
    assert getattr(agentspec, name).__module__ == "agentspec"


def test_every_error_and_every_name_of_the_client_is_public() -> None:
    errors = {
        name
        for name, value in vars(agentspec.errors).items()
        if isinstance(value, type) and issubclass(value, agentspec.AgentSpecError)
    }
    assert errors | set(agentspec.client.__all__) | {"__version__"} == set(agentspec.__all__)


def test_the_table_of_the_clients_names_has_all_of_them() -> None:
    table = [name for names in agentspec.client._NAMES.values() for name in names]
    assert sorted(table) == sorted(agentspec.client.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = agentspec.nonsense


def test_the_version_is_the_packages() -> None:
    try:
        installed = version("agentspec")
    except PackageNotFoundError:
        installed = "0+unknown"
    assert agentspec.__version__ == installed


def test_importing_the_package_imports_no_client() -> None:
    """Engine processes import agentspec, too, and do not use the OpenAI client."""
    script = "import sys, agentspec; print(sorted({'openai', 'pydantic', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
