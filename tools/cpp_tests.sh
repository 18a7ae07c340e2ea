#!/usr/bin/env bash
# Builds and runs the tests of include/ (tests/cpp) with CMake and CTest. `make test` calls it.
#
#   tools/cpp_tests.sh [--matrix] [options of ctest]
#
# --matrix builds them with each of COMPILERS ("g++ clang++", of tools/install_deps.sh --cpp), as C++17 and C++20, and
# more of them with AddressSanitizer; it fails if one of these is not installed. Otherwise CXX (g++) and C++17 are used.
# BIN names the folder of the Python that has fserver, BUILD another folder than build/cpp.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
PATH=$(realpath -s "$BIN"):$PATH # with the cmake of requirements/dev.txt

matrix=no
if [[ ${1:-} == --matrix ]]; then
  matrix=yes
  shift
fi

torch=$(python -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0] if s else "")')

tests() { # with one compiler and standard
  local cxx=$1 standard=$2
  shift 2
  local build=${BUILD:-build/cpp}/${cxx##*/}-$standard
  echo "cpp: $cxx, C++$standard"
  cmake -S tests/cpp -B "$build" -Dfserver_DIR="$PWD/fserver/lib/cmake/fserver" -DPYTHON="$(realpath -s "$BIN")/python" -DTORCH="$torch" \
    -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_CXX_STANDARD="$standard" -DTHOROUGH="$matrix" >"$build.log" 2>&1 || {
    cat "$build.log"
    return 1
  }
  cmake --build "$build" -j "${MAX_JOBS:-2}" >"$build.log" 2>&1 || {
    cat "$build.log"
    return 1
  }
  ctest --test-dir "$build" --output-on-failure --no-tests=error "$@"
}

mkdir -p "${BUILD:-build/cpp}"
export PYTHONPATH=$PWD
if [[ $matrix == no ]]; then
  tests "${CXX:-g++}" 17 "$@"
  exit
fi
read -ra compilers <<<"${COMPILERS:-g++ clang++}"
for cxx in "${compilers[@]}"; do
  command -v "$cxx" >/dev/null || {
    echo "cpp: --matrix: $cxx is not installed (run tools/install_deps.sh --cpp, or set COMPILERS)" >&2
    exit 1
  }
done
for cxx in "${compilers[@]}"; do
  for standard in 17 20; do
    tests "$cxx" "$standard" "$@"
  done
done
