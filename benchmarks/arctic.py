"""Build ArcticInference's suffix decoding, which the benchmarks compare with, from its PyPI source package.

    import arctic
    suffix = arctic.load()                   # the module arctic_inference.suffix_decoding
    cache = suffix.SuffixDecodingCache(max_tree_depth=64)

    python benchmarks/arctic.py                # build it and print where it is

Only ArcticInference's suffix-decoding extension is built, without torch and the rest of the package, into a folder of
its own (`~/.cache/agentspec/peer`, or `--peer-dir`). agentspec contains nothing of it.
"""

import argparse
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from agentspec.errors import ConfigurationError

DISTRIBUTION = "arctic-inference"
VERSION = "0.3.0"
SHA256 = "7f22e3e1b1071c6061c0d6951be17c0fb50b08d06d6e543144c8f52faba60a36"
PACKAGE = "arctic_inference"
EXTENSION = "suffix_decoding"
REMEDY = "pip install -r requirements/dev.txt, a C++20 compiler, and a package index that pip can reach"

# pip asks for a source package's name and version before it saves the file. The package's own set-up would import torch
# to answer. This build backend answers instead; it builds nothing.
_BACKEND = f'''
from pathlib import Path


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "{PACKAGE}-{VERSION}.dist-info"
    path = Path(folder) / name
    path.mkdir()
    (path / "METADATA").write_text("Metadata-Version: 2.1\\nName: {DISTRIBUTION}\\nVersion: {VERSION}\\n")
    return name
'''


class PeerUnavailableError(ConfigurationError):
    """Report that ArcticInference cannot be fetched or built here. The message names the remedy."""


def default_folder() -> Path:
    """Return the folder in which ArcticInference is kept without `--peer-dir`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentspec" / "peer"


def load(folder: Path | None = None) -> ModuleType:
    """Return the module `arctic_inference.suffix_decoding`, building it first if it is missing (half a minute).

    Raises PeerUnavailableError where it cannot be built.
    """
    path = str(build(folder))
    if path not in sys.path:
        sys.path.insert(0, path)
    importlib.invalidate_caches()
    return importlib.import_module(f"{PACKAGE}.{EXTENSION}")


def build(folder: Path | None = None) -> Path:
    """Fetch and build ArcticInference if it is missing. Return the folder to put on the module path.

    The folder is named after version and interpreter, and appears only when it is complete.
    Raises PeerUnavailableError.
    """
    root = (folder or default_folder()).absolute()  # CMake takes a relative path from its own build folder
    done = root / f"{VERSION}-{sysconfig.get_config_var('SOABI')}"
    if done.is_dir():
        return done
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=root) as name:
            scratch = Path(name)
            source = _unpack(_fetch(scratch, root), scratch)
            package = _lay_out(source, scratch / "module")
            _compile(source / "csrc" / EXTENSION, scratch / "build", package)
            if not done.is_dir():  # another process may have built it meanwhile
                (scratch / "module").rename(done)
    except OSError as error:
        raise PeerUnavailableError(f"the peer cannot be built in {root}: {error}; give another --peer-dir") from error
    return done


def _fetch(scratch: Path, root: Path) -> Path:
    """Return the source package, from `root` or else fetched with pip, after checking its sha256."""
    kept = root / f"{PACKAGE}-{VERSION}.tar.gz"
    if kept.is_file() and _sha256(kept) == SHA256:
        return kept
    for backend in ("setuptools/build_meta.py", "setuptools/__init__.py"):
        file = scratch / "backend" / backend
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_BACKEND if backend.endswith("meta.py") else "")
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(scratch)]
    _run(
        "fetched",
        [sys.executable, "-m", "pip", "download", *options, f"{DISTRIBUTION}=={VERSION}"],
        {**os.environ, "PYTHONPATH": str(scratch / "backend")},
    )
    found = next(scratch.glob("*.tar.gz"), None)
    if found is None or _sha256(found) != SHA256:
        raise PeerUnavailableError(
            f"the index serves another {DISTRIBUTION} {VERSION} than the one with sha256 {SHA256}: "
            "compare with a version that you trust and change benchmarks/arctic.py"
        )
    return found.replace(kept)


def _unpack(archive: Path, scratch: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extractall(scratch, filter="data")
    return next(path.parent for path in scratch.glob("*/PKG-INFO"))


def _lay_out(source: Path, module: Path) -> Path:
    """Copy suffix decoding alone into a package, under the name that users and vLLM's method `suffix` import."""
    package = module / PACKAGE / EXTENSION
    package.mkdir(parents=True)
    (module / PACKAGE / "__init__.py").touch()
    for name in ("__init__.py", "cache.py"):
        shutil.copy(source / PACKAGE / EXTENSION / name, package / name)
    shutil.copy(source / "LICENSE", module / PACKAGE / "LICENSE")
    return package


def _compile(source: Path, build: Path, target: Path) -> None:
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, "PATH": tools}
    cmake = shutil.which("cmake", path=tools)
    if cmake is None:
        raise PeerUnavailableError(f"the peer cannot be built: there is no cmake; it needs {REMEDY}")
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    _run("built", [cmake, "-S", str(source), "-B", str(build), *options], environment)
    _run("built", [cmake, "--build", str(build), "--config", "Release"], environment)


def _run(verb: str, command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no output")
        raise PeerUnavailableError(f"the peer cannot be {verb} ({reason.strip()}); it needs {REMEDY}")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def add_option(parser: argparse.ArgumentParser) -> None:
    """Register `--peer-dir`, shared by the scripts that compare with ArcticInference."""
    parser.add_argument(
        "--peer-dir", type=Path, metavar="DIR", help="where the peer is built and kept (~/.cache/agentspec/peer)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build ArcticInference. Returns the exit status: 2 where it cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_option(parser)
    try:
        print(build(parser.parse_args(arguments).peer_dir))
    except PeerUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
