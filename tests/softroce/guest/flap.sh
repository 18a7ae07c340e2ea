#!/bin/bash
# Takes the link of rxe1 down for a second, which takes that of rxe0 down as well.
ip link set rdma1 down
sleep 1
ip link set rdma1 up
"$(dirname "$0")/nics.sh" again
