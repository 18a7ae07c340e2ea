#!/usr/bin/env bash
# Writes NOTICES: the licence texts of all that is linked into the package.
#
#   tools/notices.sh            writes it
#   tools/notices.sh --check    says whether it is up to date, for tools/lint.sh
#
# The Go modules are those that the engine imports, on any processor that wheels are built for. Their texts come from the
# module cache, Go's own from its toolchain. The texts of what C++ brings are in tools/licences. GO names the toolchain, or
# BIN the folder of a Python that may have it.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOTOOLCHAIN=local
GO=${GO:-$("${BIN:-.venv/bin}/python" tools/builder.py go)}
rule=$(printf '=%.0s' {1..80})
made=$(mktemp)
trap 'rm -f "$made"' EXIT

section() { # TITLE FILE
  printf '\n%s\n%s\n%s\n\n%s\n' "$rule" "$1" "$rule" "$(<"$2")"
}
texts() { # TITLE FOLDER
  local files file
  files=$(find "$2" -maxdepth 1 -type f | grep -iE '/(LICEN[CS]E|COPYING|NOTICE|PATENTS)(\.[^/]*)?$' | LC_ALL=C sort) || {
    echo "notices: $1: no licence file in $2" >&2
    exit 1
  }
  while read -r file; do section "$1: ${file##*/}" "$file"; done <<<"$files"
}
modules() { # of one processor: path, version, folder
  GOARCH=$1 CGO_ENABLED=1 "$GO" list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' ./engine/cabi
}

found=$(modules amd64 && modules arm64)
{
  cat <<'END_OF_HEAD'
Notices of software that is part of fserver's built packages. tools/notices.sh makes this file.

Linked into the extension: the Go modules and the Go runtime below, pybind11 (header only), and, in
wheels, the GNU C++ library. Nothing is said here about the licence of fserver itself.
END_OF_HEAD
  LC_ALL=C sort -u <<<"$found" | while read -r path version folder; do texts "$path $version" "$folder"; done
  texts "The Go runtime and standard library" "$("$GO" env GOROOT)"
  for file in tools/licences/*.txt; do section "$(basename "$file" .txt)" "$file"; done
} >"$made"
if [[ ${1:-} != --check ]]; then
  cat "$made" >NOTICES
elif ! cmp -s "$made" NOTICES; then
  echo "notices: NOTICES is not up to date: run tools/notices.sh" >&2
  exit 1
fi
