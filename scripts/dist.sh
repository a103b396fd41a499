#!/usr/bin/env bash
# Checks the release workflow, then builds dist/: the sdist and, from it, manylinux wheels: one for Python 3.11 and one,
# by the stable ABI, for 3.12 to 3.14. Then installs each wheel, in a fresh environment from which no compiler can be
# found, on every Python here that it serves, and runs tests/packaging/test_installed.py there.
#   scripts/dist.sh [PYTHON...]   the interpreters; default: all of Python 3.11 to 3.14 on PATH or under pyenv
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/build/dist
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\033[1m%s\033[0m %s\n' "[dist]" "$*" >&2; }

# Prints the first interpreter of Python 3.$1 that runs; nothing where there is none.
find_python() {
  local candidate
  for candidate in "python3.$1" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3."$1".*/bin/python; do
    if "$candidate" -c "import sys, venv; sys.exit(sys.version_info[:2] != (3, $1))" >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

# Prints the minor version of interpreter $1.
minor_of() { "$1" -c 'import sys; print(sys.version_info.minor)'; }

# Installs wheel $2 for interpreter $1 where no compiler can be found, and tests it.
test_wheel() {
  local python=$1 wheel=$2 name venv compiler
  name=cp3$(minor_of "$python")
  venv=$work/test-$name
  "$python" -m venv "$venv"
  cp "$root/tests/packaging/test_installed.py" "$venv/"
  (
    cd "$venv"
    export PATH=$venv/bin
    unset CC CXX
    hash -r
    for compiler in c++ g++ cc gcc clang clang++; do
      if command -v "$compiler" >/dev/null; then
        say "$compiler can be found in $venv"
        exit 1
      fi
    done
    say "$name: installing ${wheel##*/} without a compiler"
    python -m pip install -qq --only-binary :all: "$wheel" pytest
    python -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider test_installed.py
  )
}

pythons=("$@")
if [ ${#pythons[@]} = 0 ]; then
  for minor in 11 12 13 14; do
    python=$(find_python "$minor")
    [ -z "$python" ] || pythons+=("$python")
  done
fi
[ ${#pythons[@]} -gt 0 ] || { say "no Python 3.11 to 3.14 found"; exit 1; }
say "interpreters: ${pythons[*]}"

rm -rf "$work" "$root/dist"
mkdir -p "$work" "$root/dist"
"${pythons[0]}" -m venv "$work/tools"
tools=$work/tools/bin
"$tools/python" -m pip install -qq -r "$root/requirements/dist.txt"

say "checking the release workflow"
"$tools/actionlint" "$root"/.github/workflows/*.yml

say "building the sdist"
"$tools/python" -m build --sdist --outdir "$root/dist" "$root" >"$work/sdist.log" 2>&1 ||
  { tail -n 30 "$work/sdist.log"; exit 1; }
sdist=$(echo "$root"/dist/*.tar.gz)

stable=  # the wheel of the stable ABI, once it is built
for python in "${pythons[@]}"; do
  minor=$(minor_of "$python")
  if [ "$minor" = 11 ] || [ -z "$stable" ]; then
    say "building the wheel of Python 3.$minor"
    rm -rf "$work/raw"
    "$python" -m venv "$work/build-cp3$minor"
    "$work/build-cp3$minor/bin/python" -m pip wheel --no-deps -w "$work/raw" "$sdist" >"$work/cp3$minor.log" 2>&1 ||
      { tail -n 30 "$work/cp3$minor.log"; exit 1; }
    PATH="$tools:$PATH" "$tools/auditwheel" repair -w "$work/repaired-cp3$minor" "$work"/raw/*.whl
    wheel=$(echo "$work/repaired-cp3$minor"/*.whl)
    cp "$wheel" "$root/dist/"
    [ "$minor" = 11 ] || stable=$wheel
  else
    wheel=$stable
  fi
  test_wheel "$python" "$wheel"
done
rm -rf "$work"
say "done:"
ls -l "$root/dist"
