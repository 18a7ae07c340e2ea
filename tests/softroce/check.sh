#!/usr/bin/env bash
# Builds the test programs, starts the emulated machine and runs cases in it.
#
#   tests/softroce/check.sh [NAME...]      cases of tests/softroce/cases; without names: all
#
# `make softroce` installs what it needs first. GO and BIN name the toolchain and the virtual environment.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
share=${SOFTROCE_BUILD:-$PWD/build/softroce}/share

# NAME of $share/NAME.test, and its package.
packages=(
  inproc ./engine/transport/inproc
  tcp ./engine/transport/tcp
)

"$here/image.sh" --check
mkdir -p "$share"
for program in floor facts; do
  ${CC:-cc} -O2 -Wall -Wextra -Werror -o "$share/$program" "$here/$program"*.c "$here/rdma.c" -libverbs
done
for ((i = 0; i < ${#packages[@]}; i += 2)); do
  "${GO:-go}" test -c -o "$share/${packages[i]}.test" "${packages[i + 1]}"
done
exec "$here/vm.sh" run --time "${SOFTROCE_SECONDS:-330}" -- \
  env SOFTROCE_SHARE="$share" SOFTROCE_PYTHON="${BIN:+$BIN/}python3" "$here/guest/cases.sh" "$@"
