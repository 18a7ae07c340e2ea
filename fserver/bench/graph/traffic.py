"""The channels of one side and the traffic of a disaggregated model over them, as a CUDA graph; its
time for `fserver bench graph af`."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import libraries
from ..report import percentile
from .side import GraphSide

POISON = 0x5A5A5A5A
WIRE = 395e9  # bytes per second of the copy engine between two H200
Shape = tuple[int, ...]  # layers, stages, rows, width
Opened = Sequence[tuple[torch.Tensor, torch.Tensor, Any]]
"""For each stage: int8 [rows, width] on a worker and [workers, rows, width] on a server, bf16
[servers, rows, width] or [workers, rows, width], and the channel for them."""


@contextlib.contextmanager
def opened(side: GraphSide, shape: Shape, mode: str = "", by: str = "") -> Iterator[Opened]:
    """Channels of fserver in that mode, or of another library, which a process joins once."""
    yield theirs(side, by, shape) if by else ours(side, mode, shape)
    if by:
        dist.destroy_process_group()


def ours(side: GraphSide, mode: str, shape: Shape) -> Opened:
    """Channels of the node of this side."""
    _, stages, rows, width = shape
    count = side.servers if side.is_worker else side.workers
    found = []
    for stage in range(stages):
        small = torch.zeros(count, rows, width, dtype=torch.int8, device=side.device)
        large = torch.zeros(count, rows, width, dtype=torch.bfloat16, device=side.device)
        if side.is_worker:
            small = small[0].clone()
            out, into = [small], list(large.unbind(0))
        else:
            out, into = list(large.unbind(0)), list(small.unbind(0))
        found.append((small, large, side.channel(f"stage {stage}", stage, mode, out, into)))
    return found


def theirs(side: GraphSide, by: str, shape: Shape) -> Opened:
    """Channels of another library. Each has been used once, on the current stream: NCCL connects
    when it is first used, and no kernel should be loaded beside one that waits."""
    layers, stages, rows, width = shape
    if by == "nvshmem" and layers < 2:
        raise ValueError(f"layers is {layers}: nvshmem wants 2, for signals that differ")
    workers, servers, rank = side.workers, side.servers, side.rank
    # In small a slot for each worker, in large one for each server and worker.
    sizes = [2 * stages * servers * workers * rows * width, stages * workers * rows * width]
    library = libraries.join(by, side, sum(sizes), stages)
    first, second = library.memory.split(sizes)
    large = first.view(torch.bfloat16).view(stages, servers, workers, rows, width)
    small = second.view(torch.int8).view(stages, workers, rows, width)
    found = []
    for stage in range(stages):
        if side.is_worker:
            peers, mine, wide = (
                range(workers, side.count),
                small[stage, rank],
                large[stage, :, rank],
            )
            sent, came = [mine] * servers, list(wide)
        else:
            peers, mine, wide = range(workers), small[stage], large[stage, rank]
            sent, came = list(wide), list(mine)
        ends = [list(zip(peers, tensors, strict=True)) for tensors in (sent, came)]
        channel = library.open(stage, *ends)
        calls = channel.send, channel.recv
        for call in calls if side.is_worker else calls[::-1]:
            call()
        side.sync()
        side.barrier()
        found.append((mine, wide, channel))
    return found


def _addend(layer: int, server: int, half: int) -> int:
    return 1 + 64 * layer + 2 * server + half


class Traffic:
    """The channels of one side, and all layers as a graph; `compute` has kernels in between.

    Tensors are looked at as int32, so that sums wrap and are exact. A server answers x with
    x + addend twice, in each half of the answer, and a worker goes on with the first half of one
    server's answer minus two times the second half of the next one's: -x and a number. So what is
    wrong anywhere in a layer is wrong in the end.
    """

    def __init__(
        self, side: GraphSide, of: Opened, shape: Shape, compute: bool = True, streams: str = "one"
    ) -> None:
        self.side, self.compute = side, compute
        self.layers, self.stages, rows, width = shape
        self.per = self.layers * self.stages
        self.main = side.stream(-1)
        branches = {"one": 0, "two": 1, "each": self.stages}[streams]
        self.branches = [side.stream(-1) for _ in range(branches)]
        self.apart = self.branches[0] if streams == "two" else None  # for what is sent
        self.channels = [channel for _, _, channel in of]
        self.out: list[torch.Tensor] = []
        self.incoming: list[torch.Tensor] = []
        self.first: list[torch.Tensor] = []
        self.turn = torch.zeros((), dtype=torch.int32, device=side.device)
        self.addends = torch.tensor(
            [[[_addend(i, side.rank, h)] for h in (0, 1)] for i in range(self.layers)],
            dtype=torch.int32,
            device=side.device,
        )
        for stage, (small, large, _) in enumerate(of):
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
        main: Any = torch.cuda.current_stream() if self.branches else None
        for stream in self.branches:
            stream.wait_stream(main)
        if self.apart or not self.branches:
            self._layers(range(self.stages), talk)
        else:
            for stage, stream in enumerate(self.branches):
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


def af(
    side: GraphSide, shape: Shape, streams: str, replays: int, parts: int, **which: str
) -> dict[str, Any]:
    """Times replays in so many parts, each of which begins with a checked one."""
    with opened(side, shape, **which) as channels:
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
