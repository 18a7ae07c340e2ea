"""Round trips of one channel between a worker and a server, and large messages, for `fserver bench
graph trips`: of ours, of other libraries, of plain copies, and of a program in CUDA."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import libraries
from ..baseline import compiled
from ..errors import BenchError
from ..libraries import BIG, Way
from ..report import figures, gigabytes_per_second
from .side import GraphSide, undisturbed

MODES = ("kernel", "copy", "host")
TRANSPORTS = ("cma", "tcp")  # that carry a channel of mode host
KIB, MIB = 1 << 10, 1 << 20
SIZES = [(4 * KIB, 4 * KIB), (64 * KIB, 64 * KIB), (896 * KIB, 1792 * KIB)]
ANSWER = 8  # bytes, to what goes one way
WARM = 5  # runs
POISON = 255
TARGETS = {  # on two H200, in microseconds for each of SIZES, of mode kernel
    "graph x200": (5, 6, 17),
    "graph x20": (5, 6, 17),
    "enqueued x20": (9, 9, 18),
}
SPREAD = 1.1  # p99 over p50, of those graphs
BY_RAW = 1.1  # the longest of mode copy over the raw copy engine, both in graphs
BY_WIRE = 0.98  # speed of messages over the fastest plain copies, kernel, two in flight or more

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""What this side sends, and where as much comes from the other."""


def _bytes(side: GraphSide, n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8, device=side.device)


def _pattern(t: torch.Tensor, index: int, salt: int) -> torch.Tensor:
    values = torch.arange(t.numel(), dtype=torch.int32, device=t.device)
    return values.mul_(7).add_(101 * index + 31 * salt).remainder_(251).to(torch.uint8)


def wrong_bytes(side: GraphSide, pairs: Pairs, run: Callable[[], Any]) -> int:
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


def _time(side: GraphSide, run: Callable[[], Any], count: int, by_gpu: bool = False) -> list[int]:
    """Nanoseconds of each of count runs; both sides begin together. by_gpu: from the start to the
    end on the GPU, without what the CPU takes to launch it and to be woken."""
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
            took = time.perf_counter_ns() - started
            if i >= WARM:
                values.append(round(begin.elapsed_time(end) * 1e6) if begin else took)
    return values


def _figures(times: list[int], per: int, prefix: str = "") -> dict[str, Any]:
    """Microseconds of what is in a run so often."""
    found = figures(times)
    keys = ("p50_us", "p99_us") if prefix else ("p50_us", "p99_us", "min_us")
    return {prefix + key: round(found[key] / per, 2) for key in keys}


def _timed(side: GraphSide, way: Way, how: str, runs: int, stream: Any) -> dict[str, Any]:
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
    # Every kernel is loaded before one is captured that waits.
    wrong = wrong_bytes(side, pairs, body)
    run = side.captured(body, stream) if kind == "graph" else body
    wrong += wrong_bytes(side, pairs, run)
    found = _figures(_time(side, run, runs), inner)
    found |= {"n": runs, **_figures(_time(side, run, runs, by_gpu=True), inner, "gpu_")}
    return {**found, "wrong": wrong + wrong_bytes(side, pairs, run)}


@contextlib.contextmanager
def _opened(side: GraphSide, mode: str, sizes: Sequence[tuple[int, int]]) -> Iterator[list[Way]]:
    """Channels of ours, of so many bytes that a worker pushes and pulls."""
    ways, channels = [], []
    for key, (push, pull) in enumerate(sizes):
        source = _bytes(side, push if side.is_worker else pull)
        into = [_bytes(side, pull)] if side.is_worker else None
        channel = side.channel(f"trips {key}", key, mode, [source], into)
        [landing] = into or channel.tensors[0]
        ways.append(Way(source, landing, channel.send, channel.recv))
        channels.append(channel)
    yield ways
    for channel in channels:
        channel.check()
    side.barrier()
    for channel in channels:
        channel.close()
    side.barrier()


def ours(side: GraphSide, mode: str, push: int, pull: int, how: str, runs: int) -> dict[str, Any]:
    """Times round trips of a channel."""
    stream = side.stream()
    with side.on(stream), _opened(side, mode, [(push, pull)]) as [way]:
        return _timed(side, way, how, runs, stream)


def stream_of(
    side: GraphSide, mode: str, size: int, how: str, in_flight: int, runs: int
) -> dict[str, Any]:
    """Messages of size bytes "one way", or "both ways" at once, each way on so many channels, with
    a stream each, as micro-batches have them. A message is answered with a few bytes, which is what
    lets the next one of its channel go. There are so many of them that how they begin and end, when
    not all channels are in use, does not count."""
    inner = 3 if side.dry else 40
    there, back = (size, ANSWER), (ANSWER, size)
    sizes = [there, back] * in_flight if how == "both ways" else [there] * in_flight
    with _opened(side, mode, sizes) as ways:
        streams = [side.stream() for _ in ways]

        def run() -> None:
            for _ in range(inner):
                for stream, way in zip(streams, ways, strict=True):
                    with side.on(stream):
                        if side.is_worker:
                            way.send()
                        way.recv()
                        if not side.is_worker:
                            way.send()
            for stream in streams:
                if stream:
                    stream.synchronize()

        pairs = [(way.source, way.landing) for way in ways]
        wrong = wrong_bytes(side, pairs, run)
        found = _figures(_time(side, run, runs), inner * in_flight)
        wrong += wrong_bytes(side, pairs, run)
    speed = round(gigabytes_per_second(size, found["p50_us"]), 1)
    return {**found, "n": runs, "gb_per_s": speed, "wrong": wrong}


def theirs(side: GraphSide, by: str, push: int, pull: int, how: str, runs: int) -> dict[str, Any]:
    """Times round trips by another library, in a process that uses no other."""
    stream = side.stream()
    with side.on(stream):
        if side.pair is None:
            side.pair = libraries.pair(by, side, BIG)
        way = side.pair(*((push, pull) if side.is_worker else (pull, push)))
        return _timed(side, way, how, runs, stream)


def wire(side: GraphSide, by: str) -> dict[str, Any]:
    """Plain copies of 64 MiB between both GPUs, by one process."""
    found: dict[str, Any] = {"wrong": 0}
    if side.is_worker:
        found.update({k: round(v, 2) for k, v in libraries.copies((0, 1)).items()})
        found["gb_per_s"] = round(gigabytes_per_second(BIG, found["p50_us"]), 1)
    side.barrier()
    return found


def raw(side: GraphSide, by: str) -> dict[str, Any]:
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
    return {"rows": [of_raw(row) for row in rows], "wrong": 0}


def of_raw(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the program in the words of this benchmark."""
    what, _, how = row.pop("work").removeprefix("raw ").rpartition(", ")
    return {"what": what, "how": how, **row}


Row = tuple[Callable[..., Any], dict[str, Any], float]


def rows(modes: Sequence[str], beside: Sequence[str], runs: int, dry: bool) -> Iterator[Row]:
    """Function, what differs, and seconds: first what ours is measured by, last what is most likely
    to fail."""
    big = MIB if dry else BIG
    few = max(3, min(runs, 500) // 10)  # of what takes milliseconds
    limit = 40 + runs * 0.005
    yield wire, {"by": "wire"}, 40
    yield raw, {"by": "raw"}, 120
    for mode in modes:
        plans = [("graph x200", max(3, runs // 5)), ("graph x20", runs), ("enqueued x20", runs)]
        if mode == "host":
            plans = [("graph x20", few)]
        for transport in TRANSPORTS if mode == "host" else (None,):
            for how, count in plans:
                for push, pull in SIZES:
                    what = {"mode": mode, "push": push, "pull": pull, "how": how, "runs": count}
                    yield ours, what | ({"transport": transport} if transport else {}), limit
        for how in ("one way", "both ways") if mode != "host" else ():
            for in_flight in (1, 2, 3):
                what = {"mode": mode, "size": big, "how": how, "in_flight": in_flight}
                yield stream_of, {**what, "runs": max(3, few // 5)}, limit
    for by in beside:
        for how in ("enqueued x20", "graph x20"):
            for push, pull in [*SIZES, (big, ANSWER)]:
                count = few if push == big else min(runs, 500)
                yield theirs, {"by": by, "push": push, "pull": pull, "how": how, "runs": count}, 40


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
    mode, how, p50 = row["mode"], row["how"], row["p50_us"]
    size: Any = row.get("push"), row.get("pull")
    if mode == "kernel" and how in TARGETS:
        met: bool = p50 <= TARGETS[how][SIZES.index(size)]
        return met and (how == "enqueued x20" or row["p99_us"] <= SPREAD * p50)
    raw = [one for one in before if one.get("by") == "raw" and "p50_us" in one]
    if mode == "copy" and how == "graph x20" and size == SIZES[-1]:
        same = {"what": "copy engine", "how": how, "push": size[0], "pull": size[1]}
        plain = [one["p50_us"] for one in raw if same.items() <= one.items()]
        return p50 <= BY_RAW * plain[0] if plain else None
    if mode == "kernel" and row.get("in_flight", 0) > 1:
        key = "both_ways_p50_us" if how == "both ways" else "p50_us"
        plain = [one["p50_us"] for one in raw if one["what"] == f"copy engine {how}"]
        plain += [one[key] for one in before if one.get("by") == "wire" and key in one]
        return min(plain) / p50 >= BY_WIRE if plain else None
    return None
