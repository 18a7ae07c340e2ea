#!/usr/bin/env bash
# Makes what vm.sh boots: the distribution's kernel, unpacked but not installed, and an initramfs
# that mounts this host's files. Does nothing if both are there already.
#
#   tests/softroce/image.sh [--check]
#
# --check   make nothing: print what is missing and exit with 1, or print nothing and exit with 0
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=${SOFTROCE_BUILD:-$(cd "$here/../.." && pwd)/build/softroce}
image=$build/image

# What runs on the host, and what the guest's own scripts call on the host's files.
programs=(qemu-system-x86_64 busybox modprobe depmod dpkg-deb python3 ip rdma ibv_devinfo setpriv chrt)

# The image is made again when a script that makes it has changed.
recipe=$(cat "$here/image.sh" "$here/vmlinux.py" "$here/guest/init" | sha256sum | cut -c1-16)

missing() {
  local program
  [[ $(uname -m) == x86_64 ]] || echo "the emulated machine is for x86_64 hosts; this is $(uname -m)"
  for program in "${programs[@]}"; do
    PATH=$PATH:/sbin:/usr/sbin type -P "$program" >/dev/null || echo "no $program"
  done
  [[ -e /usr/include/infiniband/verbs.h ]] || echo "no infiniband/verbs.h (libibverbs-dev)"
}

ready() { [[ $(cat "$image/recipe" 2>/dev/null) == "$recipe" ]]; }

# Downloads the kernel that apt knows now.
download() {
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }')
  [[ -n $package ]] && (cd "$1" && apt-get -q download "$package")
}

unpack_kernel() {
  local package folder=$build/download
  rm -rf "$folder"
  mkdir -p "$folder"
  # What apt knows may be missing or old.
  download "$folder" || {
    if ((EUID == 0)); then apt-get -q update; else sudo apt-get -q update; fi
    download "$folder"
  } || {
    echo "softroce: cannot download linux-image-amd64 of Debian by apt-get" >&2
    return 1
  }
  dpkg-deb -x "$folder/${package}"_*.deb "$image"
  release=${package#linux-image-}
  depmod -b "$image" "$release"
  python3 "$here/vmlinux.py" "$image/boot/vmlinuz-$release" "$image/vmlinux"
  rm -rf "$folder"
}

# The modules that mount the host's files, in the order in which they are loaded.
copy_modules() {
  local path name
  for name in virtio_pci virtio_console 9pnet_virtio 9p overlay; do
    modprobe -d "$image" -S "$release" --show-depends "$name"
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
    name=$(basename "$path")
    case $name in
    *.xz) xz -dc "$path" >"$root/modules/${name%.xz}" ;;
    *.zst) zstd -dcq "$path" >"$root/modules/${name%.zst}" ;;
    *) cp "$path" "$root/modules/$name" ;;
    esac
    echo "${name%%.ko*}.ko"
  done >"$root/modules/order"
}

pack_initramfs() {
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  mkdir -p "$root"/{bin,dev,host,modules,new,proc,ram,sys}
  cp "$(type -P busybox)" "$root/bin/busybox"
  ln -s busybox "$root/bin/sh"
  install -m 755 "$here/guest/init" "$root/init"
  copy_modules
  # Not compressed: unpacking would take longer in the emulated machine than reading.
  (cd "$root" && find . | busybox cpio -o -H newc >"$image/initramfs") 2>/dev/null
}

export PATH=$PATH:/sbin:/usr/sbin
mapfile -t lacks < <(missing)
if ((${#lacks[@]})); then
  printf 'softroce: %s\n' "${lacks[@]}" >&2
  echo "softroce: make softroce installs what is missing" >&2
  exit 1
fi
if [[ ${1:-} == --check ]]; then
  ready || {
    echo "softroce: no image in $image (make softroce makes it)" >&2
    exit 1
  }
  exit 0
fi
mkdir -p "$build"
exec 8>"$build/image.lock"
flock 8
ready && exit 0
rm -rf "$image"
mkdir -p "$image"
unpack_kernel
pack_initramfs
echo "$release" >"$image/release"
echo "$recipe" >"$image/recipe"
echo "softroce: kernel $release is in $image"
