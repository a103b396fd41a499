#!/usr/bin/env bash
# Builds the core with a sanitizer, apart from the installed one, and runs the cache's tests on it.
#   scripts/sanitize.sh VENV address|undefined|thread [command]
# Without a command: pytest tests/cache, without the bounds of CPU time, which such a build is too slow for.
set -euo pipefail
venv=$(cd "$1" && pwd)
kind=$2
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/build/sanitize-$kind
python=$venv/bin/python

PATH="$venv/bin:$PATH" cmake -S "$root" -B "$work/build" -DAGENTSPEC_SANITIZE="$kind" \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$python" > /dev/null
cmake --build "$work/build" --parallel 2 > /dev/null

# A copy of the package with that core; -S keeps the installed one away.
rm -rf "$work/tree"
mkdir -p "$work/tree"
cp -r "$root/agentspec" "$root/tests" "$root/csrc" "$work/tree/"
rm -f "$work"/tree/agentspec/cache/_native*.so
cp "$work"/build/_native*.so "$work/tree/agentspec/cache/"

declare -A runtimes=([address]=libasan.so [undefined]=libubsan.so [thread]=libtsan.so)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cd "$work/tree"
# Reports go to the real stderr.
[ $# -gt 0 ] || set -- -m pytest -q -p no:cacheprovider --capture=sys tests/cache --ignore tests/cache/test_stalls.py
# Leaks are not checked, as Python itself never frees some of its memory. libstdc++ is preloaded with the runtime, which
# otherwise does not find the function that throws exceptions.
preload="$(g++ -print-file-name="${runtimes[$kind]}") $(g++ -print-file-name=libstdc++.so)"
env PYTHONPATH="$work/tree:$site" PYTHONDONTWRITEBYTECODE=1 ASAN_OPTIONS=detect_leaks=0 \
  UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=report_signal_unsafe=0 LD_PRELOAD="$preload" "$python" -S "$@"
