#!/bin/bash
# Pulls the cable of rdma2 and rdma3 and puts it back. While it is out, rdma0 has to carry data. When it is back,
# rdma2 has to carry data as well.
set -uo pipefail
some=200000 # bytes: more than what sets connections up
chrt -r -p 10 $$ # or each command waits for the processes that exchange
carries() { # INTERFACE WHEN: waits until it has sent some more
  local end=$((SECONDS + 20)) statistics=/sys/class/net/$1/statistics/tx_bytes before now
  read -r before <"$statistics" || return
  while read -r now <"$statistics" && ((now - before < some)); do
    ((SECONDS < end)) || {
      echo "pull.sh: $1 carries nothing $2" >&2
      return 1
    }
    sleep 0.02
  done
}
rest() { # for 0 to 599 ms
  local ms=00$((RANDOM % 600))
  sleep "0.${ms: -3}"
}

carries rdma2 "before its cable is pulled" || exit
ip link set rdma2 down || exit
carries rdma0 "while rdma2 is down"
status=$?
rest
ip link set rdma2 up # also after a failure: the next case begins with both pairs
"$(dirname "$0")/nics.sh" again || exit
carries rdma2 "since it is up again" && exit $status
