#!/bin/bash
# Runs mesh.sh with the devices of both pairs, while the cable of rdma2 and rdma3 is pulled and put back at random times. While it is out,
# rdma0 has to carry data. When it is back, rdma2 has to carry data as well.
#
#   cable.sh PROGRAM [OPTION...]
#
# SEED chooses the times.
set -uo pipefail
here=$(dirname "$0")
RANDOM=${SEED:-1}
export DEVICES="rxe0,rxe2 rxe1,rxe3"
some=200000 # bytes: more than what sets connections up
status=0 pulls=0
wrong() {
  echo "cable.sh: $1" >&2
  status=1
}
sent() { read -r bytes <"/sys/class/net/rdma$1/statistics/tx_bytes"; }
rest() { # for 0 to 599 ms
  local ms=00$((RANDOM % 600))
  sleep "0.${ms: -3}"
}
lives() { kill -0 "$mesh" 2>/dev/null; }
carries() { # waits until rdma$1 has sent some more
  local end=$((SECONDS + 20)) before
  sent "$1" && before=$bytes
  while lives && ((SECONDS < end)); do
    sent "$1"
    ((bytes - before < some)) || return 0
    sleep 0.02
  done
  ! lives || wrong "rdma$1 carries nothing $2"
  return 1
}
put_back() {
  ip link set rdma2 up
  "$here/nics.sh" again || wrong "the routes and addresses cannot be added again"
}

sent 2 && before=$bytes
"$here/mesh.sh" "$@" &
mesh=$!
chrt -r -p 10 $$ # or each command waits for the processes that exchange
until sent 2 && ((bytes - before > some)) || ! lives; do sleep 0.05; done
while lives; do
  rest
  ip link set rdma2 down
  carries 0 "while rdma2 is down" || break
  rest
  put_back
  carries 2 "since it is up again" && pulls=$((pulls + 1))
done
wait "$mesh" || status=1
put_back # the next run begins with both pairs
echo "cable.sh: data went on after each of $pulls pulls"
((pulls >= 2)) || wrong "want at least 2 pulls: make more push_pulls (--count)"
exit $status
