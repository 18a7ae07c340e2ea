#!/bin/bash
# Runs tests/cabi/mesh once for each transport of $transports: workers at rxe0 and servers at rxe1, or at the devices
# that DEVICES names.
#
#   mesh.sh PROGRAM exchange|kill|disturb [OPTION...]
#
# HOSTS names the addresses of workers and servers, and with them the GIDs. The data has to go through the
# interface of rxe0, in packets of IPv6 if the addresses are. With two devices a side, each has to carry a tenth of
# it. Nobody spins: the five processes have two emulated processors.
set -uo pipefail
read -r workers servers <<<"${HOSTS:-10.77.0.1 10.77.0.2}"
read -r ours theirs <<<"${DEVICES:-rxe0 rxe1}"
sent() { cat "/sys/class/net/rdma${1:-0}/statistics/tx_bytes"; }
ipv6() { awk '$1 == "Ip6InOctets" { print $2 }' /proc/net/snmp6; }
status=0
for transport in ${transports:?}; do
  before=$(sent) before2=$(sent 2) before6=$(ipv6)
  "$@" --transport "$transport" --set FSERVER_SPIN_US=0 --worker-host "$workers" --server-host "$servers" \
    --worker-device "$ours" --server-device "$theirs" | tee /tmp/mesh.log || status=1
  through=$(($(sent) - before)) second=$(($(sent 2) - before2)) through6=$(($(ipv6) - before6))
  echo "$transport: rdma0 sent $through bytes, rdma2 $second; $through6 bytes came by IPv6"
  if [[ $ours == *,* ]]; then
    least=$(((through < second ? through : second) * 10))
    through=$((through + second))
    ((least >= through)) || {
      echo "$transport: one device sent less than a tenth" >&2
      status=1
    }
  fi
  compared=$(grep -o '[0-9]* bytes compared' /tmp/mesh.log | cut -d' ' -f1)
  # Of what is compared, the workers have sent half, by rdma0.
  [[ $workers != *:* ]] || through=$((through < through6 ? through : through6))
  if ((through < ${compared:-0} / 2)); then
    echo "$transport: want at least half of $compared" >&2
    status=1
  fi
done
exit $status
