"""The peer that the benchmarks compare with: ArcticInference's suffix decoding, built from its PyPI source package.

    import peer
    suffix = peer.load()                     # the module arctic_inference.suffix_decoding
    cache = suffix.SuffixDecodingCache(max_tree_depth=64)

    python benchmarks/arctic.py                # build it and print where it is

Only its suffix-decoding extension is built, without torch and without the rest of the package, into a folder of its
own (`~/.cache/agentspec/peer`, or `--peer-dir`). Nothing of it is part of agentspec.
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

# pip wants a source package's name and version before it saves the file, and would run the package's set-up for them,
# which imports torch. This build backend says them instead; nothing is built with it.
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
    """The peer cannot be fetched or built here; the message names the remedy."""


def default_folder() -> Path:
    """Where the peer is kept where nothing else is said."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentspec" / "peer"


def load(folder: Path | None = None) -> ModuleType:
    """Its module `arctic_inference.suffix_decoding`, built first where it is not there yet (half a minute).

    Raises PeerUnavailableError where it cannot be built.
    """
    path = str(build(folder))
    if path not in sys.path:
        sys.path.insert(0, path)
    importlib.invalidate_caches()
    return importlib.import_module(f"{PACKAGE}.{EXTENSION}")


def build(folder: Path | None = None) -> Path:
    """Fetches and builds it where needed; returns the folder that belongs on the module path.

    The folder is named after version and interpreter, and appears only when all of it is there.
    Raises PeerUnavailableError.
    """
    root = folder or default_folder()
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
            if not done.is_dir():  # another process may have been faster
                (scratch / "module").rename(done)
    except OSError as error:
        raise PeerUnavailableError(f"the peer cannot be built in {root}: {error}; give another --peer-dir") from error
    return done


def _fetch(scratch: Path, root: Path) -> Path:
    """The source package, checked: the one that is kept, or fetched by pip from the index it is set up for."""
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
    """The package with nothing but suffix decoding in it: what its users import, and vLLM's own method `suffix`."""
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
    """Registers `--peer-dir`, shared by the scripts that compare with the peer."""
    parser.add_argument(
        "--peer-dir", type=Path, metavar="DIR", help="where the peer is built and kept (~/.cache/agentspec/peer)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the peer. Returns the exit status: 2 where that cannot work."""
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
