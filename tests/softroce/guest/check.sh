#!/bin/bash
# Runs tools/rdma_check.sh as two hosts would, the server at rxe0 and the client at rxe1: tensors over RDMA by auto, since the
# devices are named, and perftest.
#
#   check.sh PYTHON
set -uo pipefail
results=$SOFTROCE_SHARE/rdma-check
mkdir -p "$results"
export PYTHON=$1 TRANSPORT=auto BYTEPS_ENABLE_IPC=0 FSERVER_SPIN_US=0 STEPS="peer perftest" ITERS=5 SECONDS_EACH=400 WAIT=120
half() { # ROLE DEVICE HOST [SERVER]
  env RESULTS="$results/$1" FSERVER_RDMA_DEVICE="$2" DMLC_NODE_HOST="$3" tools/rdma_check.sh "$1" ${4:+"$4"}
}
half server rxe0 10.77.0.1 &
half client rxe1 10.77.0.2 10.77.0.1
status=$?
wait $! || status=1
cat "$results"/client/peer.log
grep -q 'transport *verbs' "$results/client/peer.log" || status=1
exit $status
