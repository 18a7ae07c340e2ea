#!/bin/bash
# The guest's process 1, on the host's files: prepares the machine, runs the job that vm.sh wrote,
# reports its exit status, and switches the machine off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
here=$(cd "$(dirname "$0")" && pwd)

setting() { sed -n "s/.* softroce\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

# vm.sh listens at two ports: "output" takes what the job prints, "status" takes lines `NAME VALUE`.
port() {
  local each name
  for each in /sys/class/virtio-ports/*; do
    read -r name <"$each/name"
    [[ $name == "$1" ]] && echo "/dev/${each##*/}"
  done
}

finish() {
  echo "exit $1" >"$status"
  sync
  busybox poweroff -f
}

shares() {
  local share
  share=$(setting share)
  mount -t 9p -o cache=mmap,trans=virtio,version=9p2000.L,msize=512000 share "$share"
  # The kernel looks for modules under /lib/modules when a program asks for one.
  mkdir -p /lib/modules
  ln -sfn "$(setting image)/lib/modules/$(uname -r)" "/lib/modules/$(uname -r)"
}

status=$(port status)
mkdir -p /dev/pts /dev/shm /run
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
# There is no udev, which would make these.
ln -sfn /proc/self/fd /dev/fd
for name in stdin:0 stdout:1 stderr:2; do
  ln -sf "/proc/self/fd/${name#*:}" "/dev/${name%:*}"
done
shares || finish 125
echo "started $(cut -d' ' -f1 /proc/uptime)" >"$status"

# The job gets a pipe, which it may open by name (/dev/stderr); a port can be opened only once.
mkfifo /run/output
cat /run/output >"$(port output)" &
printer=$!
exec >/run/output 2>&1 </dev/null
hostname softroce
if [[ $(setting bare) != 1 ]]; then
  bash "$here/nics.sh" || finish 125
  echo "ready $(cut -d' ' -f1 /proc/uptime)" >"$status"
fi
SOFTROCE_STATUS=$status bash "$(setting job)"
result=$?
exec >/dev/null 2>&1
# A process that the job left behind may hold the pipe open.
for ((i = 0; i < 20; i++)); do
  kill -0 $printer || break
  sleep 0.05
done
finish $result
