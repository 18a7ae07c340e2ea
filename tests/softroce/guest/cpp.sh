#!/bin/bash
# Runs C++ programs over RDMA: examples/cpp echo and kv, bench_kv, and cases of tests/cpp/kv_calls.cc. Workers are at
# rxe0, servers at rxe1.
#
#   cpp.sh ECHO KV BENCH_KV KV_CALLS
#
# What bench_kv pushes has to go through the interface of rxe0. Nobody spins: the processes have two emulated processors.
set -uo pipefail
read -r echo kv bench calls <<<"$*"
export FSERVER_TRANSPORT=verbs FSERVER_SPIN_US=0 FSERVER_LOG=error FSERVER_INIT_TIMEOUT=100 STEPMESH_BACKEND=CPU
export DMLC_NODE_HOST=127.0.0.1 DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT=17779

# Workers and servers that run a program, and a scheduler, which is another one of ps/ps.h.
run() { # WORKERS SERVERS PROGRAM [ARGUMENT...]
  local workers=$1 servers=$2 all=() i status=0
  shift 2
  export DMLC_NUM_WORKER=$workers DMLC_NUM_SERVER=$servers
  DMLC_ROLE=scheduler "$kv" &
  all+=($!)
  for ((i = 0; i < servers; i++)); do
    DMLC_ROLE=server DMLC_NODE_RANK=$i FSERVER_RDMA_DEVICE=rxe1 "$@" &
    all+=($!)
  done
  for ((i = 0; i < workers; i++)); do
    DMLC_ROLE=worker DMLC_NODE_RANK=$i FSERVER_RDMA_DEVICE=rxe0 "$@" &
    all+=($!)
  done
  for i in "${all[@]}"; do wait "$i" || status=$?; done
  ((DMLC_PS_ROOT_PORT++))
  if ((status)); then
    echo "$(basename "$1"): a process ended with status $status" >&2
    exit 1
  fi
  echo "$(basename "$1"): passed after $SECONDS s"
}

sent() { cat /sys/class/net/rdma0/statistics/tx_bytes; }

run 1 1 "$echo"
run 2 2 "$kv"
before=$(sent)
NUM_KEY_PER_SERVER=4 LOG_DURATION=5 run 1 1 "$bench" 65536 10 push_then_pull
through=$(($(sent) - before)) least=$((65536 * 4 * 12))
echo "rdma0 sent $through bytes"
if ((through < least)); then
  echo "want at least $least bytes" >&2
  exit 1
fi
unset "${!DMLC_@}" # the scenes of kv_calls have their own
export DMLC_NODE_HOST=127.0.0.1
export SCENE_DEVICES="rxe0 rxe1"
"$calls" what_a_handler_is_told registered_memory several_apps_and_customers callbacks_run_once || exit
echo "kv_calls: passed after $SECONDS s"
