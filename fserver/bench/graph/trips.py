"""Round trips of a channel, of other libraries and of a program in CUDA: `bench graph trips`."""

import argparse
import gc
import itertools
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fserver import env

from ..baseline import compiled
from ..errors import BenchError
from ..libraries import BIG
from ..report import figures
from ..team import Teammate
from .traffic import Row, Traffic, opened

KIB = 1 << 10
SIZES = [(4 * KIB, 4 * KIB), (64 * KIB, 64 * KIB), (896 * KIB, 1792 * KIB)]
ANSWER = 8  # bytes, to a message that goes one way
WARM = 5  # runs
Found = dict[str, Any]


def _time(t: Traffic, count: int, by_gpu: bool = False) -> list[int]:
    """Returns the nanoseconds of each of count runs; both sides begin together. by_gpu: from the
    start to the end on the GPU, without what the CPU takes to launch a run and to be woken."""
    side, values = t.side, []
    gc.collect()
    gc.disable()  # and never on again: this process times trips
    with torch.cuda.stream(t.main):
        for _ in range(count + WARM):
            side.sync()
            side.together()
            started = time.perf_counter_ns()
            begin = side.mark() if by_gpu else None
            t.replay()
            end = side.mark() if by_gpu else None
            side.settle()
            took = time.perf_counter_ns() - started
            values.append(round(begin.elapsed_time(end) * 1e6) if begin else took)
    return values[WARM:]


def _micros(times: list[int], per: int, prefix: str = "") -> Found:
    found = figures(times)
    return {prefix + key: round(found[key] / per, 2) for key in ("p50_us", "p99_us", "min_us")}


def trips(side: Teammate, push: int, pull: int, how: str, runs: int, **which: str) -> Found:
    """Times round trips as `how` says: "graph xN", "enqueued xN"."""
    kind, _, count = how.partition(" x")
    layers = int(count)
    t = Traffic(side, opened(side, [(push, pull)], **which), layers)
    t.capture(kind == "graph")
    wrong = t.checked()
    found = _micros(_time(t, runs), layers)
    found |= _micros(_time(t, runs, by_gpu=True), layers, "gpu_")
    wrong += t.checked()
    t.close()
    speed = round((push + pull) / found["p50_us"] / 1e3, 3)
    return {**found, "gb_per_s": speed, "wrong": wrong}


def raw(side: Teammate, by: str) -> Found:
    rows = []
    if side.is_worker:
        program = compiled("rawchannel.cu")
        done = subprocess.run([program], capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise BenchError(f"rawchannel: status {done.returncode}: {done.stdout}{done.stderr}")
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"rows": rows, "wrong": 0}


def rows(args: argparse.Namespace) -> Iterator[Row]:
    runs, limit, every = args.runs, 40 + args.runs * 0.005, [*SIZES, (BIG, ANSWER)]
    few = max(3, min(runs, 500) // 10)  # of what takes milliseconds
    hows = {"graph x200": max(3, runs // 5), "graph x20": runs, "enqueued x20": runs}
    plans: list[Any] = [({"mode": mode}, hows, every) for mode in args.modes if mode != "host"]
    if "host" in args.modes:
        known = env.transports()  # of which the last one reaches every peer
        names = [w["name"] for w in known if w["inside"] and not w["over"] or w is known[-1]]
        plans += [({"mode": "host", "transport": n}, {"graph x20": few}, SIZES) for n in names]
    hows = dict.fromkeys(("enqueued x20", "graph x20"), min(runs, 500))
    plans += [({"by": by}, hows, every) for by in args.beside]
    yield raw, {"by": "raw"}, 120
    for way, hows, sizes in plans:
        for (how, count), (push, pull) in itertools.product(hows.items(), sizes):
            count = few if push == BIG else count
            yield trips, {**way, "push": push, "pull": pull, "how": how, "runs": count}, limit


def summary(results: Sequence[Any], args: argparse.Namespace) -> list[Found]:
    return list(results[0].pop("rows", None) or results[:1])
