from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .fake_server import FakeServer


@pytest.fixture(autouse=True)
def own_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the user's data directory, or takes keys from the environment."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Runs the extension."""
    fake = FakeServer(extension=True)
    yield fake
    fake.close()


@pytest.fixture
def plain_server() -> Iterator[FakeServer]:
    """Any other OpenAI-compatible server: refuses fields that the API does not have."""
    fake = FakeServer(extension=False)
    yield fake
    fake.close()
