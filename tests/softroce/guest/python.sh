#!/usr/bin/env bash
# Runs mesh.py, the last case, if the machine has the time: importing torch takes a minute or more.
set -euo pipefail
read -r up _ </proc/uptime
left=$((SOFTROCE_SECONDS - ${up%.*}))
if ((left < 400)); then
  echo "skipped: the machine is stopped in $left s, and importing torch takes 60 to 150 (make softroce CASES=python)"
  exit 0
fi
exec env PYTHONPATH="$PWD" "$1" tests/softroce/mesh.py
