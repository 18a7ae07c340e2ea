"""`fserver bench graph overlap`: a loop of GEMMs beside the traffic."""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ..errors import BenchError
from ..libraries import Sizes
from ..report import median_interval
from ..team import Teammate
from .traffic import Model, Row, Traffic, opened

BLOCKS = 8  # of GEMMs, of a section of the loop
AHEAD = 3  # sections that are enqueued
STEADY = 0.003  # GEMMs before and after a section differ by no more, else the clock has changed


class _Gemms:
    """Multiplications on their own stream, in captured blocks. BLOCKS of them take about `ms`."""

    def __init__(self, side: Teammate, size: int, ms: float):
        self.side, self.stream = side, side.stream()
        kind: Any = {"dtype": torch.bfloat16, "device": side.device}
        a, b = torch.randn(size, size, **kind), torch.randn(size, size, **kind)
        out = torch.empty(size, size, **kind)

        def multiply(count: int) -> None:
            for _ in range(count):
                torch.mm(a, b, out=out)

        with torch.cuda.stream(self.stream):
            for _ in range(2):  # the first time is of loading
                begin = side.mark()
                multiply(10)
                end = side.mark()
                side.sync()
            one = max(side.exchange(begin.elapsed_time(end) / 10))
            self.count = math.ceil(ms / BLOCKS / one)
            self.block = side.captured(lambda: multiply(self.count), self.stream)

    def section(self, marks: list[Any]) -> None:
        """Enqueues a section of the loop; adds the moments when its blocks have ended."""
        with torch.cuda.stream(self.stream):
            for _ in range(BLOCKS):
                self.block()
                marks.append(self.side.mark())


def overlap(
    side: Teammate,
    layers: int,
    sizes: Sizes,
    limits: tuple[int, int, float, float],
    compute: bool = False,
    streams: str = "one",
    **which: str,
) -> dict[str, Any]:
    """Runs a loop of GEMMs that never pauses, as a GPU that does changes its clock, and traffic
    beside some sections of it. Each is so many blocks, and lasts ms or, where that is longer, as
    long as three replays of the traffic. `limits`: size, rounds, ms and seconds."""
    size, rounds, ms, seconds = limits
    t = (Model if compute else Traffic)(side, opened(side, sizes, **which), layers, streams)
    t.capture()
    quiet = max(side.exchange(median(t.timed(5))))
    ms = max(ms, 3 * quiet)
    gemms = _Gemms(side, size, ms)
    replays = 1 + math.floor(ms / quiet)
    marks, traffic = _rounds(side, t, gemms, replays, rounds, seconds)
    t.meet()
    with torch.cuda.stream(t.main):
        wrong = t.wrong()
    wrong += t.checked()
    at = [marks[0].elapsed_time(mark) for mark in marks]
    times = [[tuple(marks[0].elapsed_time(m) for m in both) for both in one] for one in traffic]
    t.close()
    found = {"gemms": gemms.count, "replays": replays, "quiet_ms": quiet, "section_ms": ms}
    return {**found, "rounds": compared(at, times), "wrong": wrong}


def _rounds(
    side: Teammate, t: Traffic, gemms: _Gemms, replays: int, rounds: int, seconds: float
) -> tuple[list[Any], list[Any]]:
    """Enqueues sections, and traffic from the start of one once a whole one was free of it on all
    sides. Returns the moments of the blocks, and of the replays of each round."""
    with torch.cuda.stream(gemms.stream):
        marks = [side.mark()]
    traffic: list[Any] = []
    free = over = False
    end = time.monotonic() + seconds
    while not free or not (over or len(traffic) == rounds):
        if len(marks) > AHEAD * BLOCKS:
            marks[-1 - (AHEAD - 1) * BLOCKS].synchronize()
        mine = not traffic or traffic[-1][-1][1].query(), time.monotonic() > end
        ended, late = zip(*side.exchange(mine), strict=True)
        over = any(late) and len(traffic) > 1
        gemms.section(marks)
        begins = free and not over and len(traffic) < rounds
        free = all(ended) and not begins
        if begins:  # this takes long, while the loop goes on with what is ahead of it
            with torch.cuda.stream(t.main):
                marks[-1 - BLOCKS].wait()
            traffic.append(t.run(replays))
    return marks, traffic


def compared(at: list[float], traffic: list[list[Any]]) -> list[dict[str, Any]]:
    """By how much GEMMs were slowed in each round: blocks that traffic surely was beside, compared
    with at most as many as a section has before and after it that none was beside.

    `at` is when the loop began and when each of its blocks ended, `traffic` is, of each round, when
    each replay began and ended; in the first the sides meet."""
    spans = [(one[0][0], one[1][0], one[-1][1]) for one in traffic]
    nexts = [first for first, _, _ in spans[1:]] + [math.inf]
    rows, ended = [], 0.0

    def took(least: float, most: float) -> list[float]:
        return [e - b for b, e in pairwise(at) if least <= b and e <= most]

    for (first, met, last), begins in zip(spans, nexts, strict=True):
        near = took(ended, first)[-BLOCKS:], took(met, last), took(last, begins)[:BLOCKS]
        ended = last
        if all(near):
            before, inside, after = map(median, near)
            row = {"slowed": inside / ((before + after) / 2) - 1, "noise": after / before - 1}
            rows.append({**row, "blocks": [len(times) for times in near]})
    return rows


def rows(args: argparse.Namespace) -> Iterator[Row]:
    limits = args.size, args.rounds, args.ms, args.seconds
    run = partial(overlap, layers=args.layers, sizes=args.sizes, limits=limits)
    kinds = [{"mode": mode, "compute": by} for by in (False, True) for mode in args.modes]
    kinds += [{"by": by, "compute": True, "streams": "two"} for by in args.beside]
    for what in kinds:
        yield run, what, 2 * args.seconds + 40


def summary(results: Sequence[Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    steady = [[x["slowed"] for x in r["rounds"] if abs(x["noise"]) <= STEADY] for r in results]
    if not all(steady):
        rounds = [len(r["rounds"]) for r in results]
        raise BenchError(f"no steady round, of {rounds} (longer --ms, else more --rounds)")
    worst = max(steady, key=median)
    slowed, *between = (round(100 * x, 2) for x in (median(worst), *median_interval(worst)))
    found = {"gemms_slowed_percent": slowed, "between": between, "rounds": len(worst)}
    return [{**found, "of": max(len(r["rounds"]) for r in results), "sides": results}]
