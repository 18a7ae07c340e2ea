#!/usr/bin/env bash
# Runs a command in an emulated machine that has two software RDMA devices, rxe0 and rxe1.
#
#   tests/softroce/vm.sh run [OPTION...] -- COMMAND [ARGUMENT...]
#
#   --time S        seconds until the machine is stopped (300)
#   --memory MIB    memory of the machine (2048)
#   --memlock KIB   run COMMAND with this limit on locked memory and without the privilege to pass
#                   it (CAP_IPC_LOCK); without this option there is no limit
#   --keep          keep the logs of a run that ended as it should
#   --bare          make no RDMA devices (tests/softroce/guest/nics.sh makes them)
#
# Needs what `make softroce` installs and builds; `vm.sh check` says what is missing, and exits with 1.
#
# The machine has all of this host's processors and sees all of this host's files, at the same paths
# and read-only: its libc and libraries, the checkout, a virtual environment. COMMAND is found by
# PATH and runs as root in the current folder; of the environment it gets PATH and PYTHONPATH (use
# `-- env NAME=VALUE COMMAND` for more). What it writes goes to the machine's memory and is lost,
# except in build/softroce/share, which is this host's folder: put test programs there before, and
# results. Build outside, run inside: the processor is emulated, and some 10 times slower.
#
#   go test -c -o build/softroce/share/tcp.test ./engine/transport/tcp
#   tests/softroce/vm.sh run -- build/softroce/share/tcp.test -test.v
#
# rxe0 has the addresses 10.77.0.1 and fd77::1, rxe1 has 10.77.0.2 and fd77::2. Index 1 of the table
# of GIDs is IPv4, RoCE v2. Packets between them travel over a pair of virtual interfaces, rdma0
# and rdma1, whose counters (/sys/class/net/rdma0/statistics) show them.
#
# What COMMAND prints appears at once. The exit status is that of COMMAND; 124 when time ran out, and
# then the last line and, from a list of cases, the case are named; 125 when the machine did
# not start or died: what its kernel said is printed. A program of a list of cases says which it is at by
# `echo "case NAME" >$SOFTROCE_STATUS`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${SOFTROCE_BUILD:-$root/build/softroce}
image=$build/image
share=$build/share

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$here/vm.sh"
  exit "$1"
}

wrong() {
  echo "vm.sh: $1 (vm.sh --help)" >&2
  exit 2
}

number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || wrong "$1 $2: want a number from 1"; }

parse() {
  seconds=300 memory=2048 memlock="" bare=0 keep=0
  while (($#)); do
    case $1 in
    --time | --memory | --memlock)
      (($# > 1)) || wrong "$1 wants a number"
      number "$1" "$2"
      case $1 in
      --time) seconds=$2 ;;
      --memory) memory=$2 ;;
      --memlock) memlock=$2 ;;
      esac
      shift 2
      ;;
    --bare)
      bare=1
      shift
      ;;
    --keep)
      keep=1
      shift
      ;;
    --)
      shift
      break
      ;;
    *) wrong "$1: want --time, --memory, --memlock, --bare, --keep or --" ;;
    esac
  done
  (($#)) || wrong "no command after --"
  job=("$@")
}

# Writes the script that the guest runs.
write_job() {
  local before=()
  [[ -z $memlock ]] || before=(setpriv --bounding-set=-ipc_lock)
  {
    printf 'cd %q || exit 125\n' "$PWD"
    printf 'export HOME=/tmp/softroce-home PATH=%q PYTHONPATH=%q\n' "$PATH:/sbin:/usr/sbin" "${PYTHONPATH:-}"
    # shellcheck disable=SC2016 # the guest's
    echo 'mkdir -p "$HOME"'
    printf 'ulimit -l %s\n' "${memlock:-unlimited}"
    printf '%q ' exec ${before[@]+"${before[@]}"} "${job[@]}"
    echo
  } >"$run/job.sh"
}

start() {
  local release arguments
  release=$(<"$image/release")
  arguments="console=ttyS0 panic=-1 oops=panic quiet mitigations=off nokaslr audit=0 selinux=0"
  arguments+=" apparmor=0 nowatchdog random.trust_cpu=on tsc=reliable clocksource=tsc"
  arguments+=" softroce.boot=$here/guest/boot.sh softroce.image=$image softroce.share=$share"
  arguments+=" softroce.job=$run/job.sh softroce.bare=$bare softroce.release=$release"
  # The machine ends with this script, however that ends.
  exec setpriv --pdeathsig TERM timeout --kill-after 5 "$seconds" \
    qemu-system-x86_64 -nodefaults -no-user-config -display none -monitor none -no-reboot -nic none \
    -machine q35 -accel tcg,thread=multi,tb-size=256 -cpu max,la57=off -smp "$(nproc)" -m "$memory" \
    -kernel "$image/vmlinux" -initrd "$image/initramfs" -append "$arguments " \
    -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -fsdev local,id=share,path="$share",security_model=none \
    -device virtio-9p-pci,fsdev=share,mount_tag=share \
    -device virtio-serial-pci \
    -chardev file,id=output,path=/dev/stdout -device virtserialport,chardev=output,name=output \
    -chardev file,id=status,path="$run/status" -device virtserialport,chardev=status,name=status \
    -serial file:"$run/kernel.log" </dev/null 2>"$run/qemu.log"
}

said() { awk -v name="$1" '$1 == name { $1 = ""; value = substr($0, 2) } END { print value }' "$run/status" 2>/dev/null; }

# Says what the kernel complained of: a fault in rxe may leave the job's result as it is.
complaints() {
  grep -aE 'BUG:|WARNING:|Oops|Call Trace|blocked for more than|Out of memory' "$run/kernel.log" 2>/dev/null |
    sed 's/^/vm.sh: the kernel said: /' >&2 || true
}

report() { # the exit status of timeout
  local result
  result=$(said exit)
  complaints
  if (($1 == 124 || $1 == 137)); then
    echo "vm.sh: $seconds s are over (--time). Case: $(said case). Last line: $(tail -n 1 "$run/output")" >&2
    return 124
  fi
  if [[ -z $result ]]; then
    echo "vm.sh: the machine ended without a result (qemu: exit status $1)" >&2
    cat "$run/qemu.log" >&2
    tail -n 20 "$run/kernel.log" >&2
    return 125
  fi
  return "$result"
}

run() {
  parse "$@"
  "$here/image.sh" --check || exit 125
  [[ $build$here != *[[:space:]]* ]] || wrong "$root: no blanks are allowed in the path of the checkout"
  mkdir -p "$share" "$build/runs"
  run=$(mktemp -d "$build/runs/XXXXXX")
  write_job
  : >"$run/output"
  local result=0
  trap 'exit 143' TERM
  trap 'exit 130' INT
  start > >(tee "$run/output") &
  wait $! || result=$?
  report "$result" || result=$?
  if ((keep || result == 124 || result == 125)); then
    echo "vm.sh: logs are in $run" >&2
  else
    rm -rf "$run"
  fi
  exit "$result"
}

case ${1:-} in
run)
  shift
  run "$@"
  ;;
check) exec "$here/image.sh" --check ;;
-h | --help) usage 0 ;;
*) usage 2 >&2 ;;
esac
