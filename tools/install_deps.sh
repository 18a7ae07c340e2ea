#!/usr/bin/env bash
# Installs what a build needs from the system, on Debian or Ubuntu. Run it as often as you like.
#
#   tools/install_deps.sh [--wheels] [--softroce] [--cpp] [--dry-run]
#
# --wheels adds what tools/wheels.sh needs to build for 64-bit Arm and to try that here.
# --softroce adds what the emulated machine of tests/softroce needs: Debian on x86-64, whose kernel it runs.
# --cpp adds the second compiler of tools/cpp_tests.sh --matrix.
# The rest comes with `make setup`, a Go toolchain included if there is none.
set -euo pipefail

packages=(gcc g++ libc6-dev make python3 python3-dev python3-venv)
optional=() # if apt knows them

run=()
for option in "$@"; do
  case "$option" in
  --wheels) packages+=(libibverbs-dev g++-aarch64-linux-gnu qemu-user) ;;
  --softroce)
    if ! grep -qsx 'ID="\?debian"\?' /etc/os-release || [[ $(uname -m) != x86_64 ]]; then
      echo "install_deps: --softroce: the emulated machine runs Debian's kernel for x86-64; use Debian on x86-64" >&2
      exit 1
    fi
    packages+=(qemu-system-x86 busybox-static kmod iproute2 procps xz-utils zstd)
    packages+=(libibverbs-dev ibverbs-providers ibverbs-utils perftest)
    ;;
  --cpp)
    packages+=(clang)
    optional+=(libclang-rt-dev) # the sanitizers of clang, where they are a package of their own
    ;;
  --dry-run) run=(echo) ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
  esac
done

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install_deps: not a Debian or Ubuntu system; install the equivalents of: ${packages[*]}" >&2
  exit 1
fi

installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }
find_missing() {
  missing=()
  local package
  for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
  done
  for package in "${optional[@]}"; do
    installed "$package" || ! apt-cache show "$package" >/dev/null 2>&1 || missing+=("$package")
  done
}
find_missing
if ((${#missing[@]} == 0)); then
  echo "install_deps: nothing to do"
  exit 0
fi

if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "install_deps: run as root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  run+=(sudo)
fi
"${run[@]}" apt-get update
find_missing # apt may know more now
"${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
