#!/bin/bash
# The devices are ACTIVE and have IPv4 and global IPv6 GIDs. Their interfaces are the ends of two pairs.
set -euo pipefail
for i in 0 1 2 3; do
  about=$(ibv_devinfo -v -d rxe$i)
  grep -E '^hca_id|state:|active_mtu|GID\[' <<<"$about"
  grep -q 'PORT_ACTIVE' <<<"$about"
  grep -q "GID\[  1\]:.*::ffff:10.77.$((i / 2)).$((i % 2 + 1))," <<<"$about"
  net=fd77:
  ((i < 2)) || net=fd77:1:
  grep -q "GID\[  2\]:.*$net:$((i % 2 + 1))," <<<"$about"
done
