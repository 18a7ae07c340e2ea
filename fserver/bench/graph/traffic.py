"""Round trips of several stages as a CUDA graph, and their time: `fserver bench graph af`."""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from fserver.percentiles import percentile

from ..libraries import BIG, Call, Route, Sizes, join, theirs
from ..team import Teammate

POISON = 0xFF  # no byte of a pattern
SETS = 6  # of replays of af
# A function of a side, what differs from the other rows, and the seconds that it may take.
Row = tuple[Any, dict[str, Any], float]


def opened(side: Teammate, sizes: Sizes, mode: str = "", by: str = "") -> list[Route]:
    """Opens the routes of all stages: channels of fserver in a mode, or by another library, which a
    process joins once. A worker has the source [1, bytes] and the landing [servers, bytes], a
    server [workers, bytes] of both."""
    if not by:
        return ours(side, mode, sizes)
    if side.library is None:
        room = side.workers * sum(push + side.servers * pull for push, pull in sizes)
        side.library = join(by, side, max(room, 2 * BIG), len(sizes))
    return theirs(side, sizes)


def ours(side: Teammate, mode: str, sizes: Sizes) -> list[Route]:
    found, peers = [], len(side.peers)
    for key, (push, pull) in enumerate(sizes):
        shapes = ((1, push), (peers, pull)) if side.is_worker else ((peers, pull), (peers, push))
        out, into = (torch.zeros(n, dtype=torch.uint8, device=side.device) for n in shapes)
        made = side.channel(key, mode, list(out), list(into))
        found.append(Route(out, into, made.send, made.recv, made.check, made.close))
    return found


class Traffic:
    """Round trips of all stages, `layers` times, with nothing in between. A worker sends first.
    `streams` is "one" for all, or "two", of which one is for what is sent."""

    def __init__(self, side: Teammate, ways: Sequence[Route], layers: int, streams: str = "one"):
        self.side, self.ways, self.layers = side, ways, layers
        self.per = layers * len(ways)
        self.main = side.stream(-1)
        self.apart: Any = side.stream(-1) if streams == "two" else None
        self.replay: Any = self.body
        self.checks = 0

    def between(self, layer: int, stage: int) -> list[Call]:
        """What enqueues the kernels before a send."""
        return []

    @cached_property
    def plan(self) -> list[Call]:
        plan, worker = list[Call](), self.side.is_worker
        for layer in range(self.layers + worker):
            for stage, way in enumerate(self.ways):
                if layer or not worker:
                    plan.append(way.recv)
                if layer < self.layers:
                    send = partial(self.send_apart, way) if self.apart else way.send
                    plan += [*self.between(layer, stage), send]
        return plan

    def send_apart(self, way: Route) -> None:
        """Sends on the other stream. Nothing waits for it: what has arrived has been read."""
        self.apart.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.apart):
            way.send()

    def body(self) -> None:
        for call in self.plan:
            call()
        if self.apart:
            torch.cuda.current_stream().wait_stream(self.apart)

    def capture(self, graph: bool = True) -> None:
        """Makes `replay`, as a graph or not. Loads every kernel before one waits on a stream."""
        stages = range(len(self.ways))
        with torch.cuda.stream(self.main):
            self.poison()
            for layer in range(min(2, self.layers)):
                for call in itertools.chain(*(self.between(layer, s) for s in stages)):
                    call()
            self.wrong()
            self.meet()
            if not self.apart:  # out of a graph a channel is used on one stream
                self.body()
            self.meet()
            if graph:
                self.replay = self.side.captured(self.body, self.main)
        self.side.barrier()

    def run(self, count: int) -> list[tuple[Any, Any]]:
        """Replays; returns the moments before and after each."""
        marks = []
        with torch.cuda.stream(self.main):
            for _ in range(count):
                begin = self.side.mark()
                self.replay()
                marks.append((begin, self.side.mark()))
        return marks

    def timed(self, count: int) -> list[float]:
        """Returns the ms of each of `count` replays in a row, after two in which the sides meet."""
        self.side.barrier()
        marks = self.run(count + 2)
        self.meet()
        return [begin.elapsed_time(end) for begin, end in marks[2:]]

    def checked(self) -> int:
        """Replays once over poisoned memory; returns how many words are wrong."""
        with torch.cuda.stream(self.main):
            self.meet()
            self.poison()
            self.meet()
            self.replay()
            self.meet()
            return self.wrong()

    def poison(self) -> None:
        """Fills what is sent anew, and what comes with other bytes."""
        self.checks += 1
        for stage, way in enumerate(self.ways):
            way.source.copy_(self._bytes(way.source, self.side.index, stage))
            way.landing.fill_(POISON)

    def wrong(self) -> int:
        """Returns how many words of what came last are wrong, after a sync."""
        bad = 0
        for stage, way in enumerate(self.ways):
            for peer, came in zip(self.side.peers, way.landing, strict=True):
                bad += int((came != self._bytes(came, peer, stage)).sum())
        return bad

    def _bytes(self, like: torch.Tensor, sender: int, stage: int) -> torch.Tensor:
        """The bytes of a sender, a stage and a check."""
        values = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
        values.mul_(7).add_(101 * sender + 17 * stage + 31 * self.checks)
        return values.remainder_(251).to(torch.uint8)

    def meet(self) -> None:
        """Raises the error of a channel, if it has one."""
        self.side.sync()
        for way in self.ways:
            way.check()
        self.side.barrier()

    def close(self) -> None:
        """Both sides call it when all is well; else the node closes the channels."""
        self.meet()
        self.replay = None  # the graph goes before what it uses
        for way in self.ways:
            way.close()
        self.side.barrier()


class Model(Traffic):
    """Has light kernels in between. An answer has twice the bytes of what it is for.

    Tensors are seen as int32, so that sums wrap and are exact. A server answers x with x + addend
    twice, in each half of the answer. A worker goes on with the first half of one server's answer
    minus twice the second half of the next one's: -x and a number. An error stays to the end."""

    def __init__(self, side: Teammate, ways: Sequence[Route], layers: int, streams: str = "one"):
        super().__init__(side, ways, layers, streams)
        self.turn = torch.zeros((), dtype=torch.int32, device=side.device)
        addends = torch.arange(layers * side.servers * 2, dtype=torch.int32, device=side.device)
        self.addends = addends.view(layers, side.servers, 2, 1)
        out, came = (1, 2) if side.is_worker else (2, 1)  # how often x is in a tensor
        self.out = [way.source.view(torch.int32).view(len(way.source), out, -1) for way in ways]
        self.came = [way.landing.view(torch.int32).view(len(way.landing), came, -1) for way in ways]
        torch.manual_seed(side.rank)
        self.first = [torch.randint_like(out, 1 << 30) for out in self.out]

    def body(self) -> None:
        self.turn.add_(1)
        super().body()

    def between(self, layer: int, stage: int) -> list[Call]:
        out, came = self.out[stage], self.came[stage]
        if not self.side.is_worker:
            return [partial(torch.add, came, self.addends[layer, self.side.rank], out=out)]
        if layer == 0:
            return [partial(torch.add, self.first[stage], self.turn, out=out)]
        return [self._mixing(layer, came, out[0, 0])]

    @staticmethod
    def _mixing(layer: int, came: torch.Tensor, out: torch.Tensor) -> Call:
        i, j = layer % len(came), (layer + 1) % len(came)
        return partial(torch.add, came[i, 0], came[j, 1], alpha=-2, out=out)

    def poison(self) -> None:
        for way in self.ways:
            way.source.fill_(POISON)
            way.landing.fill_(POISON)

    def wrong(self) -> int:
        if not self.side.is_worker:
            return 0
        bad = 0
        for first, came in zip(self.first, self.came, strict=True):
            x, want = first[0, 0] + self.turn, came
            for layer in range(self.layers):
                if layer:
                    self._mixing(layer, want, x)()
                want = x + self.addends[layer]
            bad += int((came != want).sum())
        return bad


def af(
    side: Teammate, layers: int, sizes: Sizes, replays: int, streams: str, **which: str
) -> dict[str, Any]:
    """Times SETS sets of replays, each of which begins with a checked one."""
    t = Model(side, opened(side, sizes, **which), layers, streams)
    t.capture()
    wrong, took = t.checked(), []
    t.timed(min(20, replays))
    for _ in range(SETS):
        wrong += t.checked()
        took += t.timed(math.ceil(replays / SETS))
        with torch.cuda.stream(t.main):
            wrong += t.wrong()
    t.close()
    return {"took_ms": sorted(took), "wrong": wrong}


def rows(args: argparse.Namespace) -> Iterator[Row]:
    run = partial(af, layers=args.layers, sizes=args.sizes, replays=args.replays)
    for streams in ("two", "one"):
        for mode in args.modes:
            yield run, {"mode": mode, "streams": streams}, 40
    for by in args.beside:
        yield run, {"by": by, "streams": "two"}, 30


def summary(results: Sequence[Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    tokens = [side["took_ms"] for side in results[: args.workers]]
    p50 = max(percentile(t, 50) for t in tokens)
    found = {"micro_batch_us": round(1e3 * p50 / (args.layers * args.stages), 2)}
    found["token_p50_ms"] = round(p50, 3)
    for name, percent in (("token_p99_by_p50", 99), ("token_max_by_p50", 100)):
        found[name] = round(max(percentile(t, percent) / percentile(t, 50) for t in tokens), 3)
    return [{**found, "sides": results}]
