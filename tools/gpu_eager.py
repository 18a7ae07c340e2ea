"""Round trips of push_pull between two GPUs, beside what raw C reaches on the same ones.

    python tools/gpu_eager.py FLOOR [GPU_A GPU_B] [ROUNDS] > result.json

FLOOR is tools/gpu_floor.c, built. Both take turns, so that what the machine does meanwhile meets
both. One JSON object comes out: for each size p50 and p99 of both in microseconds, the ratios, and
how the tensors travelled; for 64 MiB GB/s too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

SHAPES = [
    ("4 KiB echo", 4096, 4096, 1),
    ("64 KiB echo", 65536, 65536, 1),
    ("896 KiB out, 1.75 MiB back", 128 * 7168, 2 * 128 * 7168, 1),
    ("64 MiB echo", 64 << 20, 64 << 20, 20),
]
TURNS = 5
WARM = 200


def _options(gpu: int) -> dict[str, Any]:
    return {"gpu": gpu, "rank_offset": -gpu, "backend": "GPU"}


def _server(pipe: Connection, gpu: int, cores: list[int]) -> None:
    os.sched_setaffinity(0, cores)
    import torch

    import fserver

    s = fserver.Server(host_scheduler=True, scheduler="127.0.0.1:0", connect=False, **_options(gpu))
    pipe.send(s.scheduler)
    s.connect()
    answers = {
        key: torch.empty(back, dtype=torch.uint8, device=f"cuda:{gpu}")
        for key, (_, _, back, _) in enumerate(SHAPES)
    }
    torch.cuda.synchronize(gpu)
    while True:
        try:
            batch = s.get_batch()
        except fserver.ClosedError:
            break
        for handler, _, keys in batch:
            s.respond([answers[keys[0]]], handler)
    s.stop()


def _worker(pipe: Connection, gpu: int, cores: list[int], scheduler: str) -> None:
    os.sched_setaffinity(0, cores)
    import torch

    import fserver

    where = f"cuda:{gpu}"
    with fserver.Worker(scheduler=scheduler, **_options(gpu)) as w:
        memory = {}
        while True:
            job = pipe.recv()
            if job is None:
                break
            key, rounds = job
            if key not in memory:
                _, out, back, _ = SHAPES[key]
                memory[key] = [torch.empty(n, dtype=torch.uint8, device=where) for n in (out, back)]
            x, y = [memory[key][0]], [memory[key][1]]
            torch.cuda.synchronize(gpu)
            push_pull, wait, now, keys = w.push_pull, w.wait, time.perf_counter_ns, [key]
            took = []
            for i in range(rounds + WARM):
                start = now()
                wait(push_pull(x, keys, y, keys), 60000)
                if i >= WARM:
                    took.append(now() - start)
            pipe.send((took, w.links()[0].transport))


def _percentile(values: list[int], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * p))] / 1e3


def main(arguments: list[str]) -> int:
    floor = arguments[0]
    a, b = (int(v) for v in arguments[1:3]) if len(arguments) > 2 else (0, 1)
    rounds = int(arguments[3]) if len(arguments) > 3 else 10000
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    context = multiprocessing.get_context("spawn")
    (to_server, theirs), (to_worker, workers) = context.Pipe(), context.Pipe()
    server = context.Process(target=_server, args=(theirs, b, cores[half:]))
    server.start()
    worker = context.Process(
        target=_worker, args=(workers, a, cores[:half], to_server.recv()), daemon=True
    )
    worker.start()
    rows = []
    for key, (name, out, back, share) in enumerate(SHAPES):
        each = max(20, rounds // share // TURNS)
        ours: list[int] = []
        bare: list[int] = []
        how = ""
        for _ in range(TURNS):
            to_worker.send((key, each))
            if not to_worker.poll(300):
                raise TimeoutError(f"{name}: the worker says nothing for 300 s")
            took, how = to_worker.recv()
            ours += took
            command = [floor, str(a), str(b), str(out), str(back), str(each)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            bare += [int(line) for line in done.stdout.split()]
        row: dict[str, Any] = {"name": name, "out": out, "back": back, "transport": how}
        for what, values in (("fserver", ours), ("floor", bare)):
            row[what] = {
                "p50_us": _percentile(values, 0.5),
                "p99_us": _percentile(values, 0.99),
                "min_us": min(values) / 1e3,
                "count": len(values),
                "gbps_p50": (out + back) / _percentile(values, 0.5) / 1e3,
            }
        for p in ("p50", "p99"):
            row[f"{p}_ratio"] = row["fserver"][f"{p}_us"] / row["floor"][f"{p}_us"]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    to_worker.send(None)
    worker.join(30)
    server.join(30)
    print(json.dumps({"gpus": [a, b], "rounds": rounds, "turns": TURNS, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
