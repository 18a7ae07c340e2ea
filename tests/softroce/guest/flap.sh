#!/bin/bash
# Takes links down for a second, which takes those of their other ends down as well: that of rxe1, or those of the interfaces that are named.
(($#)) || set -- rdma1
for name; do ip link set "$name" down; done
sleep 1
for name; do ip link set "$name" up; done
"$(dirname "$0")/nics.sh" again
