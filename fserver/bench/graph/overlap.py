"""`fserver bench graph overlap`: a loop of GEMMs beside the traffic."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from .. import others
from ..sides import Side
from .traffic import Traffic, joined, ours

BLOCKS = 8  # of GEMMs, of a part of overlap
AHEAD = 3  # parts that are enqueued


class Plain:
    """Copies to all peers, and pauses, as a graph as long as that of Traffic over `copy`:
    what copies cost that nobody waits for. With a pace of 0 there are no copies.

    Args:
        side: the process.
        shape: layers, stages, rows, width.
        pace_us: of the copies of a micro-batch and the pause after it.
    """

    def __init__(self, side: Side, shape: tuple[int, ...], pace_us: float) -> None:
        self.side, self.main = side, side.stream(-1)
        layers, stages, rows, width = shape
        dtype = torch.int8 if side.is_worker else torch.bfloat16
        theirs = torch.bfloat16 if side.is_worker else torch.int8
        peers = range(side.workers, side.workers + side.servers)
        if not side.is_worker:
            peers = range(side.workers)
        self.out = torch.zeros(rows, width, dtype=dtype, device=side.device)
        self.incoming = [torch.zeros(rows, width, dtype=theirs, device=side.device) for _ in peers]
        side.sync()
        mine = side.folder / str(side.index)
        mine.write_bytes(pickle.dumps([reduce_tensor(t) for t in self.incoming]))
        side.barrier()
        self.peers = []
        for peer in peers:
            make, given = pickle.loads((side.folder / str(peer)).read_bytes())[side.rank]
            # Opened as memory of this GPU, which reaches it: torch has copies between two wait for
            # a stream of each.
            assert given[6] == peer, given
            self.peers.append(make(*given[:6], side.index, *given[7:-1], False))  # is synchronized
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
            to.copy_(self.out, non_blocking=True)

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

    run, timed = Traffic.run, Traffic.timed

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.side.sync()
        self.side.barrier()
        self.replay = lambda: None
        self.peers.clear()
        self.side.barrier()


def overlap(
    side: Side, mode: str, compute: bool, shape: tuple[int, ...], **how: Any
) -> dict[str, Any]:
    """GEMMs beside channels of ours, or beside what `none` and `plain` have."""
    with side.node() as own:
        pace = 0.0
        if mode in ("none", "plain"):
            if mode == "plain":
                like = Traffic(side, ours(side, own, "copy", shape), shape, compute)
                like.capture()
                pace = 1e3 * max(side.share(median(like.timed(5)))) / like.per
                like.close()
            t: Any = Plain(side, shape, pace)
        else:
            t = Traffic(side, ours(side, own, mode, shape), shape, compute)
            t.capture()
        return _beside(side, t, compute, **how)


def overlap_by(
    side: Side, by: str, compute: bool, shape: tuple[int, ...], streams: str, **how: Any
) -> dict[str, Any]:
    """GEMMs beside another's way, in a process that did not use one before."""
    with joined(side, by):
        t = Traffic(side, others.channels(by, side, shape), shape, compute, streams)
        t.capture()
        return _beside(side, t, compute, **how)


def _beside(
    side: Side, t: Any, compute: bool, size: int, rounds: int, ms: float, seconds: float
) -> dict[str, Any]:
    """A loop of GEMMs that never pauses, as a GPU that does changes its clock, and traffic beside
    every second part of it. Each part is so many blocks, and lasts ms or, where that is longer, as
    long as three replays of the traffic; blocks that traffic surely was beside are compared with
    those before and after it that none was beside. Data is checked where the kernels make it."""
    a, b = (torch.randn(size, size, device=side.device).to(torch.bfloat16) for _ in range(2))
    c, stream = torch.empty_like(a), side.stream()

    def multiply(count: int) -> tuple[Any, Any]:
        with side.on(stream):
            begin = side.mark()
            for _ in range(count):
                torch.mm(a, b, out=c)
            return begin, side.mark()

    multiply(10)
    side.sync()
    begin, end = multiply(10)
    side.sync()
    gemm = max(side.share(begin.elapsed_time(end) / 10))

    def blocks_of(count: int) -> Callable[[list[Any]], None]:
        with side.on(stream):
            block = side.captured(lambda: [torch.mm(a, b, out=c) for _ in range(count)], stream)

        def part(marks: list[Any]) -> None:
            with side.on(stream):
                for _ in range(BLOCKS):
                    block()
                    marks.append(side.mark())

        return part

    count = max(1, round(ms / BLOCKS / gemm))
    part = blocks_of(count)
    quiet = max(side.share(median(t.timed(5))))
    side.barrier()
    tried: list[Any] = []
    part(tried)
    loaded = t.run(4)
    while not loaded[-1][1].query():  # else the last ones had the GPU for themselves
        part(tried)
        tried[-BLOCKS].synchronize()
    side.sync()
    slowest = max(side.share(max(x.elapsed_time(y) for x, y in loaded[1:])))
    lasts = max(ms, 3 * slowest)
    if lasts > ms:
        count = max(1, math.ceil(lasts / BLOCKS / gemm))
        part = blocks_of(count)
    replays = 1 + max(2, math.floor(lasts / slowest))
    rounds = min(rounds, max(2, int(1e3 * seconds / (2 * lasts))))
    with side.on(stream):
        marks = [side.mark()]
    traffic = []
    for number in range(2 * rounds + 1):
        if number >= AHEAD:
            marks[(number - AHEAD + 1) * BLOCKS].synchronize()
        side.barrier()
        part(marks)
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
    rows = _compared(at, times, side.dry)
    found = {"rounds": rows, "gemms": count, "replays": replays, "quiet_ms": quiet}
    return {**found, "part_ms": lasts, "wrong": wrong}


def _compared(
    at: list[float], traffic: list[list[tuple[float, ...]]], dry: bool
) -> list[dict[str, Any]]:
    """Of each round by how much GEMMs were slowed.

    Args:
        at: when the loop began and when each of its blocks ended; BLOCKS of them are a part, and
            round r has the parts 2 r, 2 r + 1 and 2 r + 2.
        traffic: of each round, when each replay began and ended. In the first the sides meet.
        dry: nothing runs beside anything.
    """
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
        before, inside, after = (
            blocks(2 * r, False),
            blocks(2 * r + 1, True),
            blocks(2 * r + 2, False),
        )
        if before and inside and after:
            quiet = (median(before) + median(after)) / 2
            rows.append(
                {
                    "slowed": median(inside) / quiet - 1,
                    "noise": median(after) / median(before) - 1,
                    "blocks": [len(before), len(inside), len(after)],
                    "traffic_ms": median(y - x for x, y in one[1:]),
                }
            )
    return rows
