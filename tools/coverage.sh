#!/usr/bin/env bash
# Prints which part of the lines the tests run: `make coverage`.
#
#   tools/coverage.sh [PART...]
#
# go      the Go of engine/ and cshim/, by go test -short
# python  fserver/ and csrc/, by TESTS ("tests/python tests/ringx"), with the processes that they start: over an extension
#         that is built with gcc for this, in place of the usual one, which is built again afterwards
# cpp     include/, by the tests of tools/cpp_tests.sh, built with gcc
#
# The default is all three. BIN names the folder of the Python, GO the command go, JOBS the processes of pytest. The C of
# cshim/ is not counted: Go deletes the folder in which it compiles. What fails is said, and counts all the same for what
# it ran.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export BIN=${BIN:-.venv/bin}
GO=${GO:-$("$BIN/python" tools/builder.py go)}
out=$PWD/build/coverage
mkdir -p "$out"
status=0

cover_go() {
  local all="$out/go.txt"
  "$GO" test -short -timeout 15m -p 2 -coverpkg=./engine/...,./cshim/... -coverprofile="$out/go.out" \
    ./engine/... ./cshim/... >"$all" 2>&1 || {
    grep -E '^(---|FAIL|panic)' "$all"
    status=1
  }
  # "mode: set" first, then "PACKAGE/FILE.go:BLOCK STATEMENTS COUNT", once for each package whose tests ran.
  awk 'NR > 1 { statements[$1] = $2; ran[$1] += $3 }
    END {
      for (block in statements) {
        package = block
        sub("/[^/]*$", "", package)
        all[package] += statements[block]; total += statements[block]
        if (ran[block]) { hit[package] += statements[block]; reached += statements[block] }
      }
      for (package in all) printf "%-48s%7d%6.0f%%\n", package, all[package], 100 * hit[package] / all[package] | "sort"
      close("sort")
      printf "%-48s%7d%6.0f%%\n", "all", total, 100 * reached / total
    }' "$out/go.out"
}

cover_python() {
  local tests made all="$out/pytest.txt" cc=${CC:-gcc}
  read -ra tests <<<"${TESTS:-tests/python tests/ringx}"
  made=build/$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
  "$cc" -O2 -shared -fPIC -o "$out/gcov_exit.so" tools/gcov_exit.c
  "$cc" -O2 -c -fPIC -DEXTENSION -o "$out/gcov_exit.o" tools/gcov_exit.c
  rm -f "$out"/python* "$made"/*.gcda
  CXX="${CXX:-g++} --coverage -fprofile-update=atomic" LDFLAGS=$out/gcov_exit.o \
    "$BIN/python" tools/builder.py ext >"$all" || { status=1 && return; }
  LD_PRELOAD=$out/gcov_exit.so COVERAGE_FILE=$out/python "$BIN/python" -m coverage run -m pytest -q -m '' \
    -n "${JOBS:-2}" --dist worksteal "${tests[@]}" >"$all" 2>&1 || status=1
  tail -1 "$all"
  "$BIN/python" tools/builder.py ext >>"$all" || status=1
  export COVERAGE_FILE=$out/python
  "$BIN/python" -m coverage combine -q >>"$all" 2>&1 # it names the files of processes that were killed
  "$BIN/python" -m coverage report --skip-empty
  lines_of "$made" csrc 2>>"$all"
}

cover_cpp() {
  rm -rf "$out/cpp"
  BUILD="$out/cpp" CXX="${CXX:-g++}" CXXFLAGS=--coverage LDFLAGS=--coverage tools/cpp_tests.sh -Q >"$out/cpp.txt" 2>&1 || status=1
  grep -E 'tests passed' "$out/cpp.txt"
  lines_of "$out/cpp" "$PWD/fserver/include" 2>>"$out/cpp.txt"
}

# Prints which part of the lines of a folder ran, by the counts in another. gcov merges those of all programs: "File
# 'PATH'", and below it "Lines executed:93.21% of 205".
lines_of() {
  find "$1" -name '*.gcda' -exec gcov -n {} + | awk -F "[':% ]+" -v folder="$2/" '
    $1 == "File" { file = index($2, folder) == 1 ? substr($2, length(folder) + 1) : "" }
    $2 == "executed" && file {
      printf "%-40s%6d%6.0f%%\n", file, $5, $3 | "sort"
      lines += $5
      ran += $3 * $5 / 100
      file = ""
    }
    END {
      close("sort")
      printf "%-40s%6d%6.0f%%\n", "all", lines, 100 * ran / lines
    }'
}

(($#)) || set -- go python cpp
for part in "$@"; do
  case $part in
  go | python | cpp)
    echo "coverage: $part"
    "cover_$part"
    ;;
  *)
    echo "coverage: no part $part (want go, python or cpp)" >&2
    exit 2
    ;;
  esac
done
exit $status
