#!/usr/bin/env bash
# Tests and measures fserver between two hosts, over RDMA if they have it.
#
#   tools/rdma_check.sh server              on one host, first
#   tools/rdma_check.sh client SERVER       on the other one; SERVER is an address of the first
#
# Each host writes to a folder of its own and packs it. Nothing of the hosts is changed. The settings of fserver
# (FSERVER_SECRET, FSERVER_RDMA_DEVICE, FSERVER_RDMA_TC, DMLC_INTERFACE, ...) are those of the environment. Besides:
#
#   PORT=7471         the first of 8 TCP ports of the server's host; further ports are chosen by its kernel
#   RESULTS=DIR       the folder (rdma-check-HOST-ROLE)
#   TRANSPORT=auto    verbs: RDMA or nothing
#   SECONDS_EACH=120  time limit of a step
#   WAIT=600          how long one host waits for the other one
#   SIZES=64,4K,...   bytes of a tensor in the step bytes
#   ITERS=1000        messages of each size for perftest
#   STEPS="..."       which steps, in this order: doctor tests peer bytes gpu layers tcp perftest nccl nixl ucx; the same on both
#   TEST_DEVICES=A,B  two RDMA devices of this host for the step tests, which reach each other (the first one, with itself)
#   GO=go             the toolchain for the step tests
#   PYTHON=python3    which has fserver, psutil and rich
#
# The exit status is 1 if a step failed. A step that cannot run is skipped, with the reason.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
role=${1:-} server=${2:-}
case $role in
server) ;;
client) [[ $server ]] || role="" ;;
*) role="" ;;
esac
if [[ ! $role ]]; then
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
port=${PORT:-7471} limit=${SECONDS_EACH:-120} python=${PYTHON:-python3}
results=${RESULTS:-rdma-check-$(hostname)-$role}
steps=${STEPS:-doctor tests peer bytes gpu layers tcp perftest nccl nixl ucx}
wait=${WAIT:-600}
export FSERVER_TRANSPORT=${TRANSPORT:-${FSERVER_TRANSPORT:-auto}} PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$results"
results=$(cd "$results" && pwd)
summary=$results/summary.txt
: >"$summary"
failed=0 listener="" running="" began=0

line() { # STATE STEP TEXT
  printf '%-4s %-9s %4ss  %.130s\n' "$1" "$2" "$((SECONDS - began))" "$3" | tee -a "$summary"
  [[ $1 != FAIL ]] || failed=1
}
finish() {
  trap - INT TERM
  local pid
  for pid in $listener $running; do kill "$pid" 2>/dev/null; done
  tar -C "$(dirname "$results")" -czf "$results.tar.gz" "$(basename "$results")"
  echo "results: $results.tar.gz (send those of both hosts)"
  exit "$failed"
}
trap 'failed=1; finish' INT TERM

# Runs a command with the time limit, its output in $results/STEP.log. The reason of a failure is what the doctor finds last, or what is printed last.
try() { # STEP COMMAND...
  local step=$1
  shift
  timeout -k 5 "$limit" "$@" >"$results/$step.log" 2>&1 &
  running=$! # in the background: a trap runs while bash waits, and not while a command runs
  wait "$running"
  local status=$?
  running=""
  case $status in
  0) return 0 ;;
  124 | 137) line FAIL "$step" "no end within $limit s (SECONDS_EACH); see $step.log" ;;
  *) line FAIL "$step" "$(grep '^  no ' "$results/$step.log" | tail -n 1 | grep . || grep -v '^ *$' "$results/$step.log" | tail -n 1)" ;;
  esac
  return 1
}
other() { # STEP NUMBER [OPTION...]: both hosts run this step of rdma_steps.py
  local step=$1 number=$2
  shift 2
  try "$step" "$python" "$here/rdma_steps.py" "$step" --role "$role" --at "$(join "$server" $((port + number)))" \
    --seconds "$limit" --json "$results/$step.json" "$@" || return
  line ok "$step" "$(sed -n 's/^summary: //p' "$results/$step.log")"
}
bench() { # STEP NUMBER BENCHMARK OPTION...: both hosts run `fserver bench`
  local step=$1 number=$2
  shift 2
  try "$step" "$python" -m fserver bench "$@" --scheduler "$(join "$server" $((port + number)))" --role "${role/client/worker}" \
    --rounds 3 --json "$results/$step.json" || return
  [[ $role == client ]] || {
    line ok "$step" "the client has the figures"
    return
  }
  line ok "$step" "$(awk -F '[": ,]+' '$2 == "transport" && $3 ~ /^[a-z]/ && !way { way = $3 } $2 == "bytes_out" || $2 == "bytes" { count = $3 }
    $2 == "p50_us" { found = found ", " count " B " int($3 + 0.5) " us" }
    $2 == "messages" { found = found ", " count " B " int($3) " messages/s" }
    END { print way found }' "$results/$step.json")"
}
pingpong() { # STEP TRANSPORT OPTION...
  bench "$1" 2 pingpong --transport "$2" --ops push_pull "${@:3}"
}
join() { if [[ $1 == *:* ]]; then echo "[$1]:$2"; else echo "$1:$2"; fi; }
has() { command -v "$1" >/dev/null; }
meet() { # STEP SECONDS [SAY]: the other host is at this step too; sets heard
  local at=$server
  if [[ $role == server ]]; then at=${LISTEN:-0.0.0.0}; fi
  heard=$("$python" "$here/rdma_steps.py" meet --role "$role" --at "$(join "$at" "$port")" --name "$1" --seconds "$2" --say "${3:-}" \
    2>"$results/meet.log") && return
  line FAIL "$1" "$(tail -n 1 "$results/meet.log")"
  finish
}

facts() {
  local command words
  for command in "uname -a" "ip -br addr" "ip route" "rdma link" "ibv_devinfo -v" "nvidia-smi" "nvidia-smi topo -m" "ulimit -a" "lsmod" "lscpu" "env"; do
    echo "== $command"
    case $command in
    ulimit*) ulimit -a ;;
    env) env | grep -E '^(DMLC|FSERVER|STEP|BYTEPS|PS|NCCL|UCX|CUDA)_' | grep -v '^FSERVER_SECRET=' ;;
    *)
      read -ra words <<<"$command"
      if has "${words[0]}"; then timeout 30 "${words[@]}" 2>&1; else echo "missing"; fi
      ;;
    esac
  done >"$results/facts.txt"
}
gpu() { has nvidia-smi && "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
# The same names are in fserver/bench/libraries.py. To import that takes seconds.
nixl() { "$python" -c 'import importlib.util as u, sys; sys.exit(not any(map(u.find_spec, ("nixl_cu13", "nixl_cu12", "nixl"))))' 2>/dev/null; }
mine() { # what this host has
  local found=""
  if gpu; then found+=" gpu"; fi
  if has ib_write_lat && has ib_write_bw; then found+=" perftest"; fi
  if has ucx_perftest; then found+=" ucx"; fi
  if [[ " $steps " == *" nixl "* ]] && nixl; then found+=" nixl"; fi
  echo "$found"
}
have() { [[ " $own " == *" $1 "* && " $theirs " == *" $1 "* ]]; } # WORD: both hosts
both() { # STEP WORD: both hosts have it
  if have "$2"; then return 0; fi
  line skip "$1" "only if both hosts have it: $2"
  return 1
}

doctor() {
  try doctor "$python" -m fserver doctor || return
  local found
  found=$(grep -E '^ *(yes|no|note) +verbs' "$results/doctor.log" | head -n 1 | tr -s ' ')
  line ok doctor "${found# }"
}
tests() { # of the repository, over RDMA devices of this host
  local devices=${TEST_DEVICES:-} go=${GO:-go}
  if [[ ! $devices ]]; then devices=$(find /sys/class/infiniband -mindepth 1 -printf '%f\n' 2>/dev/null | sort | head -n 1); fi
  if [[ ! $devices ]]; then
    line skip tests "this host has no RDMA device"
  elif ! has "$go" || [[ ! -e $here/../go.mod ]]; then
    line skip tests "needs a checkout of fserver and the Go toolchain (GO=PATH)"
  else
    # shellcheck disable=SC2016 # of the inner bash
    limit=$((2 * limit)) try tests env FSERVER_TEST_RDMA="$devices" bash -c 'cd "$1" && "$0" test -count=1 -v ./cshim/verbs &&
      "$0" test -count=1 -v -short -run "TestContract$|TestKilledPeer|TestVerbs" -skip TestVerbsGPU ./engine/transport/verbs ./engine/node' \
      "$go" "$here/.." || return
    line ok tests "$(grep -c '^ *--- PASS' "$results/tests.log") passed, $(grep -c '^ *--- SKIP' "$results/tests.log") skipped, over $devices"
  fi
}
peer() {
  if [[ $role == server ]]; then
    if kill -0 "$listener" 2>/dev/null; then line ok peer "answers the doctor of the client (listen.log)"; else line FAIL peer "$(tail -n 1 "$results/listen.log")"; fi
    return
  fi
  try peer "$python" -m fserver doctor --peer "$(join "$server" $((port + 1)))" || return
  line ok peer "$(grep -E '^ *yes +transport' "$results/peer.log" | tr -s ' '); $(tail -n 1 "$results/peer.log" | tr -s ' ')"
}
path() { # here or there: device, port and index of the GID, as the step peer found them
  sed -nE "s/.*RDMA $1 +(\S+) port ([0-9]+), GID ([0-9]+) .*/\1 \2 \3/p" "$results/peer.log" 2>/dev/null
}
perftest() {
  both perftest perftest || return
  local name number gid test bad=0
  # The client alone has the report of both sides.
  meet devices "$limit" "$(path there)"
  if [[ $role == client ]]; then heard="$server $(path here)"; fi
  read -r _ name number gid <<<"$heard"
  if [[ ! ${gid:-} ]]; then
    line skip perftest "the step peer did not go over RDMA"
    return
  fi
  for test in ib_write_lat ib_write_bw; do
    meet "$test" "$((limit + 30))"
    [[ $role == server ]] || sleep 1 # until it listens
    # shellcheck disable=SC2046 # the client alone names the server
    try "$test" "$test" -d "$name" -i "$number" -x "$gid" -p $((port + 5)) -F -a -n "${ITERS:-1000}" $([[ $role == server ]] || echo "$server") || bad=1
  done
  ((bad)) || line ok perftest "$(awk '$1 == 64 { if (FILENAME ~ /lat/) printf "64 B %s us, ", $5 }
    $1 == 1048576 { if (FILENAME ~ /lat/) printf "1 MiB %s us, ", $5; else printf "%s MB/s", $4 }' "$results"/ib_write_lat.log "$results"/ib_write_bw.log)"
}
ucx() {
  both ucx ucx || return
  local bytes found=""
  for bytes in 4096 917504 1835008; do
    meet "ucx $bytes" "$((limit + 30))"
    [[ $role == server ]] || sleep 1 # until it listens
    # shellcheck disable=SC2046
    try "ucx-$bytes" ucx_perftest -t ucp_put_lat -s "$bytes" -n 1000 -p $((port + 7)) $([[ $role == server ]] || echo "$server") || return
    found+=", $bytes B $(awk '$1 == "Final:" { us = $5 " us" } END { print us ? us : "see its log" }' "$results/ucx-$bytes.log")"
  done
  line ok ucx "${found#, }"
}

facts
own=$(mine)
meet start "$wait" "$own"
read -r address theirs <<<"$heard"
[[ $role == client ]] || server=$address
line ok start "$role; the server is $server; here:${own:- no perftest, GPU, ucx, nixl}; there: ${theirs:-no perftest, GPU, ucx, nixl}"
if [[ $role == server ]]; then
  "$python" -m fserver doctor --listen "$(join "$server" $((port + 1)))" >"$results/listen.log" 2>&1 &
  listener=$!
  until grep -q ^listening "$results/listen.log" || ! kill -0 "$listener" 2>/dev/null; do sleep 0.1; done
fi
for step in $steps; do
  began=$SECONDS
  meet "$step" "$((2 * limit + 60))" # the other host may be busy with its part of the last one
  began=$SECONDS
  case $step in
  doctor) doctor ;;
  tests) tests ;;
  peer) peer ;;
  perftest) perftest ;;
  ucx) ucx ;;
  bytes) pingpong bytes "$FSERVER_TRANSPORT" --sizes "${SIZES:-64,4K,64K,1M,16M,64M}" ;;
  # 61 layers with 3 stages, 20 times a second, need a round trip of 273 us.
  layers) bench layers 2 af --transport "$FSERVER_TRANSPORT" ;;
  tcp) bench tcp 2 af --transport tcp ;;
  gpu) if both gpu gpu; then bench gpu 2 kv --transport "$FSERVER_TRANSPORT" --memory gpu --ops push_pull --keys 1 --sizes 4K,1M,64M; fi ;;
  nccl) if both nccl gpu; then other nccl 6 --device gpu; fi ;;
  nixl) if both nixl nixl; then other nixl 6 --device "$(have gpu && echo gpu || echo cpu)"; fi ;;
  *) line FAIL "$step" "no such step (STEPS)" ;;
  esac
done
meet end "$((2 * limit + 60))"
finish
