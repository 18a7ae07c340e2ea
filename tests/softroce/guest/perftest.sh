#!/bin/bash
# ib_send_lat, ib_write_lat and ib_write_bw of the distribution between rxe0 and rxe1, each end on its own processor.
set -euo pipefail
pair() { # PROGRAM BYTES ITERATIONS
  local options=(-x 1 -F -s "$2" -n "$3") log server
  log=$(mktemp)
  taskset -c 1 "$1" -d rxe1 "${options[@]}" >"$log" 2>&1 &
  server=$!
  # The server listens before it prints its first rule.
  for ((n = 0; n < 200; n++)); do
    ss -ltn | grep -q ':18515 ' && break
    sleep 0.05
  done
  taskset -c 0 "$1" -d rxe0 "${options[@]}" 127.0.0.1 | grep -A 1 '#bytes' || {
    cat "$log"
    return 1
  }
  wait "$server"
}
ib() { echo "$1, $2 bytes:" && pair "$@"; }
ib ib_send_lat 64 500
ib ib_write_lat 64 500
ib ib_write_lat 4096 500
ib ib_write_bw 65536 300
ib ib_write_bw 1048576 40
