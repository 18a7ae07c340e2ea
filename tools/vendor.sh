#!/usr/bin/env bash
# Adds the Go modules that the engine is built from to an unpacked source distribution, for setup.py.
#
#   GO=... tools/vendor.sh TREE
#   GO=... tools/vendor.sh --list   names them: those of any processor that wheels are built for
set -euo pipefail
tree=$(realpath -m -- "$1")
cd "$(dirname "$0")/.."
export GOTOOLCHAIN=local CGO_ENABLED=1

modules() {
  local processor
  for processor in amd64 arm64; do
    GOARCH=$processor "$GO" list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}' ./engine/cabi
  done | sort -u
}

if [[ $1 == --list ]]; then
  modules
elif [[ ! -d $tree/vendor ]]; then # else this is made from a source distribution
  needed=$(modules)
  "$GO" mod vendor -o "$tree/vendor"
  # Modules that only tests need are removed. modules.txt, which Go compares with go.mod, keeps naming them.
  while read -r module; do
    grep -qxF "$module" <<<"$needed" || rm -rf "$tree/vendor/$module"
  done < <(sed -nE 's/^# (\S+) v.*/\1/p' "$tree/vendor/modules.txt")
fi
