#!/usr/bin/env bash
# Builds tests/cache/fuzz_snapshots.cpp in FOLDER, with a sanitizer if one is named.
#   scripts/fuzz_snapshots.sh FOLDER [address|undefined]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
cd "$1"
flags=(-std=c++20 -O1 -g1 -ffp-contract=off -Wall -Wextra -I"$root/csrc")
[ $# -lt 2 ] || flags+=("-fsanitize=$2" -fno-sanitize-recover=all -fno-omit-frame-pointer)
find "$root/csrc" "$root/tests/cache" -name '*.cpp' ! -name bindings.cpp -print0 |
  xargs -0 -P 2 -I{} sh -c '"${CXX:-g++}" "$@" -c "$0" -o "$(basename "$0").o"' {} "${flags[@]}"
"${CXX:-g++}" "${flags[@]}" ./*.o -pthread -o fuzz_snapshots
