#!/usr/bin/env bash
# Prints which part of the lines the tests run: `make coverage`.
#
#   tools/coverage.sh [PART...]
#
# go      the Go of engine/ and cshim/, by go test -short
# python  fserver/, by TESTS ("tests/python tests/ringx"), with the processes that they start
# cpp     include/, by the tests of tools/cpp_tests.sh, built with gcc
#
# The default is all three. BIN names the folder of the Python, GO the command go, JOBS the processes of pytest. csrc/ and
# the C of cshim/ are not counted: the extension and Go's archive would have to be built again for that. What fails is
# said, and counts all the same for what it ran.
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
  local tests
  read -ra tests <<<"${TESTS:-tests/python tests/ringx}"
  rm -f "$out"/python*
  export COVERAGE_FILE=$out/python
  "$BIN/python" -m coverage run -m pytest -q -m '' -n "${JOBS:-2}" --dist worksteal "${tests[@]}" >"$out/pytest.txt" 2>&1 || status=1
  tail -1 "$out/pytest.txt"
  "$BIN/python" -m coverage combine -q >>"$out/pytest.txt" 2>&1 # it names the files of processes that were killed
  "$BIN/python" -m coverage report --skip-empty
}

cover_cpp() {
  rm -rf "$out/cpp"
  BUILD="$out/cpp" CXX="${CXX:-g++}" CXXFLAGS=--coverage LDFLAGS=--coverage tools/cpp_tests.sh -Q >"$out/cpp.txt" 2>&1 || status=1
  grep -E 'tests passed' "$out/cpp.txt"
  # gcov merges what all programs ran: "File 'PATH'", and below it "Lines executed:93.21% of 205".
  find "$out/cpp" -name '*.gcda' -exec gcov -n {} + 2>>"$out/cpp.txt" | awk -F "[':% ]+" -v folder="$PWD/fserver/include/" '
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
