#!/bin/bash
# Both devices are ACTIVE, have IPv4 and global IPv6 GIDs, and their interfaces are the two ends of one pair.
set -euo pipefail
for i in 0 1; do
  about=$(ibv_devinfo -v -d rxe$i)
  grep -E '^hca_id|state:|active_mtu|GID\[' <<<"$about"
  grep -q 'PORT_ACTIVE' <<<"$about"
  grep -q "GID\[  1\]:.*::ffff:10.77.0.$((i + 1))," <<<"$about"
  grep -q "GID\[  2\]:.*fd77::$((i + 1))," <<<"$about"
done
