#!/usr/bin/env bash
# Checks and times what needs GPUs, from the source tree or an unpacked device bundle.
#
#   tools/gpu_check.sh PART...        parts: channel
#
# OUT=DIR for results (default build/gpu), PYTHON, RUNS of each measurement, SWEEP=1 for other
# thresholds too, FULL=1 for the sanitizer. Builds the extension if there is none. Prints PASS or FAIL for each step; the exit status says whether all passed.
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

# Everything in it is bounded: 90 s in all without FULL=1.
channel() {
  local raw=() lanes=("$PYTHON" -m pytest tests/gpu -v -s --maxfail=2 -rf --durations=5)
  if command -v nvcc >/dev/null; then
    step channel-raw-build timeout 60 nvcc -O3 -arch=native -o "$OUT/raw_channel" \
      tests/gpu/raw_channel.cu -lcuda
    raw=(--raw "$OUT/raw_channel")
  fi
  step channel-smoke timeout 40 "${lanes[@]}" -k "lane and unaligned and two_gpus or lane and one_way and two_gpus"
  step channel-bench timeout 60 "$PYTHON" tests/gpu/bench_channel.py --json "$OUT/channel.json" \
    --runs "${RUNS:-40}" "${raw[@]}" ${SWEEP:+--sweep}
  grep '^work=' "$OUT/channel-bench.txt"
  step channel-graphs timeout 60 "${lanes[@]}" -k "lane and (replay or layers or ends) and two_gpus"
  step channel-api timeout 60 "${lanes[@]}" -k "test_gpu_channel and two_gpus"
  step channel-rest timeout "${REST:-60}" "${lanes[@]}" \
    -k "test_lane and (sizes or rows or many) and two_gpus or test_lane and rows and one_gpu"
  if command -v compute-sanitizer >/dev/null && [[ -n ${FULL:-} ]]; then
    step channel-sanitizer timeout 120 compute-sanitizer --target-processes all \
      --error-exitcode 9 "$PYTHON" -m pytest tests/gpu/test_lane.py -v -s \
      -k "two_gpus and unaligned"
  fi
  tar -czf "$OUT/channel.tgz" -C "$OUT" --exclude=raw_channel --exclude=channel.tgz .
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
