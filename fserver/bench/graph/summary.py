"""The few numbers of a row, from what its processes have measured. Of several GPUs the worst
counts."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from ..errors import BenchError
from ..report import percentile
from .memory import RESIDENT

WIRE = 395e9  # bytes per second of the copy engine between two H200
# By how much two looks at a process may differ: pages touched for the first time, bytes that a
# collection left, objects of the looks themselves.
HOST = {
    **dict.fromkeys(RESIDENT, 1 << 20),
    **dict.fromkeys(("go_bytes", "malloc_bytes"), 16 << 10),
    "python_blocks": 100,
}
STEADY = 0.003  # GEMMs before and after a part differ by no more, else the clock has changed


def between(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values, between which the median of all that could be measured is with 95 %
    confidence (how many are below it is binomial); of few values, the least and the most."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(ordered) / 2 - half) - 1)
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return ordered[low], ordered[high]


def _af(results: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    workers, servers = args.shape
    per = args.layers * args.stages
    tokens = [sorted(r["took_ms"]) for r in results[:workers]]
    p50 = max(percentile(t, 50) for t in tokens)
    spread = max(percentile(t, 99) / percentile(t, 50) for t in tokens)
    return {
        "micro_batch_us": round(1e3 * p50 / per, 2),
        "token_p50_ms": round(p50, 3),
        "token_p99_by_p50": round(spread, 3),
        "token_max_by_p50": round(max(max(t) / percentile(t, 50) for t in tokens), 3),
        "wire_us": round(1e6 * 2 * args.rows * args.width * max(workers, servers) / WIRE, 2),
        "kernels_us": [round(r["kernels_us"], 2) for r in results],
        "meets": 1e3 * p50 / per <= 20 and spread <= 1.05,
    }


def _overlap(results: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    if not all(r["rounds"] for r in results):
        part, replay = (max(r[k] for r in results) for k in ("part_ms", "quiet_ms"))
        raise BenchError(
            "GEMMs and traffic took turns: no round has GEMMs beside traffic and others apart "
            f"from it. A part takes {part:.0f} ms, a replay alone takes {replay:.1f} ms: use "
            "longer parts (--ms). If that does not help, they really take turns"
        )
    steady = [
        [x["slowed"] for x in r["rounds"] if args.dry or abs(x["noise"]) <= STEADY] for r in results
    ]
    if not all(steady):
        raise BenchError(
            f"GEMMs before and after a part were never within {STEADY:.1%} of each other, "
            f"because the GPU's clock changes; --rounds is {args.rounds}: want more"
        )
    worst = max(steady, key=median)
    slowed = [median(x) for x in steady]
    low, high = between(worst)
    target = 0.005  # of copy, without kernels
    return {
        "gemms_slowed_percent": round(100 * max(slowed), 2),
        "between": [round(100 * low, 2), round(100 * high, 2)],
        "of_each_gpu": [round(100 * s, 2) for s in slowed],
        "noise_percent": round(
            100 * median(abs(x["noise"]) for r in results for x in r["rounds"]), 2
        ),
        "traffic_slowed_percent": round(
            100 * median(x["traffic_ms"] / r["quiet_ms"] - 1 for r in results for x in r["rounds"]),
            1,
        ),
        "rounds": len(worst),
        "of": max(len(r["rounds"]) for r in results),
        "meets": True if high <= target else False if low > target else "cannot be told",
    }


def _memory(results: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    growth = [r["growth"] for r in results]
    return {
        "exchanges": results[0]["exchanges"],
        **{f"growth_{k}": [g.get(k) for g in growth] for k in growth[0]},
        "meets": all(v <= HOST.get(k, 0) for g in growth for k, v in g.items()),
    }


def _zero_sm(results: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    kernels: Counter[str] = Counter()
    for r in results:
        kernels.update(r["kernel"])
    return {
        "transport": results[0]["transport"],
        "kernels": dict(kernels),
        "copies": [r["gpu_memcpy"] for r in results],
        "memsets": [r["gpu_memset"] for r in results],
        "profiler_sees_kernels": all(r["control"] for r in results),
        "meets": not kernels and all(r["control"] for r in results),
    }


OF: dict[str, Callable[[list[Any], argparse.Namespace], dict[str, Any]]] = {
    "af": _af,
    "overlap": _overlap,
    "memory": _memory,
    "zero-sm": _zero_sm,
}
