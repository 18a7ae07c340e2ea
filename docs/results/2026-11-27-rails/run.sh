#!/bin/bash
# Two network namespaces joined by two links; a worker on core 0 and a server on core 1. Needs root.
#
#   run.sh split   whole tensors and cut ones in turn, over two links: writes split.txt
#   run.sh small   one link and two in turn: writes small.txt
set -euo pipefail
cd "$(dirname "$0")"
top=$(cd ../../.. && pwd)
export PYTHONPATH=$top DMLC_PS_ROOT_URI=10.77.0.2 FSERVER_TRANSPORT=tcp FSERVER_LOG=error STEPMESH_BACKEND=CPU OMP_NUM_THREADS=1

links() {
  local name link
  for name in A B; do
    ip netns del $name 2>/dev/null || true
    ip netns add $name
    ip -n $name link set lo up
  done
  for link in 0 1; do
    ip link add a$link netns A type veth peer name b$link netns B
    ip -n A addr add 10.77.$link.1/24 dev a$link
    ip -n B addr add 10.77.$link.2/24 dev b$link
    ip -n A link set a$link up
    ip -n B link set b$link up
  done
}

pair() { # INTERFACES OF THE WORKER, OF THE SERVER, SIZES, SPLIT
  export DMLC_PS_ROOT_PORT=$((7000 + RANDOM % 1000)) FSERVER_SPLIT_BYTES=$4
  DMLC_ROLE=server DMLC_INTERFACE=$2 FSERVER_HOST_SCHEDULER=1 ip netns exec B taskset -c 1 "$top/.venv/bin/python" pair.py &
  DMLC_ROLE=worker DMLC_INTERFACE=$1 ip netns exec A taskset -c 0 "$top/.venv/bin/python" pair.py "$3"
  wait
}

links
for ((round = 0; round < ${ROUNDS:-8}; round++)); do
  case $1 in
  split)
    for split in 1000000000 4096; do
      echo "$split: $(pair a0,a1 b0,b1 16384,32768,65536,131072,262144,524288,1048576,4194304 $split)"
    done
    ;;
  small)
    echo "0: $(pair a0 b0 64,4096,16777216 131072)"
    echo "0,1: $(pair a0,a1 b0,b1 64,4096,16777216 131072)"
    ;;
  esac
done | tee "$1.txt"
