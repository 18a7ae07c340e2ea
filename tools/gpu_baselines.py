"""Round trips between two GPUs by what others offer, for the work that ours is timed with.

    python tools/gpu_baselines.py [--iters N] [--json FILE] [--budget S] [--only NAMES] [--dry]

One process per GPU, and new ones for each baseline, as a baseline may crash or hang. Side 0 sends,
side 1 answers when all has come. Three ways to time that, in microseconds per round trip:

    sync each   the host waits for its stream at each round trip
    enqueued    INNER round trips are enqueued, then the host waits
    graph       the same, captured in a CUDA graph and replayed

For the last two p50_us is by the host's clock from before the first call until the stream is idle,
as bench_channel.py measures, and gpu_p50_us by CUDA events on side 0's stream. Before each timing
what arrives is compared, over memory that was poisoned. What cannot be measured leaves a row with
"skipped": the reason. The wire is what the copy engine moves between the GPUs in one process.

--dry times gloo between two processes on the CPU, to try the program.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from pair import Pair, Side, undisturbed  # noqa: E402

from fserver.bench import others  # noqa: E402
from fserver.bench.others import reason  # noqa: E402
from fserver.bench.report import percentile  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
# Bytes out and back, and how many times fewer round trips; one way is answered with 8 bytes.
SHAPES = [
    (4 * KIB, 4 * KIB, 1),
    (64 * KIB, 64 * KIB, 1),
    (896 * KIB, 1792 * KIB, 1),
    (64 * MIB, 8, 20),
]
BIG = 64 * MIB
INNER = 20
WARM = {1: 20, INNER: 5}  # runs, by round trips of a run
POISON = 255
LIMIT_S = 15.0
ALL = ("sync each", "enqueued", "graph")
MODES = {
    "wire": ("wire",),
    "nccl": ALL,
    "symm": ALL,
    "nvshmem": ALL,
    "nixl": ("sync each",),
}
NIXL = ("nixl_cu13", "nixl_cu12", "nixl")


@dataclass
class Way:
    """How one side sends source and takes what comes into landing, on the current stream."""

    source: torch.Tensor
    landing: torch.Tensor
    send: Callable[[], Any]
    recv: Callable[[], Any]


# Both live as long as the process: freeing symmetric memory is a collective call.
WAYS: dict[tuple[int, int], Way] = {}
AGENT: dict[str, Any] = {}


def _place(side: Side) -> str:
    return "cpu" if side.device is None else f"cuda:{side.device}"


def _empty(side: Side, n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device=_place(side))


def _settle(side: Side) -> None:
    if side.device is not None:
        torch.cuda.current_stream().synchronize()


# -- the baselines: each opens a way for the bytes that go out of a side and come into it


def _send_recv(side: Side, out: int, into: int) -> Way:
    source, landing, peer = _empty(side, out), _empty(side, into), 1 - side.index
    return Way(source, landing, lambda: dist.send(source, peer), lambda: dist.recv(landing, peer))


def _symm(side: Side, out: int, into: int) -> Way:
    peer = 1 - side.index
    memory, handle = others.symmetric(max(out, into), torch.device(_place(side)))
    source, theirs = _empty(side, out), handle.get_buffer(peer, (out,), torch.uint8)

    def send() -> None:
        theirs.copy_(source, non_blocking=True)
        handle.put_signal(peer, channel=0)

    return Way(source, memory[:into], send, lambda: handle.wait_signal(peer, channel=0))


def _nvshmem(side: Side, out: int, into: int) -> Way:
    """A put goes to the same symmetric address, so there is a tensor for each direction. The
    signal must equal what is waited for, which a replayed graph meets too: the last value of a
    replay is not the first of the next."""
    ops, me, peer = torch.ops.symm_mem, side.index, 1 - side.index
    sizes = (out, into) if me == 0 else (into, out)
    tensors, pads = [], []
    for size in sizes:
        memory, handle = others.symmetric(size, torch.device(_place(side)))
        pad = handle.get_signal_pad(me, (1,), dtype=torch.int64)
        pad.fill_(0)
        tensors.append(memory)
        pads.append((pad, handle))
    torch.cuda.synchronize()
    side.barrier()
    sent = waited = 0

    def send() -> None:
        nonlocal sent
        sent += 1
        ops.nvshmem_put_with_signal(tensors[me], pads[me][0], sent, peer)

    def recv() -> None:
        nonlocal waited
        waited += 1
        ops.nvshmem_wait_for_signal(pads[peer][0], waited, peer)

    return Way(tensors[me], tensors[peer], send, recv)


def _nixl(side: Side, out: int, into: int) -> Way:
    agent, peer = AGENT["agent"], AGENT["peer"]
    source, landing = AGENT["source"][:out], AGENT["landing"][:into]
    address, device = side.exchange((landing.data_ptr(), side.device))
    ours = agent.get_xfer_descs([(source.data_ptr(), out, side.device)], "VRAM")
    theirs = agent.get_xfer_descs([(address, out, device)], "VRAM")
    transfer = agent.initialize_xfer("WRITE", ours, theirs, peer, b"sent")

    def send() -> None:
        state = agent.transfer(transfer, b"sent")
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"nixl: the state of a transfer is {state}")

    def recv() -> None:
        while not agent.get_new_notifs():
            pass

    return Way(source, landing, send, recv)


OPEN = {"gloo": _send_recv, "nccl": _send_recv, "symm": _symm, "nvshmem": _nvshmem, "nixl": _nixl}


def join(side: Side, name: str) -> None:
    """What a baseline needs before its first way."""
    if name == "nixl":
        _join_nixl(side)
    elif name != "wire":
        device = torch.device(_place(side))
        others.join(name, side.index, 2, device, lambda port: side.exchange(port) or port)


def _join_nixl(side: Side) -> None:
    """The agents write into each other's memory, registered once; without NIXL's own thread, which
    makes it slower."""
    package = next(package for package in NIXL if importlib.util.find_spec(package))
    api = importlib.import_module(f"{package}._api")
    agent = api.nixl_agent(f"side{side.index}", api.nixl_agent_config(enable_prog_thread=False))
    AGENT.update(agent=agent, source=_empty(side, BIG), landing=_empty(side, BIG))
    agent.register_memory([AGENT["source"], AGENT["landing"]])
    peer = agent.add_remote_agent(side.exchange(agent.get_agent_metadata()))
    AGENT["peer"] = peer.decode() if isinstance(peer, bytes) else peer


# -- what the sides do


def _pattern(side: Side, n: int, index: int, salt: int) -> torch.Tensor:
    values = torch.arange(n, dtype=torch.int32, device=_place(side))
    return values.mul_(7).add_(101 * index + 31 * salt).remainder_(251).to(torch.uint8)


def _check(side: Side, way: Way, run: Callable[[], None]) -> None:
    for salt in (1, 2, 3):
        way.source.copy_(_pattern(side, way.source.numel(), side.index, salt))
        way.landing.fill_(POISON)
        want = _pattern(side, way.landing.numel(), 1 - side.index, salt)
        _settle(side)
        side.barrier()
        run()
        _settle(side)
        wrong = int((way.landing != want).sum())
        if wrong:
            raise ValueError(f"wrong data: {wrong} of {want.numel()} bytes, try {salt}")
    side.barrier()


def _time(
    side: Side, run: Callable[[], None], count: int, inner: int
) -> tuple[list[float], list[float]]:
    """Microseconds of a round trip in each of count runs, by the host and by events. Runs of one
    round trip follow one another at once, without events; others begin together."""
    host, gpu = [], []
    events = None
    if inner > 1 and side.device is not None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with undisturbed():
        for i in range(count + WARM[inner]):
            if inner > 1:
                _settle(side)
                side.together()
            started = time.perf_counter_ns()
            if events:
                events[0].record()
            run()
            if events:
                events[1].record()
            _settle(side)
            took = time.perf_counter_ns() - started
            if i >= WARM[inner]:
                host.append(took / 1000 / inner)
                if events:
                    gpu.append(events[0].elapsed_time(events[1]) * 1000 / inner)
    return host, gpu


def round_trips(
    side: Side, name: str, mode: str, out: int, back: int, count: int
) -> dict[str, Any]:
    """Checks, then times count round trips."""
    gpu = side.device is not None
    mine, theirs = (out, back) if side.index == 0 else (back, out)
    inner = 1 if mode == "sync each" else INNER
    with torch.cuda.stream(torch.cuda.Stream()) if gpu else contextlib.nullcontext():
        if (out, back) not in WAYS:
            WAYS[out, back] = OPEN[name](side, mine, theirs)
        way = WAYS[out, back]
        first, second = (way.send, way.recv) if side.index == 0 else (way.recv, way.send)

        def body() -> None:
            for _ in range(inner):
                first()
                second()

        run = body
        _check(side, way, body)
        if mode == "graph":
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                body()
            run = graph.replay
            _check(side, way, run)
        host, device = _time(side, run, max(5, count // inner), inner)
        if mode == "graph":
            side.barrier()
            graph.reset()
    row = {"baseline": name, "mode": mode, "push": out, "pull": back, "n": len(host)}
    for prefix, values in (("", host), ("gpu_", device)):
        if values:
            row[f"{prefix}p50_us"] = round(percentile(sorted(values), 50), 2)
            row[f"{prefix}p99_us"] = round(percentile(sorted(values), 99), 2)
            row[f"{prefix}min_us"] = round(min(values), 2)
    return row


def wire(side: Side, devices: tuple[int, int]) -> list[dict[str, Any]]:
    """What the copy engine moves, 64 MiB at a time. torch makes both GPUs' streams wait for each
    other around a copy between them: with two copies in flight on streams of their own, that time
    is hidden. The faster is the wire."""
    if side.index:
        return []
    copies, rows, best = 20, [], {}
    for both in (False, True):
        for flying in (1, 2):
            lanes = []
            for a, b in [devices, devices[::-1]] if both else [devices]:
                for _ in range(flying):
                    source = torch.randint(0, 251, (BIG,), dtype=torch.uint8, device=f"cuda:{a}")
                    landing = torch.full_like(source, POISON, device=f"cuda:{b}")
                    lanes.append((source, landing, torch.cuda.Stream(a), torch.cuda.Stream(b)))

            def run(lanes: list[Any], count: int) -> float:
                for device in devices:
                    torch.cuda.synchronize(device)
                started = time.perf_counter_ns()
                for _ in range(count):
                    for source, landing, here, there in lanes:
                        with torch.cuda.stream(there), torch.cuda.stream(here):
                            landing.copy_(source, non_blocking=True)
                for device in devices:
                    torch.cuda.synchronize(device)
                return (time.perf_counter_ns() - started) / 1000

            run(lanes, 1)
            if any(not torch.equal(lane[0].cpu(), lane[1].cpu()) for lane in lanes):
                raise ValueError("wrong data")
            values = [run(lanes, copies) / copies / flying for _ in range(20)]
            p50 = percentile(sorted(values), 50)
            mode = f"{'both ways' if both else 'one way'}, {flying} in flight"
            row = {"baseline": "wire", "mode": mode, "push": BIG, "pull": BIG if both else 0}
            rows.append({**row, "p50_us": round(p50, 2), "gb_per_s": round(BIG / p50 / 1000, 1)})
            best[both] = min(p50, best.get(both, p50))
    for out, back in [*(shape[:2] for shape in SHAPES), (BIG, BIG)]:
        took = round((out + back) * best[False] / BIG, 3)
        rows.append({"baseline": "wire", "mode": "wire", "push": out, "pull": back, "p50_us": took})
    row = {"baseline": "wire", "mode": "both ways", "push": BIG, "pull": BIG}
    return [*rows, {**row, "p50_us": round(best[True], 2)}]


# -- the program


def measure(
    name: str,
    devices: tuple[Any, Any],
    iters: int,
    deadline: float,
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Adds the rows of a baseline. After an error a mode is left out, and new processes try the
    next."""
    pair, modes = None, list(ALL[:2] if name == "gloo" else MODES[name])

    def left(seconds: float) -> float:
        seconds = min(seconds, deadline - time.monotonic())
        if seconds < 1:
            raise TimeoutError("the time of --budget is over")
        return seconds

    def skip(mode: str, error: BaseException) -> None:
        print(f"{name}, {mode}: {error!r}\n{error}", file=sys.stderr, flush=True)
        add({"baseline": name, "mode": mode, "skipped": reason(error)})

    try:
        if name == "nixl" and not any(importlib.util.find_spec(package) for package in NIXL):
            raise ModuleNotFoundError(f"no module of {', '.join(NIXL)} is installed")
        while modes:
            if pair is None:
                left(LIMIT_S)
                pair = Pair(devices)
                pair.run(join, left(30), name=name)
            mode = modes.pop(0)
            try:
                if name == "wire":
                    for row in pair.run(wire, left(30), devices=devices)[0]:
                        add(row)
                    continue
                for out, back, share in SHAPES[:-1] if name == "gloo" else SHAPES:
                    count = max(20, iters // share)
                    work = {"name": name, "mode": mode, "out": out, "back": back, "count": count}
                    add(pair.run(round_trips, left(LIMIT_S + count * 5e-4), **work)[0])
            except Exception as error:  # the other modes are of interest still
                pair.close()
                pair = None
                skip(mode, error)
    except Exception as error:  # nothing more of it works here
        for mode in modes:
            skip(mode, error)
    if pair:
        pair.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=10_000, help="round trips of each measurement")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--budget", type=float, default=100, help="seconds for all")
    parser.add_argument("--only", default=",".join(MODES), help="some of %(default)s")
    parser.add_argument("--dry", action="store_true", help="gloo on the CPU, and nothing else")
    options = parser.parse_args()
    os.environ.update(others.ENVIRONMENT)
    gpus = torch.cuda.device_count()
    result: dict[str, Any] = {"torch": torch.__version__, "iters": options.iters, "rows": []}
    if gpus:
        result["gpu"] = torch.cuda.get_device_name(0)

    def add(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n")

    deadline = time.monotonic() + options.budget
    why = "--dry" if options.dry else f"{gpus} GPUs, and 2 are the least" if gpus < 2 else ""
    if options.dry:
        measure("gloo", (None, None), options.iters, deadline, add)
    for name in options.only.split(","):
        if why:
            add({"baseline": name, "mode": "all", "skipped": why})
        else:
            measure(name, (0, 1), options.iters, deadline, add)
    return 0 if any("p50_us" in row for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
