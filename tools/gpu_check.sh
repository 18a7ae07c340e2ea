#!/usr/bin/env bash
# Checks and times what needs GPUs, from the source tree or an unpacked device bundle.
#
#   tools/gpu_check.sh PART...        parts: tests eager channel sanitizer bench staged af ringx cpp
#
# OUT=DIR for results (default build/gpu), PYTHON, QUICK=1 for fewer runs. MPS=1 runs NVIDIA's
# multi-process service meanwhile: the processes of a test then use one GPU at the same time, where they
# take turns otherwise, of milliseconds each; not in those that kill one for which the GPU works, which the
# service may not survive. Prints PASS or FAIL for
# each step; the exit status says whether all passed, and is 2 without a part or for one that there is not.
#
# tests needs the archive alone: all of tests/gpu in one go, within LIMIT seconds (default 900), or
# FILES="tests/gpu/test_lane.py ..." of them, or those that K="lane and two_gpus" selects. It leaves tests.txt, and with MPS=1
# tests-killed.txt.
#
# eager needs a device bundle, or what `make device-bundle` builds, and nvcc: tests, round trips by `fserver bench pingpong` on GPUs,
# beside those in C, without pollers and on the CPU, ROUNDS of each size (default 5), and what calls of the driver take. All that
# it leaves is one file, eager.tgz: logs and JSON.
#
# bench needs the archive alone, and 2 GPUs: `fserver bench` pingpong (on the CPU too) and graph trips with tensors
# on GPUs, each in turn with others' ways or beside them, and prints what they say, within 9 minutes:
# ROUNDS of each size (default 5), RUNS of 20 round trips through a channel (default 1000). All that it
# leaves is one file, bench.tgz.
#
# staged needs the archive and nvcc: copies between a GPU and pinned memory, GPU tensors over TCP in C, and CPU and GPU tensors over
# TCP by `fserver bench pingpong`, ROUNDS of each in turn (default 4), and prints them, within 5 minutes. All that it leaves is
# one file, staged.tgz.
#
# channel needs the archive alone: RUNS of each measurement (default 40), SWEEP=1 for other
# thresholds too.
#
# sanitizer needs the archive alone, and compute-sanitizer: kernels of channels, within 7 minutes.
#
# af needs the archive, psutil, and 2 or 4 GPUs: fserver bench graph af and overlap, and the tests of memory and
# of kernels on the timeline, within 9 minutes (it takes about 5, and others' ways up to one more). It leaves one
# file, af.tgz. QUICK=1 for fewer exchanges and rounds.
#
# ringx, which needs no extension: RANKS="2 4" for the numbers of GPUs (default: 2 and 4 of those
# there are), TOKENS=8K,32K,... for the lengths (default 8K to 128K; 256K takes 7 minutes on 4 GPUs). On
# one GPU with MPS=1 it checks only, with RANKS processes (default "2 3 4"; 2 minutes each).
#
# cpp needs the archive and a C++ compiler (CXX, default c++): the tests of tests/cpp that need a GPU, those of them with torch,
# and `fserver bench kv` with values on GPUs, within 10 minutes. It leaves kv.json.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

parts="tests eager channel sanitizer bench staged af ringx cpp"

wrong() {
  echo "gpu_check: $1; usage: tools/gpu_check.sh PART... (parts: $parts)" >&2
  exit 2
}

(($#)) || wrong "no part is named"

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export NEED_GPU=1 # tests that find none fail
failed=0

if [[ -n ${MPS:-} ]]; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) || exit
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d || {
    rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
    wrong "MPS=$MPS: the multi-process service does not start"
  }
fi
packing=() # what is to be packed, also when it is interrupted
leave() {
  ((${#packing[@]})) && pack "${packing[@]}"
  [[ -z ${MPS:-} ]] && return
  # It waits for processes that a step has left behind.
  echo quit | timeout -k 5 30 nvidia-cuda-mps-control || echo "gpu_check: the multi-process service goes on" >&2
  rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
}
trap leave EXIT

# step NAME COMMAND...: its output goes to the log of that name, and its end to the terminal.
step() {
  local name=$1 log started=$SECONDS
  shift
  log="$OUT/$name.txt"
  if "$@" >"$log" 2>&1; then
    echo "PASS $name ($((SECONDS - started)) s): $(tail -1 "$log")"
  else
    echo "FAIL $name ($((SECONDS - started)) s), exit status $?, see $log:"
    grep -nE '^ *--- FAIL|^FAILED |^ERROR |^panic:|^E  ' "$log" | head -60
    tail -40 "$log"
    failed=1
  fi
}

ringx() {
  local gpus ranks=${RANKS:-} tokens=${TOKENS:-8K,16K,32K,64K,128K} n
  gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit
  if [[ -z $ranks ]]; then
    if ((gpus == 1)) && [[ -n ${MPS:-} ]]; then
      ranks="2 3 4"
    else
      for n in 2 4; do ((n <= gpus)) && ranks+=" $n"; done
    fi
  fi
  if [[ -z $ranks ]]; then
    echo "FAIL ringx: $gpus GPUs, and 2 are the least"
    failed=1
    return
  fi
  [[ -n ${QUICK:-} ]] && tokens=8K,32K
  ((gpus > 1)) && step ringx-tests "$PYTHON" -m pytest -q tests/ringx/test_ringx_streams.py tests/ringx/test_ringx_combine.py
  for n in $ranks; do
    RANKS=$n step "ringx-check-$n" "$PYTHON" -m pytest -v -rs tests/ringx/test_ringx_ranks.py
    ((n <= gpus)) || continue
    local run=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$n" tools/ringx_bench.py)
    step "ringx-causal-$n" "${run[@]}" --tokens "$tokens" --json "$OUT/ringx-causal-$n.json"
    cat "$OUT/ringx-causal-$n.txt"
    step "ringx-graph-$n" "${run[@]}" --graph --tokens 8K,32K --json "$OUT/ringx-graph-$n.json"
    cat "$OUT/ringx-graph-$n.txt"
    [[ -n ${QUICK:-} ]] && continue
    step "ringx-full-$n" "${run[@]}" --mask full --tokens 8K,32K,64K --json "$OUT/ringx-full-$n.json"
    cat "$OUT/ringx-full-$n.txt"
    NCCL_P2P_DISABLE=1 step "ringx-slow-$n" "${run[@]}" --tokens 8K,32K,64K --json "$OUT/ringx-slow-$n.json"
    cat "$OUT/ringx-slow-$n.txt"
  done
}

machine() {
  nvidia-smi topo -m && nvidia-smi -L && "$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count())'
}

within() { timeout -k 5 "$@"; }

build() { FSERVER_ARCHIVE=build/libfserver.a within 60 "$PYTHON" tools/builder.py ext; }

floor() { within 30 nvcc -O2 -o "$OUT/gpu_floor" tools/gpu_floor.c -lcuda -lcudart; }

# pack FILE DIR leaves what is in DIR as one file.
pack() {
  rm -f "$2/gpu_floor"
  tar -czf "$1" -C "$2" . && rm -rf "$2"
}

# packed PART runs its steps and packs what they leave.
packed() {
  local logs
  logs=$(mktemp -d) || exit
  packing=("$OUT/$1.tgz" "$logs")
  OUT=$logs "$1_steps"
  pack "${packing[@]}"
  packing=()
}

# Without -test.v, only tests that fail print, and what they print stands below their names.
eager_steps() {
  local last
  last=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() - 1)') || exit
  step machine machine
  step build build
  [[ -e fserver/include/fserver.h ]] || return
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  step eager-tests within 240 "$PYTHON" -m pytest -v -p no:cacheprovider --maxfail=4 --durations=8 \
    tests/gpu -k "not lane and not channel" --junitxml="$OUT/eager-tests.xml"
  step floor floor
  step eager-calls within 30 "$OUT/gpu_floor" calls 0 "$last"
  cat "$OUT/eager-calls.txt"
  local trips=(--sizes "4K,64K,896K:1792K,64M" --ops push_pull --rounds "${ROUNDS:-5}" --beside none)
  bench_step eager 160 --device cpu,gpu "${trips[@]}"
  FSERVER_PROGRESS=caller bench_step eager-caller 120 --device gpu "${trips[@]}"
  step go-cuda within 10 env -C cshim/cuda "$PWD/build/tests/cuda.test"
  step go-stage within 40 build/tests/stage.test -test.run GPU -test.timeout 38s
  step go-cudaipc within 40 build/tests/cudaipc.test -test.run GPU -test.timeout 38s
  step go-node within 12 build/tests/node.test -test.run RealGPU -test.timeout 11s
}

# graph_step PART WORK SECONDS OPTION...: its rows go to the terminal.
graph_step() {
  local name=$1-$2 work=$2 limit=$3
  shift 3
  step "$name" within "$limit" "$PYTHON" -m fserver bench graph "$work" --json "$OUT/$work.json" "$@"
  grep -hE '^(FAIL .*)?work=' "$OUT/$name.txt"
}

# bench_step NAME SECONDS OPTION...: fserver bench pingpong, whose table goes to the terminal.
bench_step() {
  local name=$1 limit=$2
  shift 2
  step "bench-$name" within "$limit" "$PYTHON" -m fserver bench pingpong --json "$OUT/$name.json" "$@"
  cat "$OUT/bench-$name.txt"
}

bench_steps() {
  step machine machine
  step build build
  [[ -e fserver/include/fserver.h ]] || return
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  bench_step pingpong 160 --device gpu --transport auto --sizes 4K,896K:1792K,64M --rounds "${ROUNDS:-5}"
  bench_step devices 130 --device cpu,gpu --sizes 4K,1M --rounds 3 --seconds 0.1
  graph_step bench trips 190 --modes kernel,copy --runs "${RUNS:-1000}"
}

# GPU tensors over a transport that takes host memory alone.
staged_steps() {
  local cores=${CORES:-4,6} round last
  last=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() - 1)') || exit
  step machine machine
  step build build
  [[ -e fserver/include/fserver.h ]] || return
  step floor floor
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  for ((round = 1; round <= ${ROUNDS:-4}; round++)); do
    step "copies-$round" within 20 "$OUT/gpu_floor" copies 0 "${cores%,*}" 4096 1048576 67108864
    step "floor-$round" within 40 "$OUT/gpu_floor" staged 0 "$last" "${cores%,*}" "${cores#*,}" 4096 1048576 67108864
    echo "bytes, ns of a copy from and to the GPU; bytes, ns of a round trip in C (and without the copies):"
    cat "$OUT/copies-$round.txt" "$OUT/floor-$round.txt"
    bench_step "tcp-$round" 60 --device cpu,gpu --transport tcp --sizes 4K,1M,64M --ops push_pull --rounds 3 --cores "$cores" --beside none
  done
}

tests() {
  local files
  read -rd '' -a files <<<"${FILES:-tests/gpu}"
  step build build
  local -x PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  local run=("$PYTHON" -m pytest "${files[@]}" -v -p no:cacheprovider -rfs --durations=20 -k "${K:-}")
  if [[ -z ${MPS:-} ]]; then
    step tests within "${LIMIT:-900}" "${run[@]}"
  else
    step tests within "${LIMIT:-900}" "${run[@]}" -m "not killed_at_work"
    step tests-killed killed_at_work "${run[@]}" -m killed_at_work
  fi
}

# killed_at_work COMMAND...: pytest, without MPS. There may be none of them in FILES and K (5).
killed_at_work() {
  env -u CUDA_MPS_PIPE_DIRECTORY timeout -k 5 "${LIMIT:-900}" "$@"
  local rc=$?
  return $((rc == 5 ? 0 : rc))
}

# Everything in it is bounded: 6 minutes in all. The two processes of a test are on two
# GPUs, or on the only one.
channel() {
  local gpus here=two_gpus other=one_gpu lanes=("$PYTHON" -m pytest tests/gpu -v -s --maxfail=2 -rf --durations=5)
  gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit
  ((gpus >= 2)) || { here=one_gpu other=two_gpus; }
  step build build
  step channel-smoke within 60 "${lanes[@]}" -k "test_lane and (unaligned or one_way) and $here"
  if ((gpus >= 2)); then
    graph_step channel trips 120 --runs "${RUNS:-40}" --beside none
    step channel-calls within 60 "$PYTHON" tests/gpu/bench_channel.py --json "$OUT/calls.json" \
      --runs "${RUNS:-40}" ${SWEEP:+--sweep}
    grep '^work=' "$OUT/channel-calls.txt"
  fi
  step channel-graphs within 110 "${lanes[@]}" -k "test_lane and (replay or layers or ends) and $here"
  step channel-api within 240 "${lanes[@]}" -k "test_gpu_channel and not $other"
  step channel-rest within "${REST:-60}" "${lanes[@]}" \
    -k "test_lane and (sizes or rows or many) and $here or test_lane and rows and one_gpu"
  tar -czf "$OUT/channel.tgz" -C "$OUT" --exclude=channel.tgz .
}

sanitizer() {
  local here=two_gpus check=(compute-sanitizer --target-processes all --error-exitcode 9)
  (($("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') >= 2)) || here=one_gpu
  step build build
  step sanitizer within 240 "${check[@]}" "$PYTHON" -m pytest tests/gpu/test_lane.py -v -s \
    -k "$here and (unaligned or rows or one_way or many)"
  # The driver has to refuse what test_flags hands in.
  step sanitizer-flags within 90 "${check[@]}" --report-api-errors no "$PYTHON" -m pytest tests/gpu/test_eager.py -v -s -k test_flags
}

# compiled NAME SOURCE OPTION...: a program with the headers of C++, in $OUT.
compiled() {
  local name=$1 source=$2
  shift 2
  step "$name-build" within 180 "${CXX:-c++}" -std=c++20 -O1 -Wall -Wextra -Ifserver/include -o "$OUT/$name" "$source" "$@" \
    -Lfserver/lib "-Wl,-rpath,$PWD/fserver/lib" -lfserver -pthread -ldl
}

cpp() {
  local torch transport
  step build build
  [[ -e fserver/include/fserver.h ]] || return
  local -x PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} FSERVER_LOG=error
  torch=$("$PYTHON" -c 'import importlib.util; print(importlib.util.find_spec("torch").submodule_search_locations[0])') || exit
  compiled cpp-gpu tests/cpp/gpu.cc
  compiled cpp-af tests/cpp/ps_af.cc -isystem "$torch/include" "$torch/lib/libtorch_cpu.so" "$torch/lib/libc10.so" "-Wl,-rpath,$torch/lib"
  for transport in auto cma tcp; do
    FSERVER_TRANSPORT=$transport step "cpp-gpu-$transport" within 60 "$OUT/cpp-gpu"
    FSERVER_TRANSPORT=$transport STEPMESH_BACKEND=GPU step "cpp-af-$transport" within 60 "$PYTHON" -m fserver run \
      --workers 2 --servers 2 -- "$OUT/cpp-af"
  done
  step cpp-kv within 180 "$PYTHON" -m fserver bench kv --memory cpu,cpu:gpu,gpu:cpu,gpu --transport auto,tcp --places local \
    --sizes 4K,1M --keys 10 --rounds 3 --json "$OUT/kv.json"
  cat "$OUT/cpp-kv.txt"
  rm -f "$OUT/cpp-gpu" "$OUT/cpp-af"
}

af_steps() {
  step machine machine
  step build build
  [[ -e fserver/include/fserver.h ]] || return
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  local rounds=() exchanges=1000000 tests=("$PYTHON" -m pytest -v -s -p no:cacheprovider)
  [[ -n ${QUICK:-} ]] && rounds=(--rounds 20) exchanges=50000
  graph_step af af 180
  step af-zero-sm within 60 "${tests[@]}" tests/gpu/test_zero_sm.py
  graph_step af overlap 210 --seconds 12 "${rounds[@]}"
  EXCHANGES=$exchanges step af-memory within 120 "${tests[@]}" tests/gpu/test_growth.py
  grep -h ' exchanges by ' "$OUT/af-memory.txt"
}

for part in "$@"; do
  case $part in
    eager | bench | staged | af) packed "$part" ;;
    tests | channel | sanitizer | ringx | cpp) "$part" ;;
    *) wrong "no part $part" ;;
  esac
done
exit "$failed"
