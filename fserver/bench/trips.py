"""Round trips of one channel between a worker and a server, and large messages, for `fserver bench
graph trips`: of ours, of others' ways, of plain copies, and of a program in CUDA."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import others, ways
from .baseline import compiled
from .errors import BenchError
from .report import gigabytes_per_second, percentile
from .sides import Side

MODES = ("kernel", "copy", "host")
TRANSPORTS = ("cma", "tcp")  # that carry a channel of mode host
KIB, MIB = 1 << 10, 1 << 20
SIZES = [(4 * KIB, 4 * KIB), (64 * KIB, 64 * KIB), (896 * KIB, 1792 * KIB)]
ANSWER = 8  # bytes, to what goes one way
WARM = 5  # runs
POISON = 255
# Targets on two H200, in microseconds for each of SIZES.
GRAPH_US = dict(zip(SIZES, (5, 6, 17), strict=True))  # of 200 round trips, mode kernel
ENQUEUED_US = dict(zip(SIZES, (9, 9, 18), strict=True))  # mode kernel
SPREAD = 1.1  # p99 over p50, of those graphs
BY_RAW = 1.1  # the longest of mode copy over the raw copy engine, both in graphs
BY_WIRE = (
    0.98  # speed of large messages over the fastest plain copies, kernel, two in flight or more
)

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""What this side sends, and where as much comes from the other."""

_joined: dict[str, ways.Open] = {}  # as long as the process lives


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No collection of garbage while something is timed, as in timeit."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _bytes(side: Side, n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8, device=side.device)


def _pattern(t: torch.Tensor, index: int, salt: int) -> torch.Tensor:
    values = torch.arange(t.numel(), dtype=torch.int32, device=t.device)
    return values.mul_(7).add_(101 * index + 31 * salt).remainder_(251).to(torch.uint8)


def _wrong(side: Side, pairs: Pairs, run: Callable[[], Any]) -> int:
    """Runs with new data over poisoned memory; how many bytes are wrong that came."""
    wrong = 0
    for salt in (1, 2):
        for i, (source, landing) in enumerate(pairs):
            source.copy_(_pattern(source, side.index, salt + 2 * i))
            landing.fill_(POISON)
        side.sync()
        side.barrier()
        run()
        side.sync()
        for i, (_, landing) in enumerate(pairs):
            wrong += int((landing != _pattern(landing, 1 - side.index, salt + 2 * i)).sum())
        side.barrier()
    return wrong


def _time(
    side: Side, run: Callable[[], Any], count: int, per: int, by_gpu: bool = False
) -> list[float]:
    """Microseconds of each of count runs, divided by per; both sides begin together. by_gpu: from
    the start to the end on the GPU, without what the CPU takes to launch it and to be woken."""
    values = []
    with undisturbed():
        for i in range(count + WARM):
            side.sync()
            side.together()
            started = time.perf_counter_ns()
            begin = side.mark() if by_gpu else None
            run()
            end = side.mark() if by_gpu else None
            side.settle()
            took = (time.perf_counter_ns() - started) / 1000
            if i >= WARM:
                values.append((begin.elapsed_time(end) * 1000 if begin else took) / per)
    return values


def _figures(values: list[float], by_gpu: Sequence[float] = ()) -> dict[str, Any]:
    values, by_gpu = sorted(values), sorted(by_gpu)
    found = {
        "p50_us": round(percentile(values, 50), 2),
        "p99_us": round(percentile(values, 99), 2),
        "min_us": round(values[0], 2),
        "n": len(values),
    }
    for p in (50, 99) if by_gpu else ():
        found[f"gpu_p{p}_us"] = round(percentile(by_gpu, p), 2)
    return found


def _timed(side: Side, way: ways.Way, how: str, runs: int, stream: Any) -> dict[str, Any]:
    """Times round trips as `how` says: "graph xN", "enqueued xN". The stream is current."""
    kind, _, count = how.partition(" x")
    inner = min(int(count), 3) if side.dry else int(count)
    calls = [way.send, way.recv]
    if side.index:
        calls.reverse()

    def body() -> None:
        for _ in range(inner):
            for call in calls:
                call()

    pairs = [(way.source, way.landing)]
    wrong = _wrong(side, pairs, body)  # every kernel is loaded before one is captured that waits
    run = side.captured(body, stream) if kind == "graph" else body
    wrong += _wrong(side, pairs, run)
    times = [_time(side, run, runs, inner, by_gpu) for by_gpu in (False, True)]
    wrong += _wrong(side, pairs, run)
    return {**_figures(*times), "wrong": wrong}


class _Channel:
    """A channel of ours, and how many bytes go out of this side by it, and come in."""

    def __init__(self, side: Side, own: Any, mode: str, push: int, pull: int, key: int = 0) -> None:
        out, into = (push, pull) if side.is_worker else (pull, push)
        self.source = _bytes(side, out)
        keys: list[int] = [key]
        options = {"mode": mode, "timeout_ms": 20000.0, "name": f"trips {key}"}
        if side.is_worker:
            self.landing = _bytes(side, into)
            self.channel = own.channel([self.source], keys, [self.landing], keys, **options)
        else:
            self.channel = own.channel(keys, [self.source], keys, **options)
            [[self.landing]] = self.channel.tensors
        path = "host" if side.dry or mode == "host" else mode
        if self.channel.path != path:
            raise RuntimeError(f"the channel goes by {self.channel.path!r}, and not by {path!r}")


def ours(
    side: Side, mode: str, push: int, pull: int, how: str, runs: int, transport: str | None = None
) -> dict[str, Any]:
    """Times round trips of a channel."""
    stream = side.stream()
    options = {"transport": transport} if transport else {}
    with side.node(**options) as own, side.on(stream):
        it = _Channel(side, own, mode, push, pull)
        way = ways.Way(it.source, it.landing, it.channel.send, it.channel.recv)
        found = _timed(side, way, how, runs, stream)
        it.channel.check()
        side.barrier()
        it.channel.close()
        side.barrier()
    return found


def stream_of(
    side: Side, mode: str, size: int, how: str, in_flight: int, runs: int
) -> dict[str, Any]:
    """Messages of size bytes "one way", or "both ways" at once, each way on so many channels, with
    a stream each, as micro-batches have them. A message is answered with a few bytes, which is what
    lets the next one of its channel go. There are so many of them that how they begin and end, when
    not all channels are in use, does not count."""
    inner, directions = 3 if side.dry else 40, 1 + (how == "both ways")
    with side.node() as own:
        channels = []
        for key in range(directions * in_flight):
            sizes = (size, ANSWER) if key % directions == 0 else (ANSWER, size)
            channels.append(_Channel(side, own, mode, *sizes, key=key))
        streams = [side.stream() for _ in channels]

        def run() -> None:
            for _ in range(inner):
                for stream, it in zip(streams, channels, strict=True):
                    with side.on(stream):
                        if side.is_worker:
                            it.channel.send()
                        it.channel.recv()
                        if not side.is_worker:
                            it.channel.send()
            for stream in streams:
                if stream:
                    stream.synchronize()

        pairs = [(it.source, it.landing) for it in channels]
        wrong = _wrong(side, pairs, run)
        values = _time(side, run, runs, inner * in_flight)
        wrong += _wrong(side, pairs, run)
        for it in channels:
            it.channel.check()
        side.barrier()
        for it in channels:
            it.channel.close()
        side.barrier()
    found = _figures(values)
    speed = round(gigabytes_per_second(size, percentile(sorted(values), 50)), 1)
    return {**found, "gb_per_s": speed, "wrong": wrong}


def theirs(side: Side, by: str, push: int, pull: int, how: str, runs: int) -> dict[str, Any]:
    """Times round trips by another's way, in a process that uses no other."""
    os.environ.update(others.ENVIRONMENT)
    stream = side.stream()
    with side.on(stream):
        if by not in _joined:
            _joined[by] = ways.join("gloo" if side.dry else by, side, ways.BIG)
        way = _joined[by](*((push, pull) if side.is_worker else (pull, push)))
        return _timed(side, way, how, runs, stream)


def wire(side: Side, by: str) -> dict[str, Any]:
    """Plain copies of 64 MiB between both GPUs, by one process."""
    found: dict[str, Any] = {"wrong": 0}
    if side.is_worker:
        found.update({k: round(v, 2) for k, v in ways.wire((0, 1)).items()})
        found["gb_per_s"] = round(gigabytes_per_second(ways.BIG, found["p50_us"]), 1)
    side.barrier()
    return found


def raw(side: Side, by: str) -> dict[str, Any]:
    """What rawchannel.cu prints: rows."""
    rows = []
    if side.is_worker:
        major, minor = torch.cuda.get_device_capability(side.device)
        options = ["-O3", f"-arch=sm_{major}{minor}"]
        program = str(compiled("rawchannel.cu", [os.environ.get("NVCC", "nvcc"), *options]))
        done = subprocess.run([program], capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise BenchError(f"rawchannel: status {done.returncode}: {done.stdout}{done.stderr}")
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"rows": [_of_raw(row) for row in rows], "wrong": 0}


def _of_raw(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the program in the words of this benchmark."""
    what, _, how = row.pop("work").removeprefix("raw ").rpartition(", ")
    return {"what": what, "how": how, **row}


def rows(
    modes: Sequence[str], beside: Sequence[str], runs: int, dry: bool
) -> list[tuple[Callable[..., Any], dict[str, Any], float]]:
    """Function, what differs, and seconds: first what ours is measured by, last what is most likely
    to fail."""
    big = MIB if dry else ways.BIG
    few = max(3, min(runs, 500) // 10)  # of what takes milliseconds
    limit = 40 + runs * 0.005
    found: list[tuple[Callable[..., Any], dict[str, Any], float]] = [
        (wire, {"by": "wire"}, 40),
        (raw, {"by": "raw"}, 120),
    ]
    for mode in modes:
        if mode == "host":
            for transport in TRANSPORTS:
                for push, pull in SIZES:
                    what = {"mode": mode, "transport": transport, "push": push, "pull": pull}
                    found.append((ours, {**what, "how": "graph x20", "runs": few}, limit))
            continue
        for how, count in (
            ("graph x200", max(3, runs // 5)),
            ("graph x20", runs),
            ("enqueued x20", runs),
        ):
            for push, pull in SIZES:
                what = {"mode": mode, "push": push, "pull": pull, "how": how, "runs": count}
                found.append((ours, what, limit))
        for how in ("one way", "both ways"):
            for in_flight in (1, 2, 3):
                what = {"mode": mode, "size": big, "how": how, "in_flight": in_flight}
                found.append((stream_of, {**what, "runs": max(3, few // 5)}, limit))
    for by in beside:
        for how in ("enqueued x20", "graph x20"):
            for push, pull in [*SIZES, (big, ANSWER)]:
                count = few if push == big else min(runs, 500)
                what = {"by": by, "push": push, "pull": pull, "how": how, "runs": count}
                found.append((theirs, what, 40))
    return found


def summary(
    row: dict[str, Any], found: dict[str, Any], before: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What differs, and what the worker found, as rows; those of ours that have a target say
    whether it is met, as far as what they are measured by is in the rows before."""
    wrong = row.pop("wrong")
    several = found.pop("rows", [{}])
    made = [{**row, **found, **one, "wrong": wrong} for one in several]
    for one in made:
        met = None if "by" in one else _met(one, before)
        if met is not None:
            one["meets"] = met
    return made


def _met(row: dict[str, Any], before: Sequence[dict[str, Any]]) -> bool | None:
    """Whether a target is met; None: there is none, or nothing to measure by."""
    key: tuple[Any, Any] = row.get("push"), row.get("pull")
    p50 = row["p50_us"]
    if row["mode"] == "kernel" and row["how"] in ("graph x200", "graph x20"):
        return p50 <= GRAPH_US[key] and row["p99_us"] <= SPREAD * p50
    if row["mode"] == "kernel" and row["how"] == "enqueued x20":
        return p50 <= ENQUEUED_US[key]
    if row["mode"] == "copy" and row["how"] == "graph x20" and key == SIZES[-1]:
        for one in before:
            same = all(one.get(k) == row[k] for k in ("how", "push", "pull"))
            if one.get("what") == "copy engine" and same:
                return p50 <= BY_RAW * one["p50_us"]
    if row["mode"] == "kernel" and row.get("in_flight", 0) > 1:
        both = row["how"] == "both ways"
        plain = [
            one["both_ways_p50_us" if both else "p50_us"]
            for one in before
            if one.get("by") == "wire" and "p50_us" in one
        ]
        what = f"copy engine {row['how']}"
        plain += [one["p50_us"] for one in before if one.get("what") == what]
        return min(plain) / p50 >= BY_WIRE if plain else None
    return None
