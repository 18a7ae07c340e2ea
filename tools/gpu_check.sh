#!/usr/bin/env bash
# Checks and times what needs GPUs, from the source tree or an unpacked device bundle.
#
#   tools/gpu_check.sh PART...        parts: channel
#
# OUT=DIR for results (default build/gpu), PYTHON, QUICK=1 for fewer runs. Builds the extension if
# there is none. Prints PASS or FAIL for each step; the exit status says whether all passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
failed=0

# step NAME COMMAND...: its output goes to the log of that name, and its end to the terminal.
step() {
  local name=$1 log started=$SECONDS
  shift
  log="$OUT/$name.txt"
  if "$@" >"$log" 2>&1; then
    echo "PASS $name ($((SECONDS - started)) s): $(tail -1 "$log")"
  else
    echo "FAIL $name ($((SECONDS - started)) s), exit status $?, see $log:"
    tail -40 "$log"
    failed=1
  fi
}

build() {
  local archive=${FSERVER_ARCHIVE:-}
  [[ -z $archive && -f build/libfserver.a ]] && archive=build/libfserver.a
  FSERVER_ARCHIVE=$archive "$PYTHON" tools/builder.py ext
}

channel() {
  local extra=() raw=()
  [[ -n ${QUICK:-} ]] && extra+=(--quick)
  [[ -n ${SWEEP:-} ]] && extra+=(--sweep)
  if command -v nvcc >/dev/null; then
    step channel-raw-build nvcc -O3 -arch=native -o "$OUT/raw_channel" tests/gpu/raw_channel.cu -lcuda
    raw=(--raw "$OUT/raw_channel")
  fi
  step channel-tests "$PYTHON" -m pytest tests/gpu -q --maxfail=8 -rf --durations=8 -k "lane or channel"
  step channel-bench "$PYTHON" tests/gpu/bench_channel.py --json "$OUT/channel.json" "${raw[@]}" "${extra[@]}"
  grep '^work=' "$OUT/channel-bench.txt"
  if command -v compute-sanitizer >/dev/null && [[ -z ${QUICK:-} ]]; then
    step channel-sanitizer compute-sanitizer --target-processes all --error-exitcode 9 \
      "$PYTHON" -m pytest tests/gpu/test_lane.py -q -k "two_gpus and (unaligned or rows) and not ce"
  fi
}

step build build
for part in "$@"; do
  case $part in
    channel) "$part" ;;
    *)
      echo "gpu_check: no part $part (parts: channel)" >&2
      exit 2
      ;;
  esac
done
exit "$failed"
