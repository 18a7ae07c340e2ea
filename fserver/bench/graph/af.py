"""`fserver bench graph af`: the time of a micro-batch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from ..report import percentile
from .side import GraphSide
from .traffic import Traffic, opened

WIRE = 395e9  # bytes per second of the copy engine between two H200


def af(
    side: GraphSide,
    shape: tuple[int, ...],
    streams: str,
    replays: int,
    parts: int,
    mode: str | None = None,
    by: str | None = None,
) -> dict[str, Any]:
    """Times replays in so many parts, each of which begins with a checked one."""
    with opened(side, shape, mode, by) as channels:
        t = Traffic(side, channels, shape, streams=streams)
        t.capture()
        wrong, took = t.checked(), []
        t.timed(min(20, replays))
        for _ in range(parts):
            wrong += t.checked()
            took += t.timed(math.ceil(replays / parts))
            with side.on(t.main):
                wrong += t.wrong()
        with side.on(t.main):
            idle = side.captured(lambda: t.body(talk=False), t.main)
            idle()
            begin = side.mark()
            idle()
            end = side.mark()
        t.close()
        kernels = 1e3 * begin.elapsed_time(end) / t.per
    return {"took_ms": took, "wrong": wrong, "kernels_us": kernels}


def summary(results: Sequence[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of a row. Of several GPUs the worst counts."""
    workers, servers = args.shape
    per = args.layers * args.stages
    tokens = [sorted(r["took_ms"]) for r in results[:workers]]
    p50 = max(percentile(t, 50) for t in tokens)
    spread = max(percentile(t, 99) / percentile(t, 50) for t in tokens)
    return {
        "micro_batch_us": round(1e3 * p50 / per, 2),
        "token_p50_ms": round(p50, 3),
        "token_p99_by_p50": round(spread, 3),
        "token_max_by_p50": round(max(t[-1] / percentile(t, 50) for t in tokens), 3),
        "wire_us": round(1e6 * 2 * args.rows * args.width * max(workers, servers) / WIRE, 2),
        "kernels_us": [round(r["kernels_us"], 2) for r in results],
        "meets": 1e3 * p50 / per <= 20 and spread <= 1.05,
    }
