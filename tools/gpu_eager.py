"""Round trips of push_pull between two GPUs, beside those of C on the same GPUs.

    python tools/gpu_eager.py FLOOR [GPU_A GPU_B] [ROUNDS] > result.json

FLOOR is tools/gpu_floor.c, built. All take turns: C, and push_pull with tensors on the GPUs (gpu),
the same without pollers (gpu-caller), and with tensors on the CPU (cpu), which takes all but the
GPUs. The JSON has p50 and p99 in microseconds, how the tensors travelled, and the medians of the
eight stamps of fetch_trace, as microseconds since the first. Processes run on cores near their GPU;
no core has two.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

SHAPES = [  # the name, bytes there and back, the part of the rounds that is made
    ("4 KiB echo", 4096, 4096, 1),
    ("64 KiB echo", 65536, 65536, 1),
    ("896 KiB out, 1.75 MiB back", 128 * 7168, 2 * 128 * 7168, 1),
    ("64 MiB echo", 64 << 20, 64 << 20, 20),
]
KINDS = {
    "gpu": {"backend": "GPU"},
    "gpu-caller": {"backend": "GPU", "progress": "caller"},
    "cpu": {"backend": "CPU"},
}
TURNS, WARM, LIMIT = 4, 200, 60

node: Any = None  # of this process
memory: dict[int, list[Any]] = {}  # what it sends and takes, by key


def open_node(kind: str, gpu: int, scheduler: str | None) -> str | None:
    """Opens a worker of this scheduler, or the server, and returns the address of its scheduler."""
    global node
    import torch

    import fserver

    gpu, where = (0, "cpu") if kind == "cpu" else (gpu, f"cuda:{gpu}")
    options: dict[str, Any] = {"gpu": gpu, "rank_offset": -gpu, **KINDS[kind]}
    if scheduler:
        node = fserver.Worker(scheduler=scheduler, **options)
    else:
        own = {"host_scheduler": True, "scheduler": "127.0.0.1:0", "connect": False}
        node = fserver.Server(**own, **options)
    for key, (_, *sizes, _) in enumerate(SHAPES):
        memory[key] = [torch.zeros(n, dtype=torch.uint8, device=where) for n in sizes]
    if where != "cpu":
        torch.cuda.synchronize(gpu)
    return None if scheduler else node.scheduler


def serve() -> None:
    import fserver

    node.connect()
    get_batch, respond = node.get_batch, node.respond
    answers = {key: [answer] for key, (_, answer) in memory.items()}
    with suppress(fserver.ClosedError):
        while True:
            batch = get_batch()
            for handler, _, keys in batch:
                respond(answers[keys[0]], handler)
            del batch, _, keys  # now, while the worker is busy, not before the next answer
    node.stop()


def measure(key: int, rounds: int) -> tuple[list[int], list[list[int]], str]:
    """Nanoseconds of each round trip, its stamps, and how the tensors travelled."""
    x, y = ([t] for t in memory[key])
    push_pull, wait, now, keys = node.push_pull, node.wait, time.perf_counter_ns, [key]
    took, stamps = [], []
    for i in range(-min(WARM, rounds), rounds):
        start = now()
        h = push_pull(x, keys, y, keys)
        begun = now()
        wait(h, 1000 * LIMIT)
        end = now()
        if i >= 0:
            took.append(end - start)
            t = node.fetch_trace(h)
            stamps.append([*(v - t[0] for v in t), begun - t[0], end - t[0]])
    return took, stamps, node.links()[0].transport


def leave() -> None:
    node.stop()


def numbers(path: str) -> list[int]:
    """A file like "0-3,8" as numbers."""
    parts = [part.partition("-") for part in Path(path).read_text().split(",") if part.strip()]
    return [n for first, _, last in parts for n in range(int(first), int(last or first) + 1)]


def cores_of(a: int, b: int) -> list[list[int]]:
    """The processors that this process may use near each GPU, if they are enough, else all. Where
    both GPUs have the same ones, each gets half of the cores."""
    allowed, sides = os.sched_getaffinity(0), []
    for gpu in (a, b):
        near = allowed
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
            bus = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
            near = allowed & {*numbers(f"/sys/bus/pci/devices/{bus[-12:].lower()}/local_cpulist")}
        sides.append(near if len(near) >= 8 else allowed)
    if sides[0] == sides[1]:
        siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        core = {cpu: numbers(siblings.format(cpu))[0] for cpu in sides[0]}
        cores = sorted({*core.values()})
        first = cores[: len(cores) // 2]
        sides = [{c for c in core if (core[c] in first) == mine} for mine in (True, False)]
    return [sorted(side) for side in sides]


def summary(values: list[int], moved: int) -> dict[str, float]:
    from fserver.bench.report import percentile

    values = sorted(values)
    found = {f"p{p}_us": percentile(values, p) / 1e3 for p in (50, 99)}
    rate = {"gbps_p50": moved / percentile(values, 50)}
    return {**found, "min_us": values[0] / 1e3, "count": len(values), **rate}


def turns(floor: list[str], gpus: tuple[int, int], cores: list[list[int]], each: list[int]) -> Any:
    """Nanoseconds and stamps by kind and key, and how the tensors of each kind travelled."""
    took: dict[str, list[list[int]]] = {kind: [[] for _ in SHAPES] for kind in ("floor", *KINDS)}
    stamps: dict[str, list[Any]] = {kind: [[] for _ in SHAPES] for kind in KINDS}
    how = {}
    with ExitStack() as stack:  # which ends the processes
        pool = multiprocessing.get_context("spawn").Pool
        workers, servers = (
            {k: stack.enter_context(pool(1, os.sched_setaffinity, (0, side))) for k in KINDS}
            for side in cores
        )
        opened = {k: servers[k].apply_async(open_node, (k, gpus[1], None)) for k in KINDS}
        heard = {k: opened[k].get(LIMIT) for k in KINDS}
        served = [servers[k].apply_async(serve) for k in KINDS]
        opened = {k: workers[k].apply_async(open_node, (k, gpus[0], heard[k])) for k in KINDS}
        for one in opened.values():
            one.get(LIMIT)
        for _ in range(TURNS):
            for key, rounds in enumerate(each):
                for kind in KINDS:
                    # On the CPU 64 MiB take a hundred times as long, and are not what is asked.
                    work = (key, rounds // 10 if kind == "cpu" else rounds)
                    some, seen, how[kind] = workers[kind].apply_async(measure, work).get(LIMIT)
                    took[kind][key] += some
                    stamps[kind][key] += seen
            done = subprocess.run(floor, check=True, capture_output=True, text=True)
            for key, lines in enumerate(done.stdout.split("\n\n")[: len(SHAPES)]):
                took["floor"][key] += map(int, lines.split())
        for one in [workers[k].apply_async(leave) for k in KINDS] + served:
            one.get(LIMIT)
    return took, stamps, how


def main(floor: str, a: int = 0, b: int = 1, rounds: int = 10000) -> None:
    cores = cores_of(a, b)
    print("cores", json.dumps(cores), file=sys.stderr, flush=True)
    calls = subprocess.run([floor, "calls", str(a), str(b)], capture_output=True, text=True)
    print(calls.stdout, calls.stderr, file=sys.stderr, flush=True)
    each = [max(20, rounds // share // TURNS) for *_, share in SHAPES]
    sizes = [f"{out}:{back}:{n}" for (_, out, back, _), n in zip(SHAPES, each, strict=True)]
    command = [floor, str(a), str(b), str(cores[0][0]), str(cores[1][0]), *sizes]
    took, stamps, how = turns(command, (a, b), cores, each)
    rows = []
    for key, (name, out, back, _) in enumerate(SHAPES):
        row: dict[str, Any] = {"name": name, "out": out, "back": back, "transport": how}
        row |= {kind: summary(took[kind][key], out + back) for kind in took}
        for kind in KINDS:
            columns = zip(*stamps[kind][key], strict=True)
            row[kind]["stamps_us"] = [round(median(column) / 1e3, 2) for column in columns]
            for p in ("p50", "p99"):
                row[kind][f"{p}_ratio"] = row[kind][f"{p}_us"] / row["floor"][f"{p}_us"]
        rows.append(row)
    result = {"gpus": [a, b], "cores": cores, "rounds": rounds, "turns": TURNS, "rows": rows}
    words = [line.split(" ", 2) for line in calls.stdout.splitlines()]
    result["calls_ns"] = [{"call": c, "p50": int(p50), "p99": int(p99)} for p50, p99, c in words]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
