#!/usr/bin/env bash
# Runs clang-tidy, whose checks are in .clang-tidy.
#
#   tools/tidy.sh [FILE...]
#
# Without a FILE: over csrc/, cshim/, include/ and fserver/bench/. BIN names the folder of the Python that has clang-tidy,
# and torch, with whose pybind11 the extension is compiled. MAX_JOBS is the number of processes, by default one for each
# core. Nothing has to be built before.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}

if (($# == 0)); then
  # The two headers include all others of theirs. The one with torch takes longest, so it is first.
  mapfile -t files < <(find csrc cshim fserver/bench -name '*.c' -o -name '*.cc' | sort)
  set -- include/ps/af_tensor_app.h include/fserver/fserver.hpp "${files[@]}"
fi

# What the build generates is data for clang-tidy. These stand for it.
generated=build/tidy
mkdir -p "$generated"
echo '""' >"$generated/channel_source.inc"
echo '#define FS_ADAPTER 1' >"$generated/adapter_id.inc"
: >"$generated/forwarded.inc"

{
  read -r python
  read -r torch
} < <("$BIN/python" -c 'import importlib.util, sysconfig
print(sysconfig.get_path("include"))
print(importlib.util.find_spec("torch").submodule_search_locations[0] + "/include")')

tidy() {
  local flags=(-Wall -Wextra)
  case $1 in
  *.c) flags+=(-std=gnu17) ;;
  cshim/*) flags+=(-std=c++17 "-DFORWARDED=\"$PWD/$generated/forwarded.inc\"") ;;
  csrc/*) flags+=(-std=c++20 -Iengine/cabi -Icshim/cuda -Ifserver/_torch "-I$generated" -isystem "$torch" -isystem "$python") ;;
  *) flags+=(-xc++ -std=c++20 -Iinclude -Iengine/cabi -isystem "$torch") ;;
  esac
  local said # each warning is an error
  said=$("$BIN/clang-tidy" --quiet "$1" -- "${flags[@]}" 2>&1) || {
    printf '%s\n' "$said"
    return 1
  }
}
export -f tidy
export BIN generated python torch
# shellcheck disable=SC2016 # the argument of the other bash
printf '%s\0' "$@" | xargs -0 -n 1 -P "${MAX_JOBS:-$(nproc)}" bash -c 'tidy "$1"' tidy
