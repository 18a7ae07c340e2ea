"""Measures stream channels in CUDA graphs, with the traffic of a disaggregated model.

There are workers (attention) and servers (FFN), one process for each GPU. In each layer and for
each stage (micro-batch, with a channel of its own), a worker sends int8 [rows, width] to every
server and receives bf16 [rows, width] from each. Both sides run a light kernel in between. Each
side captures all layers and stages in one graph and replays it.

af       the time of a micro-batch (the time of a graph divided by layers x stages), and the spread
         of the time of a graph (one token). Data is checked. Streams: with `two`, sends have a
         stream of their own; with `one`, everything is on one stream; with `each`, the graph has a
         branch for each stage. Rows `by` other libraries have the same tensors and kernels, but
         the data travels by NCCL's send and recv, by copies and flags in torch's symmetric memory,
         or by puts of NVSHMEM. A library that does not work here is `skipped`. --modes or --beside
         without a name leaves these rows out.
overlap  how much a loop of GEMMs and this traffic slow each other, with and without the kernels of
         the model in the traffic. `none` has no traffic and shows the error of the measurement.
         `plain` makes the same copies as `copy` at the same rate, but nothing waits for them. Rows
         `by` other libraries are as in af. The columns `between` are the limits of the 95 %
         confidence interval of the median.
memory   memory of processes and GPUs before and after many exchanges.
zero-sm  the kernels that run on the GPU during round trips of push_pull and of channels, by
         torch.profiler. `kernel` does run kernels, and so shows that the profiler sees them.
trips    round trips of a channel between one worker and one server, and messages of 64 MiB; by
         other libraries; by plain copies (`wire`); and by a program in CUDA (`raw`), if nvcc is
         installed. Mode `host` is measured over cma and tcp. Times are microseconds of a round
         trip, or of a message, by the host's clock, from before the launch until the stream is
         idle; times with the prefix `gpu_` are by CUDA events. Data is compared before and after
         each timing, over poisoned memory.

--dry uses tensors on the CPU, loops instead of graphs, and gloo instead of NCCL: it checks the
program, not the speed.
The JSON file is written after each row. The exit status is 1 if a row failed or data was wrong. It
is 0 if only a target was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from fserver.channel.describe import mode_named

from . import others, trips
from .crew import by_the_byte
from .errors import BenchError
from .options import output, positive, positive_milliseconds, positive_seconds
from .peers import in_use
from .report import percentile, save
from .sides import Crew, Side

WIRE = 395e9  # bytes per second of the copy engine between two H200
POISON = 0x5A5A5A5A
RESIDENT = ("VmRSS", "RssAnon")
# By how much two looks at a process may differ: pages touched for the first time, bytes that a
# collection left, objects of the looks themselves.
HOST = {
    **dict.fromkeys(RESIDENT, 1 << 20),
    **dict.fromkeys(("go_bytes", "malloc_bytes"), 16 << 10),
    "python_blocks": 100,
}
KINDS = ("eager", "copy", "copy graph", "kernel")
MODES = ("kernel", "copy")  # of channels on GPUs
BLOCKS = 8  # of GEMMs, of a part of overlap
AHEAD = 3  # parts that are enqueued
STEADY = 0.003  # GEMMs before and after a part differ by no more, else the clock has changed
STREAMS = ("two", "one", "each")
# Options: default and help, which begins with the works that they are for alone.
OPTIONS: dict[str, tuple[Any, str]] = {
    "layers": (61, "number of layers (default 61)"),
    "stages": (3, "number of micro-batches (default 3)"),
    "rows": (128, "rows of a tensor (default 128)"),
    "width": (7168, "width of a tensor, a multiple of 4 (default 7168)"),
    "replays": (300, "af: number of timed replays for each row (default 300)"),
    "parts": (6, "af: number of parts into which the replays are divided (default 6)"),
    "size": (8192, "overlap: size of the GEMM (default 8192)"),
    "rounds": (200, "overlap: number of rounds, with and without traffic, for a row (default 200)"),
    "ms": (30.0, "overlap: length of each part, in milliseconds (default 30)"),
    "exchanges": (10**6, "memory: number of exchanges for each mode (default 1000000)"),
    "seconds": (40.0, "overlap, memory: longest time of a row (default 40)"),
    "trips": (20, "zero-sm: number of round trips (default 20)"),
    "runs": (1000, "trips: number of runs of a graph of 20 round trips (default 1000)"),
}


def _addend(layer: int, server: int, half: int) -> int:
    return 1 + 64 * layer + 2 * server + half


Opened = list[tuple[torch.Tensor, torch.Tensor, Any]]


def ours(side: Side, own: Any, mode: str, shape: tuple[int, ...]) -> Opened:
    """For each stage: int8 [rows, width] on a worker and [workers, rows, width] on a server, bf16
    [servers, rows, width] or [workers, rows, width], and a channel of the node for them."""
    _, stages, rows, width = shape
    options = {"mode": mode, "timeout_ms": 20000.0}
    count = side.servers if side.is_worker else side.workers
    opened: Opened = []
    for stage in range(stages):
        small = torch.zeros(count, rows, width, dtype=torch.int8, device=side.device)
        large = torch.zeros(count, rows, width, dtype=torch.bfloat16, device=side.device)
        key, wide = [stage], list(large.unbind(0))
        options["name"] = f"stage {stage}"
        if side.is_worker:
            small = small[0].clone()
            channel = own.channel([small], key, wide, key, **options)
        else:
            channel = own.channel(key, wide, key, push=list(small.unbind(0)), **options)
        if channel.path != ("host" if side.dry else mode):
            raise RuntimeError(f"the channel goes by {channel.path!r}, and mode is {mode!r}")
        opened.append((small, large, channel))
    return opened


class Traffic:
    """The channels of one side, and all layers as a graph.

    Tensors are looked at as int32, so that sums wrap and are exact. A server answers x with
    x + addend twice, in each half of the answer, and a worker goes on with the first half of one
    server's answer minus two times the second half of the next one's: -x and a number. So what is
    wrong anywhere in a layer is wrong in the end.

    Args:
        side: the process.
        opened: what it sends and receives, as ours gives it.
        shape: layers, stages, rows, width.
        compute: have the kernels in between.
        streams: one of STREAMS.
    """

    def __init__(
        self,
        side: Side,
        opened: Opened,
        shape: tuple[int, ...],
        compute: bool = True,
        streams: str = "one",
    ) -> None:
        self.side, self.compute = side, compute
        self.layers, self.stages, rows, width = shape
        self.per = self.layers * self.stages
        self.main = side.stream(-1)
        branches = {"one": 0, "two": 1, "each": self.stages}[streams]
        self.branches = [side.stream(-1) for _ in range(branches)]
        self.apart = self.branches[0] if streams == "two" else None  # for what is sent
        self.channels = [channel for _, _, channel in opened]
        self.out: list[torch.Tensor] = []
        self.incoming: list[torch.Tensor] = []
        self.first: list[torch.Tensor] = []
        self.turn = torch.zeros((), dtype=torch.int32, device=side.device)
        self.addends = torch.tensor(
            [[[_addend(i, side.rank, h)] for h in (0, 1)] for i in range(self.layers)],
            dtype=torch.int32,
            device=side.device,
        )
        for stage, (small, large, _) in enumerate(opened):
            words, answers = small.view(torch.int32), large.view(torch.int32)
            answers = answers.view(len(large), 2, -1)
            if side.is_worker:
                made = torch.Generator().manual_seed(100 * side.rank + stage)
                first = torch.randint(
                    -(1 << 31), 1 << 31, (rows * width // 4,), dtype=torch.int32, generator=made
                )
                self.first.append(first.to(side.device))
                self.out.append(words.view(-1))
                self.incoming.append(answers)
            else:
                self.out.append(answers)
                self.incoming.append(words.view(len(small), 1, -1))

    def _step(self, layer: int, stage: int, talk: bool) -> None:
        channel, out, came = self.channels[stage], self.out[stage], self.incoming[stage]
        if talk and not (self.side.is_worker and layer == 0):
            channel.recv()
        if not self.compute:
            pass
        elif not self.side.is_worker:
            torch.add(came, self.addends[layer], out=out)
        elif layer == 0:
            torch.add(self.first[stage], self.turn, out=out)
        else:
            i, j = (layer - 1) % len(came), layer % len(came)
            torch.add(came[i, 0], came[j, 1], alpha=-2, out=out)
        if talk and self.apart:
            # Who has the message has read the tensor: nothing waits for this stream.
            self.apart.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.apart):
                channel.send()
        elif talk:
            channel.send()

    def _layers(self, stages: range, talk: bool) -> None:
        for layer in range(self.layers):
            for stage in stages:
                self._step(layer, stage, talk)
        if talk and self.side.is_worker:
            for stage in stages:
                self.channels[stage].recv()

    def body(self, talk: bool = True) -> None:
        """All layers; without talk only what is in between."""
        if self.compute:
            self.turn.add_(1)
        if not self.branches:
            self._layers(range(self.stages), talk)
            return
        main = torch.cuda.current_stream()
        if self.apart:
            self.apart.wait_stream(main)
            self._layers(range(self.stages), talk)
            main.wait_stream(self.apart)
            return
        for stage, stream in enumerate(self.branches):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                self._layers(range(stage, stage + 1), talk)
        for stream in self.branches:
            main.wait_stream(stream)

    def capture(self) -> None:
        """Makes the graphs. Every kernel has been loaded before one that waits is on a stream."""
        with self.side.on(self.main):
            if self.compute:
                self.poison()
                self.body(talk=False)
                self.wrong()
            self.side.sync()
            self.side.barrier()
            if not self.apart:  # out of a graph a channel is used on one stream
                self.body()
            self.side.sync()
            self.check()
            self.side.barrier()
            self.replay = self.side.captured(self.body, self.main)
        self.side.barrier()

    def run(self, count: int) -> list[tuple[Any, Any]]:
        """Replays; the moments before and after each."""
        marks = []
        with self.side.on(self.main):
            for _ in range(count):
                begin = self.side.mark()
                self.replay()
                marks.append((begin, self.side.mark()))
        return marks

    def timed(self, count: int, drop: int = 2) -> list[float]:
        """Milliseconds of each of count replays one behind the other; before them come as many
        as are dropped, in which the sides meet."""
        self.side.barrier()
        marks = self.run(count + drop)
        self.side.sync()
        self.check()
        return [a.elapsed_time(b) for a, b in marks[drop:]]

    def check(self) -> None:
        for channel in self.channels:
            channel.check()

    def poison(self) -> None:
        for tensor in (*self.out, *self.incoming):
            tensor.fill_(POISON)

    def wrong(self) -> int:
        """How many words of the last answers are wrong, after a sync."""
        if not self.side.is_worker:
            return 0
        servers, sign, plus = self.side.servers, 1, 0
        for layer in range(self.layers - 1):
            a, b = _addend(layer, layer % servers, 0), _addend(layer, (layer + 1) % servers, 1)
            sign, plus = -sign, -plus + a - 2 * b
        bad = 0
        last = self.layers - 1
        for first, came in zip(self.first, self.incoming, strict=True):
            for server in range(servers):
                for half in (0, 1):
                    add = plus + _addend(last, server, half)
                    bad += int((came[server, half] != (first + self.turn) * sign + add).sum())
        return bad

    def checked(self) -> int:
        """One replay over poisoned memory; how many words are wrong."""
        with self.side.on(self.main):
            self.side.sync()
            self.side.barrier()
            self.poison()
            self.side.sync()
            self.side.barrier()
            self.replay()
            self.side.sync()
            self.check()
            return self.wrong()

    def close(self) -> None:
        """Both sides call it when all is well; else the node closes the channels."""
        self.side.sync()
        self.side.barrier()
        self.replay = lambda: None  # the graph goes before what it uses
        for channel in self.channels:
            channel.close()
        self.side.barrier()


def af(side: Side, mode: str, shape: tuple[int, ...], **how: Any) -> dict[str, Any]:
    """Times channels of ours."""
    with side.node() as own:
        return _timed(side, ours(side, own, mode, shape), shape, **how)


@contextlib.contextmanager
def joined(side: Side, by: str) -> Iterator[None]:
    """The process group of another's way: once in the life of a process."""
    os.environ.update(others.ENVIRONMENT)
    count = side.workers + side.servers
    others.join(by, side.index, count, side.device, lambda port: int(max(side.share(port))))
    yield
    dist.destroy_process_group()


def af_by(side: Side, by: str, shape: tuple[int, ...], **how: Any) -> dict[str, Any]:
    """Times another's way, in a process that did not use one before."""
    with joined(side, by):
        return _timed(side, others.channels(by, side, shape), shape, **how)


def _timed(
    side: Side, opened: Opened, shape: tuple[int, ...], streams: str, replays: int, parts: int
) -> dict[str, Any]:
    """Times replays in so many parts, each of which begins with a checked one."""
    t = Traffic(side, opened, shape, streams=streams)
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
    return {"took_ms": took, "wrong": wrong, "kernels_us": 1e3 * begin.elapsed_time(end) / t.per}


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


def _memory(side: Side) -> dict[str, Any]:
    """Bytes that the process and its GPU have in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found: dict[str, Any] = {name: int(fields[name].split()[0]) << 10 for name in RESIDENT}
    if side.dry:
        return found
    free, total = torch.cuda.mem_get_info()
    found.update(gpu_used=total - free, torch_reserved=torch.cuda.memory_reserved())
    # In a container the numbers of processes may be others: this one is alone on its GPU.
    try:
        uuid = str(torch.cuda.get_device_properties(side.device).uuid)
        query = ["--query-compute-apps=gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=10, check=True
        )
        mine = [line.split(",")[1] for line in done.stdout.splitlines() if uuid in line]
        found["nvidia_smi"] = sum(int(mib) for mib in mine) << 20 if mine else None
    except (AttributeError, ValueError, IndexError, OSError, subprocess.SubprocessError) as error:
        found["nvidia_smi_error"] = repr(error)
    return found


def memory(
    side: Side, mode: str, shape: tuple[int, ...], exchanges: int, seconds: float
) -> dict[str, Any]:
    """Replays for so many exchanges, or seconds, after a tenth of that; five samples on the way."""
    with side.node() as own:
        t = Traffic(side, ours(side, own, mode, shape), shape)
        t.capture()
        wrong = t.checked()
        replay_ms = max(side.share(median(t.timed(10))))
        count = max(5, min(math.ceil(exchanges / t.per), int(1e3 * seconds / replay_ms)))

        def go(replays: int) -> None:
            side.barrier()
            with side.on(t.main):
                for i in range(replays):
                    t.replay()
                    if i % 50 == 49:
                        side.sync()
            side.sync()
            t.check()

        for _ in range(3):  # what looks warms up too
            _memory(side)
            in_use(None)
        go(math.ceil(count / 10))
        used = [in_use(None)]
        samples = [_memory(side)]
        for _ in range(5):
            go(math.ceil(count / 5))
            samples.append(_memory(side))
        used.append(in_use(None))
        wrong += t.checked()
        t.close()
    done = 5 * math.ceil(count / 5) * t.per
    numbers = [k for k, v in samples[0].items() if isinstance(v, int)]
    growth = {k: samples[-1][k] - samples[0][k] for k in numbers if samples[-1].get(k) is not None}
    growth.update({k: used[1][k] - used[0][k] for k in used[0]})
    return {"exchanges": done, "growth": growth, "samples": samples, "used": used, "wrong": wrong}


def _profiled(side: Side, run: Callable[[], Any]) -> dict[str, Any]:
    """What is on the GPU's timeline while run runs, by kind and name."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU if side.dry else activity.CUDA]) as seen:
        side.barrier()
        run()
        side.sync()
        side.barrier()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    found = {}
    for kind in ("kernel", "gpu_memcpy", "gpu_memset"):
        names = Counter(e["name"] for e in events if e.get("cat") == kind)
        found[kind] = dict(names.most_common(20))
    return found


def zero_sm(side: Side, kind: str, shape: tuple[int, ...], trips: int) -> dict[str, Any]:
    """Round trips under the profiler, after some without it."""
    # Else the profiler leaves CUDA after each use, and graphs do not survive that.
    os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    _, _, rows, width = shape
    at = side.device.index or 0
    gpu = {} if side.dry else {"backend": "GPU", "gpu": at, "rank_offset": -at}
    sample = torch.zeros(1024, device=side.device)
    control = _profiled(side, lambda: sample.add_(1))
    with side.node(**(gpu if kind == "eager" else {})) as own:
        if kind == "eager":
            dtype = torch.int8 if side.is_worker else torch.bfloat16
            out = torch.ones(rows, width, dtype=dtype, device=side.device)
            back = torch.zeros(rows, width, dtype=torch.bfloat16, device=side.device)
            came = [back]
            side.sync()

            def run(count: int = trips) -> None:
                for _ in range(count):
                    if side.is_worker:
                        own.wait(own.push_pull([out], [0], [back], [0], need_event=True))
                    else:
                        [(handler, came[:], _)] = own.get_batch(timeout_ms=10000)
                        own.respond([out], handler, need_event=True)

            run(5)
            out.fill_(3)
            side.sync()
            side.barrier()
            found = _profiled(side, run)
            how = "+".join(link.transport for link in own.links())
            wrong = sum(int((x != 3).sum()) for x in came)
            side.barrier()
        else:
            shape = (trips, 1, rows, width)
            t = Traffic(side, ours(side, own, kind.split()[0], shape), shape, compute=False)
            t.capture()
            t.poison()
            for tensor in t.out:
                tensor.fill_(1)
            side.sync()
            side.barrier()
            with side.on(t.main):
                found = _profiled(side, t.replay if kind == "copy graph" else t.body)
            how, wrong = t.channels[0].path, sum(int((x != 1).sum()) for x in t.incoming)
            t.close()
    return {**found, "control": control["kernel"], "transport": how, "wrong": wrong}


def between(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values, between which the median of all that could be measured is with 95 %
    confidence (how many are below it is binomial); of few values, the least and the most."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(ordered) / 2 - half) - 1)
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return ordered[low], ordered[high]


def _summary(work: str, results: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The few numbers of a row; of several GPUs the worst counts."""
    workers, servers = args.shape
    if work == "af":
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
    if work == "overlap":
        if not all(r["rounds"] for r in results):
            part, replay = (max(r[k] for r in results) for k in ("part_ms", "quiet_ms"))
            raise BenchError(
                "GEMMs and traffic took turns: no round has GEMMs beside traffic and others apart "
                f"from it. A part takes {part:.0f} ms, a replay alone takes {replay:.1f} ms: use "
                "longer parts (--ms). If that does not help, they really take turns"
            )
        steady = [
            [x["slowed"] for x in r["rounds"] if args.dry or abs(x["noise"]) <= STEADY]
            for r in results
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
                100
                * median(x["traffic_ms"] / r["quiet_ms"] - 1 for r in results for x in r["rounds"]),
                1,
            ),
            "rounds": len(worst),
            "of": max(len(r["rounds"]) for r in results),
            "meets": True if high <= target else False if low > target else "cannot be told",
        }
    if work == "memory":
        growth = [r["growth"] for r in results]
        return {
            "exchanges": results[0]["exchanges"],
            **{f"growth_{k}": [g.get(k) for g in growth] for k in growth[0]},
            "meets": all(v <= HOST.get(k, 0) for g in growth for k, v in g.items()),
        }
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


def _rows(args: argparse.Namespace) -> list[tuple[Callable[..., Any], dict[str, Any], float]]:
    """Function, what differs, and seconds; what is most likely to fail comes last."""
    found: list[tuple[Callable[..., Any], dict[str, Any], float]]
    streams = "one" if args.dry else "two"
    if args.work == "af":
        order = [(m, how) for how in (("one",) if args.dry else STREAMS) for m in args.modes]
        found = [(af, {"mode": m, "streams": how}, 40.0) for m, how in order]
        return found + [(af_by, {"by": way, "streams": streams}, 30.0) for way in args.beside]
    if args.work == "overlap":
        limit = 2 * args.seconds + 40
        parts = [(m, kernels) for kernels in (False, True) for m in args.modes]
        if not args.dry:
            parts = [("none", False), ("plain", False), *parts]
        found = [(overlap, {"mode": m, "compute": kernels}, limit) for m, kernels in parts]
        what = {"compute": True, "streams": streams}
        return found + [(overlap_by, {"by": way, **what}, limit) for way in args.beside]
    if args.work == "memory":
        return [(memory, {"mode": m}, 2 * args.seconds + 30) for m in args.modes]
    if args.work == "trips":
        return trips.rows(args.modes, args.beside, args.runs, args.dry)
    return [(zero_sm, {"kind": kind}, 40) for kind in KINDS]


def _measured(
    args: argparse.Namespace, options: dict[str, Any]
) -> Generator[list[dict[str, Any]], None, None]:
    """Rows, one by one or several that belong together. Processes that have used another's way are
    not used for anything else, and what has failed of a way is not tried again."""
    crew, used = None, None
    gave_up: dict[tuple[Any, ...], str] = {}
    done: list[dict[str, Any]] = []
    try:
        for function, what, limit in _rows(args):
            row = {"work": args.work, **{k: v for k, v in what.items() if k != "runs"}}
            by = what.get("by")
            kind = by, what.get("how")
            if by and args.dry and by != "nccl":
                gave_up[kind] = "it takes GPUs"
            if kind in gave_up:
                yield [{**row, "skipped": gave_up[kind]}]
                continue
            way = by if by in others.WAYS or by == "wire" else None  # what changes its process
            if crew and way != used:
                crew.close()
                crew = None
            try:
                if not crew:
                    with by_the_byte() if args.work == "memory" else contextlib.nullcontext():
                        crew = Crew(args.shape, args.dry)
                used = way
                results = crew.run(function, limit, {**options, **what})
                row["wrong"] = sum(r["wrong"] for r in results)
                if args.work == "trips":
                    rows = trips.summary(row, results[0], done)
                else:
                    row.update(sides=results, **_summary(args.work, results, args))
                    if by:
                        del row["meets"]  # a target of ours
                    rows = [row]
            except Exception as error:  # the other rows are of interest still
                if crew:
                    crew.close()
                crew = None
                if by:
                    print(f"{by}: {error!r}\n{error}", file=sys.stderr, flush=True)
                    row["skipped"] = gave_up[kind] = others.reason(error)
                else:
                    row["error"] = traceback.format_exc()
                rows = [row]
            done += rows
            yield rows
    finally:
        if crew:
            crew.close()


def _print(row: dict[str, Any]) -> None:
    if "error" in row:
        what = {k: v for k, v in row.items() if k not in ("work", "error")}
        print(f"FAIL {row['work']} {what}:\n{row['error']}", flush=True)
        return
    shown = "  ".join(f"{k}={v}" for k, v in row.items() if k != "sides")
    print(f"FAIL wrong data: {shown}" if row.get("wrong") else shown, flush=True)


def _shape(text: str) -> tuple[int, int]:
    a, _, b = text.partition("x")
    try:
        return positive(a), positive(b)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: want workers x servers, for example 2x2, 1 or more of each"
        ) from None


def _width(text: str) -> int:
    width = positive(text)
    if width % 4:
        raise argparse.ArgumentTypeError(f"{text!r}: want a multiple of 4")
    return width


TYPES = {"width": _width, "ms": positive_milliseconds, "seconds": positive_seconds}


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status."""
    first, rest = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        prog="fserver bench graph",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    measured = ["af", "overlap", "memory", "zero-sm", "trips"]
    parser.add_argument("work", choices=measured, help="the measurement, see below")
    parser.add_argument("--json", metavar="FILE", type=output, help="write the results to FILE")
    parser.add_argument("--dry", action="store_true", help="use tensors on the CPU, see below")
    parser.add_argument(
        "--shape",
        type=_shape,
        metavar="AxF",
        help="numbers of workers and servers (default: 2x2 with 4 or more GPUs, else 1x1)",
    )
    parser.add_argument(
        "--modes",
        nargs="*",
        type=mode_named,
        choices=trips.MODES,
        help="modes of the channels (default: all, but host only with trips)",
    )
    parser.add_argument(
        "--beside",
        nargs="*",
        default=others.WAYS,
        choices=others.WAYS,
        help="af, overlap, trips: other libraries to compare with (default: all)",
    )
    for name, (default, text) in OPTIONS.items():
        kind = TYPES.get(name, positive)
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    args = parser.parse_args(argv)
    if args.modes is None:
        args.modes = trips.MODES if args.work == "trips" else MODES
    if args.work != "trips" and "host" in args.modes:
        parser.error(f"--modes: 'host': want some of {', '.join(MODES)} with {args.work}")
    gpus = torch.cuda.device_count()
    if args.work in ("zero-sm", "trips"):
        args.shape = (1, 1)
    args.shape = args.shape or ((2, 2) if args.dry or gpus >= 4 else (1, 1))
    shared = gpus > 0 and "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    if not args.dry and not shared and gpus < sum(args.shape):
        raise BenchError(
            f"torch sees {gpus} GPUs, but {sum(args.shape)} are needed (use NVIDIA's multi-process "
            "service with one GPU, which needs CUDA_MPS_PIPE_DIRECTORY, or --dry without a GPU)"
        )
    options: dict[str, Any] = {}
    if args.work != "trips":
        options["shape"] = (args.layers, args.stages, args.rows, args.width)
        for name, (_, text) in OPTIONS.items():
            works, colon, _ = text.partition(": ")
            if colon and args.work in works.split(", "):
                options[name] = getattr(args, name)
    result: dict[str, Any] = {"arguments": vars(args), "torch": torch.__version__, "gpus": gpus}
    result["rows"] = []
    failures = 0
    with contextlib.closing(_measured(args, options)) as pieces:
        for rows in pieces:
            for row in rows:
                _print(row)
            failures += any("error" in row or row.get("wrong", 0) > 0 for row in rows)
            result["rows"] += rows
            if args.json:
                save(args.json, result)
            if failures == 2:
                break
    return 1 if failures else 0
