"""`fserver bench graph overlap`: a loop of GEMMs beside the traffic."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from ..errors import BenchError
from ..report import median_interval
from .side import GraphSide
from .traffic import Shape, Traffic, opened, ours

BLOCKS = 8  # of GEMMs, of a part of overlap
AHEAD = 3  # parts that are enqueued
STEADY = 0.003  # GEMMs before and after a part differ by no more, else the clock has changed


class Plain(Traffic):
    """Copies to all peers, and pauses, as a graph as long as that of Traffic over `copy`: what
    copies cost that nobody waits for. `pace_us` is of the copies of a micro-batch and the pause
    after it; with 0 there are no copies."""

    def __init__(self, side: GraphSide, shape: Shape, pace_us: float) -> None:
        self.side, self.main = side, side.stream(-1)
        layers, stages, rows, width = shape
        dtype, theirs = torch.int8, torch.bfloat16
        peers = range(side.workers, side.count)
        if not side.is_worker:
            dtype, theirs, peers = theirs, dtype, range(side.workers)
        self.data = torch.zeros(rows, width, dtype=dtype, device=side.device)
        self.landing = [torch.zeros(rows, width, dtype=theirs, device=side.device) for _ in peers]
        side.sync()
        given = side.exchange([reduce_tensor(t) for t in self.landing])
        self.peers = []
        for peer in peers:
            make, what = given[peer][side.rank]
            # Opened as memory of this GPU, which reaches it: torch has copies between two wait for
            # a stream of each.
            assert what[6] == peer, what
            self.peers.append(make(*what[:6], side.index, *what[7:-1], False))  # is synchronized
        side.barrier()
        self.pause = self._cycles(pace_us)

        def body() -> None:
            for _ in range(layers * stages):
                if pace_us:
                    self._copies()
                torch.cuda._sleep(self.pause)

        with side.on(self.main):
            self.replay = side.captured(body, self.main)

    def _copies(self) -> None:
        for to in self.peers:
            to.copy_(self.data, non_blocking=True)

    def _cycles(self, pace_us: float) -> int:
        """Of the pause that fills the pace, or of 30 us."""
        with self.side.on(self.main):
            moments = []
            for _ in range(2):  # the first time is of loading
                moments = [self.side.mark()]
                for _ in range(50):
                    self._copies()
                moments.append(self.side.mark())
                torch.cuda._sleep(10**6)
                moments.append(self.side.mark())
        self.side.sync()
        copies = 1e3 * moments[0].elapsed_time(moments[1]) / 50
        million = 1e3 * moments[1].elapsed_time(moments[2])
        return max(1, int(1e6 * ((pace_us - copies) if pace_us else 30) / million))

    def check(self) -> None:
        """There are no channels."""

    def close(self) -> None:
        """Both sides call it."""
        self.side.sync()
        self.side.barrier()
        self.replay = lambda: None
        self.peers.clear()
        self.side.barrier()


def overlap(
    side: GraphSide,
    shape: Shape,
    compute: bool,
    streams: str = "one",
    mode: str = "",
    by: str = "",
    **how: Any,
) -> dict[str, Any]:
    """GEMMs beside channels, or beside what the modes `none` and `plain` have."""
    if mode in ("none", "plain"):
        pace = 0.0
        if mode == "plain":
            like = Traffic(side, ours(side, "copy", shape), shape, compute)
            like.capture()
            pace = 1e3 * max(side.exchange(median(like.timed(5)))) / like.per
            like.close()
        return _beside(side, Plain(side, shape, pace), compute, **how)
    with opened(side, shape, mode, by) as channels:
        t = Traffic(side, channels, shape, compute, streams)
        t.capture()
        return _beside(side, t, compute, **how)


class _Gemms:
    """Multiplications on a stream of their own, in blocks that are captured."""

    def __init__(self, side: GraphSide, size: int) -> None:
        self.side, self.stream = side, side.stream()
        self.a, self.b = (
            torch.randn(size, size, device=side.device).to(torch.bfloat16) for _ in range(2)
        )
        self.c = torch.empty_like(self.a)
        self._multiply(10)
        side.sync()
        begin, end = self._multiply(10)
        side.sync()
        self.ms = max(side.exchange(begin.elapsed_time(end) / 10))  # of one
        self.block: Callable[[], object] = lambda: None

    def _multiply(self, count: int) -> tuple[Any, Any]:
        with self.side.on(self.stream):
            begin = self.side.mark()
            for _ in range(count):
                torch.mm(self.a, self.b, out=self.c)
            return begin, self.side.mark()

    def resize(self, count: int) -> None:
        """Makes blocks of so many."""
        with self.side.on(self.stream):
            self.count, self.block = (
                count,
                self.side.captured(
                    lambda: [torch.mm(self.a, self.b, out=self.c) for _ in range(count)],
                    self.stream,
                ),
            )

    def part(self, marks: list[Any]) -> None:
        """A part of the loop; the moments when its blocks have ended."""
        with self.side.on(self.stream):
            for _ in range(BLOCKS):
                self.block()
                marks.append(self.side.mark())


def _beside(
    side: GraphSide, t: Traffic, compute: bool, size: int, rounds: int, ms: float, seconds: float
) -> dict[str, Any]:
    """A loop of GEMMs that never pauses, as a GPU that does changes its clock, and traffic beside
    every second part of it. Each part is so many blocks, and lasts ms or, where that is longer, as
    long as three replays of the traffic; blocks that traffic surely was beside are compared with
    those before and after it that none was beside. Data is checked where the kernels make it."""
    loop = _Gemms(side, size)
    loop.resize(max(1, round(ms / BLOCKS / loop.ms)))
    quiet = max(side.exchange(median(t.timed(5))))
    side.barrier()
    tried: list[Any] = []
    loop.part(tried)
    loaded = t.run(4)
    while not loaded[-1][1].query():  # else the last ones had the GPU for themselves
        loop.part(tried)
        tried[-BLOCKS].synchronize()
    side.sync()
    slowest = max(side.exchange(max(x.elapsed_time(y) for x, y in loaded[1:])))
    lasts = max(ms, 3 * slowest)
    if lasts > ms:
        loop.resize(max(1, math.ceil(lasts / BLOCKS / loop.ms)))
    replays = 1 + max(2, math.floor(lasts / slowest))
    rounds = min(rounds, max(2, int(1e3 * seconds / (2 * lasts))))
    with side.on(loop.stream):
        marks = [side.mark()]
    traffic = []
    for number in range(2 * rounds + 1):
        if number >= AHEAD:
            marks[(number - AHEAD + 1) * BLOCKS].synchronize()
        side.barrier()
        loop.part(marks)
        if number % 2:  # this takes long, while the loop goes on with what is ahead of it
            if not side.dry:
                t.main.wait_event(marks[number * BLOCKS])
            traffic.append(t.run(replays))
    side.sync()
    t.check()
    wrong = 0
    if compute:
        with side.on(t.main):
            wrong = t.wrong()
    at = [marks[0].elapsed_time(mark) for mark in marks]
    times = [[tuple(marks[0].elapsed_time(m) for m in both) for both in one] for one in traffic]
    t.close()
    rows = compared(at, times, side.dry)
    found = {"rounds": rows, "gemms": loop.count, "replays": replays, "quiet_ms": quiet}
    return {**found, "part_ms": lasts, "wrong": wrong}


def compared(
    at: list[float], traffic: list[list[tuple[float, ...]]], dry: bool
) -> list[dict[str, Any]]:
    """By how much GEMMs were slowed in each round. `at`: when the loop began and when each of its
    blocks ended; BLOCKS of them are a part, and round r has the parts 2 r to 2 r + 2. `traffic`: of
    each round, when each replay began and ended; in the first the sides meet. `dry`: nothing runs
    beside anything."""
    spans = [(one[1][0], one[-1][1]) for one in traffic]

    def blocks(part: int, beside: bool) -> list[float]:
        found = []
        for i in range(part * BLOCKS, (part + 1) * BLOCKS):
            begin, end = at[i], at[i + 1]
            within = any(x <= begin and end <= y for x, y in spans)
            apart = all(end <= one[0][0] or one[-1][1] <= begin for one in traffic)
            if within if beside and not dry else apart or dry:
                found.append(end - begin)
        return found

    rows = []
    for r, one in enumerate(traffic):
        parts = blocks(2 * r, False), blocks(2 * r + 1, True), blocks(2 * r + 2, False)
        if all(parts):
            before, inside, after = map(median, parts)
            rows.append(
                {
                    "slowed": inside / ((before + after) / 2) - 1,
                    "noise": after / before - 1,
                    "blocks": [len(part) for part in parts],
                    "traffic_ms": median(y - x for x, y in one[1:]),
                }
            )
    return rows


def summary(results: Sequence[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of a row. Of several GPUs the worst counts."""
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
    worst, slowed = max(steady, key=median), [median(x) for x in steady]
    low, high = median_interval(worst)
    every = [(x, r) for r in results for x in r["rounds"]]
    noise = median(abs(x["noise"]) for x, _ in every)
    traffic = median(x["traffic_ms"] / r["quiet_ms"] - 1 for x, r in every)
    target = 0.005  # of copy, without kernels
    return {
        "gemms_slowed_percent": round(100 * max(slowed), 2),
        "between": [round(100 * low, 2), round(100 * high, 2)],
        "of_each_gpu": [round(100 * s, 2) for s in slowed],
        "noise_percent": round(100 * noise, 2),
        "traffic_slowed_percent": round(100 * traffic, 1),
        "rounds": len(worst),
        "of": max(len(r["rounds"]) for r in results),
        "meets": True if high <= target else False if low > target else "cannot be told",
    }
