#!/bin/bash
# Makes four RDMA devices, on the ends of two pairs of virtual network interfaces.
#
#   device  interface  IPv4       IPv6        other end
#   rxe0    rdma0      10.77.0.1  fd77::1     rxe1
#   rxe1    rdma1      10.77.0.2  fd77::2     rxe0
#   rxe2    rdma2      10.77.1.1  fd77:1::1   rxe3
#   rxe3    rdma3      10.77.1.2  fd77:1::2   rxe2
#
# `nics.sh again` adds the routes and addresses that were lost when an interface went down.
#
# rxe sees the first network namespace only, so all ends are in it, and the kernel has to be told
# that packets between two of its own addresses go out by one interface and come in by the other:
# those of rxe, and those of a socket that is bound to one of the addresses.
set -euo pipefail

set_ipv4() { echo "$3" >"/proc/sys/net/ipv4/conf/$1/$2"; }
ipv4() { echo "10.77.$(($1 / 2)).$((1 + $1 % 2))"; }
ipv6() { (($1 < 2)) && echo "fd77::$((1 + $1))" || echo "fd77:1::$(($1 - 1))"; }
other() { echo $(($1 ^ 1)); }

add_routes() { # by one process: each takes long while others are busy
  local i peer mac
  for i in 0 1 2 3; do
    peer=$(other $i)
    read -r mac <"/sys/class/net/rdma$peer/address"
    echo "route replace $(ipv4 "$peer") dev rdma$i table $((100 + i))"
    echo "addr replace $(ipv6 $i)/64 dev rdma$i nodad"
    echo "route replace $(ipv6 "$peer") dev rdma$i table $((100 + i))"
    echo "neigh replace $(ipv6 "$peer") dev rdma$i lladdr $mac"
  done | ip -batch -
}

if [[ ${1:-} == again ]]; then
  add_routes
  exit
fi

# rdma_rxe asks for the "crc32" of crc32_generic, and does not load it.
modprobe -a crc32_generic rdma_rxe ib_uverbs rdma_ucm veth

# An RDMA packet of 4096 bytes and its headers fit in one frame.
ip link add rdma0 mtu 4200 type veth peer name rdma1 mtu 4200
ip link add rdma2 mtu 4200 type veth peer name rdma3 mtu 4200
set_ipv4 all rp_filter 0
for i in 0 1 2 3; do
  set_ipv4 rdma$i rp_filter 0
  set_ipv4 rdma$i accept_local 1 # take packets that come from an address of this machine
  set_ipv4 rdma$i arp_ignore 1   # answer for the address of this interface alone
  set_ipv4 rdma$i arp_announce 2
  ip addr add "$(ipv4 $i)/24" dev rdma$i
  ip link set rdma$i up
done
ip link set lo up

# Without these rules, the table of local addresses sends packets to lo. Those of IPv4 are for packets
# that this machine makes. IPv6 has no accept_local: its rules apply to packets for which the sender
# has chosen the interface, as rxe does.
for family in -4 -6; do
  ip $family rule del pref 0
  ip $family rule add pref 10 table local
done
for i in 0 1 2 3; do
  ip rule add pref $((1 + i)) iif lo from "$(ipv4 $i)" to "$(ipv4 "$(other $i)")" table $((100 + i))
  ip -6 rule add pref $((1 + i)) oif rdma$i table $((100 + i))
done
for i in 0 1 2 3; do
  rdma link add rxe$i type rxe netdev rdma$i
done
await() { # INDEX PATTERN, of a GID of each device
  local i n port state gid
  for i in 0 1 2 3; do
    port=/sys/class/infiniband/rxe$i/ports/1
    for ((n = 0; n < 200; n++)); do
      read -r state <$port/state
      read -r gid <"$port/gids/$1"
      # shellcheck disable=SC2053 # it is a pattern
      [[ $state == 4:* && $gid == $2 ]] && break
      sleep 0.05
    done
    ((n < 200)) || {
      echo "softroce: rxe$i is not ACTIVE with GID $1 like $2: $state, $gid" >&2
      exit 1
    }
  done
}
await 1 '*:ffff:*' # the first free entry, if there is no global IPv6 address yet
add_routes
await 2 'fd77:*'

# The kernel's thread for packets waits up to 4 ms behind a program that polls, unless it comes first.
for pid in $(pgrep ksoftirqd); do
  chrt -f -p 50 "$pid"
done
