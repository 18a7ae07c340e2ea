#!/usr/bin/env bash
# Runs every check and says which failed.
#
#   tools/lint.sh               all checks of all files (`make lint`)
#   tools/lint.sh CHECK FILE... one check of some files: clang-format clang-tidy gofmt ruff shellcheck sizes
#
# BIN names the folder of the Python that has requirements/dev.txt; GO the command go.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export BIN=${BIN:-.venv/bin}
GO=${GO:-$("$BIN/python" tools/builder.py go)}

staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2
failed=()

check() {
  local name=$1
  shift
  echo "lint: $name"
  "$@" || failed+=("$name")
}

# gofmt has no exit status for a file that it would change.
gofmt_clean() {
  local files
  files=$("$("$GO" env GOROOT)/bin/gofmt" -l -s "$@") && [[ -z $files ]] || {
    printf 'gofmt -s -w %s\n' "$files"
    return 1
  }
}

# A file has at most 500 lines, and one that only tests use at most 800.
sizes() {
  local file lines most status=0
  for file in "$@"; do
    [[ -e $file ]] || continue # removed, and not committed yet
    case $file in
    tests/* | *_test.go | */testdata/* | *test/*.go | */fakegpu/*) most=800 ;;
    *) most=500 ;;
    esac
    lines=$(wc -l <"$file")
    ((lines <= most)) || {
      echo "$file: $lines lines, of at most $most (split it by subject)"
      status=1
    }
  done
  return $status
}

some() { # one check of some files
  local name=$1
  shift
  case $name in
  clang-format) "$BIN/clang-format" --dry-run -Werror "$@" ;;
  clang-tidy) tools/tidy.sh "$@" ;;
  gofmt) gofmt_clean "$@" ;;
  ruff) "$BIN/ruff" check "$@" && "$BIN/ruff" format --check "$@" ;;
  shellcheck) "$BIN/shellcheck" "$@" ;;
  sizes) sizes "$@" ;;
  *)
    echo "lint: no check $name for files (want clang-format, clang-tidy, gofmt, ruff, shellcheck or sizes)" >&2
    return 2
    ;;
  esac
}

if (($#)); then
  some "$@"
  exit
fi

c_folders=(csrc cshim engine examples fserver/_torch fserver/bench include tests tools)
mapfile -t c_files < <(find "${c_folders[@]}" -name '*.[ch]' -o -name '*.cc' -o -name '*.hpp' | sort)
mapfile -t sources < <(git ls-files -co --exclude-standard -- '*.go' '*.py' '*.pyi' '*.[ch]' '*.cc' '*.cu' '*.hpp' '*.sh')

check "git ls-files" test "${#sources[@]}" != 0
check gofmt some gofmt engine cshim
check "go mod tidy" "$GO" mod tidy -diff
check "go vet" "$GO" vet ./...
check staticcheck "$GO" run "$staticcheck" ./...
check "generated files (go test ./engine/conf -run TestSettingsPage -update)" \
  "$GO" test ./engine/conf -run TestSettingsPage
check ruff some ruff .
check "notices (tools/notices.sh)" env GO="$GO" tools/notices.sh --check
check mypy "$BIN/mypy"
check "mypy (tools)" "$BIN/mypy" tools/*.py
check "mypy (integrations)" "$BIN/mypy" --no-warn-unused-configs integrations/ringx_attn
check clang-format some clang-format "${c_files[@]}"
check clang-tidy some clang-tidy
check shellcheck some shellcheck .ci/run tools/*.sh tests/softroce/*.sh tests/softroce/guest/*
check sizes some sizes "${sources[@]}"

if ((${#failed[@]})); then
  printf 'lint: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "lint: clean"
