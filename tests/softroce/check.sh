#!/usr/bin/env bash
# Builds the test programs, starts the emulated machine and runs cases in it.
#
#   tests/softroce/check.sh [NAME...]      cases of tests/softroce/cases; without names: all but *_long
#
# `make softroce` installs what it needs first. GO and BIN name the toolchain and the virtual environment.
# SOFTROCE_SECONDS is the time until the machine is stopped, SOFTROCE_ROUNDS how many rounds cable_long makes (20), and
# SOFTROCE_MEMORY the machine's memory in MiB (2048; demo_long needs 6000).
set -euo pipefail

# The transports that the cases with tests/cabi/mesh try.
transports=${TRANSPORTS:-verbs}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
share=${SOFTROCE_BUILD:-$PWD/build/softroce}/share

# NAME of $share/NAME.test, and its package.
packages=(
  tcp ./engine/transport/tcp
  shim ./cshim/verbs
  verbs ./engine/transport/verbs
  node ./engine/node
)

for name in "$@"; do
  grep -q "^$name " "$here/cases" || {
    echo "check.sh: $name: no such case in tests/softroce/cases" >&2
    exit 2
  }
done
"$here/image.sh" --check
mkdir -p "$share"
needed() { # whether a case that is to run names $share/PROGRAM
  local name=$1
  shift
  awk -v chosen=" $* " -v program="\$share/$name" '
    $1 !~ /^#/ && (chosen == "  " ? $1 !~ /_long$/ : index(chosen, " " $1 " ")) && index($0 " ", program " ") { found = 1 }
    END { exit !found }' "$here/cases"
}
for program in floor facts; do
  needed "$program" "$@" || continue
  ${CC:-cc} -O2 -Wall -Wextra -Werror -o "$share/$program" "$here/$program"*.c "$here/rdma.c" -libverbs
done
if needed dmabuf.so "$@"; then
  ${CC:-cc} -O2 -Wall -Wextra -Werror -shared -fPIC -o "$share/dmabuf.so" "$here/dmabuf.c" -libverbs
fi
# As tests/cabi/test_cabi.py builds them.
cabi() { # PROGRAM FILE...
  needed "$1" "${names[@]}" || return 0
  ${CC:-cc} -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -Iengine/cabi -o "$share/$1" "${@:2}" build/libfserver.a -pthread \
    -lresolv -Wl,-z,lazy,--unresolved-symbols=ignore-in-object-files,--export-dynamic
}
if needed model "$@"; then
  PYTHONPATH=$PWD "${BIN:+$BIN/}python3" "$here/model.py" "$share/model"
fi
names=("$@")
cabi abi_test tests/cabi/abi_test.c
cabi mesh tests/cabi/mesh*.c
# The same for programs of C++: PROGRAM SOURCE...
cpp() {
  needed "$1" "${names[@]}" || return 0
  ${CXX:-c++} -std=c++17 -O2 -Wall -Wextra -Werror -Iinclude -Iengine/cabi -o "$share/$1" "${@:2}" build/libfserver.a -pthread \
    -lresolv -ldl -Wl,-z,lazy,--unresolved-symbols=ignore-in-object-files,--export-dynamic
}
cpp cpp_echo examples/cpp/echo.cc
cpp cpp_kv examples/cpp/kv.cc
cpp cpp_bench fserver/bench/bench_kv.cc
cpp cpp_calls tests/cpp/{ps_scenes,kv_calls}.cc
cabi echo tests/softroce/echo.c tests/softroce/rdma.c -libverbs
# As the Makefile has it, which may have looked before libibverbs-dev was installed.
[[ ${CGO_CFLAGS:-} == *-DCS_VERBS_INSTALLED* ]] || export CGO_CFLAGS="${CGO_CFLAGS:--O2 -g} -DCS_VERBS_INSTALLED"
for ((i = 0; i < ${#packages[@]}; i += 2)); do
  needed "${packages[i]}.test" "$@" || continue
  "${GO:-go}" test -c -o "$share/${packages[i]}.test" "${packages[i + 1]}"
done
seconds=${SOFTROCE_SECONDS:-2400}
exec "$here/vm.sh" run --time "$seconds" --memory "${SOFTROCE_MEMORY:-2048}" -- \
  env SOFTROCE_SECONDS="$seconds" SOFTROCE_ROUNDS="${SOFTROCE_ROUNDS:-20}" SOFTROCE_SHARE="$share" SOFTROCE_TRANSPORTS="$transports" SOFTROCE_PYTHON="${BIN:+$BIN/}python3" "$here/guest/cases.sh" "$@"
