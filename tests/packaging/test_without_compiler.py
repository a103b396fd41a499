"""Test what a user who installs from the sdist without a compiler is told."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILERS = ("c++", "g++", "cc", "gcc", "clang", "clang++", "icpx")


@pytest.fixture
def sdist(tmp_path: Path) -> Iterator[Path]:
    """Build the sdist from this checkout, and return its path."""
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    yield tmp_path / ran.stdout.splitlines()[-1]


@pytest.fixture
def path_without_compiler(tmp_path: Path) -> str:
    """Return a PATH with the tools for building, but without a compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("cmake", "ninja"):
        found = shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    path = str(folder)
    assert not any(shutil.which(name, path=path) for name in COMPILERS)
    return path


def test_installing_the_sdist_ends_in_a_line_that_names_the_package(
    sdist: Path, path_without_compiler: str, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), str(sdist)],
        env={**environment, "PATH": path_without_compiler},
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0
    # pip shows what the build printed, and marks its end.
    built = (ran.stdout + ran.stderr).partition("[end of output]")[0].rstrip()
    assert "apt-get install g++" in built.splitlines()[-1], built
