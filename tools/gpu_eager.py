"""Where the time of push_pull between two GPUs goes: round trips with their stamps.

    python tools/gpu_eager.py RESULT.json [GPU_A GPU_B] [ROUNDS]

Takes turns with tensors on the GPUs (gpu), the same without pollers (gpu-caller), and tensors on
the CPU (cpu), which takes all but the GPUs. The stamps are the medians of those of fetch_trace, and
of the returns of push_pull and wait, as microseconds since the first. Processes run on cores near
their GPU; no core has two. `fserver bench pingpong --device gpu` compares with a program in C.
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

SHAPES = [  # name, bytes there and back, divisor of the rounds
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


def turns(gpus: tuple[int, int], cores: list[list[int]], each: list[int]) -> Any:
    """The results of `measure`, by key and kind."""
    found: list[dict[str, list[Any]]] = [{kind: [] for kind in KINDS} for _ in SHAPES]
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
                    found[key][kind].append(workers[kind].apply_async(measure, work).get(LIMIT))
        for one in [workers[k].apply_async(leave) for k in KINDS] + served:
            one.get(LIMIT)
    return found


def main(file: str, a: int = 0, b: int = 1, rounds: int = 10000) -> None:
    from fserver.bench.report import percentile

    cores, rows = cores_of(a, b), []
    print("cores", json.dumps(cores), flush=True)
    print("stamps: start posted received delivered respond answered arrived done, returns of both")
    each = [max(20, rounds // share // TURNS) for *_, share in SHAPES]
    for (name, out, back, _), kinds in zip(SHAPES, turns((a, b), cores, each), strict=True):
        for kind, rounds_of in kinds.items():
            times, stamps, how = zip(*rounds_of, strict=True)
            took = sorted(ns for some in times for ns in some)
            columns = zip(*(trip for some in stamps for trip in some), strict=True)
            row = {"name": name, "out": out, "back": back, "kind": kind, "transport": how[-1]}
            row |= {f"p{p}_us": percentile(took, p) / 1e3 for p in (50, 99)}
            row |= {"min_us": took[0] / 1e3, "count": len(took)}
            row["gbps_p50"] = (out + back) / percentile(took, 50)
            row["stamps_us"] = [round(median(column) / 1e3, 2) for column in columns]
            rows.append(row)
            way = f"{kind} ({how[-1]})"
            print(f"{name:28}{way:22}p50 {row['p50_us']:8.1f} us  p99 {row['p99_us']:8.1f}")
            print(" " * 28, *row["stamps_us"])
    result = {"gpus": [a, b], "cores": cores, "rounds": rounds, "turns": TURNS, "rows": rows}
    Path(file).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
