#!/usr/bin/env bash
# Checks that take too long for `make test`, each by name; all of them without one.
#
#   tools/check_long.sh [PART...]
#
#   wheel   a wheel for this Python, tried in empty environments with the oldest and the newest torch
#   sdist   the source distribution builds without network for Go
#   site    the documentation is built and opened in a browser
#   demo    the demo with its packaged model
#   chaos   1,000 kills in a cluster, over tcp, cma and auto
#   soak    10^6 push_pulls each way: does anything grow?
#   random  RANDOM_STEPS (5,000) steps of random requests over tcp, cma and auto, of a random seed, compared byte by byte
#   fuzz    every parser
#   softroce  100 kills, the whole contract of verbs, 6,000 messages of channels, SOFTROCE_ROUNDS (20) rounds of a pulled cable, C++ programs, and the demo, in the emulated machine
#   pytest  the Python tests that `make test` leaves out
#   engine  go test without the race detector: every seed of faults, and every variant of the contract
#   cpp     the tests of the C++ headers with each compiler and standard
#   links   10^4 exchanges while the links between two network namespaces go down and come back (needs root)
#
# `make check-long PARTS="wheel sdist"` builds what they need first, and sets BIN and MAKE.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

all=(wheel sdist site demo chaos soak random fuzz softroce pytest engine cpp links)
python=${BIN:-$PWD/.venv/bin}/python
make=${MAKE:-make}

part_wheel() { long tests/long/check_wheel.py tests/long/check_arm.py; }
part_sdist() { long tests/long/check_sdist.py; }
part_site() { # `make docs` installs what it needs
  if [[ -x tools/site.sh ]]; then
    "$make" docs && tools/site.sh
  else
    echo "check-long: there is no tools/site.sh here" >&2
    return 1
  fi
}
part_demo() { long tests/long/check_demo.py; }
part_chaos() {
  local transport status=0
  for transport in tcp cma auto; do
    "$make" chaos N=1000 TRANSPORT="$transport" || status=1
  done
  return $status
}
part_soak() { "$make" soak; }
part_random() {
  RANDOM_STEPS=${RANDOM_STEPS:-5000} RANDOM_SEED=${RANDOM_SEED:-$RANDOM} long tests/python/test_random.py
}
part_fuzz() { "$make" fuzz; }
part_softroce() {
  local rounds=${SOFTROCE_ROUNDS:-20}
  SOFTROCE_SECONDS=$((2400 + 60 * rounds)) SOFTROCE_ROUNDS=$rounds "$make" softroce CASES="kill_long carry_long verbs_long check_long cpp_long cable_long" &&
    SOFTROCE_SECONDS=2500 SOFTROCE_MEMORY=6000 "$make" softroce CASES=demo_long
}
part_pytest() { "$python" -m pytest -m long; }
part_engine() { "$("$python" tools/builder.py go)" test -count 1 -timeout 20m ./...; }

part_cpp() { tools/install_deps.sh --cpp && tools/cpp_tests.sh --matrix; }

part_links() {
  LINKS_ROUNDS=${LINKS_ROUNDS:-3400} "$python" -m pytest -o faulthandler_timeout=0 -s tests/python/test_rails.py -k links_go_down
}

# They are no tests of `make test`: pytest runs them only by name, without its limit of silence.
long() { "$python" -m pytest -o faulthandler_timeout=0 "$@"; }

parts=("$@")
((${#parts[@]})) || parts=("${all[@]}")
for part in "${parts[@]}"; do
  if [[ " ${all[*]} " != *" $part "* ]]; then
    echo "check-long: $part: no such part; want some of: ${all[*]}" >&2
    exit 2
  fi
done

failed=()
for part in "${parts[@]}"; do
  printf 'check-long: %s\n' "$part"
  "part_$part" || failed+=("$part")
done
if ((${#failed[@]})); then
  printf 'check-long: failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
echo "check-long: passed: ${parts[*]}"
