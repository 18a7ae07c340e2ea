#!/bin/bash
# Times push_pulls over verbs beside a program in C and perftest of the same boot, taking turns.
#
#   speed.sh FLOOR ECHO
set -euo pipefail
file=$(mktemp)
for ((i = 0; i < 3; i++)); do
  "$1" --seconds 0.5 --json "$file"
  "$2" --seconds 0.5 --floor "$file"
done
"$(dirname "$0")/perftest.sh"
