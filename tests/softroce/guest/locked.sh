#!/bin/bash
# Runs tests/cabi/mesh where little memory may be locked: verbs says how to change that, and tcp has
# no need of it.
#
#   locked.sh PROGRAM
set -uo pipefail
status=0
for transport in ${transports:?}; do
  said=$(ulimit -l 64 && setpriv --bounding-set=-ipc_lock "$1" exchange --count 4 --sizes 1,1048576 \
    --set FSERVER_SPIN_US=0 --limit 30 --transport "$transport" --worker-host 10.77.0.1 --server-host 10.77.0.2 \
    --worker-device rxe0 --server-device rxe1 2>&1)
  result=$?
  printf '%s\n' "$said"
  case $transport in
  verbs) [[ $result == 1 && $said == *"ulimit -l"* ]] ;;
  *) [[ $result == 0 ]] ;;
  esac || {
    echo "$transport: exit status $result with ulimit -l 64" >&2
    status=1
  }
done
exit $status
