#!/usr/bin/env bash
# The C++ compiler of tools/wheels.sh: what it makes runs with glibc 2.28 or later.
#
#   PYTHON=... tools/wheel_cxx.sh MACHINE [arguments of g++]
#
# It compiles with g++ and links with zig, which has the symbols of glibc 2.28, and with wheel_later.cc. The GNU C++ library is
# linked into the extension. An adapter takes the one that torch has loaded, because exceptions and types pass between the two.
set -euo pipefail
machine=$1
shift
cross=
[[ $machine == "$(uname -m)" ]] || cross=$machine-linux-gnu-
cxx=${cross}g++
if [[ " $* " != *" -shared "* ]]; then
  exec "$cxx" "$@"
fi

zig=("$PYTHON" -m ziglang cc -target "$machine-linux-gnu.2.28")
library() { "$cxx" "-print-file-name=$1"; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
kept=() stubs=() made=""
for word; do
  [[ $made == next ]] && made=$word
  case $word in
  -o) made=next kept+=("$word") ;;
  # zig's linker has no such options. Debug information is removed afterwards.
  -Wl,--exclude-libs,ALL | -Wl,-z,text | -Wl,--strip-debug | -Wl,--as-needed) ;;
  # Empty libraries stand for torch's, because those of the other processor are not here. The symbols are looked for when the
  # adapter is loaded.
  -ltorch_python | -ltorch_cpu | -lc10)
    stubs+=("$folder/lib${word#-l}.so")
    "${zig[@]}" -shared "-Wl,-soname,lib${word#-l}.so" -x c /dev/null -o "${stubs[-1]}"
    ;;
  *) kept+=("$word") ;;
  esac
done
libraries=("$(library libstdc++.a)") define=()
if ((${#stubs[@]})); then
  libraries=("-Wl,--no-as-needed" "${stubs[@]}" "$(library libstdc++.so)") define=(-DADAPTER)
fi
"$cxx" -std=c++20 -O2 -fPIC "${define[@]}" -c "$(dirname "$0")/wheel_later.cc" -o "$folder/later.o"
"${zig[@]}" "${kept[@]}" "$folder/later.o" "${libraries[@]}" "$(library libgcc_s.so.1)" -lm
"${cross}strip" --strip-debug "$made"
