#!/usr/bin/env bash
# Runs every check and says which failed. `make lint` sets GO and BIN.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

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
  files=$("$("$GO" env GOROOT)/bin/gofmt" -l -s engine cshim) && [[ -z $files ]] || {
    printf 'gofmt -s -w %s\n' "$files"
    return 1
  }
}

mapfile -t c_files < <(find csrc cshim engine examples fserver/_torch fserver/bench include tests tools -name '*.[ch]' -o -name '*.cc' -o -name '*.hpp' | sort)

check gofmt gofmt_clean
check "go mod tidy" "$GO" mod tidy -diff
check "go vet" "$GO" vet ./...
check staticcheck "$GO" run "$staticcheck" ./...
check "generated files (go test ./engine/conf -run TestSettingsPage -update)" \
  "$GO" test ./engine/conf -run TestSettingsPage
check "ruff check" "$BIN/ruff" check .
check "ruff format" "$BIN/ruff" format --check .
check "notices (tools/notices.py)" "$BIN/python" tools/notices.py --check
check mypy "$BIN/mypy"
check clang-format "$BIN/clang-format" --dry-run -Werror "${c_files[@]}"
check shellcheck "$BIN/shellcheck" .ci/run tools/*.sh tests/softroce/*.sh tests/softroce/guest/*

if ((${#failed[@]})); then
  printf 'lint: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "lint: clean"
