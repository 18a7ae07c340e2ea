"""Round trips of push_pull between two GPUs, beside what raw C reaches on the same ones.

    python tools/gpu_eager.py FLOOR [GPU_A GPU_B] [ROUNDS] > result.json

FLOOR is tools/gpu_floor.c, built. All take turns, so that what the machine does meanwhile meets
all: raw C; push_pull with tensors on the GPUs (gpu), the same without pollers (gpu-caller), and
with tensors on the CPU (cpu), which is what all but the GPUs takes. One JSON object comes out:
for each size p50 and p99 of all in microseconds, how the tensors travelled, and the medians of the
eight stamps of fetch_trace, as microseconds since the first.

Processes run on cores near their GPU, no two of them on threads of one core.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from fserver.bench.report import percentile

SHAPES = [
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
TURNS = 4
WARM = 200


def _options(kind: str, gpu: int) -> dict[str, Any]:
    gpu = 0 if kind == "cpu" else gpu
    return {"gpu": gpu, "rank_offset": -gpu, **KINDS[kind]}


def _place(kind: str, gpu: int) -> str:
    return "cpu" if kind == "cpu" else f"cuda:{gpu}"


def _server(pipe: Connection, kind: str, gpu: int, cores: list[int]) -> None:
    os.sched_setaffinity(0, cores)
    import torch

    import fserver

    s = fserver.Server(
        host_scheduler=True, scheduler="127.0.0.1:0", connect=False, **_options(kind, gpu)
    )
    pipe.send(s.scheduler)
    s.connect()
    answers = {
        key: [torch.zeros(back, dtype=torch.uint8, device=_place(kind, gpu))]
        for key, (_, _, back, _) in enumerate(SHAPES)
    }
    if kind != "cpu":
        torch.cuda.synchronize(gpu)
    get_batch, respond = s.get_batch, s.respond
    while True:
        try:
            batch = get_batch()
        except fserver.ClosedError:
            break
        for handler, _, keys in batch:
            respond(answers[keys[0]], handler)
        del batch, _, keys  # now, while the worker is busy, not before the next answer
    s.stop()


def _worker(pipe: Connection, kind: str, gpu: int, cores: list[int], scheduler: str) -> None:
    os.sched_setaffinity(0, cores)
    import torch

    import fserver

    where = _place(kind, gpu)
    with fserver.Worker(scheduler=scheduler, **_options(kind, gpu)) as w:
        memory = {}
        while True:
            job = pipe.recv()
            if job is None:
                break
            key, rounds = job
            if key not in memory:
                _, out, back, _ = SHAPES[key]
                memory[key] = [torch.zeros(n, dtype=torch.uint8, device=where) for n in (out, back)]
            x, y = [memory[key][0]], [memory[key][1]]
            if kind != "cpu":
                torch.cuda.synchronize(gpu)
            push_pull, wait, now, keys = w.push_pull, w.wait, time.perf_counter_ns, [key]
            took, stamps = [], []
            warm = min(WARM, rounds)
            for i in range(rounds + warm):
                start = now()
                h = push_pull(x, keys, y, keys)
                begun = now()
                wait(h, 60000)
                end = now()
                if i >= warm:
                    took.append(end - start)
                    t = w.fetch_trace(h)
                    stamps.append([*(v - t[0] for v in t), begun - t[0], end - t[0]])
            pipe.send((took, stamps, w.links()[0].transport))


def _numbers(text: str) -> list[int]:
    """0-3,8 as numbers."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _near(gpu: int, allowed: set[int]) -> list[list[int]]:
    """The allowed processors near a GPU, or all, by core."""
    near = allowed
    try:
        query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
        bus = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
        path = Path("/sys/bus/pci/devices", bus[-12:].lower(), "local_cpulist")
        near = allowed & set(_numbers(path.read_text()))
    except (OSError, ValueError, subprocess.SubprocessError):
        pass
    if len(near) < 8:
        near = allowed
    cores = {}
    for cpu in sorted(near):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings = _numbers(path.read_text()) if path.exists() else [cpu]
        cores[min(siblings)] = [c for c in siblings if c in allowed]
    return list(cores.values())


def _cores(a: int, b: int) -> list[list[int]]:
    """Processors for the side of each GPU."""
    allowed = os.sched_getaffinity(0)
    near = [_near(a, allowed), _near(b, allowed)]
    if near[0] == near[1]:
        half = len(near[0]) // 2
        near = [near[0][:half], near[0][half:]]
    return [sorted(cpu for core in side for cpu in core) for side in near]


def _summary(values: list[int], moved: int) -> dict[str, float]:
    values = sorted(values)
    return {
        "p50_us": percentile(values, 50) / 1e3,
        "p99_us": percentile(values, 99) / 1e3,
        "min_us": min(values) / 1e3,
        "count": len(values),
        "gbps_p50": moved / percentile(values, 50),
    }


def main(arguments: list[str]) -> int:
    floor = arguments[0]
    a, b = (int(v) for v in arguments[1:3]) if len(arguments) > 2 else (0, 1)
    rounds = int(arguments[3]) if len(arguments) > 3 else 10000
    cores = _cores(a, b)
    print("cores", json.dumps(cores), file=sys.stderr, flush=True)
    calls = subprocess.run([floor, "calls", str(a), str(b)], capture_output=True, text=True)
    print(calls.stdout, calls.stderr, file=sys.stderr, flush=True)
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    heard = {}
    for kind in KINDS:
        heard[kind], theirs = context.Pipe()
        processes.append(
            context.Process(target=_server, args=(theirs, kind, b, cores[1]), daemon=True)
        )
        processes[-1].start()
    for kind in KINDS:
        if not heard[kind].poll(60):
            raise TimeoutError(f"{kind}: the server says nothing for 60 s")
        pipes[kind], theirs = context.Pipe()
        address = heard[kind].recv()
        processes.append(
            context.Process(target=_worker, args=(theirs, kind, a, cores[0], address), daemon=True)
        )
        processes[-1].start()
    each = [max(20, rounds // share // TURNS) for *_, share in SHAPES]
    sizes = [f"{out}:{back}:{each[k]}" for k, (_, out, back, _) in enumerate(SHAPES)]
    command = [floor, str(a), str(b), str(cores[0][0]), str(cores[1][0]), *sizes]
    bare: list[list[int]] = [[] for _ in SHAPES]
    ours: dict[str, list[list[int]]] = {kind: [[] for _ in SHAPES] for kind in KINDS}
    stamps: dict[str, list[list[list[int]]]] = {kind: [[] for _ in SHAPES] for kind in KINDS}
    how: dict[str, str] = {}
    for _ in range(TURNS):
        for key, (name, *_) in enumerate(SHAPES):
            for kind, pipe in pipes.items():
                # On the CPU 64 MiB take a hundred times as long, and are not what is asked.
                pipe.send((key, each[key] // 10 if kind == "cpu" else each[key]))
                if not pipe.poll(60):
                    raise TimeoutError(f"{name}, {kind}: the worker says nothing for 60 s")
                took, seen, how[kind] = pipe.recv()
                ours[kind][key] += took
                stamps[kind][key] += seen
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for key, lines in enumerate(done.stdout.split("\n\n")[: len(SHAPES)]):
            bare[key] += [int(line) for line in lines.split()]
    rows = []
    for key, (name, out, back, _) in enumerate(SHAPES):
        row: dict[str, Any] = {"name": name, "out": out, "back": back, "transport": how}
        row["floor"] = _summary(bare[key], out + back)
        for kind in KINDS:
            row[kind] = _summary(ours[kind][key], out + back)
            row[kind]["stamps_us"] = [
                round(median(column) / 1e3, 2) for column in zip(*stamps[kind][key], strict=True)
            ]
            for p in ("p50", "p99"):
                row[kind][f"{p}_ratio"] = row[kind][f"{p}_us"] / row["floor"][f"{p}_us"]
        rows.append(row)
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join(10)
    calls_ns = [line.split(" ", 2) for line in calls.stdout.splitlines()]
    result = {"gpus": [a, b], "cores": cores, "rounds": rounds, "turns": TURNS, "rows": rows}
    result["calls_ns"] = [{"call": c, "p50": int(p50), "p99": int(p99)} for p50, p99, c in calls_ns]
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
